"""Detects budgets at which a policy is worse after training than before.

A mean over budgets can hide a budget at which training degraded the policy. The training loop,
reports and studies call `declines` to find such budgets on one evaluation set. The module does not
test which of two methods is better.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bacr_jax.evaluation.intervals import wilson_interval
from bacr_jax.evaluation.summary import Summary

# The fraction of closed answers never counts as declined if it is at least this number.
CLOSED_ANSWERS = 0.95
ACCURACY, CLOSED = "accuracy", "closed answers"
# Significance level of one-sided tests whether a decline is shown, over all budgets.
SHOWN_LEVEL = 0.025


class Decline(NamedTuple):
    """A decline of a rate at one budget, from before training to after training.

    The rate after training is below the 95 % interval of before. If both evaluations have few
    questions, such a decline is often chance.

    Attributes:
      mode: decoding mode, greedy or sampled.
      budget: thinking budget in tokens, as the text that is its key in the results.
      measure: the rate that declined. Either `ACCURACY`, or `CLOSED`, which is the fraction of
        answers that ended with a closing tag or an end token.
      before: the rate before training, in [0, 1].
      after: the rate after training, in [0, 1].
      problems: number of problems on which `before` was measured.
      is_shown: True if Fisher's exact test shows the decline (`fisher_p`), at the level
        `SHOWN_LEVEL` divided by the number of budgets. False if the decline may be chance.
    """

    mode: str
    budget: str
    measure: str
    before: float
    after: float
    problems: int
    is_shown: bool


def fisher_p(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Returns the p-value of Fisher's exact test that a success rate fell (one-sided).

    This is the probability of at most as many successes after training, if the same total number
    of successes were distributed at random over all trials.

    Args:
      before: number of successes and of trials before training.
      after: the same numbers after training.
    """
    # Commands start faster without this import, and most of them need no test.
    from scipy.stats import hypergeom

    trials = before[1] + after[1]
    successes = before[0] + after[0]
    return float(hypergeom.cdf(after[0], trials, successes, after[1]))


def accuracy_declined(before: float, after: float, problems: int) -> bool:
    """True if `after` is below the 95 % Wilson interval of `before`.

    Args:
      before: accuracy before training, in [0, 1].
      after: accuracy after training, in [0, 1].
      problems: number of problems on which `before` was measured.
    """
    lowest, _ = wilson_interval(before * problems, problems)
    return after < lowest


def interval_before(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the 95 % Wilson interval of the accuracy before training.

    Args:
      entry: results at one budget, before training.
    """
    problems = int(entry["problems"])
    return wilson_interval(entry["accuracy"] * problems, problems)


def closed_answers_declined(before: float, after: float, problems: int) -> bool:
    """True if `after` is below both `CLOSED_ANSWERS` and the Wilson interval of `before`."""
    return after < CLOSED_ANSWERS and accuracy_declined(before, after, problems)


def declines(before: Summary, after: Summary) -> Iterator[Decline]:
    """Yields each accuracy and each share of closed answers that declined, in the order of `after`.

    Args:
      before: results before training, by decoding mode and budget.
      after: results after training, in the same format. Budgets that `before` does not contain are
        skipped.
    """
    for mode, budgets in after.items():
        before_of_mode = before.get(mode, {})
        compared = [budget for budget in budgets if budget in before_of_mode]
        for budget in compared:
            level = SHOWN_LEVEL / len(compared)
            yield from _declines_at(mode, budget, before_of_mode[budget], budgets[budget], level)


def _declines_at(
    mode: str,
    budget: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    level: float,
) -> Iterator[Decline]:
    """Yields the declines at one budget. `level` is the significance level of a shown decline."""
    problems = int(before["problems"])
    problems_after = int(after["problems"])

    def decline(measure: str, rate_before: float, rate_after: float) -> Decline:
        # The rate of sampled answers is a mean over several samples per problem. It is tested as if
        # each problem had one sample, because samples of the same problem are correlated.
        p = fisher_p(
            (round(rate_before * problems), problems),
            (round(rate_after * problems_after), problems_after),
        )
        return Decline(mode, budget, measure, rate_before, rate_after, problems, p < level)

    accuracy_before = before["accuracy"]
    accuracy_after = after["accuracy"]
    if accuracy_declined(accuracy_before, accuracy_after, problems):
        yield decline(ACCURACY, accuracy_before, accuracy_after)
    closed_before = before.get("closed_rate")
    closed_after = after.get("closed_rate")
    if closed_before is None or closed_after is None:
        return
    if closed_answers_declined(closed_before, closed_after, problems):
        yield decline(CLOSED, closed_before, closed_after)
