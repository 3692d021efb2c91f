"""Defines tables and formats them for a terminal, HTML, Markdown, LaTeX and CSV.

`comparison` builds the most common table: accuracy and thinking tokens by budget, with one column
per policy.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

import rich.table
from markupsafe import Markup
from rich import box
from rich.text import Text

from bacr_jax.config.derived import HOLDOUT
from bacr_jax.errors import printable
from bacr_jax.evaluation.decline import Decline
from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report.html_page import render

NONE = "-"
BEST = "best"
SECOND = "second"
MARKS = ("†", "‡")
_SET_NAMES = {
    "ledger": "Ledger",
    "gsm8k": "GSM8K",
    "math": "MATH",
    "math500": "MATH-500",
    "aime24": "AIME 2024",
    "minerva_math": "Minerva Math",
}
# Most policies for which accuracy and tokens fit on one line of a terminal.
_ONE_LINE_POLICIES = 2
# Special characters of LaTeX, and the characters outside ASCII in the labels of studies.
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
        **{c: rf"${c}$" for c in "<>"},
        # A row that begins with a bracket would be an argument of the line break before it.
        **{c: f"{{{c}}}" for c in "[]"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "−": "$-$",
        "–": "--",
        "×": r"$\times$",
        "✓": r"\checkmark{}",
        "†": r"$^{\dagger}$",
        "‡": r"$^{\ddagger}$",
        "Δ": r"$\Delta$",
        "α": r"$\alpha$",
        "β": r"$\beta$",
        "λ": r"$\lambda$",
        "μ": r"$\mu$",
        "σ": r"$\sigma$",
        "≥": r"$\geq$",
    }
)
_LATEX_RANKS = {BEST: r"\textbf{{{}}}", SECOND: r"\underline{{{}}}"}
_MARKDOWN_RANKS = {BEST: "**{}**", SECOND: "<ins>{}</ins>"}


@dataclass(frozen=True)
class Shown:
    """Content of a table's cell.

    Attributes:
      numbers: numbers for CSV: the value, then both ends of its interval if it has one.
      rank: `BEST`, `SECOND` or empty.
      marks: characters of `MARKS` after the text.
    """

    text: str
    numbers: tuple[float | None, ...] = ()
    rank: str = ""
    marks: str = ""


# The style of a `Text` is only visible on a terminal.
Item = Shown | Text | str


def _shown(item: Item) -> Shown:
    return item if isinstance(item, Shown) else Shown(str(item))


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      words: number of columns with words, from the left; the other columns contain numbers.
      sections: True to show the first column as headings between the rows on a terminal.
      name: name of the table, for error messages.
      groups: (heading, number of columns) above the header, from the left; empty for no groups.
      rules: indices of rows after which LaTeX draws a line.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Item]]
    words: int = 1
    caption: str = ""
    sections: bool = False
    name: str = ""
    groups: Sequence[tuple[str, int]] = ()
    rules: Sequence[int] = ()

    def __post_init__(self) -> None:
        if {len(row) for row in self.rows} - {len(self.header)}:
            raise ValueError(f"table {self.name}: rows of other lengths than the header")
        if self.groups and sum(span for _, span in self.groups) != len(self.header):
            raise ValueError(f"table {self.name}: groups of other widths than the header")

    def columns(self) -> list[str]:
        """Returns the names of the columns, each after the name of its group."""
        if not self.groups:
            return list(self.header)
        above = [group for group, span in self.groups for _ in range(span)]
        return [f"{g} {name}".strip() for g, name in zip(above, self.header)]

    def terminal(self) -> rich.table.Table:
        """Returns the table for a terminal."""
        terminal_table = rich.table.Table(
            # A Text, because rich reads [...] in a string as markup.
            title=Text(self.title),
            title_justify="left",
            title_style="bold",
            caption=Text(self.caption) if self.caption else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        first = 1 if self.sections else 0
        for index, name in enumerate(self.header[first:], first):
            justify: Literal["left", "right"] = "left" if index < self.words else "right"
            terminal_table.add_column(Text(name), justify=justify)
        heading = None
        for row in self.rows:
            if self.sections and row[0] != heading:
                if heading is not None:
                    terminal_table.add_section()
                heading = row[0]
                terminal_table.add_row(Text(str(heading), style="bold"))
            terminal_table.add_row(*map(_terminal_text, row[first:]))
        return terminal_table

    def html(self) -> Markup:
        """Returns the table as HTML, with every text escaped."""
        return render("table.html", table=self, rows=[list(map(_shown, row)) for row in self.rows])

    def markdown(self) -> str:
        """Returns the table as Markdown, for pages that allow `<ins>`."""
        alignment = ["---" if i < self.words else "---:" for i in range(len(self.header))]
        head = _markdown_line(map(_markdown, self.columns())) + _markdown_line(alignment)
        body = "".join(_markdown_line(map(_markdown, row)) for row in self.rows)
        caption = f"\n{_markdown(self.caption)}\n" if self.caption else ""
        return f"### {_markdown(self.title)}\n\n{head}{body}{caption}"

    def latex(self) -> str:
        """Returns the table as a LaTeX tabular, which needs the packages booktabs and amssymb."""
        columns = "l" * self.words + "r" * (len(self.header) - self.words)
        lines = [
            f"% {printable(' '.join(self.title.split()))}",
            "% needs \\usepackage{booktabs} and \\usepackage{amssymb}",
            f"% {printable(' '.join(self.caption.split()))}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *self._latex_groups(),
            _latex_line(self.header),
            r"\midrule",
        ]
        for number, row in enumerate(self.rows):
            lines.append(_latex_line(row))
            if number in self.rules and number + 1 < len(self.rows):
                lines.append(r"\midrule")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def _latex_groups(self) -> list[str]:
        cells = []
        rules = []
        start = 1
        for group, span in self.groups:
            text = group.translate(_LATEX)
            cells.append(rf"\multicolumn{{{span}}}{{c}}{{{text}}}" if span > 1 else text)
            if group and span > 1:
                rules.append(rf"\cmidrule(lr){{{start}-{start + span - 1}}}")
            start += span
        lines = [" & ".join(cells) + r" \\", " ".join(rules)]
        return [line for line in lines if line] if cells else []

    def csv(self) -> str:
        """Returns the table as CSV, in which a column with intervals becomes three columns."""
        rows = [list(map(_shown, row)) for row in self.rows]
        widths = [max((len(item.numbers) for item in column), default=0) for column in zip(*rows)]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        named = zip(self.columns(), widths or [0] * len(self.header))
        ends = ("", " low", " high")
        writer.writerow([name + end for name, width in named for end in ends[: max(width, 1)]])
        for row in rows:
            writer.writerow([v for item, width in zip(row, widths) for v in _fields(item, width)])
        return out.getvalue()


def _terminal_text(item: Item) -> Text:
    return item if isinstance(item, Text) else Text(_shown(item).text)


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _latex_line(row: Iterable[Item]) -> str:
    return " & ".join(map(_latex, row)) + r" \\"


def _markdown(item: Item) -> str:
    """Returns a cell on one line, escaped; `<` before a blank stays, as it opens no tag."""
    cell = _shown(item)
    text = " ".join(cell.text.split()).replace("\\", "\\\\")
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("&lt; ", "< ")
    return _MARKDOWN_RANKS.get(cell.rank, "{}").format(text) + cell.marks


def _latex(item: Item) -> str:
    cell = _shown(item)
    text = _LATEX_RANKS.get(cell.rank, "{}").format(cell.text.translate(_LATEX))
    return text + cell.marks.translate(_LATEX)


def _fields(item: Shown, width: int) -> list[str]:
    """Returns the CSV cells of an item: `width` numbers, or the text if `width` is 0."""
    if width == 0:
        return [item.text]
    numbers = (*item.numbers, *[None] * (width - len(item.numbers)))
    return ["" if value is None else f"{value:.6g}" for value in numbers]


def by_size(budgets: Iterable[str]) -> list[str]:
    """Sorts budgets, named as in results.json, by size; no budget comes last."""
    return sorted(budgets, key=lambda budget: math.inf if budget == UNLIMITED else int(budget))


def budget_name(budget: str) -> str:
    """Formats a budget as in `4,096`; returns other words, such as for no budget, unchanged."""
    return f"{int(budget):,}" if budget.isdecimal() else budget


def accuracy_text(entry: Mapping[str, Any], name: str = "accuracy", ends: str = "ci95") -> str:
    """Formats a rate in percent with its interval, `67.0 [62.8, 71.0]`; a dash if it is None."""
    if entry[name] is None:
        return NONE
    low, high = entry[ends]
    return f"{100 * entry[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def in_one_line(summary: Summary) -> str:
    """Formats accuracy in percent by budget: `greedy 8: 27.6, 16: 30.4; sampled 8: 25.0, ...`."""
    parts = []
    for mode, budgets in summary.items():
        cells = [
            f"{budget_name(budget)}: {100 * entry['accuracy']:.1f}"
            for budget, entry in budgets.items()
        ]
        parts.append(f"{mode} {', '.join(cells)}")
    return "; ".join(parts)


# Most declines on one line of a terminal.
_MOST_DECLINES = 4


def decline_text(declines: Sequence[Decline]) -> str:
    """Returns what a policy lost in training, such as `greedy at 48: accuracy 55.8 to 0.0 %`."""
    parts = [
        f"{one.mode} at {budget_name(one.budget)}: {one.measure} {100 * one.before:.1f} to "
        f"{100 * one.after:.1f} %"
        for one in declines[:_MOST_DECLINES]
    ]
    num_omitted = len(declines) - len(parts)
    if num_omitted:
        parts.append(f"and {num_omitted} more")
    return "; ".join(parts)


def set_title(spec: str) -> str:
    """Returns the usual name of a set, such as `MATH-500` for `math500:data/test.jsonl`.

    Other tables are named after their file. The title of held-out training questions states that
    they are not a test set.
    """
    if spec == HOLDOUT:
        return f"{spec} (validation, not a test set)"
    name, _, path = spec.partition(":")
    if name in _SET_NAMES or not path:
        return _SET_NAMES.get(name, name)
    return PurePosixPath(path).stem or spec


def set_titles(specs: Iterable[str]) -> dict[str, str]:
    """Returns the `set_title` of each set; sets with equal titles get their entry of data.eval."""
    titles = {spec: set_title(spec) for spec in specs}
    counts = Counter(titles.values())
    return {
        spec: f"{title} ({spec})" if counts[title] > 1 else title for spec, title in titles.items()
    }


def with_and_without(
    title: str, policies: Mapping[str, Summary]
) -> Iterator[tuple[str, Mapping[str, Summary]]]:
    """Yields title and summaries, then again without near-duplicates if the set has any.

    The second title is `math500 without 29 near-duplicates of training questions (471 problems)`.
    """
    yield title, policies
    key = "without_near_duplicates"
    others = {
        name: {
            mode: {budget: entry[key] for budget, entry in budgets.items() if key in entry}
            for mode, budgets in summary.items()
        }
        for name, summary in policies.items()
    }
    if not any(budgets for summary in others.values() for budgets in summary.values()):
        return

    def count(summaries: Mapping[str, Summary]) -> int:
        of_modes = (budgets for summary in summaries.values() for budgets in summary.values())
        return next(entry["problems"] for budgets in of_modes for entry in budgets.values())

    left = count(others)
    near = f"{count(policies) - left:,} near-duplicates of training questions"
    yield f"{title} without {near} ({left:,} problems)", others


def rows(policies: Mapping[str, Summary]) -> list[tuple[str, str, list[Mapping[str, Any] | None]]]:
    """Returns (decoding, budget, entry of each policy), ordered by decoding, then budget.

    The entry is None for a policy that was not evaluated with this decoding and budget.
    """
    modes = dict.fromkeys(mode for summary in policies.values() for mode in summary)
    return [
        (mode, budget, [summary.get(mode, {}).get(budget) for summary in policies.values()])
        for mode in modes
        for budget in by_size({b for summary in policies.values() for b in summary.get(mode, {})})
    ]


def _style(entry: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """Returns green or red if the interval lies above or below the first policy's interval."""
    if first is None or entry is first:
        return ""
    if entry["ci95"][0] > first["ci95"][1]:
        return "bold green"
    return "red" if entry["ci95"][1] < first["ci95"][0] else ""


def comparison(
    title: str, policies: Mapping[str, Summary], *, between: str = ", ", caption: str = ""
) -> Table:
    """Builds the table with a row per decoding and budget, and a column per policy.

    Accuracies are coloured if their interval does not overlap with the first policy's interval.

    Args:
      policies: summaries by name; the first policy is the reference.
      between: text between accuracy and tokens.
    """

    def cell(entry: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> Text:
        if entry is None:
            return Text(NONE)
        accuracy = (accuracy_text(entry), _style(entry, first))
        return Text.assemble(accuracy, between, f"{entry['mean_thinking_tokens']:,.1f} tok")

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
    """Returns the table of `comparison` for a terminal."""
    between = "  " if len(policies) <= _ONE_LINE_POLICIES else "\n"
    caption = "accuracy in percent [95 % interval], mean thinking tokens"
    return comparison(title, policies, between=between, caption=caption).terminal()
