"""Reading the settings of the variance study, and refusing what can't be used in one line."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_study.study_file import read_study
from research.variance.gradient_pool import Draws, draw_budgets
from research.variance.main import run_config
from research.variance.settings import read_settings

STUDIES = Path(__file__).parents[2] / "configs" / "studies"
FOLDER = Path(__file__).parents[2] / "research" / "variance"
SHIPPED = FOLDER / "variance.yaml"
TRAINING = FOLDER / "variance-training.yaml"


@pytest.mark.parametrize("size", ["cpu", "gpu", "7b"])
def test_the_shipped_study_has_every_size(size):
    settings = read_settings(SHIPPED, size)
    assert settings.questions >= 64
    assert settings.traces >= 64
    assert len(settings.budgets) >= 4


def test_the_training_regime_is_that_of_the_controls(tmp_path):
    """What bacr-weighted trains with there, at the budgets that it draws, on seeds of its own."""
    settings = read_settings(TRAINING, "cpu")
    config = run_config(settings, settings.seeds[0], tmp_path)
    controls = read_study(STUDIES / "controls.yaml", size="cpu")
    assert not set(settings.seeds) & set(controls.seeds)
    there = controls.config_of("tradeoff", "bacr-weighted", {})
    for part in ("advantage", "budget", "cuts", "reward", "value", "loss", "optimizer", "rollout"):
        assert getattr(config, part) == getattr(there, part), part
    assert (settings.regimes, settings.answers, config.cuts.count) == (("training",), 1, 1)
    drawn = draw_budgets(config, "training", settings.budgets, 20, 50, seed=0)
    values, counts = np.unique(drawn, return_counts=True)
    np.testing.assert_array_equal(values, config.budget.choices)
    assert counts.min() > 0.15 * drawn.size


def test_overrides_win():
    assert read_settings(SHIPPED, "cpu", ["questions=4", "groups=[2]"]).groups == (2,)


@pytest.mark.parametrize(
    ("content", "size", "overrides", "line"),
    [
        (
            "sizes: {cpu: {questions: 4}}",
            "gpu",
            [],
            "--size: found 'gpu'; use cpu",
        ),
        ("sizes:\n  cpu: {question: 4}", "cpu", [], "question: there is no such key"),
        ("sizes:\n  cpu: {questions: 1}", "cpu", [], "found 1; use numbers"),
        ("sizes:\n  cpu: {questions: x}", "cpu", [], "found 'x'; use a whole"),
        ("sizes:\n  cpu: {traces: 16}", "cpu", [], "use 32 or more"),
        ("sizes:\n  cpu: {calibration: 7}", "cpu", [], "each half needs 4 quest"),
        (
            "sizes:\n  cpu: {budgets: [1, 2, 3, 4, 5], calibration: 9}",
            "cpu",
            [],
            "calibration=9: each half needs 5 questions; use 10 or more",
        ),
        ("sizes:\n  cpu: {seeds: []}", "cpu", [], "is empty"),
        ("sizes:\n  cpu: {regimes: [odd]}", "cpu", [], "found ['odd']; use"),
        (
            "sizes:\n  cpu: {questions: 4}",
            "cpu",
            ["question=3"],
            "no such key; use one of config",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, content, size, overrides, line):
    path = tmp_path / "study.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as refused:
        read_settings(path, size, overrides)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("study", "key", "line"),
    [
        (SHIPPED, "method=dapo", "the run needs a value head, found method=dapo"),
        (
            SHIPPED,
            "budget.grace=2",
            "budget.grace: found 2; tokens after the budget are in no segment",
        ),
        (
            SHIPPED,
            "adapter.rank=4",
            "adapter.rank: found 4; the study takes gradients of all weights",
        ),
        (
            SHIPPED,
            "reward.weights={correct: 1, mine.py:f: .2}",
            "the study's outcomes are right or wrong",
        ),
        (SHIPPED, "budget.max=8", "is over the run's budget.max=8"),
        (
            TRAINING,
            "budget.prior=uniform",
            "found budget.prior=uniform; set budget.prior=choices",
        ),
        (TRAINING, "cuts.count=2", "answers=1: the run has cuts.count=2"),
    ],
)
def test_a_run_that_cannot_be_measured_is_one_line(tmp_path, study, key, line):
    settings = read_settings(study, "cpu")
    settings = dataclasses.replace(settings, overrides=(*settings.overrides, key))
    with pytest.raises(UserError) as refused:
        run_config(settings, 0, tmp_path)
    assert line in str(refused.value)


@pytest.mark.parametrize("budgets", [(8, 16), (8, 12, 16, 24), tuple(range(8, 17))])
def test_either_half_of_the_calibration_has_every_budget(budgets):
    """Questions take the budgets in turn."""
    settings = dataclasses.replace(
        read_settings(SHIPPED, "cpu"), budgets=budgets, calibration=4 * len(budgets) + 8
    )
    draws = Draws(settings, None, "common", 0, None, None)
    second = draws.second[:: settings.calibration_traces]
    turns = np.resize(budgets, settings.calibration)
    assert set(turns[second]) == set(turns[~second]) == set(budgets)
