"""Numbers are parsed exactly and compared by one rule."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_grading.numbers import Number, equal
from bacr_grading.parsed_answer import read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-5", -5),
        ("\u22125", -5),
        ("+3", 3),
        ("007", 7),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("1,234,567", 1234567),
        ("11,\\! 111,\\! 111", 11111111),
        ("14{,}916", 14916),
        ("1 000", 1000),
        ("10\\,000", 10000),
        ("\\frac{10}{4}", Fraction(5, 2)),
        ("\\dfrac{-1}{2}", Fraction(-1, 2)),
        ("-\\frac12", Fraction(-1, 2)),
        ("-20/13", Fraction(-20, 13)),
        ("12\\frac{3}{5}", Fraction(63, 5)),
        ("-1\\frac{1}{2}", Fraction(-3, 2)),
        ("2 1/2", Fraction(5, 2)),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("16.\\overline{6}", Fraction(50, 3)),
        ("6.02 \\times 10^{23}", 602 * 10**21),
        ("1.4e-9", Fraction(14, 10**10)),
        ("10^{-3}", Fraction(1, 1000)),
        ("(5)", 5),
        ("\\$18.50", Fraction(37, 2)),
        ("18 dollars", 18),
        ("10\\text{ units}", 10),
        ("5 \\text{ million}", 5_000_000),
        ("2 dozen eggs", 24),
        ("20\\text{ square units}", 20),
        ("45^\\circ", 45),
        ("45^{\\circ}", 45),
        ("\uff14\uff12", 42),
        ("10 \\pmod{11}", 10),
    ],
)
def test_these_spellings_are_this_number(text, value):
    assert read(text).number.value == value


@pytest.mark.parametrize(
    "text",
    [
        "1 2",
        "32, 349",
        "1,22",
        "3x",
        "2\\pi",
        "\\sqrt{2}",
        "5!",
        "2^{10}",
        "1/0",
        "\\frac{1}{0}",
        "",
        "x",
        "5 hundredths",
        "2 pi",
        "3 and 4",
        "4:51",
        "1.2.3",
        "--5",
        "1e999999999",
        "9" * 1000,
        "1\x002",
    ],
)
def test_these_are_no_number(text):
    assert read(text).number is None


@pytest.mark.parametrize(
    ("pred", "reference", "strict", "lenient"),
    [
        ("0.333333", "1/3", True, True),
        ("0.3333", "1/3", False, True),
        ("0.33", "1/3", False, True),
        ("0.3", "1/3", False, False),
        ("0.34", "1/3", False, False),
        ("0.13", "1/8", False, False),  # 0.125 can be written down
        ("5.001", "5", False, False),
        ("0.0000001", "0.0000002", False, False),
        ("28", "28\\%", True, True),
        ("0.28", "28\\%", True, True),
        ("7/25", "28\\%", True, True),
        ("28\\%", "28", True, True),
        ("0.28\\%", "28\\%", False, False),
        ("7.2", "7.2\\%", True, True),
        ("25\\text{ ft}", "25\\text{ feet}", True, True),
        ("25\\text{ m}", "25\\text{ ft}", False, True),
        ("25", "25\\text{ ft}", True, True),
        ("25\\text{ cm}^2", "25\\text{ cm}", False, True),
        ("8\\text{ a.m.}", "8\\text{ p.m.}", False, False),
        ("\\$5", "5\\text{ dollars}", True, True),
    ],
)
def test_number_rules(pred, reference, strict, lenient):
    ours, theirs = read(pred).number, read(reference).number
    assert equal(ours, theirs, lenient=False) is strict
    assert equal(ours, theirs, lenient=True) is lenient


def test_a_relative_tolerance_accepts_rounded_measurements():
    pred, reference = Number(Fraction("6.7e-11")), Number(Fraction("6.674e-11"))
    assert not equal(pred, reference, lenient=False)
    assert equal(pred, reference, lenient=False, relative_tolerance=0.01)
    assert not equal(pred, reference, lenient=False, relative_tolerance=0.001)


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_equal_exactly_when_their_values_are(a, b):
    spellings = [f"\\frac{{{x.numerator}}}{{{x.denominator}}}" for x in (a, b)]
    ours, theirs = read(spellings[0]).number, read(spellings[1]).number
    assert ours.value == a
    assert equal(ours, theirs, lenient=True) is (a == b)


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=3))
def test_a_decimal_keeps_its_exact_value(number):
    text = f"{number:f}"
    assert read(text).number.value == Fraction(text)
    assert read(f"{number:,f}").number.value == Fraction(text)
