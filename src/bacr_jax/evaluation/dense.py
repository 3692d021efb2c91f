"""The dense curve: one trace told the largest budget, and the answer it would give when cut early.

It says how good an anytime reasoner the policy is (what AnytimeReasoner reports, arXiv 2505.13438).
The curve over told budgets says something else: what the policy makes of a budget that it knows.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bacr_jax.evaluation.graded import Graded, interval, number
from bacr_jax.evaluation.intervals import bootstrap_intervals, rate_intervals, stack_scores
from bacr_jax.evaluation.metrics import anytime_weights

# {mode: curve}, as `dense_curve` gives it.
Dense = dict[str, dict[str, Any]]


def dense_curve(by_cut: Mapping[int, Graded]) -> dict[str, Any]:
    """The numbers of the same traces at every cut.

    Args:
      by_cut: their samples by thinking tokens kept; the largest is the budget that was told.

    Returns:
      told; curve, by cut: accuracy with its interval, strict accuracy, mean tokens, completion_rate
      (traces that ended by themselves by then), forced_share, problems and samples; mean and area
      of the accuracy over the cuts with their intervals, as `summary.anytime` has them.
    """
    cuts = sorted(by_cut)
    cells = [by_cut[cut] for cut in cuts]
    column = lambda name: [getattr(cell, name).mean(1) for cell in cells]
    # One set of resamples serves all cuts of the same problems.
    correct = stack_scores(column("correct"))
    over = correct @ anytime_weights(cuts).T
    ends = rate_intervals(np.concatenate([correct, over], axis=1))
    tokens = stack_scores([*column("thinking"), *column("total")])
    token_ends, count = bootstrap_intervals(tokens), len(cuts)
    curve = {
        str(cut): {
            "accuracy": number(correct[:, i].mean()),
            "ci95": interval(ends[i]),
            "strict_accuracy": number(cell.strict.mean()),
            "mean_thinking_tokens": number(cell.thinking.mean()),
            "thinking_ci95": interval(token_ends[i]),
            "mean_forced_tokens": number(cell.forced_tokens.mean()),
            "mean_answer_tokens": number(cell.answered.mean()),
            "mean_total_tokens": number(cell.total.mean()),
            "total_ci95": interval(token_ends[count + i]),
            "completion_rate": number((~cell.forced).mean()),
            "forced_share": number(cell.forced.mean()),
            "problems": len(cell.ids),
            "samples": cell.samples,
        }
        for i, (cut, cell) in enumerate(zip(cuts, cells))
    }
    return {
        "told": cuts[-1],
        "curve": curve,
        "mean": number(over[:, 0].mean()),
        "mean_ci95": interval(ends[count]),
        "area": number(over[:, 1].mean()),
        "area_ci95": interval(ends[count + 1]),
    }
