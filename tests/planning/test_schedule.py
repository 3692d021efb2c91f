"""The schedule of an iteration on rows that only have lengths."""

import dataclasses

import numpy as np
import pytest

from bacr_plan import schedule
from bacr_plan.lengths import SUFFIX_TOKENS, Lengths
from plan_world import mesh, workload


def rows_of(prompts, thinking, answers=1):
    shape = (len(prompts), 4)
    return Lengths(np.array(prompts), np.array(thinking), np.full(shape, answers), "by hand")


def rollout(rows, slots, layout, *overrides):
    work = workload(*overrides, slots=slots, draw=lambda: rows)
    return schedule.rollout(work, layout)


def test_two_rows_on_two_devices_by_hand():
    rows = rows_of([100, 200], [20, 5])
    made = rollout(rows, 2, mesh(fsdp=2), "rollout.chunk=16")
    assert made.prefills == [(2, 256)]
    first, second = made.chunks
    # 5,120 positions in four windows; two rows, one a device, of which one ends after 5 tokens.
    assert (first.slots, first.length, first.steps) == (2, 1280, 16)
    np.testing.assert_array_equal(np.sort(first.live[0]), [101, 201])
    np.testing.assert_array_equal(np.sort(first.live[5]), [0, 106])
    np.testing.assert_array_equal(np.sort(first.tiles[0]), [128, 256])
    assert second.live.sum() == sum(range(117, 121))
    # One round for both, as long as the longer answer: suffix and a token, in chunks of 16.
    assert made.answers == [(2, 1280, 16)]


def test_caches_grow_when_a_chunk_needs_it_by_hand():
    made = rollout(rows_of([1000, 1], [300, 900]), 2, mesh(fsdp=2), "rollout.chunk=16")
    lengths = [chunk.length for chunk in made.chunks]
    # 1,000 + 16 x 17 positions fit 1,280; the ended row keeps its slot.
    assert lengths[:19] == 17 * [1280] + 2 * [2560]
    # 57 chunks in all: 900 tokens. Nothing is shortened while both rows are there.
    assert lengths[19:] == 38 * [2560]


def test_every_token_is_sampled_once_and_every_row_answered():
    rng = np.random.default_rng(0)
    rows = rows_of(rng.integers(50, 500, 64), rng.integers(256, 2000, 64), answers=30)
    made = rollout(rows, 16, mesh(), "rollout.chunk=16")
    live = sum(chunk.live.sum() for chunk in made.chunks)
    # Token t of a row sees its prompt and t + 1 tokens.
    thinking, prompts = rows.thinking, rows.prompts
    assert live == (thinking * prompts + thinking * (thinking + 1) // 2).sum()
    assert sum(count for count, _, _ in made.answers) >= 64
    assert {steps for _, _, steps in made.answers} == {48}
    assert all((chunk.tiles >= chunk.live).all() for chunk in made.chunks)


def test_fewer_slots_take_more_steps():
    work = workload()
    steps = [rollout(work.lengths, slots, mesh()).steps for slots in (512, 128)]
    assert steps[0] < steps[1] < 4 * steps[0]


def test_slots_that_are_refilled_together_are_answered_in_fewer_rounds_after_more_steps():
    work = workload()
    early, late = (
        rollout(work.lengths, 128, mesh(), f"rollout.refill={share}") for share in (0.25, 1.0)
    )
    assert len(late.answers) == 4 < len(early.answers)
    assert early.steps < late.steps


def test_micro_batches_by_rows_are_as_wide_as_the_longest_row():
    first, second = schedule.updates(workload(), mesh())
    assert first == second == [schedule.PlannedMicroBatch(16, 5120, 544)] * 16


def test_micro_batches_by_tokens_hold_every_row_and_less_padding():
    tokens = workload("train.micro_batch_rows=null", "train.micro_batch_tokens=90624")
    made = schedule.updates(tokens, mesh())
    rows = [sum(one.rows for one in update) for update in made]
    assert len(made) == 2 and min(rows) >= 256
    assert all(one.rows % 8 == 0 for update in made for one in update)
    by_rows = schedule.updates(workload(), mesh())
    share = lambda parts: schedule.real_share(workload(), parts)
    assert share(by_rows) < 0.35 < 0.5 < share(made) <= 1


def test_the_share_of_real_positions_by_hand():
    rows = rows_of([10, 20], [30, 40], answers=2)
    work = dataclasses.replace(workload(), draw=lambda: rows)
    real = 100 + 2 * 4 * (2 + SUFFIX_TOKENS - 1)
    parts = [[schedule.PlannedMicroBatch(2, 80, 40)]]
    assert schedule.real_share(work, parts) == pytest.approx(real / 240)


def test_micro_batches_without_padding_are_filled_with_real_tokens_by_hand():
    """Rows of 132, 162, 162 and 232 tokens, 4 answers of 8 each among them; 300 at a time."""
    rows = rows_of([100, 100, 100, 100], [0, 30, 30, 100])
    keys = ("rollout.group_size=2", "train.minibatches=1", "rollout.answer_tokens=8")
    work = workload(*keys, rows=4, prompt=100, thinking=100, draw=lambda: rows)
    work = work.by_real_tokens(300, padding_free=True)
    # The first two rows fit together, the others do not.
    (update,) = schedule.updates(work, mesh(fsdp=1))
    assert {one.tokens for one in update} == {300} and len(update) == 3
    # Without a budget in the prompt two rows of a question compute it once: 194 and 294 tokens.
    without_budget = dataclasses.replace(work, conditioned=False)
    (update,) = schedule.updates(without_budget, mesh(fsdp=1))
    assert len(update) == 2
    assert schedule.real_share(without_budget, [update]) == (400 + 160 + 4 * 4 * 8) / 600


def test_without_padding_fewer_positions_are_computed():
    padded, work = (workload().by_real_tokens(90624, padding_free=free) for free in (False, True))
    before, after = (schedule.updates(one, mesh(fsdp=1)) for one in (padded, work))
    positions = lambda updates: sum(one.positions for update in updates for one in update)
    assert positions(after) < positions(before)
    assert schedule.real_share(padded, before) < schedule.real_share(work, after) <= 1
