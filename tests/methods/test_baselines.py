import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.methods import baselines

unchecked = inspect.unwrap


class TestBRPO:
    R = jnp.array([[[0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 0.25, 0.5]]])
    BUDGETS = jnp.array([2000, 4000, 6000, 8000])

    @pytest.mark.parametrize(
        "prior, first, second",
        [
            ("uniform", [0.21875, 0.3203125, 0.244792, 0.069196],
                        [-0.21875, -0.1171875, 0.015625, 0.051339]),
            ("linear", [0.2625, 0.396875, 0.339583, 0.110714],
                       [-0.2625, -0.128125, 0.03125, 0.082143]),
            ("base", [0.25, 0.4375, 0.458333, 0.276786],
                     [-0.25, -0.0625, 0.125, 0.205357]),
        ],
    )  # fmt: skip
    def test_published_form_on_two_traces(self, prior, first, second):
        prior = baselines.brpo_prior(prior, self.BUDGETS)
        got = jax.jit(baselines.brpo_advantage)(self.R, prior)
        np.testing.assert_allclose(got, [[first, second]], atol=2e-6)

    def test_priors(self):
        np.testing.assert_allclose(
            baselines.brpo_prior("linear", self.BUDGETS), [0.1, 0.2, 0.3, 0.4], rtol=1e-6
        )
        np.testing.assert_array_equal(baselines.brpo_prior("base", self.BUDGETS), [0, 0, 0, 1])
        np.testing.assert_array_equal(baselines.brpo_prior("uniform", self.BUDGETS), [0.25] * 4)

    def test_parts_by_hand(self):
        prior = jnp.full(4, 0.25)
        returns = np.array([[0.625, 0.625, 0.5, 0.25], [0.1875, 0.1875, 0.1875, 0.125]])
        none = baselines.brpo_advantage(self.R, prior, mode="none")
        np.testing.assert_allclose(none[0], returns)
        group = baselines.brpo_advantage(self.R, prior, mode="v2")
        np.testing.assert_allclose(group[0], returns - returns.mean(0))
        # V1 of trace A: segment 2 sees (.5 * .5 + .25 * 0) / .75 over a remaining mass of 1/2;
        # segment 3 sees (.5 * 1 + .25 * .5 + .125 * 0) / .875 over 1/4.
        v1 = np.array([0.0, 0.0, 1 / 6, 0.625 / 0.875 / 4])
        past = baselines.brpo_advantage(self.R, prior, mode="v1")
        np.testing.assert_allclose(past[0, 0], returns[0] - v1, rtol=1e-6)

    def test_leave_one_out_compares_with_the_other_traces_only(self):
        prior = jnp.full(4, 0.25)
        loo = baselines.brpo_advantage(self.R, prior, mode="v2", loo=True)
        plain = baselines.brpo_advantage(self.R, prior, mode="v2")
        np.testing.assert_allclose(loo, 2 * plain, rtol=1e-6)

    def test_a_lone_trace_has_no_group_baseline(self):
        alone = baselines.brpo_advantage(self.R[:, :1], jnp.full(4, 0.25), mode="v2")
        np.testing.assert_allclose(alone[0, 0], [0.625, 0.625, 0.5, 0.25])

    def test_later_outcomes_do_not_change_the_past_reward_baseline(self):
        prior = jnp.full(4, 0.25)
        other = self.R.at[0, 0, 3].set(0.0)
        for changed, segment in ((other, 3), (self.R.at[0, 0, 2].set(0.0), 2)):
            with_baseline = baselines.brpo_advantage(changed, prior, mode="v1")
            without = baselines.brpo_advantage(changed, prior, mode="none")
            before = baselines.brpo_advantage(self.R, prior, mode="v1")
            before_without = baselines.brpo_advantage(self.R, prior, mode="none")
            np.testing.assert_allclose(
                (without - with_baseline)[0, 0, : segment + 1],
                (before_without - before)[0, 0, : segment + 1], atol=1e-6,
            )  # fmt: skip

    def test_answers_compare_within_a_cut_or_within_the_group_when_alone(self):
        r = jnp.array([[[[1.0, 0.0, 0.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]]]])
        np.testing.assert_allclose(
            baselines.answer_advantage(r), [[[[0.5, -0.5, -0.5, 0.5]], [[0, 0, 0, 0]]]]
        )
        alone = jnp.array([[[[1.0]], [[0.0]], [[0.0]], [[0.0]]]])
        np.testing.assert_allclose(
            baselines.answer_advantage(alone)[0, :, 0, 0], [0.75, -0.25, -0.25, -0.25]
        )

    def test_unknown_names_are_refused(self):
        with pytest.raises(UserError, match="base, uniform or linear"):
            unchecked(baselines.brpo_prior)("flat", self.BUDGETS)
        with pytest.raises(UserError, match="brpo, v1, v2 or none"):
            unchecked(baselines.brpo_advantage)(self.R, jnp.full(4, 0.25), mode="v3")


class TestDAPO:
    def test_overlong_penalty_in_the_published_setting(self):
        lengths = jnp.array([0, 16384, 18432, 20480, 30000])
        got = baselines.overlong_penalty(lengths, max_length=20480, buffer=4096)
        np.testing.assert_allclose(got, [0.0, 0.0, -0.5, -1.0, -1.0])
        half = baselines.overlong_penalty(lengths, max_length=20480, buffer=4096, factor=0.5)
        np.testing.assert_allclose(half, [0.0, 0.0, -0.25, -0.5, -0.5])

    def test_dynamic_sampling_keeps_mixed_groups_and_lone_traces(self):
        correct = jnp.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.5]])
        np.testing.assert_array_equal(baselines.dynamic_keep(correct), [False, True, False, True])
        np.testing.assert_array_equal(baselines.dynamic_keep(jnp.zeros((3, 1))), [True] * 3)


