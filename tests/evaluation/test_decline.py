"""A policy has declined where it is worse than chance explains, whatever it gained elsewhere."""

import pytest
from scipy.stats import fisher_exact

from bacr_jax.evaluation.decline import ACCURACY, CLOSED, Decline, declines, fisher_p


def entry(accuracy, closed=1.0, problems=100):
    return {"accuracy": accuracy, "closed_rate": closed, "problems": problems}


def test_a_gain_at_one_budget_does_not_hide_a_loss_at_another():
    # Wilson's 95 % interval of 50 in 100 is [.4038, .5962].
    before = {"greedy": {"16": entry(0.5), "48": entry(0.5)}}
    after = {"greedy": {"16": entry(0.9), "48": entry(0.40)}}
    assert list(declines(before, after)) == [
        Decline("greedy", "48", ACCURACY, 0.5, 0.40, problems=100, is_shown=False)
    ]
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
    found = [(one.mode, one.budget, *one[2:5]) for one in declines(start, end)]
    assert found == ([("sampled", "8", CLOSED, before, after)] if declined else [])


def test_what_was_not_evaluated_before_is_left_out():
    before = {"greedy": {"16": entry(0.5)}}
    after = {"greedy": {"32": entry(0.0)}, "sampled": {"16": entry(0.0)}}
    assert list(declines(before, after)) == []
    old_run = {"accuracy": 0.5, "problems": 100}
    assert list(declines({"greedy": {"16": old_run}}, {"greedy": {"16": entry(0.5, 0.0)}})) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [((50, 100), (40, 100)), ((36, 64), (0, 64)), ((3, 4), (1, 9)), ((0, 5), (0, 5)),
     ((7, 9), (5, 5)), ((1000, 1319), (930, 1319))],
)  # fmt: skip
def test_the_probability_of_a_decline_is_that_of_fishers_exact_test(before, after):
    table = [[before[0], before[1] - before[0]], [after[0], after[1] - after[0]]]
    expected = fisher_exact(table, alternative="greater").pvalue
    assert fisher_p(before, after) == pytest.approx(expected, rel=1e-8)


def test_a_decline_is_shown_if_it_is_no_chance_over_all_budgets():
    def shown_at(budgets, *, before, after, problems=100):
        start, end = (
            {"greedy": dict.fromkeys(budgets, entry(rate, problems=problems))}
            for rate in (before, after)
        )
        return {one.is_shown for one in declines(start, end)}

    p = fisher_exact([[15, 85], [5, 95]], alternative="greater").pvalue
    assert 0.025 / 4 < p < 0.025
    assert shown_at(["8"], before=0.15, after=0.05) == {True}
    assert shown_at(["8", "16", "32", "64"], before=0.15, after=0.05) == {False}
    # More questions show the same change.
    assert shown_at(["8", "16", "32", "64"], before=0.15, after=0.05, problems=300) == {True}
    # The loss of the recipe's failed run on 64 validation questions, and a chance loss.
    budgets = ["12", "20", "28", "48"]
    assert shown_at(budgets, before=36 / 64, after=0.0, problems=64) == {True}
    assert shown_at(budgets, before=9 / 64, after=3 / 64, problems=64) == {False}


def test_closed_answers_are_tested_too_and_budgets_that_are_not_compared_do_not_count():
    before = {"sampled": {"8": entry(0.5, 0.99)}}
    after = {"sampled": {"8": entry(0.5, 0.90), "16": entry(0.5, 0.0), "32": entry(0.5)}}
    p = fisher_exact([[99, 1], [90, 10]], alternative="greater").pvalue
    assert p < 0.025
    (decline,) = declines(before, after)
    assert decline == Decline("sampled", "8", CLOSED, 0.99, 0.90, problems=100, is_shown=True)
    # One more budget is compared, and its results are equal.
    before["sampled"]["32"] = entry(0.5)
    (decline,) = declines(before, after)
    assert decline.is_shown == (p < 0.025 / 2)


def test_a_decline_on_few_questions_after_training_is_not_shown():
    def is_shown(questions_after):
        before = {"greedy": {"8": entry(0.15, problems=100)}}
        after = {"greedy": {"8": entry(0.05, problems=questions_after)}}
        (decline,) = declines(before, after)
        return decline.is_shown

    few = fisher_exact([[15, 85], [1, 19]], alternative="greater").pvalue
    many = fisher_exact([[15, 85], [5, 95]], alternative="greater").pvalue
    assert many < 0.025 < few
    assert is_shown(100) and not is_shown(20)
