"""The benchmarks of decoding run on a CPU, except for cuDNN and the list of kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, *words):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_enable_fast_min_max=false",
    }
    command = [sys.executable, BENCHMARKS / script, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_decoding_step_is_timed_and_compared_with_its_memory_bound(tmp_path):
    path = tmp_path / "new.json"
    sizes = "--layers 1 --rows 2 --prompt 8 --chunk 2 --rounds 3 --attention xla --copy-mib 1"
    printed = run("decoding.py", *sizes.split(), "--kernels", "--record", path)
    content = record.read(path)
    assert content["xla_flags"] == ["--xla_cpu_enable_fast_min_max=false"]
    assert len(content["measurements"]["decoding step"]["values"]) == 3
    # Eight prompt tokens, two calls of two steps for warming up, and half of three calls.
    assert printed["keys"] == 15 and printed["finite"]
    # A CPU has no streams of a GPU.
    assert printed["kernels_per_step"] == 0


@pytest.mark.slow
def test_attention_of_a_layer_is_timed_with_full_and_half_caches(tmp_path):
    path = tmp_path / "new.json"
    words = ["--rows", "2", "--keys", "16", "--rounds", "2", "--variants", "xla"]
    printed = run("decode_attention.py", *words, "--record", path)
    assert printed["xla_16_us"] > 0 and printed["xla_8_us"] > 0
    assert set(record.read(path)["measurements"]) == {"16 of 16 keys, xla", "8 of 16 keys, xla"}


def test_the_gpu_script_prints_commands_that_its_benchmarks_accept(tmp_path):
    command = ["bash", BENCHMARKS / "gpu.sh", "--dry-run", "--out", tmp_path / "gpu"]
    environment = os.environ | {"PYTHON": "python"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 15
    names = [Path(line.split()[-1]).name for line in lines]
    assert len(set(names)) == len(names), "two measurements would have one record"
    assert not (tmp_path / "gpu").exists()
    for line in lines:
        words = line.split()
        (script,) = [word for word in words if word.endswith(".py")]
        text = Path(script).read_text()
        for option in (word for word in words if word.startswith("--") and "xla_" not in word):
            assert f'"{option}"' in text or option == "--record", (script, option)
