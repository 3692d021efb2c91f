"""`bacr plan`: what it prints, and how it refuses."""

import json
import re

import pytest

import hf_world
from bacr_jax import __main__
from bacr_jax.config import shipped
from bacr_jax.config.shipped import locate
from bacr_jax.errors import UserError
from bacr_plan import __main__ as plan
from bacr_plan import compiling
from bacr_plan.workload import sizes_of
from plan_world import QUICKSTART, SEVEN


def run(capsys, *arguments, config=SEVEN, compiler="none"):
    code = plan.main(["--config", str(config), "--compile", compiler, *arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


def as_json(capsys, *arguments, **options):
    code, out, err = run(capsys, "--json", *arguments, **options)
    assert (code, err, out.count("\n")) == (0, "", 1)
    return json.loads(out)


def test_the_papers_run_fits_one_box_and_both_outputs_say_so(capsys):
    keys = ("--devices", "8", "--device-memory", "80")
    assert as_json(capsys, *keys)["fits"] is True
    assert "FITS: peak" in run(capsys, *keys)[1]


def test_a_run_that_does_not_fit_is_an_answer_too(capsys):
    keys = ("--devices", "4", "--device-memory", "40")
    code, out, err = run(capsys, *keys)
    assert (code, err) == (0, "") and "DOES NOT FIT: peak" in out
    assert as_json(capsys, *keys)["device"] == "NVIDIA A100-SXM4-40GB"


@pytest.mark.parametrize("name", shipped.names(("",)))
def test_a_shipped_config_is_planned_for_the_gpus_of_its_description(name):
    arguments = plan.parse(["--config", name])
    described = re.search(r"(one|\d+) GPU", shipped.description(name))
    count = 8 if described and described[1] == "8" else 1
    assert arguments.devices == count
    # The mesh and the micro-batches of the config are valid for this number.
    sizes_of(arguments.config, count)


def test_a_copy_of_a_shipped_config_keeps_its_number_of_gpus(tmp_path):
    copy, bare = tmp_path / "copy.yaml", tmp_path / "bare.yaml"
    text = locate("qwen2.5-7b-math").read_text()
    copy.write_text(text)
    bare.write_text(text.partition("\n")[2])
    assert plan.parse(["--config", str(copy)]).devices == 8
    assert plan.parse(["--config", str(copy), "--devices", "4"]).devices == 4
    assert plan.parse(["--config", str(bare)]).devices == 1


def test_the_trained_budgets_are_a_list_and_untrained_ones_are_warned_about(capsys):
    code, out, _ = run(capsys, config=QUICKSTART)
    assert code == 0 and "\nTrained  budgets 8, 16, 32, 64 (eval.budgets)\n" in out
    assert "WARNING" not in out
    code, out, _ = run(capsys, "budget.max=1024", config=QUICKSTART)
    assert code == 0 and "\nTrained  budgets 8, 16, 32, 64 (eval.budgets)\n" in out
    assert "\nWARNING, budget.max=1024: the largest trained budget is 64, because" in out


@pytest.mark.slow
def test_memory_decides_on_the_device_unless_one_is_named(capsys):
    assert as_json(capsys)["device"] == "NVIDIA A100-SXM4-80GB"
    assert as_json(capsys, "--device", "h200")["device_memory_gib"] == 141
    named = as_json(capsys, "--device", "h100", "--device-memory", "64")
    assert (named["device"], named["device_memory_gib"]) == ("NVIDIA H100 80GB HBM3", 64)


def test_small_runs_are_planned_too(capsys):
    assert as_json(capsys, "--devices", "1", config=QUICKSTART)["fits"] is True


def test_it_is_a_command_of_the_package(capsys):
    words = ["--config", str(SEVEN), "--devices", "8", "--compile", "none", "--json"]
    assert __main__.main(["plan", *words]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.parametrize(("options", "gb_per_s"), [((), 25), (("--network", "12.5"), 12.5)])
def test_the_network_between_machines_is_an_option(options, gb_per_s):
    words = ["--config", str(SEVEN), "--devices", "16", "--compile", "none", *options]
    assert plan.answer(plan.parse(words)).device.network_bandwidth == gb_per_s * 1e9


BAD = {
    "a number of devices": (["--devices", "0"], "--devices 0: the number"),
    "a known device": (["--device", "v100"], "use one of rtx-4090, a10, l4, rtx-5090"),
    "a memory": (["--device-memory", "0"], "--device-memory 0.0: the memory"),
    "a finite memory": (["--device-memory", "nan"], "--device-memory nan: the memory"),
    "a network": (["--network", "0"], "--network 0.0: the bandwidth between machines"),
    "a finite network": (["--network", "nan"], "--network nan: the bandwidth"),
    "a mesh of all devices": (
        ["--devices", "8", "mesh.fsdp=3"],
        "whose product is not the number of devices, 8; set",
    ),
    "the mesh of another number of devices": (
        ["--devices", "8", "mesh.fsdp=4"],
        ", or pass --devices 4",
    ),
    "devices that divide the width": (["--devices", "3"], "does not divide the model's width"),
    "heads for every tensor shard": (
        ["--devices", "8", "mesh.tensor=8"],
        "mesh.tensor=8 does not divide",
    ),
    "rows for every device": (
        ["--devices", "8", "train.micro_batch_rows=4"],
        "set train.micro_batch_rows=8, or pass --devices 1",
    ),
    "a single device without padding": (
        [
            "--devices",
            "8",
            "train.micro_batch_rows=null",
            "train.micro_batch_tokens=90624",
            "train.padding_free=true",
        ],
        "set train.padding_free=false, or pass --devices 1",
    ),
    "slots for every device": (
        ["--devices", "8", "rollout.slots=12"],
        "set rollout.slots=8, or pass --devices 1",
    ),
    "a config in range": (["budget.max=0"], "budget.max: found 0"),
    "keys that exist": (["model.size=7"], "no such key"),
    "positions for its thinking": (["budget.max=40000"], "budget.max=40000: the model has"),
    "a model that is known": (
        ["model.path=mine"],
        "mine/config.json does not exist and no known model has this name",
    ),
}


@pytest.mark.parametrize("wanted", BAD)
def test_bad_input_is_one_line_and_exit_code_2(capsys, wanted):
    arguments, line = BAD[wanted]
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert line in err


@pytest.mark.slow
def test_the_shape_of_a_model_of_the_hub_is_got_when_asked(capsys, tmp_path, monkeypatch):
    import huggingface_hub

    asked, kept = [], tmp_path / "0123abc"

    def snapshot(name, **how):
        asked.append((how["allow_patterns"], how["local_files_only"]))
        return kept

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    keys = ("model.path=somebody/else",)
    code, _, error = run(capsys, *keys)
    assert code == 2 and "add --download to get its config.json" in error
    hf_world.make_folder(kept)
    one = ("--devices", "1", "--download")
    assert as_json(capsys, *one, *keys)["model"] == f"{kept}/config.json"
    assert asked == [(["config.json"], True), (["config.json"], False)]
    # A released model is known by its name.
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert "guessed from the name" in as_json(capsys, "model.path=Qwen/Qwen2.5-7B")["model"]


def test_a_config_is_needed(capsys):
    assert plan.main(["--devices", "8"]) == 2
    assert "no config is given" in capsys.readouterr().err


def test_a_compiler_that_stops_is_reported_in_one_line(capsys, monkeypatch):
    def refuse(*_, **__):
        raise UserError("--compile gpu: the compilation failed (INTERNAL: no)")

    monkeypatch.setattr(compiling, "can_compile_for_gpus", lambda: True)
    monkeypatch.setattr(compiling, "measure", refuse)
    code, _, err = run(capsys, compiler="gpu")
    assert (code, err) == (2, "error: --compile gpu: the compilation failed (INTERNAL: no)\n")
