"""What outcomes do to the schedule."""

import jax.numpy as jnp
import numpy as np

from bacr_jax.config import CurriculumConfig
from bacr_jax.curriculum import init_curriculum
from bacr_jax.training.adapt import adapted

GROUPS = jnp.array([0, 1])


def after(correct, due, **settings):
    return adapted(
        init_curriculum(2, mu0=8.0), GROUPS, jnp.asarray(correct), due,
        settings=CurriculumConfig(**settings),
    )  # fmt: skip


def test_outcomes_count_at_once_and_the_schedule_moves_when_it_is_due():
    right = [[1.0, 1.0], [0.0, 0.0]]
    waiting, moved = after(right, False), after(right, True)
    np.testing.assert_array_equal(waiting.ema_rate, moved.ema_rate)
    assert int(waiting.updates) == 0 and int(moved.updates) == 1
    assert waiting.pass_rate[0] == waiting.pass_rate[1]
    assert moved.pass_rate[0] > moved.pass_rate[1]


def test_one_outcome_that_is_no_number_records_nothing():
    fresh = init_curriculum(2, mu0=8.0)
    spoilt = after([[1.0, jnp.nan], [0.0, 0.0]], True)
    np.testing.assert_array_equal(spoilt.pass_rate, fresh.pass_rate)
    np.testing.assert_array_equal(spoilt.ema_rate, fresh.ema_rate)
