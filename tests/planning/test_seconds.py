"""Learner and servers on devices of their own: what a plan says of each split."""

import pytest

from bacr_plan import schedule, seconds
from bacr_plan.devices import DEVICES
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
    other = DeviceSplit(4, 4, learn=45.0, sample=30.0, transfer=7.0)
    text = "\n".join(seconds.split_lines([one, other], together=60.0, accepts_async=True))
    assert (
        "in turn: 4 learn, 4 sample" in text and "rollout.async_steps=1: 4 learn, 4 sample" in text
    )
    assert "fastest: rollout.async_steps=1: 4 learn, 4 sample; of each 7 s" in text
    assert "fastest: all in turn, own decoder" in "\n".join(
        seconds.split_lines([one], together=50.0, accepts_async=True)
    )
    assert seconds.split_lines([], together=50.0, accepts_async=True) == []


def test_a_run_that_refuses_async_rollouts_gets_no_row_for_them():
    split = DeviceSplit(4, 4, learn=45.0, sample=30.0, transfer=7.0)
    text = "\n".join(seconds.split_lines([split], together=90.0, accepts_async=False))
    assert "async_steps" not in text
    assert "fastest: in turn: 4 learn, 4 sample; of each 7 s" in text


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
