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

import rich.console
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
# Texts inside a table cell before which the cell continues on the next line if the terminal is
# narrow. Two spaces precede the token count of a comparison, and " [" begins an interval.
_TOKENS = ("  ",)
_INTERVALS = ("  ", " [")
# Minimum number of columns that identify a row and are repeated if a table is split.
_NUM_LABELS = 2
# Special characters of LaTeX, and the characters outside ASCII in the labels of studies.
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
        **{c: rf"${c}$" for c in "<>"},
        # LaTeX would read a bracket at the beginning of a row as an argument of the preceding line
        # break.
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
    """Content of a table cell.

    Attributes:
      numbers: numbers for CSV: the value, and both ends of its interval if it has one.
      rank: `BEST`, `SECOND` or empty.
      marks: characters that are appended to the text, such as `MARKS` of significant differences.
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
    """A table that can be formatted for a terminal, HTML, Markdown, LaTeX and CSV.

    Attributes:
      words: number of leading columns that contain text. The other columns contain numbers.
      sections: True to show the first column as headings between the rows on a terminal.
      name: name of the table in error messages.
      groups: heading and number of columns of each group of columns, from left to right. The group
        headings are above the header.
      rules: indices of rows after which LaTeX draws a line.
      drop: columns that are omitted on a narrow terminal, the least important first.
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
    drop: Sequence[str] = ()

    def __post_init__(self) -> None:
        num_columns = len(self.header)
        if any(len(row) != num_columns for row in self.rows):
            raise ValueError(
                f"table {self.name}: a row and the header have different numbers of entries"
            )
        if self.groups and sum(span for _, span in self.groups) != num_columns:
            raise ValueError(
                f"table {self.name}: the groups and the header have different numbers of columns"
            )

    def columns(self) -> list[str]:
        """Returns the names of the columns. The name of a column's group comes before its name."""
        if not self.groups:
            return list(self.header)
        headings = []
        for group, span in self.groups:
            headings += [group] * span
        return [f"{heading} {name}".strip() for heading, name in zip(headings, self.header)]

    def terminal(self) -> "FittedTable":
        """Returns the table for a terminal of any width."""
        return FittedTable(self)

    def html(self) -> Markup:
        """Returns the table as HTML, with every text escaped."""
        rows = [list(map(_shown, row)) for row in self.rows]
        return render("table.html", table=self, rows=rows)

    def markdown(self) -> str:
        """Returns the table as Markdown, for pages that allow `<ins>`."""
        num_numbers = len(self.header) - self.words
        lines = [
            f"### {_markdown(self.title)}\n",
            _markdown_line(map(_markdown, self.columns())),
            _markdown_line(["---"] * self.words + ["---:"] * num_numbers),
        ]
        for row in self.rows:
            lines.append(_markdown_line(map(_markdown, row)))
        if self.caption:
            lines.append(f"\n{_markdown(self.caption)}")
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """Returns the table as a LaTeX tabular, which needs the packages booktabs and amssymb."""
        columns = "l" * self.words + "r" * (len(self.header) - self.words)
        lines = [
            f"% {printable(_on_one_line(self.title))}",
            "% needs \\usepackage{booktabs} and \\usepackage{amssymb}",
            f"% {printable(_on_one_line(self.caption))}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *self._latex_groups(),
            _latex_line(self.header),
            r"\midrule",
        ]
        last = len(self.rows) - 1
        for index, row in enumerate(self.rows):
            lines.append(_latex_line(row))
            # The table ends with \bottomrule, so its last row needs no other line.
            if index in self.rules and index != last:
                lines.append(r"\midrule")
        lines += [r"\bottomrule", r"\end{tabular}", ""]
        return "\n".join(lines)

    def _latex_groups(self) -> list[str]:
        """Returns the line of group headings and the rules below it.

        The list is empty if the table has no groups of columns.
        """
        if not self.groups:
            return []
        cells = []
        rules = []
        first = 1
        for group, span in self.groups:
            last = first + span - 1
            text = group.translate(_LATEX)
            if span > 1:
                cells.append(rf"\multicolumn{{{span}}}{{c}}{{{text}}}")
                if group:
                    rules.append(rf"\cmidrule(lr){{{first}-{last}}}")
            else:
                cells.append(text)
            first = last + 1
        lines = [" & ".join(cells) + r" \\"]
        if rules:
            lines.append(" ".join(rules))
        return lines

    def csv(self) -> str:
        """Returns the table as CSV.

        A column with intervals becomes three columns. The marks of a column follow in a separate
        column. A cell without numbers contains its text.
        """
        rows = [list(map(_shown, row)) for row in self.rows]
        header = []
        lines: list[list[str]] = [[] for _ in rows]
        for index, name in enumerate(self.columns()):
            items = [row[index] for row in rows]
            width = max((len(item.numbers) for item in items), default=0)
            has_marks = any(item.marks for item in items)
            header.append(name)
            header += [f"{name} {end}" for end in ("low", "high")[: max(width - 1, 0)]]
            if has_marks:
                header.append(f"{name} marks")
            for line, item in zip(lines, items):
                line += _csv_fields(item, width)
                if has_marks:
                    line.append(item.marks)
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([header, *lines])
        return out.getvalue()


