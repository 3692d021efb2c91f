"""Lines of a plan about splits between a learner and servers."""

from bacr_plan.report_text import split_lines
from bacr_plan.seconds import DeviceSplit

ONE = DeviceSplit(6, 2, learn=30.0, sample=50.0, transfer=7.0)
OTHER = DeviceSplit(4, 4, learn=45.0, sample=30.0, transfer=7.0)


def test_the_fastest_split_or_no_split_is_named():
    text = "\n".join(split_lines([ONE, OTHER], together=60.0, accepts_async=True))
    assert "in turn: 4 learn, 4 sample" in text
    assert "rollout.async_steps=1: 4 learn, 4 sample" in text
    assert "fastest: rollout.async_steps=1: 4 learn, 4 sample; of each 7 s" in text
    text = "\n".join(split_lines([ONE], together=50.0, accepts_async=True))
    assert "fastest: all in turn, own decoder" in text
    assert split_lines([], together=50.0, accepts_async=True) == []


def test_a_run_that_refuses_async_rollouts_gets_no_row_for_them():
    text = "\n".join(split_lines([OTHER], together=90.0, accepts_async=False))
    assert "async_steps" not in text
    assert "fastest: in turn: 4 learn, 4 sample; of each 7 s" in text
