"""Disk, grader and model's folder, sound and with faults; versions and devices of this machine."""

import fcntl
import hashlib
import os
from pathlib import Path

import pytest

import faulty_doctor
import hf_world
from bacr_client.fingerprint import write_manifest
from bacr_doctor import machine
from bacr_doctor.__main__ import read_subject
from bacr_doctor.records import Subject
from bacr_grading import pool
from bacr_jax.config import Config
from bacr_jax.config.gpus import has_driver
from bacr_jax.errors import UserError


@pytest.fixture
def subject(tmp_path):
    return read_subject(["--config", "quickstart", f"output.dir={tmp_path / 'runs' / 'one'}"])[0]


def test_a_sound_disk_is_ok_and_is_left_as_it_was(subject, tmp_path):
    record = machine.files(subject)
    assert record.status in ("ok", "warn") and record.values["mb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def refuse(*_):
    raise OSError(95, "Operation not supported")


def full(_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("where", "name", "fault", "said"),
    [
        (os, "replace", refuse, "Operation not supported"),
        (os, "fsync", full, "No space left"),
        (fcntl, "flock", lambda *_: None, "two runs get .lock"),
    ],
)
def test_a_disk_without_rename_room_or_locks_is_broken(
    subject, monkeypatch, where, name, fault, said
):
    monkeypatch.setattr(where, name, fault)
    record = machine.files(subject)
    assert record.status == "broken" and said in record.measured


def test_what_can_change_numbers_is_named(subject):
    found = machine.versions(subject)
    assert found.values["jax"] in found.measured and "orbax-checkpoint" in found.values
    # Keys of the run, which may name places, are not.
    assert not any("." in name for name in found.values)
    assert machine.devices(subject).values["platform"] == "cpu"


def test_a_driver_without_a_gpu_in_jax_is_a_warning_also_in_wsl(subject, monkeypatch):
    assert machine.devices(subject).status == "ok" or has_driver()
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    record = machine.devices(subject)
    assert record.status == "warn" and "JAX does not use a GPU" in record.measured


def test_a_system_without_affinities_counts_its_cores(subject, monkeypatch):
    """macOS has no os.sched_getaffinity."""
    monkeypatch.delattr(os, "sched_getaffinity")
    record = machine.devices(subject)
    assert f", {os.cpu_count()} cores, load " in record.measured


@pytest.mark.slow  # a worker hangs for its deadline, and others start
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_judge_and_one_that_hangs_is_replaced(workers):
    words = ["--config", "quickstart", f"grading.workers={workers}", "grading.deadline=2"]
    record = machine.grader(read_subject(words)[0])
    assert record.status == "ok", record
    assert record.values["timeouts"] == 1
    assert record.values["worker_starts"] == 2 or workers > 1


def test_workers_that_do_not_start_are_refused(monkeypatch, subject):
    monkeypatch.setattr(pool.Program, "__init__", pool.Program.__init__)
    faulty_doctor.dead_grader()
    with pytest.raises(UserError, match="worker processes do not start"):
        machine.grader(subject)


@pytest.fixture
def folder(tmp_path):
    hf_world.make_folder(tmp_path / "model")
    return tmp_path / "model"


def of_folder(folder, **keys):
    return Subject(Config(), named=True).with_keys({"model.path": str(folder), **keys})


def test_a_flipped_byte_of_the_weights_is_found(folder):
    write_manifest(folder)
    record = machine.model(of_folder(folder))
    assert record.status == "ok" and "manifest" in record.measured
    weights = next(folder.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 64
    weights.write_bytes(content)
    with pytest.raises(UserError, match="is not the file that was exported"):
        machine.model(of_folder(folder))


def test_large_files_of_a_model_are_read_at_most_once_and_only_up_to_a_limit(folder, monkeypatch):
    write_manifest(folder)
    weights = next(folder.glob("*.safetensors"))
    hashed = []
    digest = hashlib.file_digest

    def recorded(file, name):
        hashed.append(Path(file.name))
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", recorded)
    whole = machine.model(of_folder(folder))
    assert whole.status == "ok" and "not hashed" not in whole.measured
    assert len(hashed) == len(set(hashed)) and weights in hashed
    monkeypatch.setattr(machine, "MOST_HASHED", weights.stat().st_size - 1)
    hashed.clear()
    record = machine.model(of_folder(folder))
    assert record.status == "ok" and weights not in hashed
    assert f"not hashed, because it would take too long: {weights.name}" in record.measured
    assert record.values == {
        **whole.values,
        weights.name: f"{weights.stat().st_size} bytes, not hashed",
    }
    # Small files are still compared, and truncated or missing weights are still found.
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(UserError, match=weights.name):
        machine.model(of_folder(folder))
    weights.unlink()
    with pytest.raises(UserError, match=weights.name):
        machine.model(of_folder(folder))
    weights.write_bytes(content)
    settings = folder / "config.json"
    settings.write_text(settings.read_text() + " ")
    with pytest.raises(UserError, match="config.json is not the file that was exported"):
        machine.model(of_folder(folder))


def test_a_template_with_markup_of_another_model_is_broken(folder):
    tokenizer = hf_world.chat_tokenizer()
    subject = of_folder(folder, **{"data.train": "math:train.jsonl"})
    tokenizer.save_pretrained(folder)
    assert machine.template(subject).status == "ok", machine.template(subject)
    tokenizer.chat_template = "<|start_header_id|>" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    record = machine.template(subject)
    assert (
        record.status == "broken"
        and "writes <|start_header_id|>, which is not a token" in record.measured
    )


def test_without_a_folder_there_is_nothing_to_look_at():
    subject = Subject(Config())
    assert machine.model(subject).status == machine.template(subject).status == "ok"
