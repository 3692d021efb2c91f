"""Credit of thinking segments and answers, and the tokens that it is spread over."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax import advantages, rewards


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

    @settings(max_examples=50)
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


unchecked = inspect.unwrap


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
            reward = (dense @ self.WEIGHTS)[0, 0]
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
            return jnp.sum(jax.nn.softmax(theta) * (dense @ self.WEIGHTS))

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

    def test_to_go_adds_this_cut_and_the_later_ones(self):
        got = advantages.to_go(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([0.5, 0.25, 0.25]))
        np.testing.assert_allclose(got, [[2.0, 1.5, 1.0]])

    def test_modes_by_hand(self):
        residual, w = jnp.array([[[1.0, -2.0, 4.0]]]), jnp.array([0.25, 0.25, 0.5])
        for mode, want in {
            "to_go": [1.75, 1.5, 2.0], "answer_literal": [1.75, 1.5, 2.0],
            "trajectory": [1.75] * 3, "segment": [0.25, -0.5, 2.0],
        }.items():  # fmt: skip
            got = advantages.thinking_credit(residual, w, mode=mode)
            np.testing.assert_allclose(got, [[want]])

    def test_unknown_mode_is_refused(self):
        with pytest.raises(ValueError, match="to_go, answer_literal"):
            unchecked(advantages.thinking_credit)(jnp.ones((1, 1, 2)), jnp.ones(2), mode="mean")
