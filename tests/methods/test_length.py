"""Rewards for being short, and learning from the shortest."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from bacr_jax.methods import length, load_method
from methods_world import group_batch, load


class TestFormulas:
    def test_laser_pays_a_bonus_within_the_target(self):
        got = length.laser_reward(
            jnp.array([1.0, 1.0, 1.0, 0.0]), jnp.array([100, 4096, 4097, 100]),
            target=4096.0, bonus=0.5,
        )  # fmt: skip
        np.testing.assert_allclose(got, [1.5, 1.5, 1.0, -0.5])

    def test_shorter_better_measures_from_the_shortest_right_response(self):
        """The first group's is 300 long; no one is right in the second, whose mean is 400."""
        got = length.shorter_better_reward(
            jnp.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
            jnp.array([[300, 1300, 100], [100, 200, 900]]),
            alpha=1e-3,
        )
        np.testing.assert_allclose(got, [[2.0, 1.0, -0.2], [-0.3, -0.2, -0.5]], rtol=1e-6)

    def test_the_shortest_are_kept_and_of_equals_the_earlier(self):
        got = length.shortest(jnp.array([[5, 3, 3, 3], [1, 9, 2, 8]]), 2)
        np.testing.assert_array_equal(got, [[0, 1, 1, 0], [1, 0, 1, 0]])

    def test_an_advantage_within_those_that_are_kept(self):
        """Kept are rewards 1 and 0: mean .5, deviation .5."""
        kept = jnp.array([[True, True, False]])
        got = length.filtered_advantage(jnp.array([[1.0, 0.0, 1.0]]), kept)
        np.testing.assert_allclose(got, [[1.0, -1.0, 0.0]], rtol=1e-5)

    def test_equal_rewards_give_nothing(self):
        """Three times .673 have a mean that is not .673."""
        kept = jnp.array([[True, True, True, False]])
        got = length.filtered_advantage(jnp.array([[0.673, 0.673, 0.673, 1.0]]), kept)
        np.testing.assert_array_equal(got, [[0.0, 0.0, 0.0, 0.0]])


def test_a_length_is_measured_in_shares_of_the_largest_budget(tmp_path):
    """budget.max is 12: a target of 3 tokens, and 4 tokens too many cost a third of the weight."""
    small = ("rollout.questions=1", "rollout.group_size=2")
    batch = lambda config: dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [1.0]]])), lengths=jnp.array([[3, 7]])
    )
    config = load(tmp_path, "laser", *small)
    rewards = load_method(config).rewards(None, batch(config))
    np.testing.assert_allclose(rewards[..., 0], [[1.5, 1.0]])
    config = load(tmp_path, "shorter_better", *small)
    rewards = load_method(config).rewards(None, batch(config))
    np.testing.assert_allclose(rewards[..., 0], [[2.0, 2.0 - 6.0 / 3]], atol=1e-6)


def test_gfpo_gives_nothing_to_responses_that_are_not_kept(tmp_path):
    config = load(tmp_path, "gfpo", "rollout.questions=1", "length.keep_fraction=0.5")
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [0.0], [1.0], [1.0]]])),
        lengths=jnp.array([[9, 2, 3, 8]]),
    )
    method = load_method(config)
    found = method.advantages(None, batch, method.rewards(None, batch), None)
    np.testing.assert_allclose(found.thinking[0, :, 0], [0.0, -1.0, 1.0, 0.0], atol=1e-4)
    np.testing.assert_array_equal(found.keep, [[False, True, True, False]])
    np.testing.assert_allclose(found.baseline[..., 0], 0.5)
