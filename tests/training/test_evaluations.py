"""Tests that the evaluations of a run select the best checkpoint, which best.json records."""

import json
from itertools import pairwise

import numpy as np
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


def new_evaluations(folder, checkpoints):
    config = changed(eval={"every": 1, "holdout": 4})
    selected = selection_set(config.eval, config.data)
    return Evaluations(selected, RunFolder(folder, None), checkpoints)


@pytest.fixture
def evaluations(tmp_path, checkpoints):
    return new_evaluations(tmp_path, checkpoints)


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
    records = [
        record(0, "before", 0.5),
        record(1, "during", 0.9),
        record(2, "during", 0.6),
    ]
    evaluations.restore(records, existing_steps=[2])
    assert evaluations.best.step == 2 and len(evaluations.records) == 3
    # The later choices are between this checkpoint and new ones.
    evaluations.add(record(3, "during", 0.7))
    assert evaluations.best.step == 3


# Steps, accuracies and lower ends of their 95 % intervals. Step 20 has the highest accuracy, and
# step 40 is the newest within its interval.
DURING = [(20, 0.60, 0.55), (40, 0.56, 0.51), (60, 0.52, 0.47), (80, 0.50, 0.45)]


def restore_all(evaluations, existing_steps):
    records = [record(0, "before", 0.3)]
    for step, accuracy, lower_bound in DURING:
        one = record(step, "during", accuracy)
        one["anytime"]["train_holdout"]["greedy"]["mean_ci95"] = [lower_bound, 1.0]
        records.append(one)
    evaluations.restore(records, existing_steps)


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
    restore_all(evaluations, existing_steps)
    assert (evaluations.best and evaluations.best.step) == best
    assert checkpoints.preferred[-1:] == ([] if best is None else [best])


def at_budgets(step, when, right, interval):
    """An evaluation of 64 questions at several budgets.

    Args:
      right: number of right answers at each budget.
      interval: half of the width of the mean's 95 % interval.
    """
    entries = {
        str(budget): {"accuracy": count / 64, "closed_rate": 1.0, "problems": 64}
        for budget, count in enumerate(right, 1)
    }
    one = record(step, when, sum(right) / 64 / len(right))
    mean = one["anytime"]["train_holdout"]["greedy"]["mean"]
    one["anytime"]["train_holdout"]["greedy"]["mean_ci95"] = [mean - interval, mean + interval]
    one["sets"]["train_holdout"]["greedy"] = entries
    return one


def bests_of(evaluations, records):
    """Adds the records, and returns the step of the best checkpoint after each of them."""
    bests = []
    for one in records:
        evaluations.add(one)
        bests.append(evaluations.best and evaluations.best.step)
    return bests


def test_a_higher_mean_does_not_make_an_older_checkpoint_the_best(evaluations):
    # At step 75, the interval of the highest mean no longer contains the mean of step 25. Step 50
    # has a smaller loss than step 75, but it was never the best, so it may not have been saved.
    records = [
        at_budgets(0, "before", [9, 10, 36, 36], 0.06),
        at_budgets(25, "during", [9, 14, 36, 36], 0.06),
        at_budgets(50, "during", [8, 24, 38, 38], 0.06),
        at_budgets(75, "during", [7, 36, 39, 39], 0.06),
    ]
    assert bests_of(evaluations, records) == [None, 25, 25, 75]


@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_always_the_previous_best_or_the_newest_also_after_a_resume(tmp_path, seed):
    rng = np.random.default_rng(seed)
    records = [at_budgets(0, "before", [20, 10], 0.05)]
    for step in range(1, 31):
        # The loss at the first budget varies, and the mean rises because of the second budget.
        right = [20 - rng.integers(0, 8), 10 + step + rng.integers(-4, 5)]
        records.append(at_budgets(step, "during", right, 0.05))
    bests = bests_of(new_evaluations(tmp_path, PreferredSteps()), records)
    assert all(now in (before, step) for step, (before, now) in enumerate(pairwise(bests), 1))
    for stop in (10, 20):
        resumed = new_evaluations(tmp_path, PreferredSteps())
        # Only the best and the newest checkpoint are kept.
        resumed.restore(records[: stop + 1], {bests[stop], stop})
        assert resumed.best.step == bests[stop]
        assert bests_of(resumed, records[stop + 1 :]) == bests[stop + 1 :]


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
