"""The best checkpoint is not one that ruined a budget, whatever its mean is."""

import itertools

import pytest

from bacr_jax.evaluation.decline import ACCURACY, CLOSED, Decline
from bacr_jax.evaluation.selection import (
    Candidate,
    WorstBudget,
    choose,
    make_candidate,
    to_record,
)

# 50 of 100 before training: Wilson's 95 % interval is [.4038, .5962].
BEFORE = {"16": 0.5, "48": 0.5}


def summary(accuracies, closed=1.0):
    entries = {
        budget: {"accuracy": accuracy, "closed_rate": closed, "problems": 100}
        for budget, accuracy in accuracies.items()
    }
    return {"greedy": entries}


def candidate(step, accuracies, before=BEFORE, closed=1.0, half_width=0.0):
    """An evaluation of the set `val`, whose mean is that over its budgets."""
    mean = sum(accuracies.values()) / len(accuracies)
    interval = [mean - half_width, mean + half_width]
    record = {
        "step": step,
        "when": "during",
        "sets": {"val": summary(accuracies, closed), "test": summary({"16": 0.0})},
        "anytime": {"val": {"greedy": {"mean": mean, "mean_ci95": interval}}},
    }
    start = {"test": summary({"16": 1.0})}
    if before:
        start["val"] = summary(before)
    return make_candidate(record, start, "val")


def test_a_candidate_has_its_mean_and_the_budget_that_lost_most():
    made = candidate(10, {"16": 0.9, "48": 0.4})
    assert made.step == 10 and made.accuracy == pytest.approx(0.65)
    assert made.worst == WorstBudget("48", 0.5, 0.4)
    assert made.worst.loss == pytest.approx(0.1)
    assert made.declines == (Decline("greedy", "48", ACCURACY, 0.5, 0.4, 100, False),)
    assert to_record(made, "val") == {
        "step": 10,
        "accuracy": made.accuracy,
        "set": "val",
        "worst": {"budget": "48", "before": 0.5, "after": 0.4},
        "declines": [
            {
                "mode": "greedy",
                "budget": "48",
                "measure": "accuracy",
                "before": 0.5,
                "after": 0.4,
                "problems": 100,
                "is_shown": False,
            }
        ],
    }


def test_the_worst_budget_of_a_checkpoint_that_gained_everywhere_gained_least():
    assert candidate(10, {"16": 0.9, "48": 0.6}).worst == WorstBudget("48", 0.5, 0.6)


def test_a_ruined_budget_is_not_outweighed_by_a_higher_mean():
    # Means .52, .70 and .54; only the second has declined.
    rising = candidate(10, {"16": 0.53, "48": 0.51})
    ruined = candidate(20, {"16": 1.0, "48": 0.4})
    last = candidate(30, {"16": 0.66, "48": 0.42})
    assert [bool(one.declines) for one in (rising, ruined, last)] == [False, True, False]
    assert choose([rising, ruined]) == rising
    assert choose([rising, ruined, last]) == last
    assert choose([ruined]) == ruined


def test_answers_that_no_longer_close_are_a_decline_too():
    unclosed = candidate(10, {"16": 0.9, "48": 0.9}, closed=0.5)
    assert [one.measure for one in unclosed.declines] == [CLOSED, CLOSED]
    healthy = candidate(20, {"16": 0.5, "48": 0.5})
    assert choose([unclosed, healthy]) == healthy


def test_of_declined_checkpoints_the_one_with_the_smallest_loss_wins():
    # Losses at the worst budgets: .5, .2 and .2; means .5, .3 and .35.
    high = candidate(10, {"16": 1.0, "48": 0.0})
    low = candidate(20, {"16": 0.3, "48": 0.3})
    same_loss = candidate(30, {"16": 0.4, "48": 0.3})
    assert choose([high, low]) == low
    assert choose([high, low, same_loss]) == same_loss


def test_the_newest_checkpoint_within_the_interval_of_the_highest_mean_wins():
    # Means .70 [.66, .74], .65, .67 and .60.
    means = {10: 0.70, 20: 0.65, 30: 0.67, 40: 0.60}
    candidates = [
        candidate(step, {"16": mean, "48": mean}, half_width=0.04) for step, mean in means.items()
    ]
    first, below, within, last = candidates
    assert choose([first]) == first
    assert choose([first, below]) == first
    assert choose([first, below, within]) == within
    assert choose([first, below, within, last]) == within
    # A new highest mean sets the interval: .75 [.71, .79].
    higher = candidate(50, {"16": 0.75, "48": 0.75}, half_width=0.04)
    assert choose([*candidates, higher]) == higher
    # A mean at the bound itself is within the interval.
    at_bound = candidate(60, {"16": 0.5, "48": 0.5})._replace(accuracy=first.lower_bound)
    assert choose([first, at_bound]) == at_bound


