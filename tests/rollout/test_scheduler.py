"""Who waits, who sits where, and who is answered when."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.rollout.scheduler import (
    Scheduler,
    doubling_sizes,
    prefill_batches,
    spread_over_devices,
)


def test_sizes_double_from_the_share_to_the_half_and_all():
    assert doubling_sizes(64, 1 / 8) == [8, 16, 32, 64]
    assert doubling_sizes(6, 1 / 4) == [2, 6]
    assert doubling_sizes(1, 1 / 4) == [1]
    # a share above the half is waited for too
    assert doubling_sizes(10, 0.6) == [6, 10] and doubling_sizes(64, 0.55) == [35, 64]
    assert doubling_sizes(64, 1.0) == doubling_sizes(64, 0.999) == [64]
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


def test_slots_are_dealt_to_and_fro_over_the_devices():
    np.testing.assert_array_equal(spread_over_devices(np.arange(8), 8, 2), [0, 4, 5, 1, 2, 6, 7, 3])
    np.testing.assert_array_equal(spread_over_devices(np.arange(4), 4, 1), [0, 1, 2, 3])
    # three free slots on the first device of two, one on the second
    np.testing.assert_array_equal(spread_over_devices(np.array([0, 1, 3, 6]), 8, 2), [0, 6, 1, 3])
    scheduler = Scheduler(np.array([4, 3, 2, 1]), 4, [4], shards=2)
    rows, slots = scheduler.assign()
    np.testing.assert_array_equal(scheduler.slot_row, [0, 3, 1, 2])
    np.testing.assert_array_equal(rows, [0, 1, 2, 3])


def test_wide_prompts_are_prefilled_apart_where_that_saves_positions():
    def batches(widths, sizes):
        return [batch.tolist() for batch in prefill_batches(np.array(widths), sizes)]

    assert batches([128] * 3, [2, 4]) == [[0, 1, 2]]
    # 2 x 512 + 4 x 128 positions, not 8 x 512
    assert batches([128, 512, 128, 128, 512, 128], [2, 4, 8]) == [[1, 4], [0, 2, 3, 5]]
    # a wide row alone takes the smallest batch, and a free place of it a narrow one
    assert batches([128, 512, 128], [2, 4]) == [[0, 1], [2]]


@given(st.lists(st.sampled_from([128, 256, 1024]), min_size=1, max_size=40), st.integers(0, 3))
def test_every_prompt_is_prefilled_once_at_no_more_positions_than_all_at_once(widths, kind):
    sizes = [[40], [8, 16, 40], [1, 40], [3, 6, 12, 24, 40]][kind]
    batches = prefill_batches(np.array(widths), sizes)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(widths)))
    holding = lambda n: next(size for size in sizes if size >= n)
    positions = sum(holding(len(b)) * max(widths[i] for i in b) for b in batches)
    assert positions <= holding(len(widths)) * max(widths)


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
