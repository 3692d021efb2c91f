"""A refusal is one line, whatever input it quotes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.errors import UserError, attempt, first_of, printable, reason_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data/été 数学.jsonl", "data/été 数学.jsonl"),
        ("a\nb\tc", r"a\nb\tc"),
        ("red \x1b[31m", r"red \x1b[31m"),
        ("half \ud83d", r"half \ud83d"),
        ("turned \u202e", r"turned \u202e"),
    ],
)
def test_what_can_not_be_printed_is_escaped(text, shown):
    assert printable(text) == str(UserError(text)) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_becomes_one_line_that_stays_as_it_is(text):
    line = printable(text)
    assert line.isprintable() and printable(line) == line
    line.encode()


def test_a_notebook_shows_the_lines_of_a_refusal_and_no_frames(capsys):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.run_cell(
        "from bacr_jax.errors import UserError\n"
        "def check():\n    raise UserError('seed=x: write a number', 'a\\nb')\n"
        "check()"
    )
    assert capsys.readouterr().out == "error: seed=x: write a number\nerror: a\\nb\n"


def test_of_many_names_the_first_are_said_and_the_others_counted():
    assert first_of(["a"]) == "a" and first_of(["a", "b"]) == "a and 1 more"
    assert first_of(["a", "b"], 2) == "a, b" and first_of(["a", "b", "c"], 2) == "a, b and 1 more"
    assert first_of(["x"] * 1202, 2) == "x, x and 1,200 more"


def test_the_reason_of_an_error_is_its_first_line_or_its_type():
    assert reason_of(OSError("no space\nat all")) == "no space"
    assert reason_of(KeyError()) == "KeyError"


def test_what_no_result_depends_on_may_fail_with_a_line(capsys):
    def draw(ok):
        if not ok:
            raise ValueError("odd \x1b[31m\nsecond line")

    assert attempt("p.png: can't be drawn", draw, True)
    assert capsys.readouterr().err == ""
    assert not attempt("p.png: can't be drawn", draw, False)
    assert capsys.readouterr().err == "warning: p.png: can't be drawn (odd \\x1b[31m)\n"


def test_an_interrupt_is_no_such_failure():
    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt("p.png: can't be drawn", stopped)