def test_within_the_interval_the_smallest_loss_at_any_budget_comes_first():
    # Losses at the worst budget: .02, 0 (it gained), 0 (it gained less), .09; all are within.
    losses = [{"16": 0.9, "48": 0.48}, {"16": 0.7, "48": 0.55}, {"16": 0.68, "48": 0.51},
              {"16": 0.95, "48": 0.41}]  # fmt: skip
    first, second, third, last = (
        candidate(step, accuracies, half_width=0.2) for step, accuracies in enumerate(losses, 1)
    )
    assert not any(one.declines for one in (first, second, third, last))
    assert choose([first, last]) == first
    # A gain is not a loss, so the newer one of two that gained is taken.
    assert choose([first, second, third, last]) == third
    assert choose([last, first, second]) == second
    # Outside the interval a checkpoint does not count, whatever its losses are.
    assert choose([candidate(1, {"16": 0.5, "48": 0.5}), candidate(2, losses[3])]).step == 2


def test_a_checkpoint_with_a_decline_is_not_chosen_for_being_within_the_interval():
    healthy = candidate(10, {"16": 0.6, "48": 0.7}, half_width=0.1)
    ruined = candidate(20, {"16": 1.0, "48": 0.3}, half_width=0.1)
    assert ruined.accuracy == pytest.approx(healthy.accuracy)
    assert choose([healthy, ruined]) == healthy


def test_ties_go_to_the_newer_checkpoint_unless_all_have_declined():
    first, second = (candidate(step, {"16": 0.6, "48": 0.7}) for step in (10, 20))
    assert choose([first, second]) == second
    ruined = [candidate(step, {"16": 0.1, "48": 0.1}) for step in (10, 20)]
    assert choose(ruined) == ruined[0]


@pytest.mark.parametrize("half_width", [0.3, 0.0])
def test_equal_losses_at_different_accuracies_are_a_tie(half_width):
    """.30 - .28 and .50 - .48 differ by float rounding; so do means of the same accuracies."""
    for first, second in itertools.permutations([(0.30, 0.28), (0.50, 0.48), (0.10, 0.08)], 2):
        made = []
        for step, (before, after) in ((10, first), (20, second)):
            start = {"16": before, "48": 0.4}
            one = candidate(step, {"16": after, "48": 0.4}, before=start, half_width=half_width)
            made.append(one._replace(accuracy=0.4, lower_bound=0.4 - half_width))
        assert not any(one.declines for one in made)
        assert choose(made).step == 20
        ruined = [one._replace(declines=(Decline("greedy", "16", ACCURACY, 1, 0, 1, True),))
                  for one in made]  # fmt: skip
        assert choose(ruined).step == 10


def test_the_other_candidates_only_count_for_the_highest_mean():
    # Means .70 [.65, .75], .66 and .62; nothing was lost.
    high, middle, low = (
        candidate(step, {"16": mean, "48": mean}, half_width=0.05)
        for step, mean in ((10, 0.70), (20, 0.66), (30, 0.62))
    )
    assert choose([high, middle, low], [middle, low]) == middle
    # Without a checkpoint in the interval of .70, the highest mean is .62.
    assert choose([high, middle, low], [low]) == low
    assert choose([high, middle, low], []) is None


def test_without_an_evaluation_before_training_the_mean_decides():
    # Without "before", the second would not be ruined, and its mean is the higher one.
    low = candidate(10, {"16": 0.5, "48": 0.5}, before=None)
    high = candidate(20, {"16": 1.0, "48": 0.1}, before=None)
    assert (high.worst, high.declines) == (None, ())
    assert choose([low, high]) == high


def test_without_a_selection_set_the_last_checkpoint_is_returned():
    record = {"when": "after", "sets": {"test": summary(BEFORE)}, "anytime": {"test": {}}}
    made = [make_candidate({"step": step, **record}, {}, None) for step in (10, 20)]
    assert made[0] == Candidate(10, None)
    assert choose(made) == made[1]
    assert to_record(made[1], None) == {
        "step": 20,
        "accuracy": None,
        "set": None,
        "worst": None,
        "declines": [],
    }
    # A set without budgets on the scale has no mean either.
    assert make_candidate({"step": 10, **record}, {}, "test").accuracy is None
    assert choose([]) is None


def test_only_the_decoding_that_chooses_counts():
    greedy, sampled = summary({"16": 0.9}), summary({"16": 0.0})
    record = {
        "step": 10,
        "sets": {"val": {**greedy, "sampled": sampled["greedy"]}},
        "anytime": {
            "val": {
                "sampled": {"mean": 0.0, "mean_ci95": [0.0, 0.1]},
                "greedy": {"mean": 0.9, "mean_ci95": [0.8, 1.0]},
            }
        },
    }
    start = {"val": {**summary({"16": 0.5}), "sampled": summary({"16": 0.9})["greedy"]}}
    made = make_candidate(record, start, "val")
    assert (made.accuracy, made.lower_bound, made.declines) == (0.9, 0.8, ())
