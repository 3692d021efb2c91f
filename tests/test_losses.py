import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bacr_jax import losses

unchecked = inspect.unwrap
MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]
LOGP = jnp.array([[-1.0, -2.0, -9.0], [-0.5, -0.25, -3.0]])
OLD = jnp.array([[-1.1, -1.8, -1.0], [-0.5, -0.5, -0.2]])
MASK = jnp.array([[1, 1, 0], [1, 1, 1]])


def aggregate(x, mask, mode, constant):
    denominator = losses.loss_denominator(mask, mode=mode, constant=constant)
    return losses.aggregate_sum(x, mask, mode=mode) / denominator


class TestRatios:
    def test_token_ratio_by_hand(self):
        got = losses.token_ratio(LOGP[:, :2], OLD[:, :2])
        np.testing.assert_allclose(got, np.exp([[0.1, -0.2], [0.0, 0.25]]), rtol=1e-6)

    def test_ratios_stay_finite_for_absurd_logprobs(self):
        new, old = jnp.array([[0.0, -1e30]]), jnp.array([[-1e30, 0.0]])
        ratio = losses.token_ratio(new, old)
        np.testing.assert_allclose(ratio, np.exp([[20.0, -20.0]]), rtol=1e-6)
        for f in (losses.sequence_ratio, losses.gspo_ratio):
            assert np.isfinite(f(new, old, jnp.array([[1, 0]]))).all()

    def test_sequence_ratio_is_the_product_over_sampled_tokens(self):
        got = losses.sequence_ratio(LOGP, OLD, MASK)
        np.testing.assert_allclose(got, np.exp([[-0.1] * 3, [-2.55] * 3]), rtol=1e-6)

    def test_gspo_ratio_is_the_geometric_mean_with_token_gradients(self):
        got = losses.gspo_ratio(LOGP, OLD, MASK)
        np.testing.assert_allclose(got, np.exp([[-0.05] * 3, [-0.85] * 3]), rtol=1e-6)
        # d rho_t / d logp_u is s for u = t and 0 otherwise: no credit leaks between tokens.
        jacobian = jax.jacobian(lambda x: losses.gspo_ratio(x, OLD, MASK)[1])(LOGP)[:, 1]
        np.testing.assert_allclose(jacobian, np.exp(-0.85) * np.eye(3), rtol=1e-6)

    def test_no_gradient_reaches_the_old_policy(self):
        for f in (
            losses.token_ratio,
            lambda x, y: losses.sequence_ratio(x, y, MASK),
            lambda x, y: losses.gspo_ratio(x, y, MASK),
        ):
            gradient = jax.grad(lambda old, f=f: jnp.sum(f(LOGP, old)))(OLD)
            np.testing.assert_array_equal(gradient, np.zeros((2, 3)))

    def test_ratios_of_half_precision_are_finite_and_their_losses_0_without_advantage(self):
        new, old = jnp.zeros((1, 2), jnp.float16), jnp.full((1, 2), -12.0, jnp.float16)
        ratio = losses.token_ratio(new, old)
        np.testing.assert_allclose(ratio, np.full((1, 2), np.exp(12.0)), rtol=1e-6)
        loss = losses.policy_loss(ratio, jnp.zeros((1, 2)), clip_low=0.2, clip_high=0.2)
        np.testing.assert_array_equal(loss, np.zeros((1, 2)))

    @pytest.mark.parametrize(
        "term",
        [
            losses.token_ratio,
            losses.sequence_ratio,
            losses.gspo_ratio,
            lambda new, old, mask: new * losses.truncated_importance_weight(new, old, mask),
            *(functools.partial(losses.kl_penalty, kind=k) for k in ("k1", "k2", "k3", "k3+")),
        ],
    )
    def test_gradients_are_finite_where_padding_can_not_be_drawn(self, term):
        """Its log-probability is -inf under both policies; token 0 of three pads."""
        allowed, tokens = jnp.array([False, True, True]), jnp.array([[1, 2, 0], [2, 1, 1]])

        def scored(logits):
            scores = jax.nn.log_softmax(jnp.where(allowed, logits, -jnp.inf))
            return jnp.take_along_axis(scores, tokens[..., None], 2)[..., 0]

        @jax.jit
        def of_both(policy, old):
            def loss(logits):
                found = term(scored(logits), scored(old), MASK)
                return losses.aggregate_sum(found, MASK, mode="token_mean")

            return jax.value_and_grad(loss)(policy)

        one, other = np.random.default_rng(0).normal(size=(2, 2, 3, 3)).astype(np.float32)
        loss, gradient = of_both(one, other)
        assert np.isfinite(loss) and np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[0, 2], np.zeros(3))
        assert np.abs(gradient[1]).max() > 1e-3


