"""Measures whether a policy uses the budget that it receives as input.

`bacr evaluate --swap` samples one trace per input budget b, up to the largest budget, and forces an
answer at every budget b'. These functions compute the results from the graded answers. They neither
read files nor sample answers.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax.evaluation.intervals import (
    bootstrap_intervals,
    difference_intervals,
    rate_intervals,
)
from bacr_jax.evaluation.samples import (
    ACCURACY_NAMES,
    TOKENS_NAMES,
    Graded,
    measured,
    number,
)

# One number for each problem, input budget and truncation point.
PerPair = Float[np.ndarray, "n B B"]
_DIFFERENCE = ("difference", "ci95")


def matched_gains(correct: PerPair) -> Float[np.ndarray, "n B"]:
    """Returns how much accuracy increases if the input budget equals the truncation point.

        gain(b') = c(b', b') - mean over b != b' of c(b, b')

    Args:
      correct: mean verdict c(b, b') of each problem with input budget b (axis 1), truncated at b'
        (axis 2), for at least two budgets.

    Returns:
      The gain of each problem at each truncation point b'.
    """
    count = correct.shape[1]
    matched = np.diagonal(correct, axis1=1, axis2=2)
    others = (correct.sum(1) - matched) / (count - 1)
    return matched - others


def length_differences(
    thinking: Float[np.ndarray, "n B"],
) -> tuple[list[tuple[int, int]], Float[np.ndarray, "n P"]]:
    """Returns the differences in thinking length between all pairs of input budgets.

    Args:
      thinking: mean number of thinking tokens of each problem by input budget, in ascending order
        of budgets. All traces have the same limit.

    Returns:
      A tuple of the pairs (i, j) of indices of budgets with i > j, and the differences
      thinking[:, i] - thinking[:, j] of each pair.
    """
    count = thinking.shape[1]
    pairs = [(i, j) for i, j in itertools.product(range(count), repeat=2) if i > j]
    differences = [thinking[:, i] - thinking[:, j] for i, j in pairs]
    return pairs, np.column_stack(differences)


def swap_table(by_pair: Mapping[tuple[int, int], Graded]) -> dict[str, Any]:
    """Returns the accuracy and tokens of every pair of input budget and truncation point.

    All intervals are computed by a bootstrap over problems, and differences are paired by problem.

    Args:
      by_pair: samples by input budget and truncation point, for all pairs of at least two budgets.

    Returns:
      The entry `swap` of results.json, which docs/evaluation.md describes.
    """
    budgets = sorted({budget for budget, _ in by_pair})
    correct = _per_pair(by_pair, budgets, "correct")
    thinking = _per_pair(by_pair, budgets, "thinking")
    # Traces are only complete at the largest truncation point.
    pairs, differences = length_differences(thinking[:, :, -1])
    length_ends = bootstrap_intervals(differences)
    lengths = []
    for column, (i, j) in enumerate(pairs):
        entry = measured([_DIFFERENCE], differences[:, [column]], length_ends[[column]])
        lengths.append({"budget": budgets[i], "less": budgets[j], **entry})
    gains = matched_gains(correct)
    mean_gain = gains.mean(1, keepdims=True)
    all_gains = np.concatenate([gains, mean_gain], axis=1)
    gain_ends = difference_intervals(all_gains, np.zeros_like(all_gains))
    by_cut = {}
    for column, cut in enumerate(budgets):
        by_cut[str(cut)] = measured([_DIFFERENCE], gains[:, [column]], gain_ends[[column]])
    return {
        "budgets": budgets,
        "pairs": _pair_entries(by_pair, budgets),
        "matched_gain": {
            **measured([_DIFFERENCE], mean_gain, gain_ends[[-1]]),
            "by_cut": by_cut,
        },
        "lengths": lengths,
    }


def _per_pair(by_pair: Mapping[tuple[int, int], Graded], budgets: list[int], field: str) -> PerPair:
    """Returns a field's mean over samples, [problems, input budgets, truncation points]."""
    rows = []
    for budget in budgets:
        columns = [getattr(by_pair[budget, cut], field).mean(1) for cut in budgets]
        rows.append(np.stack(columns, axis=1))
    return np.stack(rows, axis=1).astype(np.float64)


def _pair_entries(
    by_pair: Mapping[tuple[int, int], Graded], budgets: list[int]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns accuracy, tokens and completion by input budget and truncation point."""
    keys = list(itertools.product(budgets, budgets))
    correct = np.column_stack([by_pair[key].correct.mean(1) for key in keys])
    thinking = [by_pair[key].thinking.mean(1) for key in keys]
    total = [by_pair[key].total.mean(1) for key in keys]
    tokens = np.column_stack([*thinking, *total])
    correct_ends = rate_intervals(correct)
    token_ends = bootstrap_intervals(tokens)
    entries: dict[str, dict[str, dict[str, Any]]] = {}
    for column, (budget, cut) in enumerate(keys):
        token_columns = [column, len(keys) + column]
        graded = by_pair[budget, cut]
        by_cut = entries.setdefault(str(budget), {})
        by_cut[str(cut)] = {
            **measured([ACCURACY_NAMES], correct[:, [column]], correct_ends[[column]]),
            **measured(TOKENS_NAMES, tokens[:, token_columns], token_ends[token_columns]),
            "completion_rate": number((~graded.forced).mean()),
            "problems": len(graded.ids),
            "samples": graded.samples,
        }
    return entries
