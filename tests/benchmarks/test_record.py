"""A record contains a benchmark's values, and what they depend on."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import record

ROOT = Path(__file__).parents[2]


def options(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--model", type=Path, default=Path("models/small"))
    parser.add_argument("--out", type=Path, default=Path("runs/here"))
    record.add_option(parser)
    return parser.parse_args(words)


def test_a_measurement_has_the_median_and_the_quartiles_of_its_values():
    result = record.measurement([4.0, 1.0, 2.0, 3.0, 5.0])
    assert result["values"] == [4, 1, 2, 3, 5]
    assert (result["median"], result["quartiles"]) == (3, [2, 4])
    assert record.measurement([7.0])["quartiles"] == [7, 7]


def test_a_record_contains_machine_versions_commit_and_settings_without_paths(tmp_path):
    path = tmp_path / "new.json"
    measurements = record.seconds({"a": [2.0, 4.0, 3.0], "b": [1.0, 2.0, 1.5]}, "part")
    record.write(options("--record", str(path)), measurements, {"a_over_b": ("part, a", "part, b")})
    content = record.read(path)
    assert content["settings"] == {"rows": 4, "model": "small"}
    assert content["ratios"]["a_over_b"]["value"] == 2.0
    assert content["measurements"]["part, a"]["median"] == 3.0
    assert content["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert {"python", "jax", "numpy"} <= set(content["versions"])
    head = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    assert content["commit"] == (head.stdout.strip() or None)
    assert str(tmp_path) not in path.read_text()


@pytest.fixture
def without_nvidia_smi(tmp_path, monkeypatch):
    """An empty folder as PATH. Returns the folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_a_record_contains_the_driver_and_the_kernel(without_nvidia_smi):
    tool = without_nvidia_smi / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && echo 580.65.06\n')
    tool.chmod(0o755)
    machine = record.machine()
    assert (machine["driver"], machine["kernel_release"]) == ("580.65.06", os.uname().release)


OPEN = (
    "Open Kernel Module for x86_64  580.65.06  Release Build  (x@y)  Sun Jul 27 07:14:28 UTC 2025"
)
CLOSED = "x86_64 Kernel Module  535.129  Thu Oct 19 18:56:32 UTC 2023\nGCC version: gcc 12.3.0"


@pytest.mark.parametrize(("text", "version"), [(OPEN, "580.65.06"), (CLOSED, "535.129")])
def test_the_driver_is_found_without_nvidia_smi(tmp_path, without_nvidia_smi, text, version):
    assert record.driver(tmp_path) is None
    file = tmp_path / "proc" / "driver" / "nvidia" / "version"
    file.parent.mkdir(parents=True)
    file.write_text(f"NVRM version: NVIDIA UNIX {text}\n")
    assert record.driver(tmp_path) == version
    # An nvidia-smi that fails does not hide the driver.
    tool = without_nvidia_smi / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho failed 1.2.3\nexit 9\n")
    tool.chmod(0o755)
    assert record.driver(tmp_path) == version


def test_a_machine_without_a_driver_has_no_such_field(monkeypatch):
    monkeypatch.setattr(record, "driver", lambda: None)
    assert "driver" not in record.machine()


@pytest.mark.parametrize("separator", ["-", "_"])
def test_a_record_contains_the_versions_of_jaxs_plug_in(tmp_path, monkeypatch, separator):
    monkeypatch.setattr(record, "PACKAGES", ())
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name, version):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    install("nvidia-cudnn-cu13", "9.19.0")
    install("cuda-toolkit", "13.0.3")
    # torch also installs cuDNN.
    assert set(record.versions()) == {"python"}
    plugins = [separator.join(("jax", "cuda13", part)) for part in ("pjrt", "plugin")]
    for name in plugins:
        install(name, "0.11.2")
    importlib.invalidate_caches()
    versions = record.versions()
    assert set(versions) == {"python", "nvidia-cudnn-cu13", *plugins}
    assert {versions[name] for name in plugins} == {"0.11.2"}


def test_nothing_is_written_without_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record.write(options(), record.seconds({"a": [1.0]}))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_and_a_missing_folder_are_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "old.json").write_text("{}")
    for name, reason in (("old.json", "found a file"), ("missing/new.json", "folder is missing")):
        with pytest.raises(SystemExit) as exit_of:
            options("--record", str(tmp_path / name))
        assert exit_of.value.code == 2 and reason in capsys.readouterr().err


def test_the_interval_of_a_ratio_contains_it_and_needs_five_values():
    ratio, (low, high) = record.ratio_interval([2.0, 2.1, 1.9, 2.2, 1.8], [1.0, 1.1, 0.9, 1.0, 1.0])
    assert ratio == 2.0 and 1.8 <= low <= 2.0 <= high <= 2.5
    assert record.ratio_interval([2.0] * 4, [1.0] * 9) == (2.0, None)


def test_what_is_no_record_is_refused_in_one_line(tmp_path):
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "other.json").write_text("[]")
    for name, reason in (
        ("text", "not JSON"),
        ("other", "not a record"),
        ("absent", "No such file"),
    ):
        with pytest.raises(ValueError, match=reason):
            record.read(tmp_path / f"{name}.json")


def test_a_benchmark_of_tiny_sizes_writes_its_record(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = tmp_path / "forward.json"
    sizes = "--threads 1 --rounds 2 --rows 1 --length 8 --layers 1 --width 16 --intermediate 16"
    words = [*sizes.split(), "--heads", "2", "--kv-heads", "1", "--vocab", "32", "--record", path]
    command = [sys.executable, ROOT / "benchmarks" / "forward.py", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    printed = json.loads(done.stdout.splitlines()[-1])
    content = record.read(path)
    assert content["benchmark"] == "forward" and content["settings"]["rounds"] == 2
    assert len(content["measurements"]["train, bacr_jax"]["values"]) == 2
    for name in ("forward_vs_hf", "train_vs_hf"):
        assert content["ratios"][name]["value"] == pytest.approx(printed[name], rel=0.01)


TIMED = ["forward", "rollout", "learner", "grading", "early_grading", "step", "step_beside_trl"]


@pytest.mark.parametrize("name", [*TIMED, "starts", "quickstart"])
def test_every_script_of_the_table_of_two_cores_takes_the_option(name):
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    assert "record.add_option(" in text and "record.write(" in text
    assert f"{name}.py" in (ROOT / "benchmarks" / "two_cores.sh").read_text()
