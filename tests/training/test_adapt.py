"""What outcomes do to the schedule, and the questions of a probe."""

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import CurriculumConfig
from bacr_jax.curriculum import init_curriculum
from bacr_jax.training.adapt import adapted, measured, probe_questions

GROUPS = jnp.array([0, 1])
NOWHERE = jnp.zeros(2)


def after(correct, due, **settings):
    schedule, _ = adapted(
        init_curriculum(2, mu0=8.0), None, GROUPS, jnp.asarray(correct), due, NOWHERE,
        settings=CurriculumConfig(**settings),
    )  # fmt: skip
    return schedule


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


def test_a_probe_is_smoothed_by_two_pseudo_rollouts_of_what_was_believed():
    believed = np.asarray(after([[0.0, 0.0], [0.0, 0.0]], True).ema_rate)
    schedule = measured(
        after([[0.0, 0.0], [0.0, 0.0]], True), GROUPS, jnp.array([[1.0], [0.0]])
    )  # fmt: skip
    # one outcome each: (c + 2 m) / (1 + 2)
    np.testing.assert_allclose(schedule.pass_rate, (np.array([1, 0]) + 2 * believed) / 3, rtol=1e-6)


@pytest.mark.parametrize("size", [4, 7])
def test_probe_questions_come_from_the_groups_in_turns(size):
    groups = np.array([0] * 90 + [1] * 6 + [2] * 4)
    chosen = probe_questions(groups, 3, size=size, seed=1)
    counts = np.bincount(groups[chosen], minlength=3)
    assert len(set(chosen.tolist())) == size and counts.max() - counts.min() <= 1
    np.testing.assert_array_equal(chosen, probe_questions(groups, 3, size=size, seed=1))
    assert probe_questions(groups, 3, size=size, seed=2).tolist() != chosen.tolist()
