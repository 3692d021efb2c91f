"""Learner and servers on devices of their own: what a plan says of each split."""

import pytest

from bacr_plan import schedule, seconds
from bacr_plan.devices import DEVICES
from bacr_plan.seconds import Split
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
    one = Split(6, 2, learn=30.0, sample=50.0, hand=7.0)
    assert (one.in_turn, one.ahead) == (87.0, 57.0)
    other = Split(4, 4, learn=45.0, sample=30.0, hand=7.0)
    text = "\n".join(seconds.split_lines([one, other], together=60.0))
    assert "in turn: 4 learn, 4 sample" in text and "rollout.ahead=1: 4 learn, 4 sample" in text
    assert "fastest: rollout.ahead=1: 4 learn, 4 sample; of each 7 s" in text
    assert "fastest: all in turn, own decoder" in "\n".join(
        seconds.split_lines([one], together=50.0)
    )
    assert seconds.split_lines([], together=50.0) == []
