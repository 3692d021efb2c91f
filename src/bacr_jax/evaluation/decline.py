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


class Decline(NamedTuple):
    """A significant decline of a rate at one budget, from before training to after training.

    Attributes:
      mode: decoding mode, greedy or sampled.
      budget: thinking budget in tokens, as the text that is its key in the results.
      measure: the rate that declined. Either `ACCURACY`, or `CLOSED`, which is the fraction of
        answers that ended with a closing tag or an end token.
      before: the rate before training, in [0, 1].
      after: the rate after training, in [0, 1].
    """

    mode: str
    budget: str
    measure: str
    before: float
    after: float


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

    The interval is recomputed from the number of problems. Results of earlier versions do not
    contain this number, so their stored interval is returned.

    Args:
      entry: results at one budget, before training.
    """
    if "problems" not in entry:
        low, high = entry["ci95"]
        return low, high
    problems = int(entry["problems"])
    return wilson_interval(entry["accuracy"] * problems, problems)


def closed_answers_declined(before: float, after: float, problems: int) -> bool:
    """True if `after` is below both `CLOSED_ANSWERS` and the Wilson interval of `before`."""
    return after < CLOSED_ANSWERS and accuracy_declined(before, after, problems)


def declines(before: Summary, after: Summary) -> Iterator[Decline]:
    """Yields each accuracy and each share of closed answers that declined, in the order of `after`.

    Args:
      before: results before training, by decoding mode and budget.
      after: results after training, in the same format. Budgets are skipped if `before` does not
        contain them or does not contain their number of problems.
    """
    for mode, budgets in after.items():
        for budget, entry in budgets.items():
            start = before.get(mode, {}).get(budget)
            if start is not None and "problems" in start:
                yield from _declines_at(mode, budget, start, entry)


def _declines_at(
    mode: str, budget: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Decline]:
    """Yields the declines at one budget."""
    problems = int(before["problems"])
    accuracy_before = before["accuracy"]
    accuracy_after = after["accuracy"]
    if accuracy_declined(accuracy_before, accuracy_after, problems):
        yield Decline(mode, budget, ACCURACY, accuracy_before, accuracy_after)
    closed_before = before.get("closed_rate")
    closed_after = after.get("closed_rate")
    if closed_before is None or closed_after is None:
        return
    if closed_answers_declined(closed_before, closed_after, problems):
        yield Decline(mode, budget, CLOSED, closed_before, closed_after)
