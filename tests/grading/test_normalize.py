"""Spellings that become one, and units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_grading.normalize import (
    canonical,
    clean,
    closing_brace,
    split_multiplier,
    split_unit,
    words,
)


@pytest.mark.parametrize(
    ("answer", "cleaned"),
    [
        ("$5$.", "5"),
        ("$x$ and $y$", "x and y"),
        ("\\(x+1\\)", "x+1"),
        ("**5**.", "5"),
        ("{x}", "x"),
        ("{x}{y}", "{x}{y}"),
        ("185\\", "185"),
        ("\\frac\\pi 2", "\\frac{\\pi}{2}"),
        ("\\mathrm{e}^2", "e^2"),
        ("（１，２）", "(1,2)"),
        ("2π", "2\\pi"),
        ("x≤½", "x\\le \\frac{1}{2}"),
    ],
)
def test_what_is_no_part_of_an_answer_is_stripped(answer, cleaned):
    assert clean(answer) == cleaned


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\dfrac{x}{2}", "\\frac x2"),
        ("\\frac{x}2", "\\frac{x}{2}"),
        ("\\left( 1 , 2 \\right)", "(1,2)"),
        ("1{,}000", "1,000"),
        ("1\\,000", "1000"),
        ("5\\mathrm{~cm}", "5\\text{cm}"),
        ("45^{\\circ}", "45\\degree"),
        ("28\\text{ percent}", "28\\%"),
        ("1 \\text{ or } 2", "1, 2"),
        ("2\\cdot 3", "2 \\times 3"),
        ("x^{2}", "x^2"),
        ("\\sqrt 2", "\\sqrt{2}"),
        *((f"\\{name}^{{-1}}(2)", f"\\arc{name}(2)") for name in ("sin", "cos", "tan", "cot")),
        ("\\tan ^ { -1 } x", "\\arctan x"),
        ("(1010)_2", "1010_{2}"),
        ("\\text{2A}_{16}", "2A_{16}"),
    ],
)
def test_equal_spellings_become_equal(one, other):
    assert canonical(clean(one)) == canonical(clean(other))


def test_a_space_after_a_comma_separates_numbers():
    assert canonical("32, 349") != canonical("32,349")


@given(st.text(alphabet="0123456789xy+-*/^_{}()[]\\,;:.!%$ \n", max_size=40))
def test_a_canonical_answer_has_no_spaces_but_between_digits(text):
    assert "  " not in canonical(clean(text))


def test_words_and_whether_they_were_marked():
    assert words("\\text{(C)}") == ("c", True)
    assert words("Evelyn") == ("evelyn", False)
    assert words("2x") is None
    assert words("\\text{2,1}") is None


def test_the_brace_that_closes():
    assert closing_brace("{a{b}\\}c}d", 0) == 8
    assert closing_brace("{a{b}", 0) is None
    assert closing_brace("{a}", 0, 2) is None


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("18 red eggs", ("18", "red eggs")),
        ("5 sq ft", ("5", "sq ft")),
        ("5cm", ("5", "cm")),
        ("2 pi", None),
        ("2 ab", None),
        ("3 over 4", None),
    ],
)
def test_plain_words_after_a_number_are_a_unit(text, split):
    assert split_unit(text) == split


def test_multipliers_are_split_from_the_words():
    assert split_multiplier("million dollars") == (10**6, "dollars")
    assert (
        split_multiplier("Hundred thousands") == split_multiplier("hundredthousand") == (10**5, "")
    )
    assert split_multiplier("million seconds") == (10**6, "seconds")
    assert split_multiplier("hundredths") == (1, "hundredths")
