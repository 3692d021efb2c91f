"""A policy has declined where it is worse than chance explains, whatever it gained elsewhere."""

import pytest

from bacr_jax.evaluation.decline import ACCURACY, CLOSED, Decline, declines


def entry(accuracy, closed=1.0, problems=100):
    return {"accuracy": accuracy, "closed_rate": closed, "problems": problems}


def test_a_gain_at_one_budget_does_not_hide_a_loss_at_another():
    # Wilson's 95 % interval of 50 in 100 is [.4038, .5962].
    before = {"greedy": {"16": entry(0.5), "48": entry(0.5)}}
    after = {"greedy": {"16": entry(0.9), "48": entry(0.40)}}
    assert list(declines(before, after)) == [Decline("greedy", "48", ACCURACY, 0.5, 0.40)]
    assert list(declines(before, {"greedy": {"48": entry(0.41)}})) == []


@pytest.mark.parametrize(
    ("before", "after", "declined"),
    [
        (1.0, 0.95, False),
        (1.0, 0.94, True),
        # Wilson's 95 % interval of 90 in 100 is [.8256, .9448].
        (0.9, 0.83, False),
        (0.9, 0.82, True),
        # Above .95 a share may fall by more than its interval.
        (1.0, 0.955, False),
    ],
)
def test_closed_answers_decline_below_a_bound_and_below_chance(before, after, declined):
    start, end = ({"sampled": {"8": entry(0.5, closed)}} for closed in (before, after))
    expected = [Decline("sampled", "8", CLOSED, before, after)] if declined else []
    assert list(declines(start, end)) == expected


def test_what_was_not_evaluated_before_is_left_out():
    before = {"greedy": {"16": entry(0.5)}}
    after = {"greedy": {"32": entry(0.0)}, "sampled": {"16": entry(0.0)}}
    assert list(declines(before, after)) == []
    old_run = {"accuracy": 0.5, "problems": 100}
    assert list(declines({"greedy": {"16": old_run}}, {"greedy": {"16": entry(0.5, 0.0)}})) == []
