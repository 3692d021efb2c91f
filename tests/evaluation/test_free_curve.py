"""A trained policy is compared with the policy before training, truncated early."""

import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.evaluation.free_curve import (
    FreeCurve,
    compare_with_free_curve,
    curve_value,
    distance,
    first_crossing,
    free_curve_of,
    tokens_needed,
)
from bacr_jax.evaluation.samples import GREEDY, SAMPLED, EvalSetting, graded
from evaluation_world import GOLD, sample

TOKENS = np.array([10.0, 20.0, 40.0])
ACCURACIES = np.array([0.2, 0.6, 0.8])


def cell(setting, verdicts, thinking):
    """Answers of a setting. Each uses 4 tokens after the thinking."""
    return graded(
        [
            sample(
                problem,
                0,
                GOLD if right else "1",
                budget=setting.budget,
                mode=setting.mode,
                cut=setting.cut,
                thinking=tokens,
            )
            for problem, (right, tokens) in enumerate(zip(verdicts, thinking, strict=True))
        ],
        setting,
    )


@pytest.mark.parametrize(
    ("tokens", "accuracy"),
    # Half way between two points, a point, and beyond both ends.
    [(15.0, 0.4), (30.0, 0.7), (20.0, 0.6), (5.0, 0.2), (100.0, 0.8)],
)
def test_the_curve_is_interpolated_between_its_points(tokens, accuracy):
    assert curve_value(tokens, TOKENS, ACCURACIES) == pytest.approx(accuracy)
    # The order of the points does not matter.
    assert curve_value(tokens, TOKENS[::-1], ACCURACIES[::-1]) == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("accuracy", "tokens"), [(0.4, 15.0), (0.7, 30.0), (0.1, 10.0), (0.8, 40.0), (0.9, None)]
)
def test_tokens_are_where_the_curve_first_reaches_an_accuracy(accuracy, tokens):
    assert tokens_needed(accuracy, TOKENS, ACCURACIES) == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("y", "level", "x"),
    # Between two points, above the level from the start, and never at the level.
    [([0.1, 0.3, 0.7], 0.4, 12.5), ([0.5, 0.4, 0.4], 0.45, 0.0), ([0.1, 0.2, 0.2], 0.3, None)],
)
def test_a_level_is_first_reached(y, level, x):
    crossing = first_crossing(np.array([0.0, 10.0, 20.0]), np.array(y), level)
    assert crossing == (x if x is None else pytest.approx(x))


def test_a_dip_does_not_hide_an_earlier_crossing():
    dipping = np.array([0.2, 0.6, 0.4])
    assert tokens_needed(0.5, TOKENS, dipping) == pytest.approx(17.5)


def curve(num_problems=40):
    """An untrained policy: no problem is right at 10 tokens, half of them at 20, all at 40."""
    half = np.arange(num_problems) % 2
    correct = np.column_stack([np.zeros(num_problems), half, np.ones(num_problems)])
    return FreeCurve([6, 16, 36], correct, np.tile(TOKENS, (num_problems, 1)), [""] * num_problems)


def test_truncating_the_same_policy_has_no_distance_from_its_curve():
    untrained = curve()
    for column in range(3):
        entry = distance(untrained.correct[:, column], untrained.total[:, column], untrained)
        assert entry["difference"] == 0.0 and entry["ci95"] == [0.0, 0.0]
        assert entry["free_tokens"] == entry["tokens"] == TOKENS[column]


def test_distance_by_hand():
    untrained = curve()
    # Right on three quarters of the problems with 20 tokens: the curve has one half there, and
    # reaches three quarters half way between 20 and 40 tokens.
    correct = (np.arange(40) % 4 != 0).astype(float)
    entry = distance(correct, np.full(40, 20.0), untrained)
    assert (entry["accuracy"], entry["free_accuracy"]) == (0.75, 0.5)
    assert (entry["difference"], entry["free_tokens"], entry["inside"]) == (0.25, 30.0, True)
    # Paired: the difference of a problem is 1 (a quarter of them) or 0, so its standard error is
    # sqrt(.25 * .75 / 40), while unpaired accuracies would have half as much again.
    low, high = entry["ci95"]
    half_width = 1.96 * np.sqrt(0.25 * 0.75 / 40)
    assert (high - low) / 2 == pytest.approx(half_width, rel=0.1)


def test_a_policy_with_fewer_tokens_than_the_curve_is_marked():
    entry = distance(np.ones(40), np.full(40, 5.0), curve())
    assert not entry["inside"] and entry["free_accuracy"] == 0.0


def test_the_dense_curve_is_used_if_there_is_one_and_the_budgets_otherwise():
    plain = {
        EvalSetting(mode, budget, 1): cell(EvalSetting(mode, budget, 1), [True], [budget - 1])
        for mode in (GREEDY, SAMPLED)
        for budget in (8, 4)
    }
    no_budget = EvalSetting(GREEDY, -1, 1)
    plain[no_budget] = cell(no_budget, [True], [20])
    assert free_curve_of(plain, GREEDY).cuts == [4, 8]
    cut = EvalSetting(GREEDY, 8, 1, 3)
    dense = {**plain, cut: cell(cut, [False], [3])}
    assert free_curve_of(dense, GREEDY).cuts == [3]
    np.testing.assert_array_equal(free_curve_of(dense, GREEDY).total, [[7.0]])
    assert free_curve_of(dense, SAMPLED).cuts == [4, 8]
    assert free_curve_of({}, GREEDY) is None


def test_every_budget_is_compared_and_other_problems_are_refused():
    setting = EvalSetting(GREEDY, 8, 1)
    one = {"ours": {setting: cell(setting, [True, True], [4, 4])}}
    before = {"ours": {setting: cell(setting, [True, False], [8, 8])}}
    entry = compare_with_free_curve(one, before)["ours"][GREEDY]
    assert entry["by_budget"]["8"]["difference"] == 0.5
    assert entry["curve"]["8"]["mean_total_tokens"] == 12.0
    fewer = {"ours": {setting: cell(setting, [True], [8])}}
    with pytest.raises(UserError, match="used different problems of this data set"):
        compare_with_free_curve(one, fewer)
