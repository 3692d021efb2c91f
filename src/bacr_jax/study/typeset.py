"""Tables with ranks, marks and grouped columns, as Markdown, LaTeX, CSV and HTML."""

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from bacr_jax.report.table import LATEX

BEST, SECOND = "best", "second"
NONE = "-"
MARKS = ("†", "‡")
# What the labels of studies use beyond ASCII.
_LATEX = LATEX | str.maketrans(
    {
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
        "<": "$<$",
        ">": "$>$",
        "≥": r"$\geq$",
    }
)


@dataclass(frozen=True)
class Shown:
    """What stands in a table's cell.

    Attributes:
      text: as it is read.
      numbers: for CSV: value, and lower and upper end of its interval where there is one.
      rank: `BEST`, `SECOND` or empty.
      marks: behind the text, of `MARKS`.
    """

    text: str
    numbers: tuple[float | None, ...] = ()
    rank: str = ""
    marks: str = ""


Item = Shown | str


@dataclass(frozen=True)
class StudyTable:
    """A table of a study.

    Attributes:
      name: of its files.
      title: above it.
      header: name of each column.
      rows: as many items in each as there are columns.
      groups: (heading, number of columns) above the header, from the left; empty: none.
      words: columns that hold words, from the left.
      caption: below it: what the columns mean.
      rules: rows after which a line is drawn.
    """

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Item]]
    groups: Sequence[tuple[str, int]] = ()
    words: int = 1
    caption: str = ""
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

    def markdown(self) -> str:
        """As Markdown, for pages that allow `<ins>`."""
        line = lambda cells: "| " + " | ".join(cells) + " |\n"
        marks = ["---" if i < self.words else "---:" for i in range(len(self.header))]
        body = "".join(line(map(_markdown, row)) for row in self.rows)
        head = line(map(_markdown, self.columns())) + line(marks)
        caption = f"\n{self.caption}\n" if self.caption else ""
        return f"### {self.title}\n\n{head}{body}{caption}"

    def latex(self) -> str:
        """As a LaTeX tabular; needs the packages booktabs and amssymb."""
        columns = "l" * self.words + "r" * (len(self.header) - self.words)
        lines = [
            f"% {' '.join(self.title.split())}",
            "% needs \\usepackage{booktabs} and \\usepackage{amssymb}",
            f"% {' '.join(self.caption.split())}",
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
        if not self.groups:
            return []
        cells, rules, start = [], [], 1
        for group, span in self.groups:
            text = group.translate(_LATEX)
            cells.append(rf"\multicolumn{{{span}}}{{c}}{{{text}}}" if span > 1 else text)
            if group and span > 1:
                rules.append(rf"\cmidrule(lr){{{start}-{start + span - 1}}}")
            start += span
        return (
            [" & ".join(cells) + r" \\", " ".join(rules)] if rules else [" & ".join(cells) + r" \\"]
        )

    def csv(self) -> str:
        """As CSV: a column with intervals becomes three, and numbers are those of results.json."""
        size = lambda item: len(item.numbers) if isinstance(item, Shown) else 0
        widths = [
            max((size(row[i]) for row in self.rows), default=0) for i in range(len(self.header))
        ]
        ends = ("", " low", " high")
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        named = zip(self.columns(), widths)
        writer.writerow([name + end for name, width in named for end in ends[: max(width, 1)]])
        for row in self.rows:
            writer.writerow([v for item, width in zip(row, widths) for v in _fields(item, width)])
        return out.getvalue()

    def html(self) -> str:
        """As HTML; every text is escaped."""
        name = lambda i: ' class="words"' if i < self.words else ""
        header = "".join(
            f"<th{name(i)}>{html.escape(text)}</th>" for i, text in enumerate(self.header)
        )
        above = "".join(
            f'<th class="group" colspan="{span}">{html.escape(group)}</th>'
            for group, span in self.groups
        )
        above = f"<tr>{above}</tr>\n" if above else ""
        body = "".join(
            f"<tr{' class=rule' if number in self.rules else ''}>"
            + "".join(f"<td{name(i)}>{_html(item)}</td>" for i, item in enumerate(row))
            + "</tr>\n"
            for number, row in enumerate(self.rows)
        )
        caption = f"<p class=note>{html.escape(self.caption)}</p>\n" if self.caption else ""
        return (
            f"<h3>{html.escape(self.title)}</h3>\n<div class=wide><table>\n<thead>{above}"
            f"<tr>{header}</tr></thead>\n<tbody>{body}</tbody></table></div>\n{caption}"
        )


def _markdown(item: Item) -> str:
    shown = item if isinstance(item, Shown) else Shown(item)
    text = shown.text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    marks = {BEST: "**{}**", SECOND: "<ins>{}</ins>"}
    return marks.get(shown.rank, "{}").format(text) + shown.marks


def _latex_line(row: Sequence[Item]) -> str:
    return " & ".join(map(_latex, row)) + r" \\"


def _latex(item: Item) -> str:
    shown = item if isinstance(item, Shown) else Shown(item)
    # A row that begins with a bracket would be read as an argument of the line break before it.
    text = shown.text.translate(_LATEX).replace("[", "{[}").replace("]", "{]}")
    marks = {BEST: r"\textbf{{{}}}", SECOND: r"\underline{{{}}}"}
    return marks.get(shown.rank, "{}").format(text) + shown.marks.translate(_LATEX)


def _html(item: Item) -> str:
    shown = item if isinstance(item, Shown) else Shown(item)
    marks = {BEST: "<b>{}</b>", SECOND: "<u>{}</u>"}
    text = marks.get(shown.rank, "{}").format(html.escape(shown.text))
    return f"{text}<sup>{shown.marks}</sup>" if shown.marks else text


def _fields(item: Item, width: int) -> list[str]:
    if width == 0:
        return [item.text if isinstance(item, Shown) else item]
    numbers = item.numbers if isinstance(item, Shown) else ()
    return [
        "" if value is None else f"{value:.6g}"
        for value in (*numbers, *[None] * (width - len(numbers)))
    ]