@dataclass(frozen=True)
class FittedTable:
    """A table that adapts to the width of the terminal when rich renders it.

    If the table is too wide, these steps are taken until it fits. First, the columns in
    `Table.drop` are omitted one by one. Then every cell is broken at two consecutive spaces.
    Finally, cells are also broken before intervals, and the columns are spread over several tables.
    An interval itself is never broken.
    """

    table: Table

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.table.Table]:
        """Yields the rich tables that fit into the width of the console."""
        table = self.table
        columns = list(range(len(table.header)))
        for name in ("", *table.drop):
            columns = [column for column in columns if table.header[column] != name]
            rich_table = _rich_table(table, columns)
            if _fits(rich_table, console, options):
                yield rich_table
                return
        rich_table = _rich_table(table, columns, breaks=_TOKENS)
        if _fits(rich_table, console, options):
            yield rich_table
            return
        # Split the table into parts that fit. Every part begins with the columns that identify a
        # row, such as decoding and budget.
        num_labels = max(table.words, _NUM_LABELS)
        labels = columns[:num_labels]
        part = labels
        parts = [part]
        for column in columns[num_labels:]:
            longer = [*part, column]
            if part == labels or _fits(
                _rich_table(table, longer, breaks=_INTERVALS), console, options
            ):
                part = longer
                parts[-1] = part
            else:
                part = [*labels, column]
                parts.append(part)
        for part in parts:
            yield _rich_table(table, part, breaks=_INTERVALS, is_last=part is parts[-1])


def _fits(
    rich_table: rich.table.Table,
    console: rich.console.Console,
    options: rich.console.ConsoleOptions,
) -> bool:
    """True if no cell of the table has to be wrapped."""
    return rich_table.__rich_measure__(console, options.update(width=10**6)).maximum <= (
        options.max_width
    )


