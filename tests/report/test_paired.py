"""A comparison shows differences problem by problem, or names the evaluations that it lacks."""

import dataclasses
import json

import pytest

from bacr_jax.config import Config
from bacr_jax.evaluation.folder import RESULTS, append, open_evaluation
from bacr_jax.evaluation.samples import GREEDY
from bacr_jax.report.paired import paired_differences
from bacr_jax.report.run_data import RunData
from bacr_jax.runs.folder import RunPaths
from evaluation_world import sample

SETTINGS = {
    "sets": {"ours": {"problems": 4, "questions": "digest"}},
    "decoding": {"cells": {GREEDY: [8]}, "budgets": [8], "samples": 0},
}


def evaluated(folder, answers, settings=SETTINGS):
    """A run whose checkpoint was evaluated on four problems."""
    path = RunPaths(folder).evaluation_of(3)
    path.parent.mkdir(parents=True)
    with open_evaluation(path, settings):
        append(path, [sample(i, 0, one, mode=GREEDY) for i, one in enumerate(answers)])
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
