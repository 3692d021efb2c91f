"""Accuracy and thinking tokens by budget, side by side for several policies."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

# {"greedy" | "sampled": {budget: {"accuracy", "ci95", "mean_thinking_tokens", ...}}}
Summary = Mapping[str, Mapping[str, Mapping[str, Any]]]


def cell(entry: Mapping[str, Any]) -> str:
    """`67.0 [62.8, 71.0]  18.9 tok`: accuracy in percent, its 95 % interval, thinking tokens."""
    low, high = entry["ci95"]
    return (
        f"{100 * entry['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]  "
        f"{entry['mean_thinking_tokens']:.1f} tok"
    )


def rows(policies: Mapping[str, Summary]) -> list[list[str]]:
    """Header and body: one row per decoding mode and budget, one column per policy."""
    first = next(iter(policies.values()))
    body = [["decoding", "budget", *policies]]
    for mode, budgets in first.items():
        for budget in budgets:
            cells = [cell(summary[mode][budget]) for summary in policies.values()]
            body.append([mode, budget, *cells])
    return body


def comparison_table(title: str, policies: Mapping[str, Summary]) -> Table:
    """A table for the terminal."""
    header, *body = rows(policies)
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for index, line in enumerate(body):
        last = index + 1 == len(body) or body[index + 1][0] != line[0]
        table.add_row(*line, end_section=last)
    return table


def markdown_table(policies: Mapping[str, Summary]) -> str:
    """The same as Markdown."""
    header, *body = rows(policies)
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, body)]) + "\n"
