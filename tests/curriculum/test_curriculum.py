import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax import curriculum
from bacr_jax.errors import UserError

PAPER = {"alpha": 0.6, "beta": 0.3, "b_min": 256, "b_max": 4096}
# Without the runtime type checks that tests run with, whose annotations would refuse first.
unchecked = inspect.unwrap
rates = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6)


def state_with(pass_rate, **fields):
    state = curriculum.init_curriculum(len(pass_rate), mu0=1500.0)
    return dataclasses.replace(state, pass_rate=jnp.asarray(pass_rate, jnp.float32), **fields)


class TestBudgetLocation:
    def test_eq5_by_hand(self):
        rho = jnp.array([0.0, 0.1075, 0.25, 0.5, 0.75, 1.0])
        mu = curriculum.budget_mean(rho, 1500.0, **PAPER)
        # 1500 (1 - .6 rho) + 1228.8 (1 - rho)
        want = [2728.8, 2499.954, 2196.6, 1664.4, 1132.2, 600.0]
        np.testing.assert_allclose(mu, want, rtol=1e-6)

    def test_leaves_the_budget_range_unless_clipped(self):
        # mu(rho=0) > b_max iff mu0 > (1 - beta) b_max; mu(rho=1) < b_min iff mu0 < b_min/(1-alpha)
        rho, mu0 = jnp.array([0.0, 1.0]), jnp.array([2868.0, 639.0])
        free = curriculum.budget_mean(rho, mu0, **PAPER, clip=False)
        assert free[0] > 4096
        assert free[1] < 256
        np.testing.assert_array_equal(curriculum.budget_mean(rho, mu0, **PAPER), [4096, 256])

    @settings(max_examples=50, deadline=None)
    @given(rates, st.floats(1, 5000))
    def test_is_finite_and_inside_for_every_rate(self, rho, mu0):
        mu = np.asarray(curriculum.budget_mean(jnp.asarray(rho, jnp.float32), mu0, **PAPER))
        assert np.isfinite(mu).all()
        assert ((mu >= 256) & (mu <= 4096)).all()

    def test_first_period_uses_mu0_and_later_ones_eq5(self):
        state = curriculum.init_curriculum(2, mu0=[1500.0, 1000.0])
        np.testing.assert_array_equal(curriculum.scheduled_mean(state, **PAPER), [1500.0, 1000.0])
        state = curriculum.record_outcomes(
            state, jnp.array([0, 1]), jnp.array([[1.0, 1.0], [0.0, 0.0]]), ema_decay=0.9
        )
        np.testing.assert_array_equal(curriculum.scheduled_mean(state, **PAPER), [1500.0, 1000.0])
        state = curriculum.update_pass_rates(state, source="epoch")
        np.testing.assert_allclose(
            curriculum.scheduled_mean(state, **PAPER), [600.0, 1000.0 + 1228.8], rtol=1e-6
        )

    def test_mu0_must_fit_the_groups(self):
        with pytest.raises(UserError, match="3 values for 4 difficulty groups"):
            curriculum.init_curriculum(4, mu0=[1.0, 2.0, 3.0])
        with pytest.raises(UserError, match="positive"):
            curriculum.init_curriculum(2, mu0=0.0)


