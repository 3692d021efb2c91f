"""How many keys a rollout reads, and how many of them for nothing."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from bacr_jax.model.sizes import preset
from bacr_jax.parallel import AXES
from bacr_jax.rollout import RolloutSpec
from rollout_world import make_prompts, make_rules, no_cuts

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "schedule.py"))
simulate, math_like, on_devices = (SCRIPT[name] for name in ("simulate", "math_like", "on_devices"))

SHAPE = preset("qwen2.5-7b")


def spec(slots, devices=1, **settings):
    mesh = AbstractMesh((1, devices, 1), AXES)
    given = {"max_thinking": 4, "answer_tokens": 1, "chunk": 2, "windows": 1, "refill": 0.5}
    return RolloutSpec(SHAPE, slots=slots, mesh=mesh, **given | settings)


def test_a_small_rollout_by_hand():
    """Prompts of 2 and 1 tokens think for 3 and 1: the rows see 3, 4, 5 keys and 2."""
    prompts, thinking = np.array([2, 1]), np.array([3, 1])
    one = simulate(prompts, thinking, thinking, spec=spec(2), width=2)
    # two chunks of two steps, two slots, caches of 2 + 4
    assert (one.steps, one.live, one.by_window, one.by_row) == (4, 14, 48, 14)
    assert one.wasted_by_row == 0 and one.wasted_by_window == pytest.approx(34 / 48)
    two = simulate(prompts, thinking, thinking, spec=spec(2, devices=2), width=2)
    # the first device holds the longer row, and the second waits for it
    assert (two.live, two.by_row) == (14, 2 * (3 + 4 + 5))
    np.testing.assert_array_equal(two.device_tokens, [3, 1])


ROWS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=30
)


@given(ROWS, st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4))
def test_every_key_of_every_row_is_counted_once(rows, devices, per_device, windows):
    prompts, limits, thinking = map(np.array, zip(*rows))
    thinking = np.minimum(thinking, limits)
    read = simulate(
        prompts,
        limits,
        thinking,
        spec=spec(devices * per_device, devices, max_thinking=12, windows=windows),
        width=5,
    )
    assert read.device_tokens.sum() == thinking.sum()
    assert read.live == (thinking * prompts + thinking * (thinking + 1) // 2).sum()
    assert read.live <= read.by_row <= read.by_window
    assert 0 <= read.wasted_by_row <= read.wasted_by_window < 1 or read.by_window == 0


def test_rows_of_math_leave_the_devices_with_equal_work():
    prompts, budgets = math_like()
    read = simulate(prompts, budgets, budgets, spec=on_devices(8), width=1024)
    assert read.device_tokens.max() < 1.01 * read.device_tokens.mean()
    assert read.wasted_by_row < 0.05
    # what windows cost, of all slots until the last row has ended
    assert read.wasted_by_window > 0.75
    finer = simulate(prompts, budgets, budgets, spec=on_devices(8, windows=16), width=1024)
    assert finer.by_row == read.by_row and finer.by_window < 0.85 * read.by_window


def test_the_schedule_is_that_of_a_rollout(world):
    """Token 6 alone is allowed, so that every row runs to its budget."""
    budgets = np.array([12, 12, 6, 6, 9])
    prompts, small = make_prompts([2, 5, 1, 3, 4], 5), world.tight()
    rules = make_rules(allowed_tokens=np.arange(16) == 6)
    counters = world.roll(prompts, budgets, rules=rules, spec=small, cuts=no_cuts(5)).counters
    read = simulate(prompts.lengths, budgets, budgets, spec=small, width=5)
    assert read.steps * small.slots == counters["row_steps"]
