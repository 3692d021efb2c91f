"""Tables of what was allowed and what was used: completion, adherence, tokens by kind."""

from collections.abc import Iterator, Mapping
from typing import Any

from bacr_jax.evaluation.summary import Summary
from bacr_jax.report.table import NONE, Table, budget_name, by_size


def _cells(summary: Summary) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for mode, budgets in summary.items():
        for budget in by_size(budgets):
            yield mode, budget_name(budget), budgets[budget]


def _share(entry: Mapping[str, Any], name: str, ends: str) -> str:
    if entry[name] is None:
        return NONE
    low, high = entry[ends]
    return f"{100 * entry[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def completion(name: str, summary: Summary) -> Table:
    """How many traces and answers ended by themselves, and accuracy among them and the others."""
    columns = (
        ("completion_rate", "completion_ci95"),
        ("closed_rate", "closed_ci95"),
        ("accuracy_if_complete", "if_complete_ci95"),
        ("accuracy_if_cut", "if_cut_ci95"),
    )
    return Table(
        f"{name}: completion, and accuracy given completion",
        ["decoding", "budget", "complete", "answer closed", "right if complete", "right if cut"],
        [
            [mode, budget, *(_share(entry, *column) for column in columns)]
            for mode, budget, entry in _cells(summary)
        ],
        caption="in % [95 % interval]; complete: the thinking ended by itself within the budget; "
        "wrong answers after complete thinking are mistakes, the others may be due to the cut",
    )


def adherence(name: str, summary: Summary) -> Table:
    """Thinking requested and used, and the tokens of each kind."""
    rows = []
    for mode, budget, entry in _cells(summary):
        used = entry["adherence"]
        ratio = NONE
        if used["ratio"] is not None:
            low, high = used["ratio_ci95"]
            ratio = f"{used['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        quantiles = [f"{used['quantiles'][q]:,.0f}" for q in ("p10", "p50", "p90", "max")]
        tokens = [entry[f"mean_{kind}_tokens"] for kind in ("forced", "answer", "total")]
        over = "0" if not used["over_share"] else f"{used['mean_excess']:,.1f}"
        rows.append(
            [mode, budget, f"{used['used']:,.1f}", ratio, *quantiles, over]
            + [f"{count:,.1f}" for count in tokens]
        )
    return Table(
        f"{name}: thinking tokens requested and used",
        ["decoding", "requested", "used", "used/requested", "10 %", "median", "90 %", "max"]
        + ["excess", "forced", "answer", "total"],
        rows,
        caption="mean thinking tokens, their share of the budget [95 % interval] and quantiles; "
        "excess: mean tokens above the budget (a grace window); then mean forced and answer "
        "tokens, and all tokens after the prompt",
    )


def entries_have_it(summary: Summary) -> bool:
    """Whether these numbers are there; evaluations of older versions lack them."""
    return all("adherence" in entry for budgets in summary.values() for entry in budgets.values())