class TestWeights:
    def test_eq6_by_hand(self):
        rho = jnp.array([0.5, 0.1, 0.0])
        np.testing.assert_allclose(
            curriculum.group_weights(rho, epsilon=0.0), [0.25 / 0.34, 0.09 / 0.34, 0.0], rtol=1e-6
        )
        np.testing.assert_allclose(
            curriculum.group_weights(rho, epsilon=0.02), [0.675, 0.275, 0.05], rtol=1e-6
        )

    def test_all_groups_solved_or_failed_gives_uniform_weights(self):
        weights = curriculum.group_weights(jnp.array([0.0, 1.0, 1.0, 0.0]), epsilon=0.0)
        np.testing.assert_allclose(weights, np.full(4, 0.25))

    def test_sizes_multiply_and_exclude_empty_groups(self):
        rho, sizes = jnp.array([0.5, 0.5, 0.5]), jnp.array([30, 10, 0])
        np.testing.assert_allclose(curriculum.group_weights(rho, sizes=sizes), [0.75, 0.25, 0.0])
        solved = curriculum.group_weights(jnp.ones(3), epsilon=0.0, sizes=sizes)
        np.testing.assert_allclose(solved, [0.5, 0.5, 0.0])

    @settings(max_examples=50, deadline=None)
    @given(rates, st.sampled_from([0.0, 0.02, 1.0]))
    def test_are_probabilities_for_every_rate(self, rho, epsilon):
        weights = curriculum.group_weights(jnp.asarray(rho, jnp.float32), epsilon=epsilon)
        assert np.isfinite(weights).all()
        assert (np.asarray(weights) >= 0).all()
        np.testing.assert_allclose(np.sum(weights), 1.0, rtol=1e-5)

    def test_half_solved_half_impossible_is_only_frontier_on_average(self):
        # Both groups have a pass rate of 1/2. Only the problems of group 1 have any spread.
        p, group_of = jnp.array([0.0, 1.0, 0.5, 0.5]), jnp.array([0, 0, 1, 1])
        literal = curriculum.group_weights(jnp.array([0.5, 0.5]))
        np.testing.assert_allclose(literal, [0.5, 0.5])
        inside = curriculum.problem_weights(p, group_of, num_groups=3, epsilon=0.02)
        np.testing.assert_allclose(inside, [0.02 / 0.29, 0.27 / 0.29, 0.0], rtol=1e-6)

    def test_problem_weights_by_size(self):
        p, group_of = jnp.full(4, 0.5), jnp.array([0, 1, 1, 1])
        weights = curriculum.problem_weights(p, group_of, num_groups=2, size_weighted=True)
        np.testing.assert_allclose(weights, [0.25, 0.75], rtol=1e-6)


class TestBudgets:
    GROUP = jnp.array([0, 1, 2, 1])

    def sample(self, assign="independent", *, group=GROUP, num_rollouts=8, sigma=512.0, seed=0):
        mu = jnp.array([300.0, 1500.0, 9000.0])
        return np.asarray(
            curriculum.sample_budgets(
                jax.random.key(seed), mu, group, sigma=sigma, b_min=256, b_max=4096,
                num_rollouts=num_rollouts, assign=assign,
            )
        )  # fmt: skip

    @pytest.mark.parametrize("assign", ["independent", "shared", "stratified"])
    def test_every_assignment_has_the_distribution_of_eq4(self, assign):
        group = jnp.full(4000, 1)
        budgets = self.sample(assign, group=group, num_rollouts=3)
        law = scipy.stats.truncnorm((256 - 1500) / 512, (4096 - 1500) / 512, 1500, 512)
        for rollout in range(3):
            # Undo the rounding so that the law is continuous again.
            jitter = np.random.default_rng(rollout).uniform(-0.5, 0.5, 4000)
            assert scipy.stats.kstest(budgets[:, rollout] + jitter, law.cdf).pvalue > 1e-4

    def test_whole_tokens_inside_the_range_even_when_mu_is_far_outside(self):
        budgets = self.sample(group=jnp.full(2000, 2))
        assert budgets.dtype == np.int32
        assert budgets.max() == 4096
        assert budgets.min() >= 256
        assert len(np.unique(budgets)) > 50

    def test_each_group_has_its_own_location_and_scale(self):
        group = jnp.repeat(jnp.arange(3), 500)
        budgets = self.sample(group=group, sigma=jnp.array([1.0, 200.0, 1.0]))
        by_group = budgets.reshape(3, -1)
        assert set(np.unique(by_group[0])) <= set(range(294, 307))
        assert 150 < by_group[1].std() < 250
        assert (by_group[2] == 4096).mean() > 0.9

    def test_shared_gives_one_budget_per_question(self):
        budgets = self.sample("shared")
        assert (budgets == budgets[:, :1]).all()
        assert len(np.unique(budgets[:, 0])) > 1

    def test_stratified_puts_one_rollout_in_each_quantile_range(self):
        budgets = np.asarray(
            curriculum.uniform_budgets(
                jax.random.key(0), b_min=0, b_max=799, shape=(300, 8), assign="stratified"
            )
        )
        strata = budgets // 100
        np.testing.assert_array_equal(np.sort(strata, axis=1), np.tile(np.arange(8), (300, 1)))
        assert scipy.stats.chisquare(np.bincount(strata[:, 0], minlength=8)).pvalue > 1e-4

    def test_uniform_budgets_cover_the_range_evenly(self):
        budgets = curriculum.uniform_budgets(jax.random.key(1), b_min=5, b_max=8, shape=(500, 8))
        counts = np.bincount(np.asarray(budgets).ravel(), minlength=10)
        assert counts[:5].sum() == counts[9:].sum() == 0
        assert scipy.stats.chisquare(counts[5:9]).pvalue > 1e-4

    def test_choices_are_drawn_equally_often_and_nothing_else(self):
        choices = jnp.array([8, 16, 24, 32])
        budgets = curriculum.choice_budgets(jax.random.key(1), choices, shape=(500, 8))
        found, counts = np.unique(np.asarray(budgets), return_counts=True)
        np.testing.assert_array_equal(found, choices)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4

    def test_stratified_choices_give_every_question_each_budget_alike(self):
        choices = jnp.array([3, 5, 100])
        budgets = curriculum.choice_budgets(
            jax.random.key(0), choices, shape=(50, 6), assign="stratified"
        )
        in_order = np.sort(budgets, axis=1)
        np.testing.assert_array_equal(in_order, np.tile([3, 3, 5, 5, 100, 100], (50, 1)))

    def test_fixed_budgets(self):
        np.testing.assert_array_equal(curriculum.fixed_budgets(7, shape=(2, 3)), np.full((2, 3), 7))

    def test_same_key_same_budgets_other_key_other_budgets(self):
        np.testing.assert_array_equal(self.sample(seed=3), self.sample(seed=3))
        assert (self.sample(seed=3) != self.sample(seed=4)).any()

    def test_unknown_assignment_is_refused(self):
        with pytest.raises(UserError, match="independent, shared or stratified"):
            unchecked(curriculum.uniform_budgets)(
                jax.random.key(0), b_min=1, b_max=2, shape=(1, 1), assign="sorted"
            )


