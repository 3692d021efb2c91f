"""A table of texts, for the terminal, Markdown and LaTeX."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
)


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
      title: above it.
      header: name of each column.
      rows: cells; as many in each row as there are columns.
      words: columns that hold words, from the left; the others hold numbers.
      caption: below it, what the columns mean.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    caption: str = ""

    def __post_init__(self) -> None:
        if {len(row) for row in self.rows} - {len(self.header)}:
            raise ValueError("rows of other lengths than the header")

    def terminal(self) -> Table:
        """For a terminal."""
        table = Table(
            title=self.title,
            title_justify="left",
            title_style="bold",
            caption=self.caption or None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for place, name in enumerate(self.header):
            table.add_column(Text(name), justify="left" if place < self.words else "right")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def markdown(self) -> str:
        """As Markdown."""
        escape = lambda text: text.replace("\\", "\\\\").replace("|", "\\|")
        line = lambda cells: "| " + " | ".join(map(escape, cells)) + " |\n"
        marks = ["---" if i < self.words else "---:" for i in range(len(self.header))]
        body = "".join(line(row) for row in self.rows)
        caption = f"\n{self.caption}\n" if self.caption else ""
        rule = "| " + " | ".join(marks) + " |\n"
        return f"### {self.title}\n\n{line(self.header)}{rule}{body}{caption}"

    def html(self) -> str:
        """As HTML; every text is escaped."""
        name = lambda i: ' class="words"' if i < self.words else ""
        cells = lambda tag, row: "".join(
            f"<{tag}{name(i)}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(row)
        )
        body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in self.rows)
        caption = f"<p class=note>{html.escape(self.caption)}</p>\n" if self.caption else ""
        return (
            f"<h3>{html.escape(self.title)}</h3>\n<div class=wide><table>\n"
            f"<tr>{cells('th', self.header)}</tr>\n{body}</table></div>\n{caption}"
        )

    def latex(self) -> str:
        """As a LaTeX tabular; needs the package booktabs."""
        line = lambda cells: " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"
        columns = "l" * self.words + "r" * (len(self.header) - self.words)
        lines = [
            f"% {self.title}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(self.header),
            r"\midrule",
            *map(line, self.rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"
