"""The one table: what it holds, and how a terminal, HTML, Markdown, LaTeX or CSV show it.

`comparison` is the table made most: accuracy and thinking tokens by budget, policies side by side.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

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
BEST, SECOND = "best", "second"
MARKS = ("†", "‡")
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
# LaTeX's own characters, and what the labels of studies use beyond ASCII.
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
    """What stands in a table's cell.

    Attributes:
      numbers: for CSV: value, and lower and upper end of its interval where there is one.
      rank: `BEST`, `SECOND` or empty.
      marks: behind the text, of `MARKS`.
    """

    text: str
    numbers: tuple[float | None, ...] = ()
    rank: str = ""
    marks: str = ""


# The style of a `Text` shows on a terminal only.
Item = Shown | Text | str


def _shown(item: Item) -> Shown:
    return item if isinstance(item, Shown) else Shown(str(item))


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      words: columns that hold words, from the left; the others hold numbers.
      sections: a terminal shows the first column as headings between the rows.
      groups: (heading, number of columns) above the header, from the left; empty: none.
      rules: rows after which a line is drawn.
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
        """Names of columns with their group before them."""
        if not self.groups:
            return list(self.header)
        above = [group for group, span in self.groups for _ in range(span)]
        return [f"{g} {name}".strip() for g, name in zip(above, self.header)]

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
        text = lambda item: item if isinstance(item, Text) else Text(_shown(item).text)
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

    def html(self) -> Markup:
        """As HTML; every text is escaped."""
        return render("table.html", table=self, rows=[list(map(_shown, row)) for row in self.rows])

    def markdown(self) -> str:
        """As Markdown, for pages that allow `<ins>`."""
        line = lambda cells: "| " + " | ".join(cells) + " |\n"
        marks = ["---" if i < self.words else "---:" for i in range(len(self.header))]
        head = line(map(_markdown, self.columns())) + line(marks)
        body = "".join(line(map(_markdown, row)) for row in self.rows)
        caption = f"\n{_markdown(self.caption)}\n" if self.caption else ""
        return f"### {_markdown(self.title)}\n\n{head}{body}{caption}"

    def latex(self) -> str:
        """As a LaTeX tabular; needs the packages booktabs and amssymb."""
        line = lambda row: " & ".join(map(_latex, row)) + r" \\"
        columns = "l" * self.words + "r" * (len(self.header) - self.words)
        lines = [
            f"% {printable(' '.join(self.title.split()))}",
            "% needs \\usepackage{booktabs} and \\usepackage{amssymb}",
            f"% {printable(' '.join(self.caption.split()))}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *self._latex_groups(),
            line(self.header),
            r"\midrule",
        ]
        for number, row in enumerate(self.rows):
            lines.append(line(row))
            if number in self.rules and number + 1 < len(self.rows):
                lines.append(r"\midrule")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def _latex_groups(self) -> list[str]:
        cells, rules, start = [], [], 1
        for group, span in self.groups:
            text = group.translate(_LATEX)
            cells.append(rf"\multicolumn{{{span}}}{{c}}{{{text}}}" if span > 1 else text)
            if group and span > 1:
                rules.append(rf"\cmidrule(lr){{{start}-{start + span - 1}}}")
            start += span
        lines = [" & ".join(cells) + r" \\", " ".join(rules)]
        return [line for line in lines if line] if cells else []

    def csv(self) -> str:
        """As CSV: a column with intervals becomes three."""
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


def _markdown(item: Item) -> str:
    """In one line, as the text that it is; a sign with a blank behind it opens no tag."""
    shown = _shown(item)
    text = " ".join(shown.text.split()).replace("\\", "\\\\")
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("&lt; ", "< ")
    return _MARKDOWN_RANKS.get(shown.rank, "{}").format(text) + shown.marks


def _latex(item: Item) -> str:
    shown = _shown(item)
    text = _LATEX_RANKS.get(shown.rank, "{}").format(shown.text.translate(_LATEX))
    return text + shown.marks.translate(_LATEX)


def _fields(item: Shown, width: int) -> list[str]:
    """Cells of CSV: the text, or as many numbers as the column has."""
    if width == 0:
        return [item.text]
    numbers = (*item.numbers, *[None] * (width - len(item.numbers)))
    return ["" if value is None else f"{value:.6g}" for value in numbers]


def by_size(budgets: Iterable[str]) -> list[str]:
    """Budgets as results.json names them, rising; without one last."""
    return sorted(budgets, key=lambda budget: math.inf if budget == UNLIMITED else int(budget))


def budget_name(budget: str) -> str:
    """`4,096`, or the word for no budget or for the mean over budgets."""
    return f"{int(budget):,}" if budget.isdecimal() else budget


def accuracy_text(entry: Mapping[str, Any], name: str = "accuracy", ends: str = "ci95") -> str:
    """`67.0 [62.8, 71.0]`: a rate in percent with its 95 % interval; a dash where it is null."""
    if entry[name] is None:
        return NONE
    low, high = entry[ends]
    return f"{100 * entry[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def in_one_line(summary: Summary) -> str:
    """`greedy 8: 27.6, 16: 30.4; sampled 8: 25.0, ...`: accuracy in percent by budget."""
    cell = lambda budget, entry: f"{budget_name(budget)}: {100 * entry['accuracy']:.1f}"
    modes = {m: ", ".join(cell(b, e) for b, e in budgets.items()) for m, budgets in summary.items()}
    return "; ".join(f"{mode} {cells}" for mode, cells in modes.items())


# Declines that fit into one line of a terminal.
_MOST_DECLINES = 4


def decline_text(declines: Sequence[Decline]) -> str:
    """Returns what a policy lost in training, such as `greedy at 48: accuracy 55.8 to 0.0 %`."""
    parts = [
        f"{one.mode} at {budget_name(one.budget)}: {one.measure} {100 * one.before:.1f} to "
        f"{100 * one.after:.1f} %"
        for one in declines[:_MOST_DECLINES]
    ]
    if rest := len(declines) - len(parts):
        parts.append(f"and {rest} more")
    return "; ".join(parts)


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


def with_and_without(
    title: str, policies: Mapping[str, Summary]
) -> Iterator[tuple[str, Mapping[str, Summary]]]:
    """Policies with their title, and where there are any, without near-duplicates once more.

    That title: `math500 without 29 near-duplicates of training questions (471 problems)`.
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
      policies: summaries by name, the one to compare with first.
      between: what separates accuracy and tokens.
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
    """`comparison` for a terminal."""
    between = "  " if len(policies) <= _ONE_LINE_POLICIES else "\n"
    caption = "accuracy in percent [95 % interval], mean thinking tokens"
    return comparison(title, policies, between=between, caption=caption).terminal()
