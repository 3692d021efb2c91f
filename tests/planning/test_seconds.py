"""Launches, links between GPUs, the warm-up, and splits between a learner and servers."""

import dataclasses

import numpy as np
import pytest

from bacr_plan import costs, schedule, seconds
from bacr_plan.devices import DEVICES
from bacr_plan.schedule import DecodedChunk, PlannedIteration, PlannedMicroBatch, Schedule
from bacr_plan.seconds import DeviceSplit
from plan_world import mesh, workload


@pytest.fixture(scope="module")
def found():
    work, device = workload(), DEVICES["h100"]
    made = schedule.iteration(work, mesh())
    return seconds.splits(work, mesh(), device, made), seconds.step_seconds(
        work, mesh(), device, made
    )


def test_devices_of_a_split_are_those_of_the_run(found):
    splits, whole = found
    assert len(splits) > 1 and all(one.learner + one.samplers == 8 for one in splits)
    by_learner = {one.learner: one for one in splits}
    # Half of the devices learn for about twice as long.
    learn = whole["update"] + whole["score"]
    assert by_learner[4].learn == pytest.approx(2 * learn, rel=0.15)
    # Fewer devices have more rows each, but no more steps.
    samples = [one.sample for one in sorted(splits, key=lambda one: one.samplers)]
    assert samples == sorted(samples, reverse=True) and samples[0] < 8 * samples[-1]


def test_a_step_ahead_takes_the_longer_part_and_the_handing_over():
    one = DeviceSplit(6, 2, learn=30.0, sample=50.0, transfer=7.0)
    assert (one.in_turn, one.ahead) == (87.0, 57.0)


def test_a_warm_up_takes_its_steps_times_one_step():
    """Four rows of 5,256 tokens on one device, products and Adam by hand."""
    keys = ("warmup.steps=300", "warmup.batch_tokens=21024", "model.remat=none")
    work, device = workload(*keys), DEVICES["h100"]
    assert seconds.warmup_seconds(workload(), mesh(fsdp=1), device) == 0
    found = seconds.warmup_seconds(work, mesh(fsdp=1), device)
    model, width = work.model, 1024 + 4096 + 8 + 128
    layers = 4 * width * 2 * model.num_layers * model.layer_matrices
    attention = 4 * model.num_layers * 4 * model.num_heads * model.head_dim * width**2 / 2
    head = 4 * width * 2 * model.vocab_size * model.hidden_size
    products = (3 * (layers + attention) + 4 * head) / (device.matmul_flops * 0.5)
    adam = 28 * model.num_parameters / (device.memory_bandwidth * 0.7)
    assert found == pytest.approx(300 * (products + adam), rel=1e-6)


KEYS = np.full((16, 1), 8 * 128)
SHORT_CHUNK = Schedule(chunks=[DecodedChunk(8, 1280, KEYS, KEYS)])
ANSWERS = Schedule(answers=[(8, 1280, 5)])


@pytest.mark.parametrize("device", ["h100", "h200", "b200"])
@pytest.mark.parametrize(("rollout", "steps"), [(SHORT_CHUNK, 16), (ANSWERS, 5)])
def test_a_decoding_step_of_a_small_model_takes_the_launches_of_its_layers(device, rollout, steps):
    """24 layers of 85 microseconds."""
    work = workload("model.preset=qwen2.5-0.5b", own_keys=True, slots=8)
    layout = mesh(fsdp=1)
    by_phase = seconds.rollout_seconds(work, layout, DEVICES[device], rollout)
    assert by_phase == {"prefill": 0, "decode": pytest.approx(steps * 24 * 85e-6)}
    # The bytes alone take less time, and a CPU launches no kernels.
    without = seconds.rollout_seconds(work, layout, DEVICES[device], rollout, launch=0.0)
    assert 0 < without["decode"] < by_phase["decode"]
    planned = schedule.PlannedIteration(rollout, [])
    iteration = seconds.step_seconds(work, layout, DEVICES[device], planned, launch=0.0)
    assert iteration["decode"] == without["decode"]


