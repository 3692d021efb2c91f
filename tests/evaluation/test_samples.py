"""An evaluation's problems, settings and batches are fixed beforehand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.config import EvalConfig
from bacr_jax.config.values import FrozenMap
from bacr_jax.evaluation.samples import (
    GREEDY,
    SAMPLED,
    EvalSetting,
    budget_key,
    dense_cuts,
    dense_settings,
    eval_settings,
    subset,
)
from bacr_jax.types import NO_BUDGET
from evaluation_world import sample


@pytest.mark.parametrize("size", [None, 5, 6])
def test_all_problems_are_evaluated_where_there_are_no_more(size):
    np.testing.assert_array_equal(subset(5, size, 0), np.arange(5))


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 100))
def test_a_subset_has_no_problem_twice_and_keeps_their_order(problems, size, seed):
    chosen = subset(problems, size, seed)
    assert len(chosen) == min(size, problems)
    assert (np.diff(chosen) > 0).all() and chosen[0] >= 0 and chosen[-1] < problems


def test_a_seed_always_chooses_the_same_problems():
    # Written down: another choice would make a new evaluation of an old one's problems.
    assert subset(100, 4, 0).tolist() == [3, 22, 77, 99]
    assert subset(100, 4, 1).tolist() != [3, 22, 77, 99]


def test_greedy_settings_come_first_and_budgets_as_the_config_has_them():
    config = EvalConfig(budgets=(4, 8), samples=3)
    greedy = [EvalSetting(GREEDY, 4, 1), EvalSetting(GREEDY, 8, 1)]
    sampled = [EvalSetting(SAMPLED, 4, 3), EvalSetting(SAMPLED, 8, 3)]
    assert eval_settings(config) == [*greedy, *sampled]
    assert eval_settings(config, greedy=False) == sampled
    assert eval_settings(dataclasses.replace(config, samples=0)) == greedy
    each = dataclasses.replace(config, samples=FrozenMap(math=3, gsm8k=0), cut_every=3)
    assert eval_settings(each, "math:x") == [*greedy, *sampled]
    assert eval_settings(each, "gsm8k:y") == greedy
    dense = dense_settings(each, "math:x")
    assert [cuts[0].samples for cuts in dense] == [1, 3]
    assert dense_settings(each, "gsm8k:y") == dense[:1]


def test_a_dense_curve_ends_at_the_largest_budget():
    assert dense_cuts(10, 4) == [4, 8, 10] and dense_cuts(8, 4) == [4, 8]
    config = EvalConfig(budgets=(4, 10), samples=3, cut_every=5)
    assert dense_settings(config) == [
        [EvalSetting(GREEDY, 10, 1, 5), EvalSetting(GREEDY, 10, 1, 10)],
        [EvalSetting(SAMPLED, 10, 3, 5), EvalSetting(SAMPLED, 10, 3, 10)],
    ]
    assert dense_settings(EvalConfig()) == []


def test_no_budget_is_told_last():
    config = EvalConfig(budgets=(0, 4), samples=0, no_budget=True)
    assert eval_settings(config) == [EvalSetting(GREEDY, b, 1) for b in (0, 4, NO_BUDGET)]
    assert [budget_key(b) for b in (0, 4, NO_BUDGET)] == ["0", "4", "none"]


def test_a_sample_is_known_by_what_it_answers():
    made = sample(2, 1, "4", budget=16, mode=GREEDY)
    assert made.key == ("ours", GREEDY, 16, None, "p2", 1)
