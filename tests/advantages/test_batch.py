"""The baseline from the other traces of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax import advantages

same_budget_mean = jax.jit(advantages.same_budget_mean)


def test_traces_are_compared_with_the_others_of_their_budget():
    rewards = jnp.array([[[1.0], [0.0]], [[1.0], [0.5]]])
    budgets = jnp.array([[8, 16], [8, 8]])
    # Budget 8 has rewards 1, 1 and .5. The trace of budget 16 is alone: (1 + 1 + .5) / 3.
    expected = [[[0.75], [2.5 / 3]], [[0.75], [1.0]]]
    np.testing.assert_allclose(same_budget_mean(rewards, budgets), expected, rtol=1e-6)


def test_equal_budgets_give_the_mean_of_all_other_traces():
    rewards = jnp.array([[[1.0, 0.2], [0.0, 0.4]], [[1.0, 0.6], [1.0, 0.8]]])
    found = same_budget_mean(rewards, jnp.full((2, 2), 7))
    np.testing.assert_allclose(found[0, 0], [2 / 3, 0.6], rtol=1e-6)
    np.testing.assert_allclose(found[0, 1], [1.0, 1.6 / 3], rtol=1e-6)


def test_a_batch_without_any_reward_moves_nothing():
    rewards = jnp.zeros((2, 4, 1))
    budgets = jnp.tile(jnp.array([8, 8, 16, 16]), (2, 1))
    np.testing.assert_array_equal(rewards - same_budget_mean(rewards, budgets), 0.0)
    alone = same_budget_mean(jnp.ones((1, 1, 2)), jnp.array([[8]]))
    np.testing.assert_array_equal(alone, 0.0)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([8, 16, 32]), min_size=6, max_size=6),
    st.integers(0, 5),
    st.floats(-1e4, 1e4, width=32),
)
def test_no_trace_is_in_its_own_baseline(budgets, place, changed):
    budgets = jnp.array(budgets).reshape(2, 3)
    rewards = np.random.default_rng(0).random((2, 3, 1)).astype(np.float32)
    before = same_budget_mean(jnp.asarray(rewards), budgets)
    rewards.reshape(-1)[place] = changed
    after = same_budget_mean(jnp.asarray(rewards), budgets)
    assert before.reshape(-1)[place] == after.reshape(-1)[place]


def test_no_gradient_reaches_the_rewards_of_the_batch():
    mean = lambda rewards: same_budget_mean(rewards, jnp.full((2, 2), 8)).sum()
    np.testing.assert_array_equal(jax.grad(mean)(jnp.ones((2, 2, 1))), np.zeros((2, 2, 1)))
