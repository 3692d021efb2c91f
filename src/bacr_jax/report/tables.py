"""Accuracy and thinking tokens by budget, side by side for several policies."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

# {"greedy" | "sampled": {budget: {"accuracy", "ci95", "mean_thinking_tokens", ...}}}
Summary = Mapping[str, Mapping[str, Mapping[str, Any]]]

_NONE = "-"
# With more policies than this, a line of a terminal no longer holds their cells side by side.
_ONE_LINE_POLICIES = 2
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
)


def accuracy_text(entry: Mapping[str, Any]) -> str:
    """`67.0 [62.8, 71.0]`: accuracy in percent with its 95 % interval."""
    low, high = entry["ci95"]
    return f"{100 * entry['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def tokens_text(entry: Mapping[str, Any]) -> str:
    """`1,234.5 tok`: mean thinking tokens."""
    return f"{entry['mean_thinking_tokens']:,.1f} tok"


def in_one_line(summary: Summary) -> str:
    """`greedy 8: 27.6, 16: 30.4; sampled 8: 25.0, ...`: accuracy in percent by budget."""
    cell = lambda budget, entry: f"{int(budget):,}: {100 * entry['accuracy']:.1f}"
    modes = {m: ", ".join(cell(b, e) for b, e in found.items()) for m, found in summary.items()}
    return "; ".join(f"{mode} {budgets}" for mode, budgets in modes.items())


def without_near_duplicates(policies: Mapping[str, Summary]) -> dict[str, Summary] | None:
    """The same policies on the problems that are no near-duplicates of training questions.

    Returns:
      Summaries by name; None if no problem was marked as one.
    """
    key = "without_near_duplicates"
    found = {
        name: {
            mode: {budget: entry[key] for budget, entry in budgets.items() if key in entry}
            for mode, budgets in summary.items()
        }
        for name, summary in policies.items()
    }
    marked = any(budgets for summary in found.values() for budgets in summary.values())
    return dict(found) if marked else None


def title_without(name: str, policies: Mapping[str, Summary], others: Mapping[str, Summary]) -> str:
    """`math500 without 29 near-duplicates of training questions (471 problems)`."""
    count = lambda summaries: next(
        entry["problems"]
        for summary in summaries.values()
        for budgets in summary.values()
        for entry in budgets.values()
    )
    left = count(others)
    near = f"{count(policies) - left:,} near-duplicates of training questions"
    return f"{name} without {near} ({left:,} problems)"


def rows(policies: Mapping[str, Summary]) -> list[tuple[str, str, list[Mapping[str, Any] | None]]]:
    """(decoding, budget, entry of each policy), in order of decoding, then rising budget.

    Policies need not have been evaluated alike: where one was not, its entry is None.
    """
    modes = dict.fromkeys(mode for summary in policies.values() for mode in summary)
    found = []
    for mode in modes:
        measured = {b for summary in policies.values() for b in summary.get(mode, {})}
        for budget in sorted(measured, key=int):
            entries = [summary.get(mode, {}).get(budget) for summary in policies.values()]
            found.append((mode, budget, entries))
    return found


def _style(entry: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """Green or red where the interval lies above or below that of the first policy."""
    if first is None or entry is first:
        return ""
    if entry["ci95"][0] > first["ci95"][1]:
        return "bold green"
    return "red" if entry["ci95"][1] < first["ci95"][0] else ""


def comparison_table(title: str, policies: Mapping[str, Summary]) -> Table:
    """A table for the terminal: a row per decoding and budget, a column per policy.

    Accuracies whose interval lies apart from the first policy's are coloured.

    Args:
      title: above the table.
      policies: summaries by name, the one to compare with first.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption="accuracy in percent [95 % interval], mean thinking tokens",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("budget", justify="right")
    for name in policies:
        table.add_column(Text(name), justify="right")
    between = "  " if len(policies) <= _ONE_LINE_POLICIES else "\n"
    last_mode = None
    for mode, budget, entries in rows(policies):
        if mode != last_mode:
            if last_mode is not None:
                table.add_section()
            table.add_row(Text(mode, style="bold"))
        cells = [
            Text.assemble(
                (accuracy_text(entry), _style(entry, entries[0])), between, tokens_text(entry)
            )
            if entry is not None
            else Text(_NONE)
            for entry in entries
        ]
        table.add_row(f"{int(budget):,}", *cells)
        last_mode = mode
    return table


def markdown_table(policies: Mapping[str, Summary]) -> str:
    """The same as Markdown."""
    cell = lambda entry: _NONE if entry is None else f"{accuracy_text(entry)}, {tokens_text(entry)}"
    escape = lambda text: text.replace("\\", "\\\\").replace("|", "\\|")
    line = lambda cells: "| " + " | ".join(map(escape, cells)) + " |\n"
    header = line(["decoding", "budget", *policies])
    rule = "| --- | ---: |" + " ---: |" * len(policies) + "\n"
    body = [line([mode, budget, *map(cell, entries)]) for mode, budget, entries in rows(policies)]
    return "".join([header, rule, *body])


def latex_table(policies: Mapping[str, Summary]) -> str:
    r"""The same as a LaTeX tabular; needs the package booktabs.

    Intervals are set small; the highest accuracy of a row is bold.
    """

    def cells(entry: Mapping[str, Any] | None, best: float) -> str:
        if entry is None:
            return "-- & --"
        accuracy, _, interval = accuracy_text(entry).partition(" ")
        # Compared as printed: what reads as equal is marked alike.
        mark = rf"\textbf{{{accuracy}}}" if float(accuracy) == best else accuracy
        tokens = f"{entry['mean_thinking_tokens']:.1f}"
        return rf"{mark} {{\scriptsize {interval}}} & {tokens}"

    names = [name.translate(_LATEX) for name in policies]
    header = "".join(rf" & \multicolumn{{2}}{{c}}{{{name}}}" for name in names)
    under = r" & accuracy (\%) & tokens" * len(names)
    lines = [
        rf"\begin{{tabular}}{{lr{'rr' * len(names)}}}",
        r"\toprule",
        rf" &{header} \\",
        rf"decoding & budget{under} \\",
    ]
    last_mode = None
    for mode, budget, entries in rows(policies):
        if mode != last_mode:
            lines.append(r"\midrule")
        best = max(float(f"{100 * e['accuracy']:.1f}") for e in entries if e is not None)
        shown = mode.translate(_LATEX) if mode != last_mode else ""
        row = " & ".join(cells(entry, best) for entry in entries)
        lines.append(rf"{shown} & {budget} & {row} \\")
        last_mode = mode
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
