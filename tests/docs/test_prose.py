"""Tests the length of lines and pages, and that pages contain no markers of a merge conflict."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Maximum length of a line, so that a review can show two versions side by side.
COLUMNS = 120
# Pages that scripts generate from the config schema and from results of studies.
MADE = ("docs/configuration.md", "docs/results/")
# Code and formulas, which have no maximum length.
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


# Maximum number of words of a page, and of all pages of docs/ together. The pages in `REFERENCE`
# are not counted: a script generates configuration.md, and metrics.md has a row for every metric.
PAGE_WORDS = 2500
ALL_WORDS = 45_000
REFERENCE = ("configuration.md", "metrics.md")
# Tables that a script generates within a page, such as the baselines of docs/performance.md.
MADE_PART = re.compile(r"<!-- Made by .*?<!-- End of the made part\. -->", re.DOTALL)
TAG = re.compile(r"</?(?:picture|source|img)\b[^>]*>")


def words_of_docs():
    folder = ROOT / "docs"
    paths = [*folder.glob("*.md"), *folder.glob("studies/*.md")]
    counts = {}
    for path in paths:
        if path.name not in REFERENCE:
            # HTML tags, such as the tags of pictures, do not count as words.
            text = TAG.sub("", MADE_PART.sub("", path.read_text()))
            counts[path.relative_to(folder).as_posix()] = len(text.split())
    return counts


def test_no_page_of_docs_is_longer_than_a_reader_reads():
    long = {name: words for name, words in words_of_docs().items() if words > PAGE_WORDS}
    assert long == {}, f"cut these pages to {PAGE_WORDS} words, or split them"


def test_docs_do_not_grow_beyond_their_limit():
    assert sum(words_of_docs().values()) <= ALL_WORDS, "cut what stands on several pages"


@pytest.mark.parametrize("page", pages())
def test_no_page_has_the_markers_of_a_merge(page):
    lines = (ROOT / page).read_text().splitlines()
    markers = ("<<<<<<< ", ">>>>>>> ", "||||||| ")
    assert [number for number, line in enumerate(lines, 1) if line.startswith(markers)] == []
