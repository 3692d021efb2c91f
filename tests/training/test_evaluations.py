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
