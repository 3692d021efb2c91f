"""Differences between two policies are paired by problem."""

import pytest

from bacr_jax.errors import UserError
from bacr_jax.evaluation.comparison import check_comparable, compare, reported
from bacr_jax.evaluation.samples import GREEDY, SAMPLED, EvalSetting, graded
from bacr_jax.types import NO_BUDGET
from evaluation_world import drawn, sample


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


def test_strict_verdicts_have_a_separate_difference():
    """The second answer of one policy is right, but not by the strict verdict."""
    setting = EvalSetting(GREEDY, 8, 1)
    mine = [sample(0, 0, "4", mode=GREEDY), sample(1, 0, "4", mode=GREEDY, strict=False)]
    theirs = [sample(0, 0, "4", mode=GREEDY), sample(1, 0, "1", mode=GREEDY)]
    one, other = ({"ours": {setting: graded(rows, setting)}} for rows in (mine, theirs))
    entry = compare(one, other)["ours"]["by_budget"][GREEDY]["8"]
    assert (entry["difference"], entry["strict_difference"]) == (0.5, 0.0)


def test_means_over_budgets_leave_out_the_budget_0():
    def cells(answers):
        return {
            EvalSetting(GREEDY, budget, 1): drawn([[answer]], budget=budget, mode=GREEDY)
            for budget, answer in answers.items()
        }

    found = compare({"ours": cells({0: "4", 8: "4"})}, {"ours": cells({0: "1", 8: "4"})})["ours"]
    assert list(found["by_budget"][GREEDY]) == ["0", "8"]
    assert found["anytime"][GREEDY]["budgets"] == [8]
    assert found["anytime"][GREEDY]["mean_difference"] == 0.0


HERE = {"ours": {"questions": "abc", "problems": 4}}


def settings(modes, *, sets=HERE, budgets=(8, 16), **decoding):
    return {"sets": sets, "decoding": {"cells": modes, "budgets": budgets, **decoding}}


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
        # The budget 4 was sampled only for majority votes.
        (HERE, {"greedy": [16], "sampled": [8, 4]}, r"it has greedy \[16\]; sampled \[8\]"),
    ],
)
def test_evaluations_of_other_things_are_not_compared(sets, modes, says):
    with pytest.raises(UserError, match=f"--compare there.*{says}"):
        check_comparable(
            settings({"greedy": [8], "sampled": [4]}, budgets=(4, 8)),
            settings(modes, sets=sets),
            "there",
        )


ALL = {"temperature": 0.6, "top_p": 0.95, "answer_tokens": 3, "grace": 4}
BOTH_MODES = {"greedy": [8], "sampled": [8]}


@pytest.mark.parametrize(
    ("changes", "modes", "says"),
    [
        ({"temperature": 1.0}, BOTH_MODES, "with --temperature 1.0, and this one with .* 0.6;"),
        ({"top_p": 1.0}, BOTH_MODES, "with --top-p 1.0, and this one with --top-p 0.95;"),
        ({"answer_tokens": 9}, {"greedy": [8]}, "answer_tokens=9, .* rollout.answer_tokens=3;"),
        # Evaluations without a grace window do not record it.
        ({"grace": None}, {"greedy": [8]}, "budget.grace=0, and this one with budget.grace=4;"),
        (
            {"temperature": 1.0, "answer_tokens": 9},
            BOTH_MODES,
            "with rollout.answer_tokens=9 --temperature 1.0, and this one with "
            "rollout.answer_tokens=3 --temperature 0.6; run one of them again",
        ),
    ],
)
@pytest.mark.parametrize("how", [{}, {"option": "--free", "same_budgets": False}])
def test_answers_that_were_decoded_differently_are_not_compared(changes, modes, says, how):
    decoding = {name: value for name, value in (ALL | changes).items() if value is not None}
    with pytest.raises(UserError, match=f"^--[a-z]+ there: the other evaluation .*{says}"):
        check_comparable(settings(BOTH_MODES, **ALL), settings(modes, **decoding), "there", **how)


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        # Greedy answers do not depend on the temperature.
        ({"temperature": 1.0, "top_p": 1.0}, {"greedy": [8]}),
        # No sampled answers are compared, because these have another budget.
        ({"temperature": 1.0}, {"greedy": [8], "sampled": [16]}),
        ({"seed": 3, "slots": 2, "samples": 9}, BOTH_MODES),
    ],
)
def test_settings_that_do_not_affect_the_compared_answers_may_differ(changes, modes):
    check_comparable(settings(BOTH_MODES, **ALL), settings(modes, **(ALL | changes)), "there")


def test_an_evaluation_without_a_grace_window_is_compared_with_its_like():
    check_comparable(settings({"greedy": [8]}), settings({"greedy": [8]}, grace=0), "there")


def test_budgets_of_votes_are_not_reported():
    cells = {
        EvalSetting(SAMPLED, budget, 2): drawn([["4", "1"]], budget=budget)
        for budget in (8, 4, NO_BUDGET)
    }
    found = reported({"ours": cells}, {"budgets": [8]})
    assert [setting.budget for setting in found["ours"]] == [8, NO_BUDGET]