def test_launches_are_hidden_behind_the_bytes_of_a_large_model():
    work = workload(own_keys=True, slots=8)
    args = (work, mesh(fsdp=1), DEVICES["h200"], SHORT_CHUNK)
    assert seconds.rollout_seconds(*args) == seconds.rollout_seconds(*args, launch=0.0)


# A micro-batch of one token for each of 16 traces: its gathers take longer than its products.
SHORT = PlannedIteration(Schedule(), [[PlannedMicroBatch(16, 1, 0)]])
LINKS, CARD = 300e9, 25e9


@pytest.mark.parametrize(
    ("layout", "fsdp_rate", "data_rate"),
    [
        # One machine of eight GPUs has no network, whatever its mesh.
        (mesh(fsdp=8), LINKS, None),
        (mesh(data=2, fsdp=4), LINKS, LINKS),
        (mesh(fsdp=6), LINKS, None),
        # Eight GPUs of each machine use eight network cards.
        (mesh(fsdp=16), 8 * CARD, None),
        (mesh(data=16, fsdp=1), None, 8 * CARD),
        # FSDP within a machine. The replicas of a shard have one GPU, or two, on each machine.
        (mesh(data=2, fsdp=8), LINKS, CARD),
        (mesh(data=4, fsdp=4), LINKS, 2 * CARD),
        # Two groups share the network cards of a machine.
        (mesh(fsdp=8, tensor=2), 4 * CARD, None),
        # The second machine has four GPUs.
        (mesh(fsdp=12), 4 * CARD, None),
        # GPUs 6, 7 | 8 are a group of FSDP, and GPUs 0, 3, 6 | 9 the replicas of a shard.
        (mesh(data=4, fsdp=3), CARD, CARD),
    ],
)
def test_an_axis_that_spans_machines_has_the_speed_of_their_network(layout, fsdp_rate, data_rate):
    work, device = workload("train.minibatches=1", scored=1.0), DEVICES["a100-80"]
    found = seconds.step_seconds(work, layout, device, SHORT)
    optimizer = costs.optimizer_bytes(work, layout) / (2039e9 * 0.7)
    gathers = scored = copies = 0.0
    if fsdp_rate:
        gathers = costs.gathered_bytes(work, layout) / (fsdp_rate * 0.7)
        scored = costs.scored_gathered_bytes(work, layout) / (fsdp_rate * 0.7)
        assert found["score"] == pytest.approx(scored)
    else:
        gathers = costs.train_flops(work, SHORT.updates[0][0]) / (16 * 312e12 * 0.5)
    if data_rate:
        copies = costs.copied_bytes(work, layout) / (data_rate * 0.7)
    assert found["update"] == pytest.approx(gathers + optimizer + copies)


def test_a_slower_network_slows_only_runs_on_several_machines():
    work, device = workload(), DEVICES["a100-80"]
    slow = dataclasses.replace(device, network_bandwidth=1e9)
    phases = lambda layout, gpu: seconds.step_seconds(work, layout, gpu, SHORT)
    assert phases(mesh(), slow) == phases(mesh(), device)
    sixteen, slower = phases(mesh(fsdp=16), device), phases(mesh(fsdp=16), slow)
    assert slower["update"] > 2 * sixteen["update"] and slower["score"] > 2 * sixteen["score"]


@pytest.mark.parametrize(("shards", "rate"), [(8, LINKS), (16, 8 * CARD)])
def test_decoding_on_several_machines_waits_for_their_network(shards, rate):
    work, device = workload(slots=64), DEVICES["a100-80"]
    layout = mesh(fsdp=16, decode_tensor=shards)
    idle = Schedule(chunks=[DecodedChunk(64, 1280, KEYS, KEYS)], answers=[])
    found, faster = (
        seconds.rollout_seconds(work, layout, gpu, idle)["decode"]
        for gpu in (
            device,
            dataclasses.replace(device, link_bandwidth=1e30, network_bandwidth=1e30),
        )
    )
    sent = costs.decode_link_bytes(work, layout, 64 / (16 // shards))
    assert found - faster == pytest.approx(idle.steps * sent / (rate * 0.7))
