"""Completion, accuracy given completion, and thinking used against thinking requested, by hand."""

import numpy as np
import pytest

from bacr_jax.evaluation.completion import adherence, completion
from bacr_jax.evaluation.graded import graded
from bacr_jax.evaluation.intervals import ratio_interval, wilson_interval
from bacr_jax.evaluation.samples import SAMPLED, EvalSetting
from bacr_jax.types import NO_BUDGET
from evaluation_world import GOLD, sample

# Thinking tokens and answer of two samples of three problems; the budget is 8.
DRAWN = [[(8, GOLD), (8, "1")], [(4, GOLD), (6, "1")], [(2, GOLD), (8, GOLD)]]


def cells(budget=8, drawn=DRAWN, **fields):
    made = [
        sample(i, j, answer, budget=budget, thinking=n, **fields)
        for i, row in enumerate(drawn)
        for j, (n, answer) in enumerate(row)
    ]
    return graded(made, EvalSetting(SAMPLED, budget, 2))


def test_completion_tells_a_cut_from_a_mistake():
    found = completion(cells())
    # Three of six traces ended by themselves, two of them right; of the three that were cut two.
    assert found["completion_rate"] == pytest.approx(1 / 2)
    assert found["accuracy_if_complete"] == pytest.approx(2 / 3)
    assert found["accuracy_if_cut"] == pytest.approx(2 / 3)
    assert found["closed_rate"] == 1.0
    for name, ends in (("accuracy_if_complete", "if_complete_ci95"), ("completion_rate",) * 2):
        ends = "completion_ci95" if ends == name else ends
        low, high = found[ends]
        assert 0 <= low < found[name] < high <= 1
    assert found["closed_ci95"] == pytest.approx(wilson_interval(3, 3))


def test_no_share_of_nothing():
    found = completion(cells(drawn=[[(8, GOLD), (8, "1")]], finished=False))
    assert found["accuracy_if_complete"] is None and found["if_complete_ci95"] is None
    assert found["accuracy_if_cut"] == 0.5 and found["closed_rate"] == 0.0


def test_a_ratio_has_the_interval_of_problems_drawn_again():
    part, whole = np.array([0.5, 0.0, 0.25, 0.0]), np.array([0.5, 0.0, 0.5, 1.0])
    drawn = np.random.default_rng(5).integers(0, 4, (200_000, 4))
    top, bottom = part[drawn].sum(1), whole[drawn].sum(1)
    expected = np.quantile(top[bottom > 0] / bottom[bottom > 0], [0.025, 0.975])
    np.testing.assert_allclose(ratio_interval(part, whole), expected, atol=0.02)
    # All alike: as wide as two problems are, since the others have nothing to show.
    alike = ratio_interval(np.array([0.5, 0.0, 1.0]), np.array([0.5, 0.0, 1.0]))
    assert alike == pytest.approx(wilson_interval(2, 2))


def test_adherence_by_hand():
    found = adherence(cells())
    assert (found["requested"], found["used"]) == (8, 6.0)
    assert found["ratio"] == pytest.approx(6 / 8)
    # Problems use 8, 5 and 5 of 8.
    assert found["ratio_ci95"] == pytest.approx([5 / 8, 1.0])
    assert found["quantiles"] == {"p10": 3.0, "p50": 7.0, "p90": 8.0, "max": 8.0}
    assert (found["over_share"], found["mean_excess"]) == (0.0, 0.0)


def test_tokens_above_the_budget_are_counted():
    found = adherence(cells(budget=4, closed_by="budget"))
    # 8 8 | 4 6 | 2 8: above 4 by 4 4 0 2 0 4.
    assert found["over_share"] == pytest.approx(4 / 6)
    assert found["mean_excess"] == pytest.approx(14 / 6)


@pytest.mark.parametrize(("budget", "requested"), [(0, 0), (NO_BUDGET, None)])
def test_nothing_requested_has_no_ratio(budget, requested):
    found = adherence(cells(budget=budget))
    assert found["requested"] == requested and found["ratio"] is found["ratio_ci95"] is None
    assert found["used"] == 6.0 and found["mean_excess"] == (6.0 if budget == 0 else 0.0)