class TestHAPO:
    @pytest.mark.parametrize(
        "length, right, wrong",
        [(0, 1.0, 0.0), (500, 0.7071, 0.0), (1000, 0.0, 0.0), (1493, -0.6993, -0.6993),
         (1500, -0.7, -0.7071), (2000, -0.7, -1.0), (9000, -0.7, -1.0)],
    )  # fmt: skip
    def test_cosine_length_reward(self, length, right, wrong):
        got = baselines.hapo_length_reward(
            jnp.array([1000, 1000]), jnp.array([length, length]), jnp.array([1, 0])
        )
        np.testing.assert_allclose(got, [right, wrong], atol=5e-5)

    @pytest.mark.parametrize(
        "length, right, wrong",
        [(250, 0.75, 0.0), (1000, 0.0, 0.0), (1050, 0.0, 0.0), (1300, -0.2, -0.2),
         (2000, -0.7, -0.9), (5000, -0.7, -1.0)],
    )  # fmt: skip
    def test_linear_length_reward(self, length, right, wrong):
        got = baselines.hapo_length_reward(
            jnp.array([1000, 1000]), jnp.array([length, length]), jnp.array([1, 0]), kind="linear"
        )
        np.testing.assert_allclose(got, [right, wrong], atol=1e-6)

    def test_total_reward_ranks_every_right_answer_above_every_wrong_one(self):
        lengths = jnp.arange(0, 5000, 7)
        history = jnp.full_like(lengths, 1000)
        right = baselines.hapo_reward(history, lengths, jnp.ones_like(lengths))
        wrong = baselines.hapo_reward(history, lengths, jnp.zeros_like(lengths))
        assert right.min() > wrong.max()
        half = baselines.hapo_reward(history[:1], lengths[:1], jnp.ones(1), weight=0.5)
        np.testing.assert_allclose(half, [1.5])

    def test_no_history_means_no_length_reward(self):
        got = baselines.hapo_reward(
            baselines.hapo_init(2), jnp.array([10, 10]), jnp.array([True, False])
        )
        np.testing.assert_array_equal(got, [1.0, 0.0])

    def test_history_is_the_running_minimum_of_correct_lengths(self):
        history = jnp.array([500, baselines.HAPO_NO_HISTORY, 300])
        update = jax.jit(baselines.hapo_update)
        # Question 1 comes twice in the batch; question 2 is only answered wrongly.
        new = update(
            history, jnp.array([1, 0, 1, 2]),
            jnp.array([[90, 80], [600, 450], [70, 60], [1, 2]]),
            jnp.array([[1, 0], [1, 1], [1, 0], [0, 0]]),
        )  # fmt: skip
        np.testing.assert_array_equal(new, [450, 70, 300])
        again = update(new, jnp.array([0]), jnp.array([[999]]), jnp.array([[1]]))
        np.testing.assert_array_equal(again, new)


class TestSelfBudgeter:
    @staticmethod
    def reward(lengths, correct, alpha, *, well_formed=1, limit=np.inf, budget=1000):
        lengths = jnp.asarray(lengths)
        full = lambda x: jnp.full(lengths.shape, x, jnp.float32)  # noqa: E731
        return baselines.selfbudgeter_reward(
            full(well_formed), full(correct), lengths, full(budget), full(limit), alpha=alpha
        )

    def test_wide_tolerance(self):
        lengths = [0, 500, 1000, 2000, 7000]
        np.testing.assert_allclose(
            self.reward(lengths, 1, 6.0), [0.8147, 0.7826, 0.75, 0.6853, 0.5], atol=5e-5
        )
        np.testing.assert_allclose(
            self.reward(lengths, 0, 6.0), [-0.3147, -0.2826, -0.25, -0.1853, 0.0], atol=5e-5
        )

    def test_tight_tolerance(self):
        lengths = [500, 900, 950, 1000, 1050, 1100, 1101]
        np.testing.assert_allclose(
            self.reward(lengths, 1, 0.1), [0.5, 1, 0.9268, 0.75, 0.5732, 0.5, 0.5], atol=5e-5
        )
        np.testing.assert_allclose(
            self.reward(lengths, 0, 0.1), [-0.5, -0.5, -0.4268, -0.25, -0.0732, 0, -0.5], atol=5e-5
        )

    def test_declaring_more_than_the_limit_costs_and_bad_format_costs_most(self):
        np.testing.assert_allclose(self.reward([1000], 1, 6.0, limit=999), [0.35], atol=1e-6)
        np.testing.assert_allclose(self.reward([1000], 1, 6.0, limit=1000), [0.75], atol=1e-6)
        np.testing.assert_allclose(self.reward([1000], 1, 6.0, well_formed=0), [-1.0])

    @pytest.mark.parametrize("alpha", [6.0, 1.0, 0.1])
    def test_a_correct_answer_is_never_worse_than_a_wrong_one(self, alpha):
        lengths = np.arange(0, 9000, 50)
        worst_right = self.reward(lengths, 1, alpha, limit=1).min()
        assert worst_right >= self.reward(lengths, 0, alpha).max()

    def test_a_declared_budget_of_zero_gives_a_finite_reward(self):
        assert np.isfinite(self.reward([0, 10], 1, 0.1, budget=0)).all()

    def test_tolerance_tightens_linearly(self):
        got = [float(baselines.alpha_schedule(f)) for f in (0.0, 0.5, 1.0, 1.5)]
        np.testing.assert_allclose(got, [6.0, 3.05, 0.1, 0.1], rtol=1e-6)
