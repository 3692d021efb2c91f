"""A comparison shows differences problem by problem, or names the evaluations that it lacks."""

import dataclasses
import json

import pytest

from bacr_jax.config import Config
from bacr_jax.evaluation.folder import RESULTS, append, open_evaluation
from bacr_jax.evaluation.samples import GREEDY, SAMPLED
from bacr_jax.report.paired import paired_differences
from bacr_jax.report.run_data import RunData
from bacr_jax.runs.folder import RunPaths
from evaluation_world import sample

SETTINGS = {
    "sets": {"ours": {"problems": 4, "questions": "digest"}},
    "decoding": {"cells": {GREEDY: [8]}, "budgets": [8], "samples": 0},
}


def evaluated(folder, answers, settings=SETTINGS, name=""):
    """A run whose checkpoint was evaluated on four problems."""
    path = RunPaths(folder).evaluation_of(3, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_evaluation(path, settings):
        for mode, budgets in settings["decoding"]["cells"].items():
            for budget in budgets:
                append(path, [sample(i, 0, a, budget, mode) for i, a in enumerate(answers)])
    (path / RESULTS).write_text("{}")
    return RunData(folder.name, RunPaths(folder), Config(), {}, "BACR", [], [])


def test_each_run_is_compared_with_the_first(tmp_path):
    first = evaluated(tmp_path / "a", "4111")
    second = evaluated(tmp_path / "b", "4441")
    (table,), notes = paired_differences([first, second])
    assert notes == [] and table.title == "ours: b: difference to a"
    decoding, budget, accuracy, other, difference, _ = table.rows[0]
    assert (decoding, budget, accuracy, other) == ("greedy", "8", "75.0", "25.0")
    assert difference.startswith("+50.0 [")
    # The mean over budgets has the same difference, because there is only one budget.
    assert table.rows[1][:2] == ["greedy", "mean"]


def sampled(temperature, cells=(8,)):
    """Settings of an evaluation with one sample at the budget 8."""
    decoding = {"budgets": [8], "samples": 1, "temperature": temperature}
    return {**SETTINGS, "decoding": {**decoding, "cells": {SAMPLED: list(cells)}}}


def test_runs_are_compared_by_their_evaluations_with_the_same_options(tmp_path):
    name = "samples-1-temperature-1.0"
    first = evaluated(tmp_path / "a", "4111", sampled(1.0), name)
    # The evaluation whose name is first, and the one with the settings of the run.
    evaluated(tmp_path / "b", "4444", sampled(0.6), "samples-1")
    evaluated(tmp_path / "b", "4444", sampled(0.6))
    second = evaluated(tmp_path / "b", "4411", sampled(1.0), name)
    (table,), notes = paired_differences([first, second])
    assert notes == [] and table.rows[0][2:4] == ["50.0", "25.0"]


def test_evaluations_at_different_temperatures_are_not_compared(tmp_path):
    first = evaluated(tmp_path / "a", "4111", sampled(1.0), "samples-1-temperature-1.0")
    second = evaluated(tmp_path / "b", "4444", sampled(0.6), "samples-1")
    tables, (note,) = paired_differences([first, second])
    assert tables == [] and "with --temperature 1.0, and this one with --temperature 0.6" in note


def test_budgets_of_votes_are_not_compared(tmp_path):
    runs = [evaluated(tmp_path / name, "4111", sampled(0.6, (8, 4))) for name in "ab"]
    (table,), _ = paired_differences(runs)
    assert [row[1] for row in table.rows] == ["8", "mean"]


def test_a_run_without_an_evaluation_gets_the_command(tmp_path):
    first = evaluated(tmp_path / "a", "4111")
    other = dataclasses.replace(first, label="b", paths=RunPaths(tmp_path / "b"))
    tables, (note,) = paired_differences([first, other])
    assert tables == []
    assert note.startswith("No paired differences for b, because they need the answers to each")
    assert f"bacr evaluate --run {tmp_path / 'b'}" in note
    # Without an evaluation of the first run, there is nothing to compare with.
    assert paired_differences([other, first])[1] == [note]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sets": {"ours": {"problems": 4, "questions": "other"}}}, "different problems of ours"),
        ({"grader": {"file": "g.py", "digest": "1"}}, "was graded by"),
    ],
)
def test_evaluations_of_other_problems_or_graders_are_not_compared(tmp_path, changes, reason):
    first = evaluated(tmp_path / "a", "4111")
    other = evaluated(tmp_path / "b", "4441", json.loads(json.dumps(SETTINGS)) | changes)
    tables, (note,) = paired_differences([first, other])
    assert tables == [] and reason in note