def _rich_table(
    table: Table, columns: Sequence[int], *, breaks: Sequence[str] = (), is_last: bool = True
) -> rich.table.Table:
    """Returns a rich table with some columns of a table.

    Args:
      table: the table.
      columns: indices of the columns, which include all columns of text.
      breaks: texts that begin with a space, such as " [". A cell is broken at this space.
      is_last: False to omit the caption, because a table with other columns follows.
    """
    dropped = [name for name in table.drop if table.header.index(name) not in columns]
    caption = table.caption
    if dropped:
        caption += f"; too narrow for the columns {', '.join(dropped)}"
    rich_table = rich.table.Table(
        # A Text, because rich reads [...] in a string as markup.
        title=Text(table.title),
        title_justify="left",
        title_style="bold",
        caption=Text(caption) if caption and is_last else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    first = 1 if table.sections else 0
    shown_columns = [column for column in columns if column >= first]
    for index in shown_columns:
        justify: Literal["left", "right"] = "left" if index < table.words else "right"
        rich_table.add_column(Text(table.header[index]), justify=justify, no_wrap=True)
    heading = None
    for row in table.rows:
        if table.sections and row[0] != heading:
            if heading is not None:
                rich_table.add_section()
            heading = row[0]
            rich_table.add_row(Text(str(heading), style="bold"))
        rich_table.add_row(*(_terminal_text(row[index], breaks) for index in shown_columns))
    return rich_table


def _terminal_text(item: Item, breaks: Sequence[str]) -> Text:
    """Returns the text of a cell for a terminal.

    Args:
      item: content of the cell.
      breaks: texts that begin with a space. The cell is broken at this space.
    """
    text = item if isinstance(item, Text) else Text(_shown(item).text)
    if not breaks:
        return text
    plain = text.plain
    for pattern in breaks:
        plain = plain.replace(pattern, f"\n{pattern.lstrip()}")
    lines = text.copy()
    lines.plain = plain
    return lines


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _latex_line(row: Iterable[Item]) -> str:
    return " & ".join(map(_latex, row)) + r" \\"


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _markdown(item: Item) -> str:
    """Formats a cell on one line and escapes it.

    `<` before a space is not escaped, because it does not begin a tag.
    """
    cell = _shown(item)
    text = _on_one_line(cell.text)
    text = text.replace("\\", "\\\\")
    text = text.replace("|", "\\|")
    text = text.replace("<", "&lt;").replace("&lt; ", "< ")
    return _MARKDOWN_RANKS.get(cell.rank, "{}").format(text) + cell.marks


def _latex(item: Item) -> str:
    cell = _shown(item)
    text = _LATEX_RANKS.get(cell.rank, "{}").format(cell.text.translate(_LATEX))
    return text + cell.marks.translate(_LATEX)


def _csv_fields(item: Shown, width: int) -> list[str]:
    """Returns the CSV fields of a cell: its numbers, or its text if it has no numbers.

    Missing numbers, and the dash of a cell without a value in a column of numbers, become empty
    fields.

    Args:
      item: content of the cell.
      width: largest number of numbers of a cell in the column; 0 for a column of text.
    """
    fields = ["" if value is None else f"{value:.6g}" for value in item.numbers]
    if not fields:
        is_missing = width > 0 and item.text == NONE
        fields = ["" if is_missing else item.text]
    return fields + [""] * (width - len(fields))


def by_size(budgets: Iterable[str]) -> list[str]:
    """Sorts budgets, which are strings in results.json, by size. An unlimited budget is last."""

    def size(budget: str) -> float:
        return math.inf if budget == UNLIMITED else int(budget)

    return sorted(budgets, key=size)


def budget_name(budget: str) -> str:
    """Formats a budget, such as `4,096`. The name of an unlimited budget is unchanged."""
    return f"{int(budget):,}" if budget.isdecimal() else budget


def accuracy_text(entry: Mapping[str, Any], name: str = "accuracy", ends: str = "ci95") -> str:
    """Formats a rate in percent with its interval, such as `67.0 [62.8, 71.0]`.

    Args:
      name: field of the rate. A rate of None is formatted as a dash.
      ends: field of the interval.
    """
    rate = entry[name]
    if rate is None:
        return NONE
    low, high = entry[ends]
    return f"{100 * rate:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def in_one_line(summary: Summary) -> str:
    """Formats the accuracy at each budget in percent, such as `greedy 8: 27.6, 16: 30.4; ...`."""
    parts = []
    for mode, budgets in summary.items():
        cells = [
            f"{budget_name(budget)}: {100 * entry['accuracy']:.1f}"
            for budget, entry in budgets.items()
        ]
        parts.append(f"{mode} {', '.join(cells)}")
    return "; ".join(parts)


# Maximum number of declines on one line of a terminal.
_MOST_DECLINES = 4


def decline_text(declines: Sequence[Decline]) -> str:
    """Lists the results that declined in training: `greedy at 48: accuracy 55.8 to 0.0 %`."""
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
    """Returns the usual name of a data set, such as `MATH-500` for `math500:data/test.jsonl`.

    A set without a usual name is named after its file. The title of held-out training questions
    states that they are not a test set.
    """
    if spec == HOLDOUT:
        return f"{spec} (validation, not a test set)"
    name, _, path = spec.partition(":")
    if name in _SET_NAMES or not path:
        return _SET_NAMES.get(name, name)
    return PurePosixPath(path).stem or spec


def set_titles(specs: Iterable[str]) -> dict[str, str]:
    """Returns the title of each set. If titles are equal, the `data.eval` entries are used."""
    titles = {spec: set_title(spec) for spec in specs}
    counts = Counter(titles.values())
    for spec, title in titles.items():
        if counts[title] > 1:
            titles[spec] = f"{title} ({spec})"
    return titles


def with_and_without(
    title: str, policies: Mapping[str, Summary]
) -> Iterator[tuple[str, Mapping[str, Summary]]]:
    """Yields the title and the results of a set, with and without near-duplicates.

    The second pair is omitted if the set has no near-duplicates. Its title is, for example,
    `math500 without 29 near-duplicates of training questions (471 problems)`.
    """
    yield title, policies
    others = {name: _without_near_duplicates(summary) for name, summary in policies.items()}
    num_others = _num_problems(others)
    if num_others is None:
        return
    num_problems = _num_problems(policies) or 0
    omitted = f"{num_problems - num_others:,} near-duplicates of training questions"
    yield f"{title} without {omitted} ({num_others:,} problems)", others


def _without_near_duplicates(summary: Summary) -> dict[str, dict[str, Any]]:
    """Returns the results of a summary on the questions that are not near-duplicates."""
    others = dict[str, dict[str, Any]]()
    for mode, budgets in summary.items():
        others[mode] = {}
        for budget, entry in budgets.items():
            if "without_near_duplicates" in entry:
                others[mode][budget] = entry["without_near_duplicates"]
    return others


def _num_problems(policies: Mapping[str, Summary]) -> int | None:
    """Returns the number of problems in the first result, or None if no policy has results."""
    for summary in policies.values():
        for budgets in summary.values():
            for entry in budgets.values():
                return int(entry["problems"])
    return None


def rows(policies: Mapping[str, Summary]) -> list[tuple[str, str, list[Mapping[str, Any] | None]]]:
    """Returns (decoding mode, budget, metrics of each policy) tuples, ordered by mode and budget.

    The metrics are None for a policy that was not evaluated with this decoding mode and budget.
    """
    summaries = list(policies.values())
    modes = dict.fromkeys(mode for summary in summaries for mode in summary)
    table_rows = list[tuple[str, str, list[Mapping[str, Any] | None]]]()
    for mode in modes:
        results = [summary.get(mode, {}) for summary in summaries]
        budgets = set[str]()
        budgets.update(*results)
        for budget in by_size(budgets):
            table_rows.append((mode, budget, [result.get(budget) for result in results]))
    return table_rows


def _style(entry: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """Returns the terminal style of an accuracy that is compared with the first policy.

    The style is bold green if the interval is above the interval of the first policy, red if it is
    below, and empty if they overlap.
    """
    if first is None or entry is first:
        return ""
    low, high = entry["ci95"]
    first_low, first_high = first["ci95"]
    if low > first_high:
        return "bold green"
    if high < first_low:
        return "red"
    return ""


def comparison(
    title: str, policies: Mapping[str, Summary], *, between: str = ", ", caption: str = ""
) -> Table:
    """Builds a table of accuracy and tokens, with a row per decoding mode and budget.

    The table has a column for each policy. Accuracies are coloured if their interval does not
    overlap with the first policy's interval.

    Args:
      policies: summaries by name. The first policy is the reference.
      between: text between accuracy and tokens.
    """

    def cell(entry: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> Text:
        if entry is None:
            return Text(NONE)
        accuracy = (accuracy_text(entry), _style(entry, first))
        tokens = f"{entry['mean_thinking_tokens']:,.1f} tok"
        return Text.assemble(accuracy, between, tokens)

    table_rows = list[list[Item]]()
    for mode, budget, entries in rows(policies):
        cells = [cell(entry, entries[0]) for entry in entries]
        table_rows.append([mode, budget_name(budget), *cells])
    return Table(
        title,
        ["decoding", "budget", *policies],
        table_rows,
        caption=caption,
        sections=True,
    )


def comparison_table(title: str, policies: Mapping[str, Summary]) -> FittedTable:
    """Returns the table that `comparison` builds, formatted for a terminal."""
    caption = "accuracy in percent [95 % interval], mean thinking tokens"
    return comparison(title, policies, between="  ", caption=caption).terminal()
