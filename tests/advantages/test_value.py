import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bacr_jax import advantages, rewards

reward_arrays = hnp.arrays(
    np.float32,
    st.sampled_from([(2, 2), (1, 4), (3, 5)]),  # each new shape is a compilation
    elements=st.sampled_from([-0.3, 0.0, 0.1, 0.7, 1.0, 1.3]),
)


class TestValues:
    @settings(max_examples=50)
    @given(reward_arrays, st.floats(0, 2))
    def test_a_value_gives_back_the_probabilities_it_was_made_from(self, p, coefficient):
        v = rewards.dense_reward(jnp.asarray(p), coefficient=coefficient)
        back = advantages.correctness_from_value(v, coefficient=coefficient)
        np.testing.assert_allclose(back, p, atol=1e-4)

    def test_correctness_from_value_by_hand(self):
        v = jnp.array([[0.3, 0.65, 0.35]])
        got = advantages.correctness_from_value(v, coefficient=0.5)
        np.testing.assert_allclose(got, [[0.2, 0.5, 0.4]], rtol=1e-6)

    def test_eq10_and_its_stopped_gradient(self):
        r, v = jnp.array([[[1.3, 0.0]]]), jnp.array([[[0.5, 0.25]]])
        np.testing.assert_allclose(advantages.bcae_advantage(r, v), [[[0.8, -0.25]]], rtol=1e-6)
        gradient = jax.grad(lambda v: jnp.sum(advantages.bcae_advantage(r, v) ** 2))(v)
        np.testing.assert_array_equal(gradient, np.zeros((1, 1, 2)))

    @settings(max_examples=30)
    @given(reward_arrays)
    def test_with_the_others_mean_as_value_bcae_is_rloo(self, r):
        r = jnp.asarray(r)[..., None]
        others = (jnp.sum(r, axis=1, keepdims=True) - r) / (r.shape[1] - 1)
        np.testing.assert_allclose(
            advantages.bcae_advantage(r, others), advantages.rloo_advantage(r, axis=1), atol=1e-5
        )


class TestBaselineCombinations:
    R = jnp.array([[1.0, 0.0, 0.5]])
    V = jnp.array([[0.6, 0.2, 0.4]])

    def test_residual_leave_one_out_by_hand(self):
        # residuals .4, -.2, .1
        got = advantages.residual_loo_baseline(self.R, self.V)
        np.testing.assert_allclose(got, [[0.6 - 0.05, 0.2 + 0.25, 0.4 + 0.1]], rtol=1e-6)

    def test_residual_leave_one_out_ignores_an_offset_of_the_value(self):
        got = self.R - advantages.residual_loo_baseline(self.R, self.V + 7.0)
        want = self.R - advantages.residual_loo_baseline(self.R, self.V)
        np.testing.assert_allclose(got, want, atol=1e-5)

    def test_shrinkage_by_hand(self):
        # (n0 V + sum of others) / (n0 + 2) for a common V = .5 and n0 = 2
        v = jnp.full((1, 3), 0.5)
        got = advantages.shrink_baseline(self.R, v, prior_strength=2.0)
        np.testing.assert_allclose(got, [[1.5 / 4, 2.5 / 4, 2.0 / 4]], rtol=1e-6)

    def test_shrinkage_ends_at_the_value_and_at_the_leave_one_out_mean(self):
        at_value = advantages.shrink_baseline(self.R, self.V, prior_strength=jnp.inf)
        np.testing.assert_allclose(at_value, self.V)
        at_loo = advantages.shrink_baseline(self.R, self.V, prior_strength=0.0)
        np.testing.assert_allclose(
            at_loo, advantages.residual_loo_baseline(self.R, self.V), rtol=1e-6
        )

    def test_in_a_group_of_one_both_are_the_value(self):
        r, v = self.R[:, :1], self.V[:, :1]
        np.testing.assert_array_equal(advantages.residual_loo_baseline(r, v), v)
        np.testing.assert_array_equal(advantages.shrink_baseline(r, v, prior_strength=0.0), v)

    @pytest.mark.parametrize("own", [0, 1, 2])
    def test_no_baseline_depends_on_the_traces_own_reward(self, own):
        changed = self.R.at[0, own].add(5.0)
        for baseline in (
            lambda r: advantages.residual_loo_baseline(r, self.V),
            lambda r: advantages.shrink_baseline(r, self.V, prior_strength=1.5),
        ):
            moved = np.abs(np.asarray(baseline(changed) - baseline(self.R)))[0] > 1e-4
            np.testing.assert_array_equal(moved, np.arange(3) != own)

    def test_prior_strength_is_recovered_from_simulated_groups(self):
        rng = np.random.default_rng(0)
        mu = rng.uniform(0.2, 0.8, (4000, 1))
        r = mu + rng.normal(0, 0.4, (4000, 8))
        v = np.broadcast_to(mu + rng.normal(0, 0.1, (4000, 1)), r.shape)
        moments = advantages.residual_moments(
            jnp.asarray(r, jnp.float32), jnp.asarray(v, jnp.float32)
        )
        got = advantages.prior_strength(*moments)
        np.testing.assert_allclose(got, 0.16 / 0.01, rtol=0.2)

    def test_prior_strength_of_a_perfect_value_is_capped(self):
        r = jnp.tile(jnp.array([[1.0, 0.0]]), (10, 1))
        moments = advantages.residual_moments(r, jnp.full((10, 2), 0.5))
        assert advantages.prior_strength(*moments) == 1e6
        half = jnp.array([0.25, 0.0], jnp.float16)
        assert advantages.prior_strength(*half) == 1e6
