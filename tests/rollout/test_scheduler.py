"""Who waits, who sits where, and who is answered when."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.rollout.scheduler import Scheduler, doubling_sizes


def test_sizes_double_from_the_share_to_the_half_and_all():
    assert doubling_sizes(64, 1 / 8) == [8, 16, 32, 64]
    assert doubling_sizes(6, 1 / 4) == [2, 6]
    assert doubling_sizes(1, 1 / 4) == [1]
    # every size is a multiple of the row shards
    assert doubling_sizes(48, 0.01, multiple=8) == [8, 16, 48]


def test_the_longest_budgets_enter_first_and_ties_keep_their_order():
    scheduler = Scheduler(np.array([3, 9, 9, 1]), 2, [1, 2])
    rows, slots = scheduler.assign()
    np.testing.assert_array_equal(rows, [1, 2])
    np.testing.assert_array_equal(slots, [0, 1])
    assert scheduler.assign()[0].size == 0
    np.testing.assert_array_equal(scheduler.release(np.array([1])), [2])
    rows, slots = scheduler.assign()
    assert rows == [0] and slots == [1]


def test_ended_rows_wait_until_enough_have_ended_or_nothing_else_is_left():
    scheduler = Scheduler(np.ones(6, int), 4, [2, 4])
    scheduler.assign()
    assert scheduler.ready(np.array([True, False, False, False])).size == 0
    np.testing.assert_array_equal(scheduler.ready(np.array([True, False, True, False])), [0, 2])
    scheduler.release(np.array([0, 2]))
    scheduler.assign()
    # nobody waits any more: answering early would only make batches smaller
    assert scheduler.ready(np.array([True, True, True, False])).size == 0
    np.testing.assert_array_equal(scheduler.ready(np.ones(4, bool)), [0, 1, 2, 3])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.integers(1, 8),
    st.floats(0.01, 1.0),
    st.integers(0, 99),
)
def test_every_row_sits_exactly_once_and_no_slot_idles_while_rows_wait(budgets, slots, share, seed):
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(np.array(budgets), slots, doubling_sizes(slots, share))
    seen, ended = [], np.ones(slots, bool)
    for _ in range(1000):
        if scheduler.done:
            break
        rows, slots_used = scheduler.assign()
        ended[slots_used] = False
        assert scheduler.occupied.all() or not scheduler.waiting
        ended |= rng.random(slots) < 0.3
        ready = scheduler.ready(ended)
        assert (scheduler.occupied & ended)[ready].all()
        seen += scheduler.release(ready).tolist()
    assert sorted(seen) == list(range(len(budgets)))
