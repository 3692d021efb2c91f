"""A device that is slower than a plan takes it to be is warned of."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_doctor import rates
from bacr_doctor.__main__ import read_subject
from bacr_doctor.records import Subject
from bacr_jax.config import Config
from bacr_plan.devices import DEVICES, GIB

PER_S = dict.fromkeys(("decoded_per_s", "learned_per_s", "flops_per_s", "bytes_per_s"), 1e4)


def judged(monkeypatch, matmul, bandwidth, device="h100"):
    words = [] if device is None else ["--device", device]
    shares = {"matmul": matmul, "bandwidth": bandwidth}
    monkeypatch.setattr(rates, "measure_throughput", lambda subject: {**PER_S, **shares})
    monkeypatch.setattr(rates, "measure_peak", lambda dtype: (1e12, 1e10))
    return rates.rates(read_subject(words)[0])


def test_shares_near_those_assumed_are_ok(monkeypatch):
    assert judged(monkeypatch, 0.45, 0.6).status == "ok"


def test_a_slow_device_is_warned_of_and_says_what_plan_assumes(monkeypatch):
    for shares in ((0.2, 0.7), (0.5, 0.3)):
        record = judged(monkeypatch, *shares)
        assert record.status == "warn" and "plan assumes 50% and 70%" in record.advice


def test_without_a_data_sheet_nothing_is_called_slow(monkeypatch):
    record = judged(monkeypatch, 0.01, 0.01, device=None)
    assert record.status == "ok" and "no data sheet" in record.measured


def test_plan_takes_the_measured_shares(monkeypatch):
    monkeypatch.setattr(
        rates, "measure_throughput", lambda _: {**PER_S, "matmul": 0.25, "bandwidth": 0.35}
    )
    subject = read_subject(["--config", "quickstart", "--device", "h100"])[0]
    found = rates.plan(subject).values
    # Half of both shares: twice the seconds.
    assert sum(found["measured"].values()) == 2 * sum(found["assumed"].values())


def test_only_gpus_wait_for_the_launches_of_kernels(monkeypatch):
    monkeypatch.setattr(
        rates, "measure_throughput", lambda _: {**PER_S, "matmul": 0.5, "bandwidth": 0.7}
    )
    subject = read_subject(["--config", "quickstart", "--device", "h100"])[0]
    on_cpu = rates.plan(subject).values["measured"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    on_gpu = rates.plan(subject).values
    assert on_gpu["measured"] == pytest.approx(on_gpu["assumed"])
    assert on_gpu["measured"].pop("decode") > 1.5 * on_cpu.pop("decode")
    assert on_gpu["measured"] == on_cpu


class TimedTrial:
    """A trial of the quickstart with two traces, whose decoding took 2 seconds."""

    def __init__(self, config):
        self.config = config
        self.batch = types.SimpleNamespace(
            prompt_lengths=np.array([8, 8]),
            sampled=np.array([16, 16]),
            answered=np.ones((2, 2), np.int32),
        )

    def rollout(self):
        return types.SimpleNamespace(counters={"decode_s": 1.5, "answer_s": 0.5})

    def start(self):
        return None

    def step(self, state, batch):
        return state, {}


def test_the_reached_bandwidth_does_not_depend_on_launches_or_the_data_sheet(monkeypatch):
    reached = []
    for device in ("h100", "l4"):
        subject = read_subject(["--config", "quickstart", "--device", device])[0]
        trial = TimedTrial(subject.config)
        monkeypatch.setattr(rates, "make_trial", lambda *_, trial=trial, **__: trial)
        reached.append(rates.measure_throughput.__wrapped__(subject)["bytes_per_s"])
    assert reached[0] == pytest.approx(reached[1])


def test_a_bare_copy_is_one_copy_of_memory():
    """Neither an element-wise pass nor an array that shares the memory of its input."""
    array = jnp.arange(1024, dtype=jnp.float32)
    program = rates.copy_array.lower(array).compile().as_text()
    entry = program[program.index("ENTRY") :]
    assert re.findall(r" = \S+ ([\w-]+)\(", entry) == ["parameter", "copy"]
    copied = rates.copy_array(array)
    assert copied.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(copied, array)


def test_the_rate_of_copies_counts_every_copy(monkeypatch):
    calls = []
    monkeypatch.setattr(rates, "copy_array", lambda array: calls.append(array.nbytes) or array)
    monkeypatch.setattr(rates, "_fastest_seconds", lambda run: (run(), 0.5)[1])
    _, bytes_per_s = rates.measure_peak.__wrapped__("float32")
    assert calls and bytes_per_s == 2 * sum(calls) / 0.5


def test_slow_additions_are_warned_of_with_the_version_that_is_fast():
    """The numbers of xla issue 46225, on a card that reads 21 MB in 28 us."""
    fast = rates.additions_record({"one_row": 1e-3, "all_rows": 2e-4}, reads=1e-3 / 28e-6)
    assert fast.status == "ok" and "into one row in 1 ms, into 399 rows in 0.2 ms" in fast.measured
    slow = rates.additions_record({"one_row": 0.5, "all_rows": 2e-3}, reads=0.5 / 28e-6)
    assert slow.status == "warn" and "17,857 times one read of the memory" in slow.measured
    assert "install jax 0.11.2 or newer, on Python 3.12" in slow.advice


def test_additions_are_measured_on_gpus_alone():
    assert rates.additions(read_subject([])[0]).measured.startswith("no GPU")


class Card:
    """A device as JAX describes it. By default, JAX uses 75 % of its memory."""

    def __init__(self, kind, gib):
        self.device_kind = kind
        self.gib = gib

    def memory_stats(self):
        return {"bytes_limit": int(0.75 * self.gib * GIB)}


@pytest.mark.parametrize(
    ("kind", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.5, "a100-40"),
        ("NVIDIA A10", 22.0, "a10"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        # Cards without a data sheet, whose names begin like those of other cards.
        ("NVIDIA A100 80GB PCIe", 79.3, None),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA A10G", 22.0, None),
    ],
)
def test_the_data_sheet_belongs_to_the_card(monkeypatch, kind, gib, name):
    monkeypatch.setattr(rates.jax, "devices", lambda: [Card(kind, gib)])
    assert rates.data_sheet(Subject(Config())) == (name and DEVICES[name])
