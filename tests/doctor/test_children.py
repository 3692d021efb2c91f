"""Checks in processes: one that hangs, dies or raises is a record, and the rest is done."""

import pytest

import faulty_doctor
from bacr_doctor import children
from bacr_doctor.children import Check, run_checks
from bacr_doctor.records import Subject
from bacr_jax.config import Config

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


def test_whatever_a_check_raises_is_a_record():
    record = Check("none", lambda subject: subject.nothing).run(None)
    assert record.status == "broken" and "AttributeError" in record.measured
