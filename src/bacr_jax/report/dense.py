"""Table and picture of the dense curve."""

from collections.abc import Mapping
from typing import Any

from bacr_jax.evaluation.dense import Dense
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report.table import NONE, Table, accuracy_text

LABEL = "one trace told {told:,} tokens, cut early"


def dense_table(name: str, dense: Dense, told: Summary) -> Table:
    """A row per decoding and cut, beside the accuracy of the policy that is told that budget.

    Args:
      name: of the set.
      dense: curves by decoding.
      told: the curve over told budgets.
    """
    rows = []
    for mode, found in dense.items():
        for cut, entry in found["curve"].items():
            own = told.get(mode, {}).get(cut)
            rows.append(
                [
                    mode,
                    f"{int(cut):,}",
                    accuracy_text(entry),
                    NONE if own is None else accuracy_text(own),
                    f"{100 * entry['completion_rate']:.1f}",
                    f"{entry['mean_thinking_tokens']:,.1f}",
                    f"{entry['mean_total_tokens']:,.1f}",
                ]
            )
        area = {"accuracy": found["area"], "ci95": found["area_ci95"]}
        rows.append([mode, "area", accuracy_text(area), *[NONE] * 4])
    label = LABEL.format(told=max(found["told"] for found in dense.values()))
    return Table(
        f"{name}: dense curve, {label}",
        ["decoding", "cut", "accuracy when cut", "told that budget", "complete", "think", "total"],
        rows,
        caption="accuracy in % [95 % interval]: every row is the same traces, told the largest "
        "budget and answered at the cut; beside it traces that were told that budget; complete: "
        "traces that ended by themselves by then, in %; area: over log2 of the cuts",
    )


def curves(dense: Mapping[str, Any], told: Summary) -> dict[str, Summary]:
    """The curves of a picture, by their labels."""
    largest = max(found["told"] for found in dense.values())
    cut: Summary = {mode: found["curve"] for mode, found in dense.items()}
    return {"told each budget": told, LABEL.format(told=largest): cut}
