import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bacr_jax import advantages, rewards
from bacr_jax.errors import UserError

unchecked = inspect.unwrap
reward_arrays = hnp.arrays(
    np.float32,
    st.sampled_from([(2, 2), (1, 4), (3, 5)]),  # each new shape is a compilation
    elements=st.sampled_from([-0.3, 0.0, 0.1, 0.7, 1.0, 1.3]),
)


class TestSegments:
    CUTS = jnp.array([[2, 4, 6, 7], [1, 1, 3, 3]])

    def test_a_cut_includes_its_own_token(self):
        positions = jnp.tile(jnp.arange(1, 9), (2, 1))
        got = advantages.segment_index(positions, self.CUTS)
        np.testing.assert_array_equal(got, [[0, 0, 1, 1, 2, 2, 3, 4], [0, 2, 2, 4, 4, 4, 4, 4]])

    def test_tokens_get_their_segments_advantage_and_none_after_the_last_cut(self):
        a = jnp.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
        got = jax.jit(advantages.scatter_segments, static_argnums=2)(a, self.CUTS, 8)
        np.testing.assert_array_equal(got, [[1, 1, 2, 2, 3, 3, 4, 0], [5, 7, 7, 0, 0, 0, 0, 0]])

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 40))
    def test_segment_is_the_first_cut_at_or_after_the_token(self, cuts, token):
        cuts = sorted(cuts)
        got = int(advantages.segment_index(jnp.array([token]), jnp.array(cuts))[0])
        reaching = [s for s, cut in enumerate(cuts) if cut >= token]
        assert got == (reaching[0] if reaching else len(cuts))

    def test_an_answer_serving_several_cuts_collects_their_advantages(self):
        a = jnp.array([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
        source = jnp.array([[0, 1, 1, 1], [0, 0, 0, 0]])
        np.testing.assert_array_equal(
            advantages.sum_reused(a, source), [[1, 14, 0, 0], [15, 0, 0, 0]]
        )

    def test_to_go_adds_this_cut_and_the_later_ones(self):
        got = advantages.to_go(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([0.5, 0.25, 0.25]))
        np.testing.assert_allclose(got, [[2.0, 1.5, 1.0]])


class TestGroupBaselines:
    R = jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0])

    def test_grpo_by_hand(self):
        # mean 1/2, unbiased deviation sqrt(2/7)
        want = np.where(self.R == 1, 1, -1) * 0.5 / np.sqrt(2 / 7)
        np.testing.assert_allclose(advantages.grpo_advantage(self.R), want, rtol=1e-5)
        biased = advantages.grpo_advantage(self.R, ddof=0)
        np.testing.assert_allclose(biased, np.where(self.R == 1, 1, -1), rtol=1e-5)

    def test_without_std_grpo_is_the_group_mean_form(self):
        np.testing.assert_array_equal(
            advantages.grpo_advantage(self.R, std=False), advantages.group_advantage(self.R)
        )
        np.testing.assert_allclose(advantages.group_advantage(self.R), self.R - 0.5)

    def test_rloo_by_hand(self):
        got = advantages.rloo_advantage(jnp.array([[1.0, 0.0, 0.5]]))
        np.testing.assert_allclose(got, [[0.75, -0.75, 0.0]], atol=1e-7)

    @settings(max_examples=50, deadline=None)
    @given(reward_arrays)
    def test_rloo_is_the_scaled_group_mean_form_and_the_leave_one_out_difference(self, r):
        n = r.shape[-1]
        rloo = np.asarray(advantages.rloo_advantage(jnp.asarray(r)))
        scaled = n / (n - 1) * np.asarray(advantages.group_advantage(jnp.asarray(r)))
        direct = r - (r.sum(-1, keepdims=True) - r) / (n - 1)
        np.testing.assert_allclose(rloo, scaled, atol=1e-6)
        np.testing.assert_allclose(rloo, direct, atol=1e-5)

    @pytest.mark.parametrize("size", [2, 3, 6, 7])
    def test_equal_rewards_give_exactly_zero(self, size):
        r = jnp.full((3, size), 0.1)
        for advantage in (
            advantages.grpo_advantage, advantages.rloo_advantage, advantages.group_advantage
        ):  # fmt: skip
            np.testing.assert_array_equal(advantage(r), np.zeros((3, size)))

    def test_groups_of_one(self):
        r = jnp.array([[0.7]])
        np.testing.assert_allclose(advantages.grpo_advantage(r), [[0.7]])
        np.testing.assert_array_equal(advantages.rloo_advantage(r), [[0.0]])

    def test_the_group_axis_can_be_any(self):
        r = jax.random.uniform(jax.random.key(0), (2, 5, 3))
        for advantage in (
            advantages.grpo_advantage, advantages.rloo_advantage, advantages.group_advantage
        ):  # fmt: skip
            np.testing.assert_allclose(
                advantage(r, axis=1), jnp.swapaxes(advantage(jnp.swapaxes(r, 1, 2)), 1, 2),
                atol=1e-6,
            )  # fmt: skip

    def test_gradients_into_rewards_are_stopped(self):
        for advantage in (
            advantages.grpo_advantage, advantages.rloo_advantage, advantages.group_advantage
        ):  # fmt: skip
            gradient = jax.grad(lambda r, f=advantage: jnp.sum(f(r) ** 2))(self.R)
            np.testing.assert_array_equal(gradient, np.zeros(8))