class TestPassRates:
    GROUP = jnp.array([0, 0, 2])
    CORRECT = jnp.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])

    def test_running_rate_by_hand(self):
        state = curriculum.init_curriculum(3, mu0=1500.0)
        state = curriculum.record_outcomes(state, self.GROUP, self.CORRECT, ema_decay=0.9)
        np.testing.assert_array_equal(state.correct, [3, 0, 0])
        np.testing.assert_array_equal(state.seen, [4, 0, 2])
        # (3 + 1) / (4 + 2) and (0 + 1) / (2 + 2), the Beta(1, 1) posterior means
        np.testing.assert_allclose(
            state.ema_rate, [0.45 + 0.1 * 4 / 6, 0.5, 0.45 + 0.1 * 0.25], rtol=1e-6
        )
        np.testing.assert_array_equal(state.pass_rate, [0.5, 0.5, 0.5])
        again = curriculum.record_outcomes(state, self.GROUP, self.CORRECT, ema_decay=0.0)
        first = state.ema_rate[0]
        np.testing.assert_allclose(again.ema_rate[0], (3 + 2 * first) / 6, rtol=1e-6)

    def test_running_rate_is_unbiased_in_the_long_run(self):
        record = jax.jit(curriculum.record_outcomes)
        state = curriculum.init_curriculum(1, mu0=1.0)
        for _ in range(300):
            state = record(state, jnp.array([0]), jnp.array([[1.0, 1.0, 1.0, 0.0]]), ema_decay=0.9)
        np.testing.assert_allclose(state.ema_rate, [0.75], rtol=1e-4)

    def test_running_rate_of_an_unseen_group_does_not_move(self):
        state = curriculum.init_curriculum(3, mu0=1500.0)
        moved = dataclasses.replace(state, ema_rate=jnp.array([0.1, 0.123456, 0.9]))
        moved = curriculum.record_outcomes(moved, self.GROUP, self.CORRECT, ema_decay=0.9)
        assert moved.ema_rate[1] == np.float32(0.123456)

    def test_epoch_update_is_the_plain_rate_and_keeps_unseen_groups(self):
        state = state_with([0.3, 0.4, 0.7])
        state = curriculum.record_outcomes(state, self.GROUP, self.CORRECT, ema_decay=0.9)
        state = curriculum.update_pass_rates(state, source="epoch")
        np.testing.assert_allclose(state.pass_rate, [0.75, 0.4, 0.0], rtol=1e-6)
        np.testing.assert_array_equal(state.seen, [0, 0, 0])
        np.testing.assert_array_equal(state.correct, [0, 0, 0])
        assert state.updates == 1

    def test_ema_update_takes_the_running_rate_and_continues_it(self):
        state = curriculum.init_curriculum(3, mu0=1500.0)
        state = curriculum.record_outcomes(state, self.GROUP, self.CORRECT, ema_decay=0.9)
        updated = curriculum.update_pass_rates(state, source="ema")
        np.testing.assert_array_equal(updated.pass_rate, state.ema_rate)
        np.testing.assert_array_equal(updated.ema_rate, state.ema_rate)
        assert updated.updates == 1

    def test_ema_rates_stay_off_0_and_1(self):
        state = curriculum.init_curriculum(2, mu0=1500.0)
        correct = jnp.array([[1.0] * 8, [0.0] * 8])
        for _ in range(20):
            state = curriculum.record_outcomes(state, jnp.array([0, 1]), correct, ema_decay=0.9)
        assert 0.0 < state.ema_rate[1] < 0.15
        assert 0.85 < state.ema_rate[0] < 1.0

    def test_unknown_source_is_refused(self):
        state = curriculum.init_curriculum(1, mu0=1.0)
        with pytest.raises(UserError, match="ema or epoch"):
            unchecked(curriculum.update_pass_rates)(state, source="step")


