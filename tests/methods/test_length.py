"""Rewards for being short, and learning from the shortest."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from bacr_jax.advantages import grpo_advantage
from bacr_jax.config.settings import resolve
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
        """Kept are rewards 1 and 0: mean .5, deviation sqrt(1/2)."""
        kept = jnp.array([[True, True, False]])
        got = length.filtered_advantage(jnp.array([[1.0, 0.0, 1.0]]), kept)
        np.testing.assert_allclose(got, [[0.5**0.5, -(0.5**0.5), 0.0]], rtol=1e-5)

    def test_a_group_that_is_kept_in_full_has_grpos_advantage(self):
        rewards = jnp.array([[1.0, 0.0, 1.0], [0.3, 0.2, 0.9]])
        got = length.filtered_advantage(rewards, jnp.ones((2, 3), bool))
        np.testing.assert_allclose(got, grpo_advantage(rewards), rtol=1e-5)

    def test_the_gated_bonus_pays_correct_responses_below_their_mean_length(self):
        """Correct lengths 100, 300 and 200 have the mean 200; the wrong response is shorter.

        All of the second group are correct, with the mean 40. None of the third is.
        """
        got = length.gated_bonus_reward(
            jnp.array([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]),
            jnp.array([[100, 300, 20, 200], [10, 20, 50, 80], [5, 6, 7, 8]]),
            weight=1.0,
        )
        want = [[1.5, 1.0, 0.0, 1.0], [1.75, 1.5, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
        np.testing.assert_allclose(got, want, rtol=1e-6)

    def test_the_gated_bonus_multiplies_the_largest_partial_outcome(self):
        """Half right is the best of this group, so its lengths 10 and 30 have the mean 20."""
        got = length.gated_bonus_reward(
            jnp.array([[0.5, 0.5, 0.25]]), jnp.array([[10, 30, 5]]), weight=0.4
        )
        np.testing.assert_allclose(got, [[0.5 * 1.2, 0.5, 0.25]], rtol=1e-6)

    SLACK = {"weight": 0.1, "cap": 0.2, "quantile": 0.25, "relative_slack": 0.1}

    def test_the_gated_penalty_compares_with_the_shortest_quarter_of_the_successes(self):
        """Successes of 100, 200, 400 and 1,000 tokens: the quarter is at 175, and 208.5 are free.

        400 exceed that by 191.5, a penalty of .1 x 191.5 / 175; 1,000 by 791.5, which is capped.
        """
        got = length.gated_penalty_reward(
            jnp.array([[1.0, 1.0, 1.0, 1.0, 0.0]]),
            jnp.array([[True, True, True, True, False]]),
            jnp.array([[100, 200, 400, 1000, 9000]]),
            absolute_slack=16.0,
            **self.SLACK,
        )
        np.testing.assert_allclose(got, [[1.0, 1.0, 1.0 - 19.15 / 175, 0.8, 0.0]], rtol=1e-6)

    def test_the_gated_penalty_needs_two_successes_that_were_not_truncated(self):
        """The second response is correct but truncated; the second group has no success."""
        got = length.gated_penalty_reward(
            jnp.array([[1.0, 1.0], [0.0, 0.5]]),
            jnp.array([[True, False], [False, False]]),
            jnp.array([[100, 5000], [100, 5000]]),
            absolute_slack=0.0,
            **self.SLACK,
        )
        np.testing.assert_array_equal(got, [[1.0, 1.0], [0.0, 0.5]])

    def test_a_quantile_within_a_mask_interpolates(self):
        """As NumPy's of the masked entries; an empty mask has none."""
        x = jnp.array([[7, 3, 100, 12, 5], [1, 2, 3, 4, 5]])
        mask = jnp.array([[True, True, False, True, True], [False] * 5])
        for q in (0.0, 0.25, 0.4, 1.0):
            got = length.masked_quantile(x, mask, q)
            want = np.quantile([7, 3, 12, 5], q)
            np.testing.assert_allclose(got[:, 0], [want, np.inf], rtol=1e-6)

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
    rewards = load_method(resolve(config).method).rewards(None, batch(config))
    np.testing.assert_allclose(rewards[..., 0], [[1.5, 1.0]])
    config = load(tmp_path, "shorter_better", *small)
    rewards = load_method(resolve(config).method).rewards(None, batch(config))
    np.testing.assert_allclose(rewards[..., 0], [[2.0, 2.0 - 6.0 / 3]], atol=1e-6)


def test_gated_rewards_become_advantages(tmp_path):
    """The bonus is only centred; the penalty is divided by the deviation too, and is in tokens.

    Lengths 4, 8 and 12 have the mean 8, so the first earns 1.5, and the mean is .875. For the
    penalty the reference is 6, and 6 x 1.1 + 12 / 32 = 6.975 tokens are free.
    """
    small = ("rollout.questions=1", "rollout.group_size=4")

    def advantage_of(preset):
        config = load(tmp_path, preset, *small)
        batch = dataclasses.replace(
            group_batch(config, outcomes=np.array([[[1.0], [1.0], [1.0], [0.0]]])),
            lengths=jnp.array([[4, 8, 12, 1]]),
            closed=jnp.array([[True, True, True, True]]),
        )
        method = load_method(resolve(config).method)
        return method.advantages(None, batch, method.rewards(None, batch), None).thinking[0, :, 0]

    bonus = np.array([1.5, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(advantage_of("gated_bonus"), bonus - 0.875, rtol=1e-6)
    penalty = np.array([1.0, 1.0 - 0.1 * 1.025 / 6, 1.0 - 0.1 * 5.025 / 6, 0.0])
    want = (penalty - penalty.mean()) / (penalty.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(advantage_of("gated_penalty"), want, rtol=1e-5)


def test_a_truncated_response_is_no_success_for_the_gated_penalty(tmp_path):
    config = load(tmp_path, "gated_penalty", "rollout.questions=1", "rollout.group_size=2")
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [1.0]]])),
        lengths=jnp.array([[2, 12]]),
        closed=jnp.array([[True, False]]),
    )
    rewards = load_method(resolve(config).method).rewards(None, batch)
    np.testing.assert_array_equal(rewards[..., 0], [[1.0, 1.0]])


def gfpo_advantages(tmp_path, keep_fraction):
    """Advantages of four responses of 9, 2, 3 and 8 tokens, of which the second is wrong."""
    fraction = f"length.keep_fraction={keep_fraction}"
    config = load(tmp_path, "gfpo", "rollout.questions=1", fraction)
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [0.0], [1.0], [1.0]]])),
        lengths=jnp.array([[9, 2, 3, 8]]),
    )
    method = load_method(resolve(config).method)
    return method.advantages(None, batch, method.rewards(None, batch), None)


def test_gfpo_gives_nothing_to_responses_that_are_not_kept(tmp_path):
    credit = gfpo_advantages(tmp_path, 0.5)
    # The kept rewards are 0 and 1, with mean 1/2 and sample deviation sqrt(1/2).
    size = 0.5**0.5
    np.testing.assert_allclose(credit.thinking[0, :, 0], [0.0, -size, size, 0.0], atol=1e-4)
    np.testing.assert_array_equal(credit.keep, [[False, True, True, False]])
    np.testing.assert_allclose(credit.baseline[..., 0], 0.5)


def test_gfpo_keeps_two_responses_at_least(tmp_path):
    credit = gfpo_advantages(tmp_path, 0.1)
    np.testing.assert_array_equal(credit.keep, [[False, True, True, False]])
