"""The programs of a tiny run, lowered on abstract arguments."""

import importlib.util
import math
from pathlib import Path

import jax
import pytest

from bacr_plan import compiling
from bacr_plan.programs import Programs
from bacr_plan.workload import planned_shape
from devices_world import run_on_devices
from plan_world import tiny_config

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "answer_program.py"
SPEC = importlib.util.spec_from_file_location("answer_program", SCRIPT)
answer_program = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(answer_program)


def programs_of(*overrides, devices=1):
    config = tiny_config(*overrides)
    shape, _ = planned_shape(config.data, config.model)
    described = compiling.described(config, shape, fused_attention=False)
    return Programs(described, shape.vocab_size, jax.devices()[:devices]), shape


@pytest.mark.parametrize("by", ["train.micro_batch_rows=4", "train.micro_batch_tokens=200"])
def test_every_way_to_split_an_update_can_be_lowered(by):
    programs, shape = programs_of(by, "loss.kl_coef=0.1")
    size = lambda leaf: math.prod(leaf.shape) * leaf.dtype.itemsize
    arguments = sum(map(size, jax.tree.leaves(programs.train().args_info)))
    # Masters and two moments in fp32, and a batch.
    assert arguments > 12 * shape.num_parameters


def test_a_decoding_step_can_be_lowered():
    programs, _ = programs_of("rollout.slots=4")
    shapes = [leaf.shape for leaf in jax.tree.leaves(programs.decode().args_info)]
    # Keys and values of two layers: 4 slots of 8 + 16 positions, 2 heads of 8.
    cached = [x for x in shapes if math.prod(x) == 4 * 24 * 2 * 8 and x[0] == 4 and len(x) == 4]
    assert len(cached) == 4


def test_answers_at_every_cut_can_be_lowered():
    programs, _ = programs_of("rollout.slots=4")
    shapes = [leaf.shape for leaf in jax.tree.leaves(answer_program.answers_of(programs).args_info)]
    # Two branches of each of 4 slots: suffix and answer, 8 + 4 tokens, keys and values of 2 layers.
    assert shapes.count((8, 2, 12, 8)) == 4


@pytest.mark.slow  # a process with two devices
def test_caches_of_answers_are_split_over_tensor_by_their_heads():
    program = """
from planning.test_programs import answer_program, programs_of
import jax
split = ("rollout.slots=4", "mesh.fsdp=2", "mesh.decode_tensor=2")
programs, _ = programs_of(*split, devices=2)
own = jax.tree.leaves(answer_program.branches_of(programs, programs.slots()).cache)
answer_program.answers_of(programs)
print({leaf.sharding.shard_shape(leaf.shape) for leaf in own})
"""
    assert run_on_devices(program, devices=2) == "{(8, 1, 12, 8)}"
