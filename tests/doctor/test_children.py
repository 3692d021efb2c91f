"""Checks in processes: one that hangs, dies or raises is a record, and the rest is done."""

import os

import pytest

import faulty_doctor
from bacr_doctor import children, machine, records
from bacr_doctor.children import Check, run_checks
from bacr_doctor.records import Subject
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.runs.folder import is_begun

KEYS = {"rollout.attention": "xla"}


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(children, "CHECK_SECONDS", 0.5)
    # An idle machine.
    monkeypatch.setattr(children.os, "getloadavg", lambda: (0.1, 0.1, 0.1))

    def examined(*names, **how):
        checks = [Check(n, getattr(faulty_doctor, n), keys=KEYS, advice="x") for n in names]
        return list(run_checks(checks, Subject(Config()), **how))

    return examined


def test_what_hangs_or_dies_is_broken_and_the_rest_is_done_in_a_fresh_process(found):
    one, hung, dead, last = found("well", "hangs", "dies", "well")
    assert (one.status, last.status) == ("ok", "ok") and one.measured != last.measured
    assert hung.status == "broken" and "has not ended after" in hung.measured
    assert dead.measured == "ended its process by SIGABRT: what it said last"
    # Nobody has seen a GPU, so nothing goes round it.
    assert hung.keys == dead.keys == {} and hung.advice == dead.advice == "x"


def test_a_check_that_is_killed_leaves_no_files(tmp_path):
    subject = Subject(config_io.override(Config(), {"output.dir": str(tmp_path)}), named=True)
    checks = [Check(name, getattr(faulty_doctor, name)) for name in ("leaves_files", "well")]
    seen = []
    for record in run_checks(checks, subject):
        seen.append(record.status)
        # Training accepts the folder of a doctor that is running or was killed.
        assert [path.name[:13] for path in tmp_path.iterdir()] == [".bacr-doctor-"]
        assert len(list(tmp_path.rglob("large"))) == 1
        assert not is_begun(tmp_path, "output.dir=x", "config.yaml", "run")
    assert seen == ["broken", "ok"] and list(tmp_path.iterdir()) == []


def test_a_doctor_that_is_interrupted_removes_its_folder(tmp_path):
    subject = Subject(config_io.override(Config(), {"output.dir": str(tmp_path)}), named=True)
    running = run_checks([Check("well", faulty_doctor.well)] * 2, subject)
    next(running)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_writable_is_the_fault_of_the_check_that_writes(monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(records.tempfile, "TemporaryDirectory", refuse)
    subject = Subject(Config())
    with subject.with_temporary() as prepared:
        assert prepared == subject
        record = Check("files", machine.files).run(prepared)
    assert record.status == "broken" and "Permission denied" in record.measured


def test_a_process_goes_on_until_a_check_breaks(found):
    one, broken, other = found("well", "breaks", "well")
    assert one.measured == broken.measured != other.measured


def test_on_a_gpu_the_keys_are_named_that_were_seen_to_go_round_it(found):
    _, helped, broken = found("has_a_gpu", "needs_xla", "breaks")
    assert (helped.status, helped.keys) == ("broken", KEYS)
    assert (broken.status, broken.keys) == ("broken", {})


def test_what_there_is_no_time_for_is_said(found):
    (late,) = found("well", most_seconds=0.0)
    assert late.status == "warn" and "not done" in late.measured and late.keys == {}


def test_a_check_without_its_full_time_is_not_finished(found):
    # Half of the usual time of all checks, and so half of a second's half for each.
    one, hung, last = found("well", "hangs", "well", most_seconds=300.0)
    assert (one.status, hung.status, last.status) == ("ok", "warn", "ok")
    assert hung.measured == "not finished after 0 s"
    assert hung.advice == "pass a larger --seconds"


def test_a_check_that_does_not_end_on_a_busy_machine_is_not_finished(found, monkeypatch):
    load = 3.0 * len(children.os.sched_getaffinity(0))
    monkeypatch.setattr(children.os, "getloadavg", lambda: (load, load, load))
    _, hung, last = found("well", "hangs", "well")
    assert (hung.status, last.status) == ("warn", "ok")
    assert "not finished after" in hung.measured
    assert f"on a busy machine (load {load:.1f}" in hung.measured
    assert "stop other processes" in hung.advice


def test_a_check_that_does_not_end_is_a_record_on_a_system_without_affinities(monkeypatch):
    """macOS has no os.sched_getaffinity."""
    monkeypatch.delattr(os, "sched_getaffinity")
    load = 3.0 * os.cpu_count()
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    record = children.overdue_record(Check("well", faulty_doctor.well), 10.0, 5.0)
    assert record.status == "warn"
    assert f"(load {load:.1f}, {os.cpu_count()} cores)" in record.measured


def test_whatever_a_check_raises_is_a_record():
    record = Check("none", lambda subject: subject.nothing).run(None)
    assert record.status == "broken" and "AttributeError" in record.measured
