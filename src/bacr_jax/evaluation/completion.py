"""Did the thinking end by itself, was the answer closed, and what was used of what was allowed?

Accuracy at a budget mixes two things: thinking that was cut, and thinking that came to its end and
was wrong. Given completion, accuracy tells them apart.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool

from bacr_jax.evaluation.graded import Graded, interval, number
from bacr_jax.evaluation.intervals import (
    bootstrap_intervals,
    rate_intervals,
    ratio_interval,
    stack_scores,
)
from bacr_jax.types import NO_BUDGET

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


def _accuracy_among(
    correct: np.ndarray, chosen: Bool[np.ndarray, "n samples"]
) -> tuple[float | None, list[float] | None]:
    """Mean score among some answers, with its interval; None where there are none of them."""
    if not chosen.any():
        return None, None
    ends = ratio_interval(np.where(chosen, correct, 0.0).mean(1), chosen.mean(1))
    return number(correct[chosen].mean()), interval(np.array(ends))


def completion(graded: Graded) -> dict[str, Any]:
    """How many traces and answers came to an end, and accuracy among these traces and the others.

    Args:
      graded: samples of a setting.

    Returns:
      completion_rate (share of traces whose thinking ended by itself, by its tag or the end of the
      turn), closed_rate (share of answers that were closed), accuracy_if_complete and
      accuracy_if_cut (of the traces that ended by themselves, and of those that the budget cut;
      null without any), each with its 95 % interval.
    """
    complete = ~graded.forced
    rates = stack_scores([complete.mean(1), graded.finished.mean(1)])
    ends, means = rate_intervals(rates), rates.mean(0)
    whole, whole_ends = _accuracy_among(graded.correct, complete)
    cut, cut_ends = _accuracy_among(graded.correct, graded.forced)
    return {
        "completion_rate": number(means[0]),
        "completion_ci95": interval(ends[0]),
        "closed_rate": number(means[1]),
        "closed_ci95": interval(ends[1]),
        "accuracy_if_complete": whole,
        "if_complete_ci95": whole_ends,
        "accuracy_if_cut": cut,
        "if_cut_ci95": cut_ends,
    }


def adherence(graded: Graded) -> dict[str, Any]:
    """Thinking tokens used against those requested.

    Args:
      graded: samples of a setting with budget b.

    Returns:
      requested, b or null where the policy was told none; used, the mean thinking tokens n; ratio,
      the mean of n / b, with its 95 % interval (null for b = 0 and without a budget); quantiles of
      n (p10, p50, p90, max); over_share and mean_excess, how often and by how much n is above b (a
      grace window allows that).
    """
    used = graded.thinking
    requested = None if graded.budget == NO_BUDGET else graded.budget
    found: dict[str, Any] = {
        "requested": requested,
        "used": number(used.mean()),
        "ratio": None,
        "ratio_ci95": None,
        "quantiles": {name: number(np.quantile(used, q)) for name, q in _QUANTILES.items()},
        "over_share": 0.0,
        "mean_excess": 0.0,
    }
    if requested is None:
        return found
    excess = np.maximum(used - requested, 0)
    found |= {"over_share": number((excess > 0).mean()), "mean_excess": number(excess.mean())}
    if requested:
        ratios = used.mean(1) / requested
        ends = bootstrap_intervals(ratios[:, None])[0]
        found |= {"ratio": number(ratios.mean()), "ratio_ci95": interval(ends)}
    return found
