import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax import curriculum

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

    @settings(max_examples=50)
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

    def test_the_first_location_is_clipped_like_later_ones(self):
        state = curriculum.init_curriculum(2, mu0=[100.0, 5000.0])
        np.testing.assert_array_equal(curriculum.scheduled_mean(state, **PAPER), [256.0, 4096.0])
        free = curriculum.scheduled_mean(state, **PAPER, clip=False)
        np.testing.assert_array_equal(free, [100.0, 5000.0])

    def test_mu0_must_fit_the_groups(self):
        with pytest.raises(ValueError, match="3 values, but there are 4 difficulty groups"):
            curriculum.init_curriculum(4, mu0=[1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="positive"):
            curriculum.init_curriculum(2, mu0=0.0)
        with pytest.raises(ValueError, match="but is nan"):
            curriculum.init_curriculum(2, mu0=float("nan"))

    def test_mu0_may_be_traced(self):
        of = lambda mu0: curriculum.init_curriculum(2, mu0=mu0).mu0
        np.testing.assert_array_equal(jax.jit(of)(3.0), [3.0, 3.0])
        np.testing.assert_array_equal(jax.jit(lambda x: of([x, 2.0 * x]))(3.0), [3.0, 6.0])


class TestPassRates:
    GROUP = jnp.array([0, 0, 2])
    CORRECT = jnp.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])

    def test_running_rate_by_hand(self):
        state = curriculum.init_curriculum(3, mu0=1500.0)
        state = curriculum.record_outcomes(state, self.GROUP, self.CORRECT, ema_decay=0.9)
        np.testing.assert_array_equal(state.correct, [3, 0, 0])
        np.testing.assert_array_equal(state.seen, [4, 0, 2])
        # (3 + 1) / (4 + 2) and (0 + 1) / (2 + 2), the Beta(1, 1) posterior means
        np.testing.assert_allclose(state.ema_rate, [4 / 6, 0.5, 1 / 4], rtol=1e-6)
        np.testing.assert_array_equal(state.pass_rate, [0.5, 0.5, 0.5])
        again = curriculum.record_outcomes(state, self.GROUP, self.CORRECT, ema_decay=0.0)
        first = state.ema_rate[0]
        np.testing.assert_allclose(again.ema_rate[0], (3 + 2 * first) / 6, rtol=1e-6)

    def test_the_first_batch_of_a_group_is_its_rate_and_later_ones_move_it(self):
        group, decay = jnp.array([0, 1]), 0.9
        record = lambda state, group, correct: curriculum.record_outcomes(
            state, group, jnp.asarray(correct), ema_decay=decay
        )
        state = record(curriculum.init_curriculum(2, mu0=1500.0), group[:1], [[0.0] * 8])
        # (0 + 1) / (8 + 2); the other group is measured for the first time a batch later.
        np.testing.assert_allclose(state.ema_rate, [0.1, 0.5], rtol=1e-6)
        state = record(state, group, [[1.0] * 8, [1.0] * 8])
        moved = 0.9 * 0.1 + 0.1 * (8 + 2 * 0.1) / 10
        np.testing.assert_allclose(state.ema_rate, [moved, 0.9], rtol=1e-6)
        # A move of the schedule starts no second first batch.
        state = record(curriculum.update_pass_rates(state, source="ema"), group[1:], [[0.0] * 8])
        np.testing.assert_allclose(state.ema_rate[1], 0.9 * 0.9 + 0.1 * 1.8 / 10, rtol=1e-6)

    def test_a_group_that_a_batch_leaves_out_has_no_second_first_batch(self):
        record = lambda state, group, correct: curriculum.record_outcomes(
            state, jnp.array([group]), jnp.array([correct]), ema_decay=0.9
        )
        # (0 + 1) / (8 + 2) after the first batch of group 0
        state = record(curriculum.init_curriculum(2, mu0=1500.0), 0, [0.0] * 8)
        state = record(state, 1, [1.0] * 8)
        np.testing.assert_array_equal(state.measured, [True, True])
        state = record(state, 0, [1.0] * 8)
        moved = 0.9 * 0.1 + 0.1 * (8 + 2 * 0.1) / 10
        np.testing.assert_allclose(state.ema_rate, [moved, 0.9], rtol=1e-6)

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

    def test_outcomes_are_counted_in_float32_whatever_their_type(self):
        state, right = curriculum.init_curriculum(1, mu0=1500.0), np.ones((300, 7))
        record = functools.partial(curriculum.record_outcomes, ema_decay=0.9)
        of_all = jnp.zeros(300, jnp.int32)
        assert record(state, of_all, jnp.asarray(right, jnp.bfloat16)).correct == 2100

        def period(state, correct):
            state = curriculum.record_outcomes(state, of_all, correct, ema_decay=np.float64(0.9))
            return curriculum.update_pass_rates(state, source="epoch"), None

        with jax.enable_x64(True):
            scanned, _ = jax.eval_shape(lambda x: jax.lax.scan(period, state, x), right[None])
        assert scanned.correct.dtype == scanned.ema_rate.dtype == jnp.float32

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

    @pytest.mark.parametrize("source", ["ema", "epoch"])
    def test_an_updated_state_may_be_donated(self, source):
        state = curriculum.init_curriculum(3, mu0=1500.0)
        state = curriculum.update_pass_rates(state, source=source)
        record = functools.partial(curriculum.record_outcomes, ema_decay=0.9)
        state = jax.jit(record, donate_argnums=0)(state, self.GROUP, self.CORRECT)
        np.testing.assert_array_equal(state.seen, [4, 0, 2])

    def test_unknown_source_is_refused(self):
        state = curriculum.init_curriculum(1, mu0=1.0)
        with pytest.raises(ValueError, match="must be ema or epoch"):
            unchecked(curriculum.update_pass_rates)(state, source="step")


@pytest.mark.slow
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
