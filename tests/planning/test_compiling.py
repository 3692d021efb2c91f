"""What is asked of the compiler, and what it is like in a process of its own."""

import re

import pytest

from bacr_jax.errors import UserError
from bacr_plan import compiling
from bacr_plan.devices import DEVICES
from bacr_plan.workload import sizes_of
from plan_world import tiny_config, workload


@pytest.fixture
def backends(monkeypatch):
    """A compiler that answers at once, and the backends it was asked for."""
    asked = []

    def answer(config, vocab_size, num_devices, gpu):
        asked.append("gpu" if gpu else "cpu")
        return {}

    monkeypatch.setattr(compiling, "measure", answer)
    return asked


def compile_seven(compiler, num_devices=8):
    return compiling.compile_run(
        workload(), num_devices=num_devices, device=DEVICES["a100-80"], compiler=compiler
    )


@pytest.mark.parametrize(
    ("compiler", "plugin", "backend", "words"),
    [
        ("gpu", True, "gpu", "compiled for this GPU"),
        ("gpu", False, "cpu", r"for CPUs.*\.\[plan\]"),
        ("cpu", True, "cpu", r"for CPUs.*--compile cpu"),
    ],
)
def test_what_compiles_is_said_in_words(monkeypatch, backends, compiler, plugin, backend, words):
    monkeypatch.setattr(compiling, "can_compile_for_gpus", lambda: plugin)
    compilation = compile_seven(compiler)
    assert backends == [backend] and compilation.exact == (backend == "gpu")
    assert re.search(words, compilation.source)


def test_arithmetic_alone_compiles_nothing(backends):
    assert compile_seven("none").programs == {} and backends == []


def test_whole_boxes_can_be_compiled_for(monkeypatch, backends):
    monkeypatch.setattr(compiling, "can_compile_for_gpus", lambda: True)
    with pytest.raises(UserError, match="a multiple of 8"):
        compile_seven("gpu", 28)
    assert compile_seven("gpu", 16).exact


def test_the_exception_of_a_traceback_is_found():
    text = (
        "Traceback ...\n  File x\njax.errors.JaxRuntimeError: INTERNAL: no\n----\nJAX has removed"
    )
    assert compiling.last_exception(text) == "jax.errors.JaxRuntimeError: INTERNAL: no"


@pytest.mark.slow
def test_two_devices_hold_half_of_the_state_each():
    config = tiny_config("train.micro_batch_rows=2")
    shape = sizes_of(config, 2)[0].model
    described = compiling.described(config, shape, fused_attention=False)
    two = compiling.measure(described, shape.vocab_size, 2, None)
    assert two.keys() == {"train", "decode"}
    assert two["train"].temporaries > 0
    embed = shape.vocab_size * shape.hidden_size
    # fp32 masters and moments of everything but the small whole things, and then those.
    assert two["train"].arguments > 12 * embed / 2
