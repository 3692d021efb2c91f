"""HAPO: rewards against a question's own history, and the history."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods import hapo, load_method
from methods_world import group_batch, load


class TestFormulas:
    @pytest.mark.parametrize(
        "length, right, wrong",
        [(0, 1.0, 0.0), (500, 0.7071, 0.0), (1000, 0.0, 0.0), (1493, -0.6993, -0.6993),
         (1500, -0.7, -0.7071), (2000, -0.7, -1.0), (9000, -0.7, -1.0)],
    )  # fmt: skip
    def test_cosine_length_reward(self, length, right, wrong):
        got = hapo.length_reward(
            jnp.array([1000, 1000]), jnp.array([length, length]), jnp.array([1, 0])
        )
        np.testing.assert_allclose(got, [right, wrong], atol=5e-5)

    @pytest.mark.parametrize(
        "length, right, wrong",
        [(250, 0.75, 0.0), (1000, 0.0, 0.0), (1050, 0.0, 0.0), (1300, -0.2, -0.2),
         (2000, -0.7, -0.9), (5000, -0.7, -1.0)],
    )  # fmt: skip
    def test_linear_length_reward(self, length, right, wrong):
        got = hapo.length_reward(
            jnp.array([1000, 1000]), jnp.array([length, length]), jnp.array([1, 0]), kind="linear"
        )
        np.testing.assert_allclose(got, [right, wrong], atol=1e-6)

    def test_every_right_answer_is_worth_more_than_every_wrong_one(self):
        lengths = jnp.arange(0, 5000, 7)
        history = jnp.full_like(lengths, 1000)
        right = 1.0 + hapo.length_reward(history, lengths, jnp.ones_like(lengths))
        wrong = hapo.length_reward(history, lengths, jnp.zeros_like(lengths))
        assert right.min() > wrong.max()

    def test_no_history_means_no_length_reward(self):
        got = hapo.length_reward(hapo.no_history(2), jnp.array([10, 10]), jnp.array([True, False]))
        np.testing.assert_array_equal(got, [0.0, 0.0])

    def test_history_is_the_running_minimum_of_correct_lengths(self):
        history = jnp.array([500, hapo.NO_HISTORY, 300])
        update = jax.jit(hapo.update_history)
        # Question 1 comes twice in the batch; question 2 is only answered wrongly.
        new = update(
            history, jnp.array([1, 0, 1, 2]),
            jnp.array([[90, 80], [600, 450], [70, 60], [1, 2]]),
            jnp.array([[1, 0], [1, 1], [1, 0], [0, 0]]),
        )  # fmt: skip
        np.testing.assert_array_equal(new, [450, 70, 300])
        again = update(new, jnp.array([0]), jnp.array([[999]]), jnp.array([[1]]))
        np.testing.assert_array_equal(again, new)


class TestMethod:
    @pytest.mark.parametrize("weight", [1.0, 0.5])
    def test_rewards_use_the_history_from_before_the_batch(self, tmp_path, weight):
        sizes = ["rollout.questions=2", "rollout.group_size=2"]
        config = load(tmp_path, "hapo", *sizes, f"hapo.weight={weight}")
        method = load_method(resolve(config).method)
        history = method.init_state(5).at[3].set(10)
        batch = group_batch(config, questions=np.array([3, 1]))
        batch = dataclasses.replace(
            batch,
            lengths=jnp.array([[5, 20], [4, 4]]),
            outcomes=jnp.array([[1.0, 0.0], [1.0, 0.0]])[..., None],
        )
        rewards = method.rewards(history, batch)
        # cos(pi/4) for half the length; twice the length and wrong; no history, no length reward
        want = [[1 + weight * np.sqrt(0.5), -weight], [1.0, 0.0]]
        np.testing.assert_allclose(rewards[..., 0], want, atol=1e-6)
        after = method.update(history, batch, rewards, None)
        none = hapo.NO_HISTORY
        np.testing.assert_array_equal(after, [none, 4, none, 5, none])