class TestQuestionStream:
    GROUP_OF = jnp.array([0, 2, 2, 2, 0, 2, 3])

    def test_groups_by_weight_then_uniform_inside_and_never_from_an_empty_group(self):
        weights = jnp.array([0.5, 0.3, 0.2, 0.0])
        index = np.asarray(
            curriculum.sample_questions(jax.random.key(0), weights, self.GROUP_OF, 20_000)
        )
        # Group 1 is empty: its .3 is shared out in proportion; group 3 has weight 0.
        want = np.array([0.5 / 2, 0.2 / 4, 0.2 / 4, 0.2 / 4, 0.5 / 2, 0.2 / 4]) / 0.7
        counts = np.bincount(index, minlength=7)
        assert counts[6] == 0
        assert scipy.stats.chisquare(counts[:6], want * 20_000).pvalue > 1e-4

    def test_all_weight_on_an_empty_group_falls_back_to_the_others(self):
        weights = jnp.array([0.0, 1.0, 0.0, 0.0])
        index = curriculum.sample_questions(jax.random.key(0), weights, self.GROUP_OF, 3000)
        groups = np.bincount(np.asarray(self.GROUP_OF)[np.asarray(index)], minlength=4)
        assert groups[1] == 0
        assert scipy.stats.chisquare(groups[[0, 2, 3]]).pvalue > 1e-4

    def test_groups_of_weight_zero_are_never_drawn(self):
        drawn = curriculum.sample_groups(jax.random.key(0), jnp.array([0.0, 2.0, 6.0]), 8000)
        counts = np.bincount(np.asarray(drawn), minlength=3)
        assert counts[0] == 0
        assert scipy.stats.chisquare(counts[1:], [2000, 6000]).pvalue > 1e-4


def test_one_period_of_the_schedule_compiles_as_a_whole():
    group_of = jnp.array([0, 1, 2, 3] * 5)

    @jax.jit
    def period(state, key):
        keys = jax.random.split(key, 3)
        weights = curriculum.group_weights(state.pass_rate)
        index = curriculum.sample_questions(keys[0], weights, group_of, 6)
        budgets = curriculum.sample_budgets(
            keys[1], curriculum.scheduled_mean(state, **PAPER), group_of[index],
            sigma=512.0, b_min=256, b_max=4096, num_rollouts=4,
        )  # fmt: skip
        solved = (budgets > 1000).astype(jnp.float32)
        state = curriculum.record_outcomes(state, group_of[index], solved, ema_decay=0.9)
        return curriculum.update_pass_rates(state, source="ema"), budgets

    state, budgets = period(curriculum.init_curriculum(4, mu0=1500.0), jax.random.key(0))
    assert budgets.shape == (6, 4)
    assert state.updates == 1
    assert float(jnp.sum(state.seen)) == 0.0