class TestPolicyLoss:
    @pytest.mark.parametrize(
        "ratio, advantage, loss",
        [(1.0, 2.0, -2.0), (1.1, 1.0, -1.1), (1.5, 1.0, -1.2), (0.5, 1.0, -0.5),
         (0.5, -1.0, 0.8), (1.5, -1.0, 1.5), (0.9, -1.0, 0.9), (7.0, 0.0, 0.0)],
    )  # fmt: skip
    def test_eq15_by_hand(self, ratio, advantage, loss):
        got = losses.policy_loss(
            jnp.array([ratio]), jnp.array([advantage]), clip_low=0.2, clip_high=0.2
        )
        np.testing.assert_allclose(got, [loss], rtol=1e-6)

    @pytest.mark.parametrize("ratio, advantage, loss", [
        (1.25, 1.0, -1.25), (1.5, 1.0, -1.28), (9.0, -1.0, 9.0), (0.7, -1.0, 0.8), (9.0, 1.0, -1.28)
    ])  # fmt: skip
    def test_clip_higher_by_hand(self, ratio, advantage, loss):
        got = losses.policy_loss(
            jnp.array([ratio]), jnp.array([advantage]), clip_low=0.2, clip_high=0.28
        )
        np.testing.assert_allclose(got, [loss], rtol=1e-6)

    @pytest.mark.parametrize("ratio, advantage, loss, slope", [
        (9.0, -1.0, 9.0, 1.0), (11.0, -1.0, 10.0, 0.0), (11.0, -0.5, 5.0, 0.0),
        (0.5, -1.0, 0.8, 0.0), (1.1, -2.0, 2.2, 2.0), (11.0, 1.0, -1.28, 0.0),
        (1.1, 1.0, -1.1, -1.0), (11.0, 0.0, 0.0, 0.0),
    ])  # fmt: skip
    def test_dual_clip_by_hand(self, ratio, advantage, loss, slope):
        """Above 10 a token with a negative advantage costs 10 times it, and has no gradient."""
        clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
        value, gradient = jax.value_and_grad(
            lambda x: losses.policy_loss(x, jnp.array(advantage), **clip)
        )(jnp.array(ratio))
        assert (float(value), float(gradient)) == pytest.approx((loss, slope), rel=1e-6)

    @settings(max_examples=50)
    # Smaller advantages times a ratio below 1 are subnormal, which XLA may take for 0.
    @given(
        st.floats(0.125, 3, width=32),
        st.floats(-2, 2, width=32).filter(lambda a: a == 0.0 or abs(a) > 1e-30),
        st.sampled_from([None, 2.0]),
    )
    def test_tokens_reported_as_clipped_are_those_without_gradient(self, ratio, advantage, dual):
        args = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": dual}
        a = jnp.array(advantage)
        gradient = jax.grad(lambda x: losses.policy_loss(x, a, **args))(jnp.array(ratio))
        clipped = losses.is_clipped(jnp.array(ratio), a, **args)
        assert bool(gradient == 0.0) == (bool(clipped) or advantage == 0.0)

    def test_at_ratio_one_the_gradient_is_the_policy_gradient(self):
        a = jnp.array([[1.5, -2.0, 0.5], [0.0, 3.0, -1.0]])

        def loss(x):
            return jnp.sum(
                losses.policy_loss(losses.token_ratio(x, LOGP), a, clip_low=0.2, clip_high=0.2)
            )

        np.testing.assert_allclose(jax.grad(loss)(LOGP), -a, rtol=1e-6)

    def test_advantages_are_constants(self):
        def loss(a):
            return jnp.sum(losses.policy_loss(jnp.ones(2), a, clip_low=0.2, clip_high=0.2))

        np.testing.assert_array_equal(jax.grad(loss)(jnp.array([1.0, -1.0])), [0.0, 0.0])


