"""Differences between two policies are paired by problem."""

import pytest

from bacr_jax.errors import UserError
from bacr_jax.evaluation.comparison import check_comparable, compare
from bacr_jax.evaluation.samples import GREEDY, EvalSetting
from evaluation_world import drawn


def test_differences_are_paired_by_problem():
    one = {"ours": {EvalSetting(GREEDY, 8, 1): drawn([["4"], ["4"], ["1"]], mode=GREEDY)}}
    other = {
        "ours": {EvalSetting(GREEDY, 8, 1): drawn([["4"], ["1"], ["1"]], mode=GREEDY, thinking=8)}
    }
    found = compare(one, other)["ours"]
    entry = found["by_budget"][GREEDY]["8"]
    assert entry["difference"] == pytest.approx(1 / 3)
    assert entry["thinking_tokens_difference"] == -3
    # Resamples differ by 0, 1, 2 or 3 of three problems, never the other way round.
    assert entry["ci95"] == pytest.approx([0.0, 1.0])
    assert found["anytime"][GREEDY]["mean_difference"] == pytest.approx(1 / 3)


HERE = {"ours": {"questions": "abc", "problems": 4}}


@pytest.mark.parametrize(
    ("sets", "modes", "says"),
    [
        (
            {"other": HERE["ours"]},
            {"greedy": [8]},
            "the other evaluation used the data sets other, but this one uses ours",
        ),
        (
            {"ours": {"questions": "x", "problems": 5}},
            {"greedy": [8]},
            "5 problems, and 4 in this evaluation",
        ),
        (HERE, {"greedy": [16], "sampled": [8]}, r"it has greedy \[16\]; sampled \[8\]"),
    ],
)
def test_evaluations_of_other_things_are_not_compared(sets, modes, says):
    with pytest.raises(UserError, match=f"--compare there.*{says}"):
        check_comparable(
            HERE, {"sets": sets, "decoding": {"cells": modes}}, {"greedy": [8]}, "there"
        )
