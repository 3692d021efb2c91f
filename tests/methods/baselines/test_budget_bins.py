"""Running moments per doubling of the budget: limits, shares, and what budgets share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from methods_world import credit_of, group_batch, load

RUNNING = [
    *("advantage.baseline=constant", "advantage.normalise=none", "advantage.score_weighted=true"),
    *("cuts.count=1", "cuts.weights=last", "reward.dense=false"),
]


@pytest.mark.slow
def test_each_doubling_of_the_budget_has_a_number_of_its_own(tmp_path):
    """Budgets from 4 to 12: those below 8 and the others."""
    own = ["budget.prior=uniform", "advantage.score_by_budget=true", "rollout.questions=16"]
    config = load(tmp_path, "bacr-full", *RUNNING, *own)
    method, batch, state, rewards, first, _ = credit_of(config)
    r, w, small = (np.asarray(x) for x in (rewards, batch.score_norm_proxy, batch.budgets < 8))
    assert 0 < small.sum() < small.size
    others = (r.sum((0, 1, 2)) - r.sum((1, 2))) / (r.size - r[0].size)
    np.testing.assert_allclose(first.answers, r - others[:, None, None], atol=1e-6)
    update = jax.jit(lambda state: method.update(state, batch, rewards, None))
    for _ in range(200):
        state = update(state)
    credit = method.advantages(state, batch, rewards, None)
    for inside in (small, ~small):
        mean = r[inside].mean()
        np.testing.assert_allclose(credit.answers[inside], r[inside] - mean, atol=1e-5)
        best = (w * r)[inside].sum() / w[inside].sum()
        off = 0.02 * abs(mean - best) + 1e-4
        np.testing.assert_allclose(credit.thinking[inside], r[inside] - best, atol=off)


def test_a_doubled_budget_begins_the_next_number(tmp_path):
    choices = ["budget.prior=choices", "budget.choices=[41,82,164]", "budget.max=164"]
    keys = ["advantage.score_by_budget=true", "budget.min=41", "rollout.questions=1"]
    keys += ["rollout.group_size=3"]
    config = load(tmp_path, "bacr-full", *RUNNING, *choices, *keys)
    method, ones = load_method(resolve(config).method), np.ones((1, 3, 1), np.float32)
    batch = dataclasses.replace(
        group_batch(config, outcomes=ones), budgets=jnp.array([[41, 82, 164]])
    )
    state = method.update(method.init_state(1), batch, jnp.asarray(ones), None)
    np.testing.assert_allclose(state["reward_seen"], [0.1 / 3, 0.2 / 3], rtol=1e-5)


def test_budgets_within_a_factor_of_two_share_their_numbers(tmp_path):
    choices = ["budget.prior=choices", "budget.choices=[6,12]"]
    found = []
    for key in ("false", "true"):
        config = load(tmp_path, "bacr-full", *RUNNING, *choices, f"advantage.score_by_budget={key}")
        *_, credit, state = credit_of(config)
        found.append(jax.tree.leaves((credit, state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(("largest", "count"), [(8, 1), (9, 2), (12, 2), (16, 2), (17, 3)])
def test_the_last_number_may_cover_less_than_a_doubling(tmp_path, largest, count):
    """The smallest budget is 4."""
    keys = ["budget.prior=uniform", "advantage.score_by_budget=true", "curriculum.mu0=8"]
    keys += [f"budget.max={largest}", f"eval.budgets=[{largest}]"]
    config = load(tmp_path, "bacr-full", *RUNNING, *keys)
    assert config.budget.min == 4
    state = load_method(resolve(config).method).init_state(1)
    assert state["reward_mean"].shape == (count,)