class TestValues:
    @settings(max_examples=50, deadline=None)
    @given(reward_arrays, st.floats(0, 2))
    def test_value_of_correctness_is_the_dense_reward_map_and_has_an_inverse(self, p, coefficient):
        v = advantages.value_from_correctness(jnp.asarray(p), coefficient=coefficient)
        np.testing.assert_allclose(
            v, rewards.dense_reward(jnp.asarray(p), coefficient=coefficient), atol=1e-5
        )
        back = advantages.correctness_from_value(v, coefficient=coefficient)
        np.testing.assert_allclose(back, p, atol=1e-4)

    def test_value_of_correctness_by_hand(self):
        p = jnp.array([[0.2, 0.5, 0.4]])
        got = advantages.value_from_correctness(p, coefficient=0.5)
        np.testing.assert_allclose(got, [[0.3, 0.65, 0.35]], rtol=1e-6)

    def test_eq12_and_its_stopped_gradient(self):
        r, v = jnp.array([[[1.3, 0.0]]]), jnp.array([[[0.5, 0.25]]])
        np.testing.assert_allclose(advantages.bcae_advantage(r, v), [[[0.8, -0.25]]], rtol=1e-6)
        gradient = jax.grad(lambda v: jnp.sum(advantages.bcae_advantage(r, v) ** 2))(v)
        np.testing.assert_array_equal(gradient, np.zeros((1, 1, 2)))

    @settings(max_examples=30, deadline=None)
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
        got = advantages.estimate_prior_strength(
            jnp.asarray(r, jnp.float32), jnp.asarray(v, jnp.float32)
        )
        np.testing.assert_allclose(got, 0.16 / 0.01, rtol=0.2)

    def test_prior_strength_of_a_perfect_value_is_capped(self):
        r = jnp.tile(jnp.array([[1.0, 0.0]]), (10, 1))
        assert advantages.estimate_prior_strength(r, jnp.full((10, 2), 0.5)) == 1e6


