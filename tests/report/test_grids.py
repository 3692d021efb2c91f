"""One table in three forms, with every text escaped for its form."""

import pytest

from bacr_jax.report.grids import Grid

GRID = Grid("A & B", ["set", "n"], [["x|<b>", "1_0"]], caption="50 % & more")


def test_markdown_escapes_bars():
    lines = GRID.markdown().splitlines()
    assert lines[0] == "### A & B"
    assert lines[2:5] == ["| set | n |", "| --- | ---: |", "| x\\|<b> | 1_0 |"]


def test_html_escapes_markup():
    found = GRID.html()
    assert '<td class="words">x|&lt;b&gt;</td><td>1_0</td>' in found
    assert "<h3>A &amp; B</h3>" in found and "50 % &amp; more" in found


def test_latex_escapes_its_own_characters():
    lines = GRID.latex().splitlines()
    assert lines[1] == r"\begin{tabular}{lr}"
    assert r"x|<b> & 1\_0 \\" in lines


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="other lengths"):
        Grid("", ["a"], [["1", "2"]])
