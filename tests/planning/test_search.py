"""What fits: the largest portions, and a layout where the config's own does not."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.runs.setup import mesh_shape
from bacr_plan import memory, search
from bacr_plan.devices import DEVICES, GIB
from bacr_plan.search import MemoryLimit
from plan_world import SEVEN, mesh, workload


def update_peak(work, layout, rows):
    return memory.update_phase(dataclasses.replace(work, micro_rows=rows), layout).peak


@pytest.mark.parametrize("gib", [22.0, 30.0, 50.0, 74.0])
def test_the_next_larger_micro_batch_would_not_fit(gib):
    work = workload()
    largest = search.largest("micro_rows", work, mesh(), MemoryLimit(gib * GIB))
    larger = [rows for rows in (8, 16, 32, 64, 128, 256) if rows > largest]
    assert largest == 0 or update_peak(work, mesh(), largest) <= gib * GIB
    assert not larger or update_peak(work, mesh(), larger[0]) > gib * GIB


@given(gib=st.floats(30.0, 80.0))
@settings(max_examples=10)
def test_eight_more_slots_would_not_fit(gib):
    work = workload()
    slots = search.largest("slots", work, mesh(), MemoryLimit(gib * GIB))
    peak = lambda slots: memory.rollout_phase(dataclasses.replace(work, slots=slots), mesh()).peak
    assert slots % 8 == 0
    assert slots == 0 or peak(slots) <= gib * GIB
    assert slots == 512 or peak(slots + 8) > gib * GIB


def test_the_largest_portion_of_many_is_found_in_a_few_looks():
    looks = []

    def fits(size):
        looks.append(size)
        return size <= 700_001 or size == 10**6

    assert search._largest(range(2, 10**6, 2), fits) == 700_000 and len(looks) < 30
    # The whole may need less than a part of it.
    assert search._largest(range(2, 10**6 + 1, 2), fits) == 10**6
    assert search._largest([800_000, 900_000], fits) == search._largest([], fits) == 0


def test_temporaries_that_the_compiler_finds_larger_leave_less_room():
    work, limit = workload(), 30.0 * GIB
    plain = search.largest("micro_rows", work, mesh(), MemoryLimit(limit))
    assert search.largest("micro_rows", work, mesh(), MemoryLimit(limit, update=2.0)) < plain


def test_every_layout_offered_is_one_that_training_accepts():
    work = workload()
    layouts = search.layouts(work, 8)
    assert mesh() in layouts and mesh(fsdp=2, tensor=4, decode_tensor=4) in layouts
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        keys = [f"mesh.{axis}={size}" for axis, size in layout._asdict().items()]
        assert mesh_shape(resolve(config_io.load([SEVEN], keys)).policy, work.model, 8) == layout
    # Fewer messages first.
    assert layouts[0].tensor == layouts[0].decode_tensor == 1


@pytest.mark.parametrize(
    ("devices", "gib", "model"),
    [(8, 73.6, "qwen2.5-14b"), (2, 129.7, "qwen2.5-7b"), (8, 36.8, "qwen2.5-7b")],
)
def test_what_is_suggested_fits_and_is_a_config(devices, gib, model):
    work = workload(f"model.preset={model}")
    choice = search.suggest(work, devices, MemoryLimit(gib * GIB))
    config = config_io.load([SEVEN], [f"model.preset={model}", *choice.overrides().split()])
    config_io.check(config)
    assert mesh_shape(resolve(config).policy, work.model, devices) == choice.layout
    chosen = dataclasses.replace(work, micro_rows=choice.work.micro_rows, slots=choice.work.slots)
    phases = (memory.update_phase, memory.score_phase, memory.rollout_phase)
    assert max(phase(chosen, choice.layout).peak for phase in phases) == choice.peak <= gib * GIB


def test_a_suggestion_keeps_the_portions_that_fit():
    work = workload("rollout.slots=64")
    choice = search.suggest(work, 8, MemoryLimit(73.6 * GIB))
    assert (choice.work.micro_rows, choice.work.slots) == (work.micro_rows, 64)


def test_runs_split_by_tokens_get_a_suggestion_in_tokens():
    work = workload("train.micro_batch_rows=null", "train.micro_batch_tokens=181248")
    overrides = search.suggest(work, 8, MemoryLimit(73.6 * GIB)).overrides()
    # 181248 = 32 rows of 1024 + 4096 + 4 x 136 tokens.
    assert "train.micro_batch_tokens=181248" in overrides
    assert "micro_batch_rows" not in overrides


def test_nothing_is_suggested_where_nothing_fits():
    assert search.suggest(workload(), 4, MemoryLimit(36.8 * GIB)) is None


def test_tensor_shards_of_the_decode_copy_are_chosen_by_time():
    work, a100 = workload(), DEVICES["a100-80"]
    fastest = lambda limit: search.fastest_decoding(work, mesh(), MemoryLimit(limit), a100)
    layout, taken = fastest(73.6 * GIB)
    assert layout.decode_tensor == 4
    # Where nothing else fits the given layout stays; a part of the weights only is read faster.
    kept, longer = fastest(0.0)
    assert kept == mesh() and longer > taken
    # Devices that each hold a whole copy can't share one: the mesh would be refused.
    copies = mesh(data=8, fsdp=1)
    assert search.fastest_decoding(work, copies, MemoryLimit(1e15), a100)[0] == copies


def test_another_layout_has_its_own_peak():
    work, room = workload(), MemoryLimit(73.6 * GIB)
    choice = search.suggest(work, 8, room)
    assert search.peak_of(choice.work, choice.layout, room) == choice.peak
    other = dataclasses.replace(choice, layout=mesh(decode_tensor=4))
    assert search.peak_of(choice.work, other.layout, room) < choice.peak
    assert "mesh.decode_tensor=4" in other.overrides()


def test_a_warm_up_that_is_too_large_gets_fewer_tokens_a_step():
    keys = ("warmup.steps=500", "warmup.batch_tokens=1048576", "adapter.rank=16")
    work, layout = workload(*keys), mesh()
    step = lambda work: MemoryLimit(0.0).of_warmup_step(work, layout)
    room = MemoryLimit(0.6 * step(work))
    fewer = search.fewer_warmup_tokens(work, layout, room)
    assert fewer.warmup_tokens < 1048576 and step(fewer) <= room.limit < step(work)
    twice = dataclasses.replace(work, warmup_tokens=2 * fewer.warmup_tokens)
    assert step(twice) > room.limit
    choice = search.suggest(work, 8, room)
    assert choice is not None and choice.peak <= room.limit
    assert f"warmup.batch_tokens={choice.work.warmup_tokens}" in choice.overrides()
    # No number of tokens makes its state smaller.
    none = search.fewer_warmup_tokens(work, layout, MemoryLimit(1.0))
    assert none.warmup.rows == 1
    assert search.fewer_eval_slots(work, layout, MemoryLimit(1.0)) is None