class TestCredit:
    """Expected gradients of an enumerable policy: two thinking tokens, an answer at each cut."""

    WEIGHTS = jnp.array([0.3, 0.7])
    LAMBDA = 0.3
    VALUES = jnp.array([[[0.9, -0.4]]])
    P = jnp.array([[[0.15, 0.6]]])
    # outcome of an answer at cut 1 given z_1, and at cut 2 given z_1 and z_2
    FIRST = np.array([[1.0, 0.25], [0.0, 1.0]])  # [z1, a1]
    SECOND = np.array([[[0.0, 1.0], [1.0, 0.5]], [[1.0, 0.0], [0.25, 0.75]]])  # [z1, z2, a2]
    PATHS = list(itertools.product((0, 1), repeat=4))
    THETA = {
        "z1": jnp.array([0.3, -0.2]),
        "z2": jnp.array([[0.1, 0.6], [-0.4, 0.2]]),
        "a1": jnp.array([[0.5, 0.0], [0.2, -0.3]]),
        "a2": jnp.array([[[0.0, 0.4], [0.1, 0.1]], [[-0.5, 0.3], [0.7, 0.0]]]),
    }

    def logprobs(self, theta, path):
        z1, z2, a1, a2 = path
        table = jax.tree.map(jax.nn.log_softmax, theta)
        return (
            table["z1"][z1],
            table["z2"][z1, z2],
            table["a1"][z1, a1],
            table["a2"][z1, z2, a2],
        )

    def outcomes(self, path):
        z1, z2, a1, a2 = path
        return jnp.array([[[self.FIRST[z1, a1], self.SECOND[z1, z2, a2]]]])

    def objective(self, theta):
        total = 0.0
        for path in self.PATHS:
            dense = rewards.dense_reward(self.outcomes(path), coefficient=self.LAMBDA)
            reward = rewards.cumulative_reward(dense, self.WEIGHTS)[0, 0]
            total += jnp.exp(sum(self.logprobs(theta, path))) * reward
        return total

    def expected_gradient(self, thinking_mode, answer_mode):
        def surrogate(theta):
            total = 0.0
            for path in self.PATHS:
                r = self.outcomes(path)
                dense = rewards.dense_reward(r, coefficient=self.LAMBDA)
                residual = advantages.bcae_advantage(dense, self.VALUES)
                think = advantages.thinking_credit(residual, self.WEIGHTS, mode=thinking_mode)
                answer = advantages.answer_credit(
                    r, dense, self.VALUES, self.P, self.WEIGHTS,
                    coefficient=self.LAMBDA, mode=answer_mode,
                )  # fmt: skip
                logprobs = self.logprobs(theta, path)
                weight = jax.lax.stop_gradient(jnp.exp(sum(logprobs)))
                per_token = [think[0, 0, 0], think[0, 0, 1], answer[0, 0, 0], answer[0, 0, 1]]
                total += weight * sum(a * lp for a, lp in zip(per_token, logprobs, strict=True))
            return total

        return jax.grad(surrogate)(self.THETA)

    @staticmethod
    def distance(a, b):
        return max(float(jnp.max(jnp.abs(a[k] - b[k]))) for k in a)

    @pytest.mark.parametrize("mode", ["to_go", "trajectory"])
    def test_is_the_exact_policy_gradient_for_any_values(self, mode):
        exact = jax.grad(self.objective)(self.THETA)
        assert max(float(jnp.max(jnp.abs(g))) for g in exact.values()) > 0.01
        assert self.distance(self.expected_gradient(mode, mode), exact) < 1e-6

    def test_segment_mode_misses_what_early_thinking_does_later(self):
        exact = jax.grad(self.objective)(self.THETA)
        got = self.expected_gradient("segment", "to_go")
        assert float(jnp.max(jnp.abs(got["z1"] - exact["z1"]))) > 0.01
        np.testing.assert_allclose(got["z2"], exact["z2"], atol=1e-6)

    def test_literal_answers_are_exact_at_the_last_cut_and_overweighted_before(self):
        exact = jax.grad(self.objective)(self.THETA)
        got = self.expected_gradient("answer_literal", "answer_literal")
        for name in ("z1", "z2", "a2"):
            np.testing.assert_allclose(got[name], exact[name], atol=1e-6)
        # u_1 is .3 * 1.3 - .7 * .3 = .18, the literal form has .3 * 1.3 = .39
        np.testing.assert_allclose(got["a1"], exact["a1"] * 0.39 / 0.18, atol=1e-6)

    def test_an_answer_that_serves_both_cuts_gets_the_gradient_of_both(self):
        # One answer token a, scored at both cuts: r = (x, x).
        outcome, theta = jnp.array([1.0, 0.25]), jnp.array([0.2, -0.1])
        source = jnp.array([[[0, 0]]])

        def objective(theta):
            r = jnp.broadcast_to(outcome[:, None], (2, 2))
            dense = rewards.dense_reward(r, coefficient=self.LAMBDA)
            return jnp.sum(jax.nn.softmax(theta) * rewards.cumulative_reward(dense, self.WEIGHTS))

        def surrogate(theta):
            logprobs = jax.nn.log_softmax(theta)
            total = 0.0
            for a in (0, 1):
                r = jnp.full((1, 1, 2), outcome[a])
                credit = advantages.answer_credit(
                    r, rewards.dense_reward(r, coefficient=self.LAMBDA), self.VALUES, self.P,
                    self.WEIGHTS, coefficient=self.LAMBDA, mode="to_go",
                )  # fmt: skip
                used = advantages.sum_reused(credit, source)
                assert used[0, 0, 1] == 0.0
                total += jax.lax.stop_gradient(jnp.exp(logprobs[a])) * used[0, 0, 0] * logprobs[a]
            return total

        exact = jax.grad(objective)(theta)
        np.testing.assert_allclose(jax.grad(surrogate)(theta), exact, atol=1e-7)

    def test_uniform_weights_give_one_over_m_and_more_for_the_last_answer(self):
        u = advantages.outcome_coefficients(jnp.full(4, 0.25), coefficient=0.3)
        np.testing.assert_allclose(u, [0.25, 0.25, 0.25, 0.325], rtol=1e-6)

    def test_modes_by_hand(self):
        residual, w = jnp.array([[[1.0, -2.0, 4.0]]]), jnp.array([0.25, 0.25, 0.5])
        for mode, want in {
            "to_go": [1.75, 1.5, 2.0], "answer_literal": [1.75, 1.5, 2.0],
            "trajectory": [1.75] * 3, "segment": [0.25, -0.5, 2.0],
        }.items():  # fmt: skip
            got = advantages.thinking_credit(residual, w, mode=mode)
            np.testing.assert_allclose(got, [[want]])

    def test_unknown_mode_is_refused(self):
        with pytest.raises(UserError, match="to_go, answer_literal"):
            unchecked(advantages.thinking_credit)(jnp.ones((1, 1, 2)), jnp.ones(2), mode="mean")


