"""The one table of the reports: what it holds, and how a terminal, HTML, Markdown or LaTeX show it.

`comparison` is the table made most: accuracy and thinking tokens by budget, policies side by side.
"""

import html
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import rich.table
from rich import box
from rich.text import Text

from bacr_jax.config.selection import HOLDOUT
from bacr_jax.errors import printable
from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.evaluation.summary import Summary

NONE = "-"
_SET_NAMES = {
    "ledger": "Ledger",
    "gsm8k": "GSM8K",
    "math": "MATH",
    "math500": "MATH-500",
    "aime24": "AIME 2024",
    "minerva_math": "Minerva Math",
}
# With more policies than this, a line of a terminal no longer holds their cells side by side.
_ONE_LINE_POLICIES = 2
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      title: above it.
      header: name of each column.
      rows: cells, as many in each row as there are columns; the style of a `Text` shows on a
        terminal only.
      words: columns that hold words, from the left; the others hold numbers.
      caption: below it, what the columns mean.
      sections: a terminal shows the first column as headings between the rows.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    words: int = 1
    caption: str = ""
    sections: bool = False

    def __post_init__(self) -> None:
        if {len(row) for row in self.rows} - {len(self.header)}:
            raise ValueError("rows of other lengths than the header")

    def terminal(self) -> rich.table.Table:
        """For a terminal."""
        shown = rich.table.Table(
            # As texts: in strings, rich would take [...] for its own markup.
            title=Text(self.title),
            title_justify="left",
            title_style="bold",
            caption=Text(self.caption) if self.caption else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        text = lambda cell: cell if isinstance(cell, Text) else Text(cell)
        first = 1 if self.sections else 0
        for place, name in enumerate(self.header[first:], first):
            shown.add_column(Text(name), justify="left" if place < self.words else "right")
        heading = None
        for row in self.rows:
            if self.sections and row[0] != heading:
                if heading is not None:
                    shown.add_section()
                heading = row[0]
                shown.add_row(Text(str(heading), style="bold"))
            shown.add_row(*map(text, row[first:]))
        return shown

    def html(self) -> str:
        """As HTML; every text is escaped."""
        name = lambda i: ' class="words"' if i < self.words else ""
        cells = lambda tag, row: "".join(
            f"<{tag}{name(i)}>{html.escape(str(cell))}</{tag}>" for i, cell in enumerate(row)
        )
        body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in self.rows)
        caption = f"<p class=note>{html.escape(self.caption)}</p>\n" if self.caption else ""
        return (
            f"<h3>{html.escape(self.title)}</h3>\n<div class=wide><table>\n"
            f"<tr>{cells('th', self.header)}</tr>\n{body}</table></div>\n{caption}"
        )

    def markdown(self) -> str:
        """As Markdown."""
        escape = lambda cell: str(cell).replace("\\", "\\\\").replace("|", "\\|")
        line = lambda cells: "| " + " | ".join(map(escape, cells)) + " |\n"
        marks = ["---" if i < self.words else "---:" for i in range(len(self.header))]
        body = "".join(line(row) for row in self.rows)
        caption = f"\n{self.caption}\n" if self.caption else ""
        rule = "| " + " | ".join(marks) + " |\n"
        return f"### {self.title}\n\n{line(self.header)}{rule}{body}{caption}"

    def latex(self) -> str:
        """As a LaTeX tabular; needs the package booktabs."""
        line = lambda cells: " & ".join(str(cell).translate(LATEX) for cell in cells) + r" \\"
        columns = "l" * self.words + "r" * (len(self.header) - self.words)
        lines = [
            f"% {printable(self.title)}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(self.header),
            r"\midrule",
            *map(line, self.rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"


def by_size(budgets: Iterable[str]) -> list[str]:
    """Budgets as results.json names them, rising; without one last."""
    return sorted(budgets, key=lambda budget: math.inf if budget == UNLIMITED else int(budget))


def budget_name(budget: str) -> str:
    """`4,096`, or the word for no budget."""
    return budget if budget == UNLIMITED else f"{int(budget):,}"


def accuracy_text(entry: Mapping[str, Any]) -> str:
    """`67.0 [62.8, 71.0]`: accuracy in percent with its 95 % interval."""
    low, high = entry["ci95"]
    return f"{100 * entry['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def tokens_text(entry: Mapping[str, Any]) -> str:
    """`1,234.5 tok`: mean thinking tokens."""
    return f"{entry['mean_thinking_tokens']:,.1f} tok"


def in_one_line(summary: Summary) -> str:
    """`greedy 8: 27.6, 16: 30.4; sampled 8: 25.0, ...`: accuracy in percent by budget."""
    cell = lambda budget, entry: f"{budget_name(budget)}: {100 * entry['accuracy']:.1f}"
    modes = {m: ", ".join(cell(b, e) for b, e in budgets.items()) for m, budgets in summary.items()}
    return "; ".join(f"{mode} {cells}" for mode, cells in modes.items())


def set_title(spec: str) -> str:
    """The name of a set as people call it: `MATH-500` for `math500:data/test.jsonl`.

    A table of one's own is called what its file is; held-out training questions are marked as no
    test set.
    """
    if spec == HOLDOUT:
        return f"{spec} (validation, not a test set)"
    name, _, place = spec.partition(":")
    if name in _SET_NAMES or not place:
        return _SET_NAMES.get(name, name)
    return PurePosixPath(place).stem or spec


def set_titles(specs: Iterable[str]) -> dict[str, str]:
    """`set_title` of each; sets of one name are told apart by what data.eval calls them."""
    titles = {spec: set_title(spec) for spec in specs}
    often = Counter(titles.values())
    return {
        spec: f"{title} ({spec})" if often[title] > 1 else title for spec, title in titles.items()
    }


def without_near_duplicates(policies: Mapping[str, Summary]) -> dict[str, Summary] | None:
    """The same policies on the problems that are no near-duplicates of training questions.

    Returns:
      Summaries by name; None if no problem was marked as one.
    """
    key = "without_near_duplicates"
    others = {
        name: {
            mode: {budget: entry[key] for budget, entry in budgets.items() if key in entry}
            for mode, budgets in summary.items()
        }
        for name, summary in policies.items()
    }
    marked = any(budgets for summary in others.values() for budgets in summary.values())
    return others if marked else None


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
    return [
        (mode, budget, [summary.get(mode, {}).get(budget) for summary in policies.values()])
        for mode in modes
        for budget in by_size({b for summary in policies.values() for b in summary.get(mode, {})})
    ]


def _style(entry: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """Green or red where the interval lies above or below that of the first policy."""
    if first is None or entry is first:
        return ""
    if entry["ci95"][0] > first["ci95"][1]:
        return "bold green"
    return "red" if entry["ci95"][1] < first["ci95"][0] else ""


def comparison(
    title: str, policies: Mapping[str, Summary], *, between: str = ", ", caption: str = ""
) -> Table:
    """A row per decoding and budget, a column per policy.

    Accuracies whose interval lies apart from the first policy's are coloured.

    Args:
      title: above the table.
      policies: summaries by name, the one to compare with first.
      between: what separates accuracy and tokens.
      caption: below the table.
    """

    def cell(entry: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> Text:
        if entry is None:
            return Text(NONE)
        accuracy = (accuracy_text(entry), _style(entry, first))
        return Text.assemble(accuracy, between, tokens_text(entry))

    return Table(
        title,
        ["decoding", "budget", *policies],
        [
            [mode, budget_name(budget), *(cell(entry, entries[0]) for entry in entries)]
            for mode, budget, entries in rows(policies)
        ],
        caption=caption,
        sections=True,
    )


def comparison_table(title: str, policies: Mapping[str, Summary]) -> rich.table.Table:
    """`comparison` for a terminal."""
    between = "  " if len(policies) <= _ONE_LINE_POLICIES else "\n"
    caption = "accuracy in percent [95 % interval], mean thinking tokens"
    return comparison(title, policies, between=between, caption=caption).terminal()
