"""`python -m bacr_jax.plan`: what it prints, and how it refuses."""

import json

import pytest

from bacr_jax import __main__, plan
from bacr_jax.errors import UserError
from bacr_jax.planning import compiling
from bacr_jax.planning.compiling import Measured
from bacr_jax.planning.devices import GIB
from plan_world import QUICKSTART, SEVEN


def run(capsys, *arguments, config=SEVEN, compiler="none"):
    code = plan.main(["--config", str(config), "--compile", compiler, *arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


def as_json(capsys, *arguments, **options):
    code, out, err = run(capsys, "--json", *arguments, **options)
    assert (code, err, out.count("\n")) == (0, "", 1)
    return json.loads(out)


def test_the_object_answers_every_question(capsys):
    found = as_json(capsys, "--devices", "8", "--device-memory", "80")
    assert {
        *("fits", "peak_gib", "limit_gib", "parts_gib", "phases_gib", "flops"),
        *("predicted_step_s", "max_micro_batch", "max_slots", "bytes_per_device", "mesh"),
    } <= found.keys()
    assert {"parameters", "optimizer", "gradients", "activations", "kv_cache", "decode_copy"} <= (
        found["parts_gib"].keys()
    )
    assert found["predicted_step_s"].keys() == {"a100-80", "h100", "h200"}


def test_the_papers_run_fits_one_box(capsys):
    found = as_json(capsys, "--devices", "8", "--device-memory", "80")
    assert found["fits"] is True
    assert found["peak_gib"] == max(found["phases_gib"].values()) <= found["limit_gib"]
    # 7,641,406,976 parameters in fp32 over eight devices.
    assert found["parts_gib"]["parameters"] == pytest.approx(7_641_406_976 * 4 / 8 / GIB, abs=1e-3)
    assert found["max_micro_batch"] >= 16
    assert found["max_slots"] == 512


def test_it_says_by_how_much_a_run_does_not_fit_and_what_would(capsys):
    keys = ("--devices", "4", "--device-memory", "40")
    code, out, _ = run(capsys, *keys)
    found = as_json(capsys, *keys)
    assert (code, found["fits"]) == (0, False)
    assert found["device"] == "NVIDIA A100-SXM4-40GB"
    assert f"{found['peak_gib'] - found['limit_gib']:.1f} GiB too much" in out
    assert found["more_devices"]["devices"] == 8
    assert found["more_devices"]["overrides"] in out
    assert found["smaller_model"]["model.preset"] == "qwen2.5-3b"


def test_what_it_suggests_fits_when_asked_again(capsys):
    keys = ("--devices", "8", "model.preset=qwen2.5-14b")
    suggested = as_json(capsys, *keys)["suggestion"]
    again = as_json(capsys, *keys, *suggested["overrides"].split())
    assert again["fits"] is True
    assert again["peak_gib"] == suggested["peak_gib"]


def test_the_largest_portions_fit_when_asked_again(capsys):
    found = as_json(capsys, "--devices", "8")
    largest = [
        f"train.micro_batch_rows={found['max_micro_batch']}",
        f"rollout.slots={found['max_slots']}",
    ]
    assert as_json(capsys, "--devices", "8", *largest)["fits"] is True


def test_memory_decides_on_the_device_unless_one_is_named(capsys):
    assert as_json(capsys)["device"] == "NVIDIA A100-SXM4-80GB"
    assert as_json(capsys, "--device", "h200")["device_memory_gib"] == 141
    named = as_json(capsys, "--device", "h100", "--device-memory", "64")
    assert (named["device"], named["device_memory_gib"]) == ("NVIDIA H100 80GB HBM3", 64)


def test_the_text_holds_every_number_of_the_object(capsys):
    found = as_json(capsys)
    _, out, _ = run(capsys)
    for gib in (*found["parts_gib"].values(), *found["phases_gib"].values()):
        assert f"{gib:.2f}" in out
    for seconds in found["predicted_step_s"].values():
        assert f"{seconds:.0f}" in out


def test_small_runs_are_planned_too(capsys):
    found = as_json(capsys, "--devices", "1", config=QUICKSTART)
    assert found["fits"] is True


def test_it_is_a_command_of_the_package(capsys):
    assert __main__.main(["plan", "--config", str(SEVEN), "--compile", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


BAD = {
    "a number of devices": (["--devices", "0"], "--devices: found '0'"),
    "a known device": (["--device", "v100"], "write one of a100-40, a100-80, h100, h200"),
    "a memory": (["--device-memory", "0"], "--device-memory: found '0'"),
    "a finite memory": (["--device-memory", "nan"], "--device-memory: found 'nan'"),
    "a mesh of all devices": (["--devices", "8", "mesh.fsdp=3"], "does not make 8 devices"),
    "devices that divide the width": (["--devices", "3"], "must divide the model's width"),
    "heads for every tensor shard": (["mesh.tensor=8"], "mesh.tensor=8: must divide"),
    "rows for every device": (["train.micro_batch_rows=4"], "write train.micro_batch_rows=8"),
    "slots for every device": (["rollout.slots=12"], "write rollout.slots=8"),
    "a config in range": (["budget.max=0"], "budget.max: found 0"),
    "keys that exist": (["model.size=7"], "no such key"),
    "a model that is known": (["model.path=mine"], "model.path: no mine/config.json here"),
}


@pytest.mark.parametrize("wanted", BAD)
def test_bad_input_is_one_line_and_exit_code_2(capsys, wanted):
    arguments, line = BAD[wanted]
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert line in err


def test_a_config_is_needed(capsys):
    assert plan.main(["--devices", "8"]) == 2
    assert "no config" in capsys.readouterr().err


def test_whole_boxes_can_be_compiled_for(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "can_compile_for_gpus", lambda: True)
    # 28 = 4 x 7 divides the width of 3584, but is not a number of boxes of eight.
    keys = ("--devices", "28", "rollout.questions=56", "train.micro_batch_rows=28")
    code, _, err = run(capsys, *keys, compiler="gpu")
    assert code == 2
    assert "whole boxes of 8" in err


# What the compiler would say, without waiting for it.
COMPILED = {
    "train": Measured(arguments=11 * GIB, outputs=0, temporaries=20 * GIB, seconds=1.0),
    "decode": Measured(arguments=30 * GIB, outputs=0, temporaries=5 * GIB, seconds=1.0),
}


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that answers at once, and what it was asked."""
    asked = []

    def measure(config, shape, **how):
        asked.append(how["backend"])
        return COMPILED

    monkeypatch.setattr(compiling, "measure", measure)
    return asked


def test_the_gpu_compilers_numbers_are_taken(capsys, monkeypatch, compiler):
    monkeypatch.setattr(compiling, "can_compile_for_gpus", lambda: True)
    found = as_json(capsys, compiler="gpu")
    assert compiler == ["gpu"]
    assert found["phases_gib"]["update"] == 31
    # Branches have their own cache, 64 rows of 4 x 136 tokens of 57,344 bytes; the state waits.
    branches = 64 * 544 * 57_344 / GIB
    assert found["phases_gib"]["rollout"] == pytest.approx(11 + 35 + branches, abs=1e-3)


def test_without_the_extra_it_says_that_temporaries_are_arithmetic(capsys, monkeypatch, compiler):
    monkeypatch.setattr(compiling, "can_compile_for_gpus", lambda: False)
    arithmetic = as_json(capsys)
    found = as_json(capsys, compiler="gpu")
    assert compiler == ["cpu"]
    assert "bacr_jax[plan]" in found["memory_from"]
    assert found["parts_gib"]["activations"] == arithmetic["parts_gib"]["activations"]
    _, out, _ = run(capsys, compiler="gpu")
    assert "for CPUs" in out


def test_a_compiler_that_stops_is_reported_in_one_line(capsys, monkeypatch):
    def refuse(*_, **__):
        raise UserError("--compile gpu: the compiler stopped (INTERNAL: no)")

    monkeypatch.setattr(compiling, "can_compile_for_gpus", lambda: True)
    monkeypatch.setattr(compiling, "measure", refuse)
    code, _, err = run(capsys, compiler="gpu")
    assert (code, err) == (2, "error: --compile gpu: the compiler stopped (INTERNAL: no)\n")


def test_the_exception_of_a_traceback_is_found():
    text = (
        "Traceback ...\n  File x\njax.errors.JaxRuntimeError: INTERNAL: no\n----\nJAX has removed"
    )
    assert compiling._reason(text) == "jax.errors.JaxRuntimeError: INTERNAL: no"
