"""What a run that has run out of memory is told to write."""

import dataclasses

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.out_of_memory import OutOfMemory
from bacr_jax.runs.folder import write_config
from bacr_plan import memory, oom_hints
from bacr_plan.devices import GIB, MEMORY_FRACTION
from bacr_plan.workload import sizes_of
from plan_world import SEVEN

BOX, LIMIT = 8, 80 * GIB * MEMORY_FRACTION
CONFIG = config_io.load([SEVEN])


def ran_out(*phases, on_host=False):
    return OutOfMemory(phases, {"slots": 512}, 2**34, on_host=on_host)


@pytest.fixture
def explain(tmp_path):
    """What a run with a config says, whose folder is in tmp_path."""

    def line_of(error, config):
        write_config(tmp_path / "config.yaml", config)
        return oom_hints.explain(error, tmp_path / "config.yaml")

    return line_of


@pytest.fixture
def box(monkeypatch):
    """Eight devices of 80 GiB."""
    monkeypatch.setattr(oom_hints, "device_memory", lambda: LIMIT)
    monkeypatch.setattr(oom_hints.jax, "device_count", lambda: BOX)


@pytest.mark.parametrize("gib", [40, 80, 140])
@pytest.mark.parametrize("phase", ["decode", "learner"])
def test_the_choice_is_smaller_where_it_failed_whatever_the_arithmetic_says(phase, gib):
    limit = gib * GIB * MEMORY_FRACTION
    work, layout = sizes_of(CONFIG, BOX)
    choice = oom_hints.smaller_choice(work, layout, limit, phase, evaluating=False)
    assert choice is not None
    peak_of = memory.rollout_phase if phase == "decode" else memory.update_phase
    chosen = dataclasses.replace(work, slots=choice.work.slots, micro_rows=choice.work.micro_rows)
    peak = peak_of(chosen, choice.layout).peak
    assert peak <= limit and peak < peak_of(work, layout).peak
    # The other phase has not failed: its portions stay, where the layout can.
    if choice.layout == layout:
        kept = "micro_rows" if phase == "decode" else "slots"
        assert getattr(chosen, kept) == getattr(work, kept)


def test_where_no_portion_is_small_enough_the_layout_changes():
    sizes = sizes_of(config_io.override(CONFIG, ["mesh.data=8", "mesh.fsdp=1"]), BOX)
    choice = oom_hints.smaller_choice(*sizes, LIMIT, "learner", evaluating=False)
    assert choice is not None and choice.layout.fsdp > 1
    assert oom_hints.smaller_choice(*sizes, LIMIT / 100, "learner", evaluating=False) is None
    assert oom_hints.smaller_choice(*sizes, LIMIT, "start", evaluating=False) is None


def test_the_line_is_a_config_that_the_plan_says_fits(box, explain):
    line = explain(ran_out("decode"), CONFIG)
    assert line.startswith(
        "decode: a device's memory ran out, and 16 GiB more were needed (slots 512);"
    )
    assert line.isprintable()
    overrides = line.partition("the plan would choose ")[2].split()
    changed = config_io.override(CONFIG, overrides)
    config_io.check(changed)
    work, layout = sizes_of(changed, BOX)
    assert work.slots < CONFIG.rollout.questions * CONFIG.rollout.group_size
    assert memory.rollout_phase(work, layout).peak <= LIMIT
    assert memory.update_phase(work, layout).peak <= LIMIT


def test_the_learner_is_told_of_remat_only_if_it_is_off(box, explain):
    off = config_io.override(CONFIG, ["model.remat=none"])
    assert explain(ran_out("learner"), off).endswith(" model.remat=full")
    assert "remat" not in explain(ran_out("learner"), CONFIG)
    assert "remat" not in explain(ran_out("decode"), off)


def test_micro_batches_by_tokens_are_advised_in_tokens(box, explain, monkeypatch):
    by_tokens = ["train.micro_batch_rows=null", "train.micro_batch_tokens=200000"]
    config = config_io.override(CONFIG, by_tokens)
    line = explain(ran_out("learner"), config)
    assert "train.micro_batch_tokens=" in line and "micro_batch_rows" not in line
    monkeypatch.setattr(oom_hints, "device_memory", lambda: None)
    line = explain(ran_out("learner"), config)
    assert "use a smaller train.micro_batch_tokens or model.logprob_chunk" in line


def test_without_a_known_memory_the_keys_and_the_command_are_named(explain, tmp_path):
    line = explain(ran_out("decode", "evaluation"), CONFIG)
    assert "decode of the evaluation: a device's memory ran out" in line
    assert "use a smaller eval.slots; bacr plan --config" in line
    assert f"{tmp_path}/config.yaml --devices 1 --device-memory GIB" in line


@pytest.mark.parametrize("phase", sorted(oom_hints.KEYS))
def test_every_key_that_is_advised_exists(phase):
    assert set(oom_hints.KEYS[phase]) <= config_io.schema().keys()


def test_the_machines_memory_is_another_matter(box, explain):
    line = explain(ran_out("start", on_host=True), CONFIG)
    assert "the machine's memory ran out" in line and "plan" not in line
