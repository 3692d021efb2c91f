"""Checks in processes: one that hangs, dies or raises is a record, and the rest is done."""

import pytest

import faulty_doctor
from bacr_doctor import children
from bacr_doctor.children import Check, examine
from bacr_doctor.records import Subject
from bacr_jax.config import Config

KEYS = {"rollout.attention": "xla"}


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(children, "CHECK_SECONDS", 0.5)

    def examined(*names, **how):
        checks = [Check(n, getattr(faulty_doctor, n), keys=KEYS, advice="x") for n in names]
        return list(examine(checks, Subject(Config()), **how))

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


def test_whatever_a_check_raises_is_a_record():
    record = Check("none", lambda subject: subject.nothing).do(None)
    assert record.status == "broken" and "AttributeError" in record.measured
