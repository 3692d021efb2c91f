"""DAPO: its penalty and its choice of questions, and the method around them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from bacr_jax.config.settings import resolve
from bacr_jax.methods import dapo, load_method
from methods_world import group_batch, load


class TestFormulas:
    def test_overlong_penalty_in_the_published_setting(self):
        lengths = jnp.array([0, 16384, 18432, 20480, 30000])
        got = dapo.overlong_penalty(lengths, max_length=20480, buffer=4096)
        np.testing.assert_allclose(got, [0.0, 0.0, -0.5, -1.0, -1.0])
        half = dapo.overlong_penalty(lengths, max_length=20480, buffer=4096, factor=0.5)
        np.testing.assert_allclose(half, [0.0, 0.0, -0.25, -0.5, -0.5])

    def test_dynamic_sampling_keeps_mixed_groups_and_lone_traces(self):
        correct = jnp.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.5]])
        np.testing.assert_array_equal(dapo.dynamic_keep(correct), [False, True, False, True])
        np.testing.assert_array_equal(dapo.dynamic_keep(jnp.zeros((3, 1))), [True] * 3)


class TestMethod:
    def test_right_and_wrong_are_plus_and_minus_one_less_the_punishment(self, tmp_path):
        config = load(tmp_path, "dapo", "rollout.questions=1", "rollout.group_size=4")
        method = load_method(resolve(config).method)
        batch = dataclasses.replace(
            group_batch(config),
            # longest response 12 + 2 tokens, the punishment starts a fifth of that earlier
            lengths=jnp.array([[5, 14, 14, 12]]),
            outcomes=jnp.array([[1.0, 1.0, 0.0, 0.0]])[..., None],
            closed=jnp.array([[True, False, False, True]]),
        )
        rewards = method.rewards(None, batch)[..., 0]
        np.testing.assert_allclose(rewards, [[1.0, 0.0, -2.0, -1.0 - 0.8 / 2.8]], rtol=1e-5)
        np.testing.assert_array_equal(method.dynamic_sampling.keep(batch), [True])

    def test_overlong_filtering_leaves_cut_traces_out_of_the_loss(self, tmp_path):
        config = load(tmp_path, "dapo", "loss.overlong_filter=true")
        method = load_method(resolve(config).method)
        batch = group_batch(config)
        rewards = method.rewards(None, batch)
        credit = method.advantages(None, batch, rewards, None)
        np.testing.assert_array_equal(credit.keep, batch.closed)
        plain = load_method(resolve(load(tmp_path, "dapo")).method).advantages(
            None, batch, rewards, None
        )
        assert plain.keep is None

    def test_dynamic_sampling_can_be_switched_off(self, tmp_path):
        assert (
            load_method(
                resolve(load(tmp_path, "dapo", "dapo.dynamic_sampling=false")).method
            ).dynamic_sampling
            is None
        )
