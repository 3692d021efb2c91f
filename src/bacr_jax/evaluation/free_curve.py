"""Compares a trained policy with the untrained policy, truncated at smaller budgets.

Truncating the untrained policy earlier saves tokens without any training. The free curve contains,
for each truncation point, the mean number of tokens and the accuracy of the untrained policy.
Training saved tokens only if the trained policy's accuracy lies above the free curve. `bacr
evaluate --free` calls these functions. They neither read files nor sample answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax.errors import UserError
from bacr_jax.evaluation.comparison import Results
from bacr_jax.evaluation.intervals import (
    percentile_interval,
    rate_intervals,
    resampled_means,
)
from bacr_jax.evaluation.samples import EvalSetting, Graded, budget_key, interval, number


@dataclass(frozen=True)
class FreeCurve:
    """Accuracy and tokens of a policy at K truncation points.

    Attributes:
      cuts: K truncation points in thinking tokens, in ascending order.
      correct: accuracy of each problem at each truncation point, in [0, 1], with shape [n, K].
      total: mean number of thinking, forced and answer tokens of each problem at each truncation
        point, with shape [n, K].
      ids: ids of the n problems.
    """

    cuts: list[int]
    correct: Float[np.ndarray, "n K"]
    total: Float[np.ndarray, "n K"]
    ids: list[str]


def curve_value(
    tokens: float, curve_tokens: Float[np.ndarray, "K"], accuracies: Float[np.ndarray, "K"]
) -> float:
    """Returns the accuracy of a free curve at a number of tokens, by linear interpolation.

    Interpolation is justified, because a policy that is truncated at one of two points at random
    has the weighted mean of their tokens and accuracies. Beyond its ends, the curve is constant.

    Args:
      tokens: mean number of tokens used.
      curve_tokens: mean number of tokens used at each truncation point.
      accuracies: mean accuracy at each truncation point.
    """
    order = np.argsort(curve_tokens, kind="stable")
    return float(np.interp(tokens, curve_tokens[order], accuracies[order]))


def tokens_needed(
    accuracy: float, curve_tokens: Float[np.ndarray, "K"], accuracies: Float[np.ndarray, "K"]
) -> float | None:
    """Returns the number of tokens at which a free curve first reaches an accuracy, or None.

    Args:
      accuracy: mean accuracy of another policy. The result is None if the curve stays below it.
      curve_tokens: mean number of tokens used at each truncation point.
      accuracies: mean accuracy at each truncation point.
    """
    order = np.argsort(curve_tokens, kind="stable")
    return first_crossing(curve_tokens[order], accuracies[order], accuracy)


def first_crossing(
    x: Float[np.ndarray, "n"], y: Float[np.ndarray, "n"], level: float
) -> float | None:
    """Returns the x at which a curve first reaches a level; None if it never does.

    The curve is linearly interpolated between points.

    Args:
      x: x coordinates of the points, in ascending order.
      y: y coordinates of the points.
      level: value of y to reach.
    """
    reached = np.flatnonzero(y >= level)
    if not reached.size:
        return None
    index = int(reached[0])
    if index == 0:
        return float(x[0])
    x_before = x[index - 1]
    y_before = y[index - 1]
    share = (level - y_before) / (y[index] - y_before)
    return float(x_before + share * (x[index] - x_before))


def distance(
    correct: Float[np.ndarray, "n"], total: Float[np.ndarray, "n"], curve: FreeCurve
) -> dict[str, Any]:
    """Returns a policy's accuracy minus the accuracy of the free curve at equal mean tokens.

    The confidence interval is computed by a bootstrap over problems. Each resample recomputes the
    mean tokens, the curve and the difference from the same problems for both policies.

    Args:
      correct: accuracy of the policy on each problem, with shape [n].
      total: mean number of tokens of the policy on each problem, with shape [n].
      curve: free curve on the same problems.

    Returns:
      A dict with `tokens` and `accuracy` of the policy, `free_accuracy` at these tokens,
      `difference` with `ci95`, `free_tokens` (tokens at which the curve first reaches the policy's
      accuracy, or None) and `inside` (True if the tokens lie between the ends of the curve).
    """
    count = len(curve.cuts)
    scores = np.column_stack([correct, total, curve.correct, curve.total]).astype(np.float64)
    means = scores.mean(0)
    curve_accuracies = means[2 : 2 + count]
    curve_tokens = means[2 + count :]
    free_accuracy = curve_value(means[1], curve_tokens, curve_accuracies)
    differences = np.array(
        [
            row[0] - curve_value(row[1], row[2 + count :], row[2 : 2 + count])
            for row in resampled_means(scores)
        ]
    )
    free_tokens = tokens_needed(means[0], curve_tokens, curve_accuracies)
    is_inside = curve_tokens.min() <= means[1] <= curve_tokens.max()
    return {
        "tokens": number(means[1]),
        "accuracy": number(means[0]),
        "free_accuracy": number(free_accuracy),
        "difference": number(means[0] - free_accuracy),
        "ci95": interval(percentile_interval(differences)),
        "free_tokens": None if free_tokens is None else number(free_tokens),
        "inside": bool(is_inside),
    }


def free_curve_of(by_setting: Mapping[EvalSetting, Graded], mode: str) -> FreeCurve | None:
    """Returns the free curve of an evaluation, or None if the decoding mode was not evaluated.

    The curve has a point for each truncation point of the dense curve (`eval.cut_every`). Without a
    dense curve, it has a point for each evaluated budget, because an untrained policy does not use
    the budget that it receives as input.

    Args:
      by_setting: samples of one evaluation set by setting.
      mode: decoding mode.
    """
    cells = {s: graded for s, graded in by_setting.items() if s.mode == mode and s.budget >= 0}
    truncated = {s.cut: graded for s, graded in cells.items() if s.cut is not None}
    points = truncated or {s.budget: graded for s, graded in cells.items()}
    if not points:
        return None
    cuts = sorted(points)
    return FreeCurve(
        cuts=cuts,
        correct=np.column_stack([points[cut].correct.mean(1) for cut in cuts]),
        total=np.column_stack([points[cut].total.mean(1) for cut in cuts]),
        ids=points[cuts[0]].ids,
    )


def compare_with_free_curve(one: Results, before: Results) -> dict[str, Any]:
    """Compares every setting of an evaluation with the free curve of the policy before training.

    Args:
      one: graded samples of the evaluated policy.
      before: graded samples of the policy before training.

    Returns:
      A dict from set and decoding mode to a dict with the entries `curve` (by truncation point) and
      `by_budget` (result of `distance` by budget). Sets and modes that only one evaluation contains
      are omitted.

    Raises:
      UserError: if the problems of a set differ.
    """
    compared: dict[str, Any] = {}
    for name, by_setting in one.items():
        for setting, graded in by_setting.items():
            curve = free_curve_of(before.get(name, {}), setting.mode)
            if setting.cut is not None or curve is None:
                continue
            if curve.ids != graded.ids:
                raise UserError(
                    f"{name}: the two evaluations used different problems of this data set; "
                    "evaluate both on the same problems"
                )
            modes = compared.setdefault(name, {})
            entry = modes.setdefault(setting.mode, {"curve": _points(curve), "by_budget": {}})
            entry["by_budget"][budget_key(setting.budget)] = distance(
                graded.correct.mean(1), graded.total.mean(1), curve
            )
    return compared


def _points(curve: FreeCurve) -> dict[str, dict[str, Any]]:
    """Returns accuracy, confidence interval and mean tokens of each truncation point of a curve."""
    ends = rate_intervals(curve.correct)
    points = {}
    for column, cut in enumerate(curve.cuts):
        points[str(cut)] = {
            "accuracy": number(curve.correct[:, column].mean()),
            "ci95": interval(ends[column]),
            "mean_total_tokens": number(curve.total[:, column].mean()),
        }
    return points
