"""Effort: a share of the group's own mean length, told and rewarded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config.settings import resolve
from bacr_jax.methods import effort, load_method
from methods_world import group_batch, load


def test_a_trace_is_measured_by_the_mean_of_its_group_at_its_effort():
    """Half the effort: at most half of (2 + 6 + 10 + 6) / 4 = 6 tokens; full effort: at most 6."""
    lengths = jnp.array([[2, 6, 10, 6], [2, 6, 10, 6]])
    budgets = jnp.array([[32] * 4, [64] * 4])
    got = effort.effort_met(lengths, budgets, largest=64)
    np.testing.assert_array_equal(got, [[1, 0, 0, 0], [1, 1, 0, 1]])


def test_efforts_in_one_group_have_means_of_their_own():
    lengths, budgets = jnp.array([[2, 6, 10, 20]]), jnp.array([[32, 32, 64, 64]])
    got = effort.effort_met(lengths, budgets, largest=64)
    np.testing.assert_array_equal(got, [[True, False, True, False]])


def test_traces_of_equal_length_meet_full_effort_and_one_token_less_does_not():
    lengths = jnp.arange(1, 40001, 37)[:, None] * jnp.ones((1, 7), int)
    met = jax.jit(effort.effort_met, static_argnames="largest")
    for largest in (41, 47, 107, 32768):
        full = jnp.full(lengths.shape, largest)
        assert met(lengths, full, largest=largest).all()
        assert not met(lengths, full - 1, largest=largest).any()


def test_a_right_answer_beyond_its_effort_earns_nothing(tmp_path):
    config = load(tmp_path, "effort", "rollout.questions=1", "rollout.group_size=4")
    method = load_method(resolve(config).method)
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [1.0], [0.0], [1.0]]])),
        thinking=jnp.array([[3, 9, 2, 6]]),
        budgets=jnp.full((1, 4), 12),
    )
    np.testing.assert_array_equal(method.rewards(None, batch)[..., 0], [[1, 0, 0, 0]])
    assert float(method.metrics(None, batch)["effort/met_share"]) == 0.5
    assert (method.truncates_at_budget, method.conditioned) == (False, False)
