"""Answers at a terminal: side by side where there is room for it."""

import io
import re

import pytest
from rich.console import Console

from bacr_jax.evaluation.ask import Answer
from bacr_jax.report.answers import LiveColumns


def answer(budget, thinking):
    return Answer("q", budget, 0, thinking, len(thinking), 2, 3, f"<{budget}>", "tag", True, (1,))


def terminal(width):
    return Console(
        file=io.StringIO(), width=width, height=30, force_terminal=True, color_system=None
    )


def last_frame(console):
    """What stands there at the end, without the sequences that moved the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return text[text.rindex("budget 8") :].splitlines()


def test_budgets_stand_side_by_side_with_the_tokens_of_each_part():
    console = terminal(100)
    with LiveColumns(console, [8, None]) as columns:
        columns.watch(1, "soon", "")
        columns.show([answer(8, "ab"), answer(None, "abcd")])
    names, thinking, answers, counts = (line.strip() for line in last_frame(console))
    assert names.split() == ["budget", "8", "no", "budget"]
    assert thinking.split() == ["ab", "abcd"] and answers.split() == ["<8>", "<None>"]
    parts = [f"{n} thinking tokens, 2 forced, 3 answer" for n in (2, 4)]
    assert " ".join(counts.split()) == " ".join(parts)
    assert "soon" in console.file.getvalue()


def test_long_thinking_stays_in_its_column():
    console = terminal(60)
    with LiveColumns(console, [8, 16]) as columns:
        columns.show([answer(8, "x" * 200), answer(16, "z" * 10)])
    lines = last_frame(console)
    assert "".join(lines).count("x") == 200 and max(map(len, lines)) <= 60


@pytest.mark.parametrize(("width", "budgets", "fits"), [(80, 3, True), (80, 4, False)])
def test_columns_too_narrow_to_read_are_none(width, budgets, fits):
    assert LiveColumns.fit(terminal(width), list(range(budgets))) == fits
    assert not LiveColumns.fit(Console(file=io.StringIO(), width=width), [8])
