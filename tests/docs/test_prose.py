"""Lines of prose that a review can show side by side: at most 120 columns."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = 120
# Written by a script, from the schema and from cells of studies.
MADE = ("docs/configuration.md", "docs/results/")
# Code and formulas are as long as they are.
NOT_PROSE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$|^\$\$.*?\$\$ *$", re.MULTILINE | re.DOTALL)
URL = re.compile(r"\S+://\S+")


def pages():
    folders = ("docs", "integrations", "recipes", "tests", "launch")
    found = [*ROOT.glob("*.md"), *(p for f in folders for p in (ROOT / f).rglob("*.md"))]
    found += (ROOT / "docs").rglob("*.rst")
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    return [name for name in names if not name.startswith(MADE)]


def long_lines(text):
    """Their numbers, without rows of tables, indented code and what only an address makes long."""
    text = NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if not line.lstrip().startswith("|")
        and not line.startswith("    ")
        and len(URL.sub("", line)) > COLUMNS
    ]


def test_prose_is_what_is_neither_code_nor_table_nor_address():
    prose = "word " * 30
    kept = (
        f"```\n{prose}\n```\n| {prose} |\n    {prose}\nsee https://{'x' * 130}\n$$\n{prose}\n$$\n"
    )
    assert long_lines(kept) == []
    assert long_lines(kept + prose) == [10]


@pytest.mark.parametrize("page", pages())
def test_no_line_of_prose_is_longer_than_a_review_shows(page):
    assert long_lines((ROOT / page).read_text()) == []