class TestImportanceWeight:
    SAMPLER = jnp.log(jnp.array([[0.25, 0.5, 0.1]]))
    LEARNER = jnp.log(jnp.array([[0.3, 0.25, 0.9]]))

    def test_is_capped_per_token(self):
        got = losses.truncated_importance_weight(self.LEARNER, self.SAMPLER)
        np.testing.assert_allclose(got, [[1.2, 0.5, 2.0]], rtol=1e-5)

    def test_carries_no_gradient(self):
        gradient = jax.grad(lambda x: jnp.sum(losses.truncated_importance_weight(x, self.SAMPLER)))(
            self.LEARNER
        )
        np.testing.assert_array_equal(gradient, np.zeros((1, 3)))

    def test_a_sequence_has_the_product_of_its_ratios_or_no_weight(self):
        """1.2 x .5 = .6, without the third token; 1.2 x .5 x 9 = 5.4 exceeds 3."""
        both = jnp.concatenate([self.LEARNER, self.LEARNER])
        sampled = jnp.concatenate([self.SAMPLER, self.SAMPLER])
        mask = jnp.array([[1, 1, 0], [1, 1, 1]])
        got = losses.masked_sequence_weight(both, sampled, mask, cap=3.0)
        np.testing.assert_allclose(got, [[0.6], [0.0]], rtol=1e-5)
        got = losses.masked_sequence_weight(both, sampled, mask, cap=6.0)
        np.testing.assert_allclose(got, [[0.6], [5.4]], rtol=1e-5)

    def test_a_sequence_weight_carries_no_gradient(self):
        gradient = jax.grad(
            lambda x: losses.masked_sequence_weight(x, self.SAMPLER, jnp.ones((1, 3)), cap=9.0)[
                0, 0
            ]
        )(self.LEARNER)
        np.testing.assert_array_equal(gradient, np.zeros((1, 3)))


def test_a_teacher_adds_its_log_probability_less_the_policys():
    """It is twice and half as sure of two tokens; the last one can't be drawn, and is padding."""
    old = jnp.log(jnp.array([0.4, 0.5, 0.0]))
    teacher = jnp.log(jnp.array([0.8, 0.25, 0.0]))
    found, divergence = losses.distilled_advantages(
        jnp.array([1.0, -1.0, 2.0]), old, teacher, jnp.array([1, 1, 0]), weight=0.5
    )
    two = np.log(2.0)
    np.testing.assert_allclose(found, [1.0 + two / 2, -1.0 - two / 2, 2.0], rtol=1e-6)
    np.testing.assert_allclose(divergence, [-two, two, 0.0], rtol=1e-6)


class TestAggregation:
    X = jnp.array([[1.0, 2.0, 3.0, 4.0], [10.0, 99.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0]])
    MASK = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])

    @pytest.mark.parametrize(
        "mode, want",
        [("token_mean", 4.0), ("seq_mean_token_sum", 8.0), ("seq_mean_token_mean", 6.0),
         ("constant", 1.6)],
    )  # fmt: skip
    def test_by_hand_with_an_empty_row(self, mode, want):
        got = aggregate(self.X, self.MASK, mode, 5)
        np.testing.assert_allclose(got, want, rtol=1e-6)

    @pytest.mark.parametrize("mode", MODES)
    def test_an_empty_batch_gives_zero_with_finite_gradients(self, mode):
        nothing = jnp.zeros_like(self.MASK)
        assert losses.loss_denominator(nothing, mode=mode, constant=5) == 0.0
        total = lambda x: losses.aggregate_sum(x, nothing, mode=mode)
        value, gradient = jax.value_and_grad(total)(jnp.full_like(self.X, jnp.nan))
        assert value == 0.0
        np.testing.assert_array_equal(gradient, np.zeros_like(self.X))

    @settings(max_examples=40)
    @given(
        hnp.arrays(np.float32, (4, 3), elements=st.floats(-5, 5, width=32)),
        hnp.arrays(np.bool_, (4, 3)),
        st.sampled_from(MODES),
    )
    def test_micro_batches_over_the_global_denominator_add_up(self, x, mask, mode):
        x, mask = jnp.asarray(x), jnp.asarray(mask)
        mask = mask.at[0, 0].set(True)  # an empty batch is another test's
        parts = [(x[:1], mask[:1]), (x[1:], mask[1:])]
        denominator = sum(losses.loss_denominator(m, mode=mode, constant=7) for _, m in parts)
        split = sum(losses.aggregate_sum(y, m, mode=mode) / denominator for y, m in parts)
        whole = aggregate(x, mask, mode, 7)
        np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("mode", MODES)
    def test_tokens_outside_the_mask_get_no_gradient_and_others_do(self, mode):
        gradient = jax.grad(lambda x: aggregate(x, self.MASK, mode, 5))(self.X)
        np.testing.assert_array_equal(gradient != 0.0, np.asarray(self.MASK) == 1)

    def test_only_the_constant_mode_weighs_tokens_alike_whatever_their_neighbours(self):
        # Gradient of the first token of row 0 as its row gets longer; row 1 stays as it is.
        def share(mode, length):
            mask = jnp.arange(4)[None] < jnp.array([[length], [1]])
            return float(jax.grad(lambda x: aggregate(x, mask, mode, 4))(self.X[:2])[0, 0])

        assert share("constant", 1) == share("constant", 4)
        assert share("token_mean", 1) > share("token_mean", 4)
        assert share("seq_mean_token_mean", 1) == 4 * share("seq_mean_token_mean", 4)

    def test_unknown_mode_is_refused(self):
        with pytest.raises(ValueError, match="token_mean, seq_mean"):
            unchecked(losses.aggregate_sum)(self.X, self.MASK, mode="mean")
        with pytest.raises(ValueError, match="token_mean, seq_mean"):
            unchecked(losses.loss_denominator)(self.MASK, mode="mean", constant=5)


