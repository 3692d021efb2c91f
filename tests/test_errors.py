"""A refusal is one line, whatever input it quotes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.errors import UserError, printable


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
