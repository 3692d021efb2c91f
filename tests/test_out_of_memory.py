"""Memory that runs out is one line: phase, sizes, bytes asked for, what to write instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bacr_jax import evaluate, generate, rollout
from bacr_jax.config import LossConfig, TrainConfig
from bacr_jax.learner import updates as updating
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.train_step import TrainState
from bacr_jax.out_of_memory import OutOfMemory, asked_for, is_out_of_memory, phase_memory, size_text
from bacr_jax.rollout.engine import SlotDecoder
from rollout_world import make_prompts, make_rules

# What XLA says: its allocator for GPUs in older and newer words, with its page about buffers; the
# allocator of CUDA itself; CUDA graphs; libraries with memory of their own; its CPU client.
BUFFERS = """
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:  372.76MiB
         preallocated temp allocation:    4.44GiB
Peak buffers:
\tBuffer 1:
\t\tSize: 6.00MiB"""
MESSAGES = [
    (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes." + BUFFERS,
        4770354232,
    ),
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB.", 16 * 2**30),
    (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 402653184 bytes. "
        "[tf-allocator-allocation-error='']",
        402653184,
    ),
    (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 256.00MiB (268435456B) on device "
        "ordinal 0",
        2**28,
    ),
    ("Resource exhausted: Out of memory while trying to allocate 5520758552 bytes.", 5520758552),
    (
        "INTERNAL: CUDA error: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of "
        "memory",
        None,
    ),
    (
        "RESOURCE_EXHAUSTED: Underlying backend ran out of memory trying to instantiate command "
        "buffer with 12 nodes",
        None,
    ),
    ("INTERNAL: cuBLAS: CUBLAS_STATUS_ALLOC_FAILED", None),
    ("RESOURCE_EXHAUSTED: Out of memory allocating 4398046511104 bytes.", 2**42),
]


def failing(text):
    def program(*_, **__):
        raise jax.errors.JaxRuntimeError(text)

    return program


@pytest.mark.parametrize(("text", "asked"), MESSAGES, ids=[text[:50] for text, _ in MESSAGES])
def test_every_way_to_say_it_is_recognised_with_the_bytes_asked_for(text, asked):
    with pytest.raises(OutOfMemory) as caught, phase_memory("decode", slots=512):
        failing(text)()
    error = caught.value
    assert (error.phases, error.sizes, error.asked) == (("decode",), {"slots": 512}, asked)
    line = str(error)
    assert line.startswith("decode: a device's memory ran out") and "(slots 512)" in line
    assert line.isprintable()


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("INTERNAL: an illegal address was encountered"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Received message larger than max"),
        RuntimeError("the grader's process died"),
        ValueError("Out of memory while trying to allocate 12 bytes."),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_pass_through_as_they_are(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, phase_memory("decode"):
        raise error
    assert caught.value is error


def test_a_real_allocation_that_no_machine_can_give_is_recognised():
    with pytest.raises(OutOfMemory) as caught, phase_memory("learner", update_rows=256):
        jax.jit(lambda: jnp.zeros((2**25, 2**25)))().block_until_ready()
    assert caught.value.asked == 2**52
    assert str(caught.value) == (
        "learner: a device's memory ran out, and 4,096 TiB more were needed (update rows 256)"
    )


def test_memory_of_the_machine_is_told_apart():
    with pytest.raises(OutOfMemory) as caught, phase_memory("start"):
        np.zeros(2**59)
    assert caught.value.on_host and caught.value.asked == 2**62
    assert "start: the machine's memory ran out" in str(caught.value)


def test_outer_phases_and_their_sizes_are_named_too():
    with (
        pytest.raises(OutOfMemory) as caught,
        phase_memory("evaluation", slots=4, problems=500),
        phase_memory("decode", slots=8),
    ):
        failing(MESSAGES[1][0])()
    assert caught.value.phases == ("decode", "evaluation")
    assert str(caught.value) == (
        "decode of the evaluation: a device's memory ran out, and 16 GiB more were needed "
        "(slots 8, "
        "problems 500)"
    )
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_sizes_are_said_as_people_say_them():
    assert [size_text(n) for n in (17, 1536, 3 * 2**20, 2**34, 2**41)] == [
        "17 bytes",
        "1.5 KiB",
        "3 MiB",
        "16 GiB",
        "2 TiB",
    ]
    assert asked_for("nothing was asked for") is None


@pytest.mark.parametrize(
    ("command", "work", "line", "advice"),
    [
        (
            evaluate,
            "evaluate",
            ["--model", "m", "--data", "ledger", "--budgets", "8", "--slots", "9"],
            "use --slots 4 --out DIR, with a new folder",
        ),
        (
            generate,
            "generate",
            ["--model", "m", "--budget", "8", "why"],
            "smaller numbers in --budget",
        ),
    ],
)
def test_commands_say_it_in_one_line_and_exit_with_1(
    monkeypatch, capsys, command, work, line, advice
):
    def runs_out(*_, **__):
        with phase_memory("decode", slots=9):
            failing(MESSAGES[0][0])()

    monkeypatch.setattr(command, work, runs_out)
    assert command.main(line) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: decode: a device's memory ran out, and 4.44 GiB more were needed")
    assert advice in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("piece", "phase"),
    [
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("open_branches", "answers"),
        ("decode_branches", "answers"),
    ],
)
def test_a_rollout_names_its_phase_and_sizes(world, monkeypatch, piece, phase):
    monkeypatch.setattr(SlotDecoder, piece, failing(MESSAGES[0][0]))
    budgets = np.array([4, 6])
    with pytest.raises(OutOfMemory) as caught:
        rollout.generate(
            world.decode,
            make_prompts([3, 5], 5),
            rollout.RolloutRequest(budgets, budgets[:, None]),
            jax.random.key(0),
            rollout.SamplingSetup(
                world.spec(), make_rules(), rollout.sampling_params(1.0), world.phi_of
            ),
        )
    assert caught.value.phases == (phase,)
    assert {
        "slots": 4,
        "prompt_tokens": 5,
        "answer_tokens": 3,
    }.items() <= caught.value.sizes.items()
    assert f"{phase}: a device's memory ran out, and 4.44 GiB more were needed" in str(caught.value)


@pytest.mark.parametrize(
    ("piece", "minibatches", "phase"),
    [("train_step", 1, "learner"), ("score_batch", 2, "scoring")],
)
def test_the_learner_names_its_phase_and_sizes(monkeypatch, world, piece, minibatches, phase):
    monkeypatch.setattr(updating, piece, failing(MESSAGES[0][0]))
    shapes = {"trunk": (8, 17), "branches": (8, 4, 5)}
    names = [field.name for field in dataclasses.fields(Batch)]
    batch = Batch(**{name: np.zeros(shapes.get(name, (8,)), np.int32) for name in names})
    config = TrainConfig(minibatches=minibatches, micro_batch_rows=2)
    spec = LearnerSpec(world.shape, None, LossConfig(), None, b_max=12)
    rest = [field.name for field in dataclasses.fields(TrainState)][1:]
    updates = updating.Updates(spec, config, optax.sgd(1.0), optax.sgd(1.0), None)
    with pytest.raises(OutOfMemory) as caught:
        updates(TrainState(policy={}, **dict.fromkeys(rest)), batch)
    assert caught.value.phases == (phase,)
    rows = 8 // minibatches
    assert caught.value.sizes == {
        "update_rows": rows,
        "micro_batch_rows": 2,
        "positions": 17 + 4 * 5,
    }