class TestValueLoss:
    def test_eq12_by_hand(self):
        got = losses.value_loss(jnp.array([0.5, 1.0]), jnp.array([1.3, 0.0]))
        np.testing.assert_allclose(got, [0.64, 1.0], rtol=1e-6)

    def test_targets_are_constants(self):
        gradient = jax.grad(lambda r: losses.value_loss(jnp.ones(()), r))(jnp.zeros(()))
        assert gradient == 0.0


class TestDivergence:
    THETA, REFERENCE = jnp.array([0.4, -0.3, 0.1]), jnp.array([0.1, 0.2, -0.5])

    def estimate(self, theta, kind, *, sampled_from):
        logp, ref = jax.nn.log_softmax(theta), jax.nn.log_softmax(self.REFERENCE)
        return jnp.sum(sampled_from * losses.kl_penalty(logp, ref, kind=kind))

    def test_values_by_hand(self):
        logp, ref = jnp.array([-1.0]), jnp.array([-1.5])
        for kind, want in {
            "k1": 0.5, "k2": 0.125, "k3": np.exp(-0.5) - 0.5, "k3+": np.exp(-0.5) - 0.5
        }.items():  # fmt: skip
            np.testing.assert_allclose(losses.kl_penalty(logp, ref, kind=kind), [want], rtol=1e-5)

    @pytest.mark.parametrize("kind", ["k1", "k3", "k3+"])
    def test_k1_and_k3_are_unbiased_estimates_of_the_divergence(self, kind):
        p, q = jax.nn.softmax(self.THETA), jax.nn.softmax(self.REFERENCE)
        got = self.estimate(self.THETA, kind, sampled_from=p)
        np.testing.assert_allclose(got, scipy.stats.entropy(p, q), rtol=1e-4)

    def test_only_k2_gradients_follow_the_divergence(self):
        p = jax.nn.softmax(self.THETA)

        def divergence(theta):
            difference = jax.nn.log_softmax(theta) - jax.nn.log_softmax(self.REFERENCE)
            return jnp.sum(jax.nn.softmax(theta) * difference)

        exact = jax.grad(divergence)(self.THETA)
        gradient = {
            kind: jax.grad(lambda t, k=kind: self.estimate(t, k, sampled_from=p))(self.THETA)
            for kind in ("k1", "k2", "k3", "k3+")
        }
        np.testing.assert_allclose(gradient["k2"], exact, atol=1e-6)
        np.testing.assert_allclose(gradient["k3+"], exact, atol=1e-6)
        np.testing.assert_allclose(gradient["k1"], np.zeros(3), atol=1e-6)
        assert float(jnp.max(jnp.abs(gradient["k3"] - exact))) > 0.01

    def test_k3_is_bounded_and_never_negative(self):
        d = jnp.array([-100.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 100.0])
        got = np.asarray(losses.kl_penalty(d, jnp.zeros(7), kind="k3"))
        assert (got >= 0.0).all()
        assert got.max() == 10.0


class TestTotal:
    def test_eq16_by_hand(self):
        got = losses.total_loss(1.0, 2.0, 3.0, value_coef=0.5, entropy_coef=0.01)
        np.testing.assert_allclose(got, 1.97, rtol=1e-6)
        with_kl = losses.total_loss(
            1.0, 2.0, 3.0, value_coef=0.5, entropy_coef=0.01, kl=4.0, kl_coef=0.1
        )
        np.testing.assert_allclose(with_kl, 2.37, rtol=1e-6)

    def test_a_step_down_the_entropy_term_raises_entropy(self):
        theta = jnp.array([1.0, 0.0, -0.5])

        entropy = lambda x: -jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(x))

        def loss(x):
            return losses.total_loss(0.0, 0.0, entropy(x), value_coef=0.5, entropy_coef=0.01)

        stepped = theta - 10.0 * jax.grad(loss)(theta)
        assert entropy(stepped) > entropy(theta)


def test_the_whole_loss_compiles_and_differentiates():
    @jax.jit
    def loss(logprobs):
        ratio = losses.token_ratio(logprobs, OLD)
        tokens = losses.policy_loss(ratio, jnp.ones_like(ratio), clip_low=0.2, clip_high=0.28)
        return aggregate(tokens, MASK, "constant", 3)

    gradient = jax.grad(loss)(LOGP)
    assert np.isfinite(gradient).all()
    assert gradient[0, 2] == 0.0
