"""Tests that the evaluations of a run select the best checkpoint, which best.json records."""

import json

import pytest

from bacr_jax.config.derived import selection_set
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.runs.folder import RunFolder
from bacr_jax.training.evaluations import Evaluations
from config_world import changed


def record(step, when, accuracy):
    """An evaluation of the held-out questions at one budget."""
    summary = {"greedy": {"16": {"accuracy": accuracy, "closed_rate": 1.0, "problems": 100}}}
    return {
        "step": step,
        "when": when,
        "sets": {"train_holdout": summary},
        "anytime": {"train_holdout": {"greedy": {"mean": accuracy, "mean_ci95": [accuracy, 1.0]}}},
    }


class PreferredSteps(Checkpoints):
    """Checkpoints that only record the steps to keep."""

    def __init__(self):
        self.preferred = []

    def prefer(self, step):
        self.preferred.append(step)


@pytest.fixture
def checkpoints():
    return PreferredSteps()


@pytest.fixture
def evaluations(tmp_path, checkpoints):
    config = changed(eval={"every": 1, "holdout": 4})
    return Evaluations(
        selection_set(config.eval, config.data), RunFolder(tmp_path, None), checkpoints
    )


def test_the_best_checkpoint_is_kept_and_recorded(evaluations, checkpoints, tmp_path):
    evaluations.add(record(0, "before", 0.5))
    evaluations.write_best()
    assert not (tmp_path / "best.json").exists()
    for step, accuracy in ((1, 0.6), (2, 0.8), (3, 0.7)):
        evaluations.add(record(step, "during", accuracy))
    assert checkpoints.preferred == [1, 2] and evaluations.best.step == 2
    evaluations.write_best()
    saved = json.loads((tmp_path / "best.json").read_text())
    assert (saved["step"], saved["set"], saved["accuracy"]) == (2, "train_holdout", 0.8)


def test_an_evaluation_without_its_checkpoint_is_recorded_but_not_selected(evaluations):
    evaluations.add(record(0, "before", 0.5))
    evaluations.add(record(1, "during", 0.9), has_checkpoint=False)
    evaluations.add(record(2, "during", 0.6))
    assert evaluations.best.step == 2 and len(evaluations.records) == 3


# Steps, accuracies and lower ends of their 95 % intervals. Step 20 has the highest accuracy, and
# step 40 is the newest within its interval.
DURING = [(20, 0.60, 0.55), (40, 0.56, 0.51), (60, 0.52, 0.47), (80, 0.50, 0.45)]


def add_all(evaluations, existing_steps):
    evaluations.add(record(0, "before", 0.3))
    for step, accuracy, lower_bound in DURING:
        one = record(step, "during", accuracy)
        one["anytime"]["train_holdout"]["greedy"]["mean_ci95"] = [lower_bound, 1.0]
        evaluations.add(one, has_checkpoint=step in existing_steps)


@pytest.mark.parametrize(
    ("existing_steps", "best"),
    [
        ((20, 40, 60, 80), 40),
        # A resumed run, whose first checkpoint was deleted.
        ((40, 60, 80), 40),
        # The best checkpoint was deleted by hand: the best of the others.
        ((20, 60, 80), 20),
        ((60, 80), 80),
        ((), None),
    ],
)
def test_deleted_checkpoints_still_count_as_the_highest_accuracy(
    evaluations, checkpoints, existing_steps, best
):
    add_all(evaluations, existing_steps)
    assert (evaluations.best and evaluations.best.step) == best
    assert checkpoints.preferred[-1:] == ([] if best is None else [best])


def test_evaluations_before_and_after_training_happen_once(evaluations):
    evaluations.add(record(0, "before", 0.5))
    evaluations.add(record(2, "during", 0.6))
    assert evaluations.has("before", 7) and evaluations.has("during", 2)
    assert not evaluations.has("during", 3) and not evaluations.has("after", 2)


def test_declines_are_those_between_before_and_after(evaluations):
    evaluations.add(record(0, "before", 0.5))
    evaluations.add(record(4, "after", 0.2))
    (decline,) = evaluations.declines_by_set()["train_holdout"]
    assert (decline.before, decline.after) == (0.5, 0.2)


def test_a_set_that_was_not_evaluated_before_training_has_no_declines(evaluations):
    """eval.every was set when the run was resumed."""
    first = record(0, "before", 0.5)
    first["sets"] = {"ledger": first["sets"]["train_holdout"]}
    evaluations.add(first)
    last = record(4, "after", 0.2)
    last["sets"]["ledger"] = last["sets"]["train_holdout"]
    evaluations.add(last)
    declines = evaluations.declines_by_set()
    assert declines["train_holdout"] == [] and len(declines["ledger"]) == 1