class TestScale:
    A = jnp.array([[[1.0, 3.0], [1.0, 3.0]], [[0.1, 0.1], [0.1, 0.1]]])

    def test_eq14_per_question_with_a_floor(self):
        got = advantages.normalize(self.A, mode="group", floor=0.1)
        # Deviations 1 and 0: the second question is divided by the floor, and not centred.
        np.testing.assert_allclose(got, [[[1, 3], [1, 3]], [[1, 1], [1, 1]]], rtol=1e-5)

    def test_batch_rms(self):
        got = advantages.normalize(self.A, mode="batch_rms", floor=0.1)
        np.testing.assert_allclose(got, self.A / np.sqrt((20 + 0.04) / 8), rtol=1e-6)

    def test_none_changes_nothing(self):
        np.testing.assert_array_equal(advantages.normalize(self.A, mode="none", floor=0.1), self.A)

    def test_masked_entries_do_not_count(self):
        mask = jnp.array([[[True, True], [True, True]], [[False, False], [False, False]]])
        scale = advantages.advantage_scale(self.A, mode="batch_rms", floor=0.1, mask=mask)
        np.testing.assert_allclose(scale, np.sqrt(5.0), rtol=1e-6)

    @pytest.mark.parametrize("mode", ["group", "batch_rms", "none"])
    def test_all_zero_advantages_stay_zero(self, mode):
        got = advantages.normalize(jnp.zeros((2, 3, 4)), mode=mode, floor=0.1)
        np.testing.assert_array_equal(got, np.zeros((2, 3, 4)))

    @settings(max_examples=50, deadline=None)
    @given(reward_arrays, st.sampled_from(["group", "batch_rms"]))
    def test_a_question_can_grow_at_most_by_the_inverse_floor(self, a, mode):
        got = np.asarray(advantages.normalize(jnp.asarray(a)[:, :, None], mode=mode, floor=0.1))
        assert np.isfinite(got).all()
        assert (np.abs(got[..., 0]) <= np.abs(a) / 0.1 + 1e-5).all()

    def test_unknown_mode_is_refused(self):
        with pytest.raises(UserError, match="batch_rms, group or none"):
            unchecked(advantages.advantage_scale)(self.A, mode="std", floor=0.1)
