"""Notations of one sign become one spelling, so that right answers are not refused."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_grading.notation import one_command, plain_bases, plain_signs, without_style
from bacr_grading.parsed_answer import read


def same(one, other):
    return read(one).key == read(other).key


@pytest.mark.parametrize(
    ("written", "latex"),
    [
        ("⅓", "\\frac13"),
        ("1⅓", "1\\frac{1}{3}"),
        ("10⁵", "10^5"),
        ("10⁻¹²", "10^{-12}"),
        ("3×10⁸", "3\\times 10^8"),
        ("√(2)", "\\sqrt{2}"),
        ("2√12", "2\\sqrt{12}"),
        ("√(x+(y))", "\\sqrt{x+(y)}"),
        ("∛2", "\\sqrt[3]{2}"),
        ("x₁", "x_1"),
        ("x₁₂", "x_{12}"),
        ("ℝ", "\\mathbb{R}"),
        ("∅", "\\emptyset"),
        ("θ", "\\theta"),
        ("𝟔", "6"),
        ("１２", "12"),
        ("x ≤ 3", "x \\leq 3"),
    ],
)
def test_unicode_is_read_as_latex(written, latex):
    assert same(written, latex)


@pytest.mark.parametrize(
    ("written", "usual"),
    [
        ("\\sqrt[3]2", "\\sqrt[3]{2}"),
        ("5\\sqrt[3]x", "5\\sqrt[3]{x}"),
        ("\\Bbb{R}", "\\mathbb{R}"),
        ("\\mathbb R", "\\mathbb{R}"),
        ("\\varnothing", "\\emptyset"),
        ("\\{\\}", "\\emptyset"),
        ("\\lbrace 1,2\\rbrace", "\\{1,2\\}"),
        ("\\lbrack 1,2)", "[1,2)"),
        ("{3 \\over 4}", "\\frac{3}{4}"),
        ("{n \\choose k}", "\\binom{n}{k}"),
        ("\\dbinom{n}{k}", "\\binom{n}{k}"),
        ("I_{\\max}", "I_{max}"),
        ("x_{\\text{max}}", "x_{max}"),
        ("1,\\dots,n", "1,\\ldots,n"),
    ],
)
def test_commands_that_print_the_same_sign_are_one(written, usual):
    assert same(written, usual)


@pytest.mark.parametrize(
    "written",
    [
        "\\textbf{6}",
        "\\mathbf{6}",
        "\\text{6}",
        "\\underline{6}",
        "\\textcolor{blue}{6}",
        "\\color{red}{6}",
        "{\\bf 6}",
        "\\boldsymbol{\\textbf{6}}",
        "\\emph{6}",
        "\\large 6",
    ],
)
def test_a_number_in_any_style_is_the_number(written):
    assert read(written).number.value == 6


def test_a_number_in_a_text_keeps_its_words_as_a_unit():
    assert read("\\text{3 hours}").unit == ("h", 1)
    assert read("\\text{\\$2.50}").number.value == 2.5


def test_words_keep_their_mark_of_text():
    assert read("\\textbf{Monday}").words == ("monday", True)
    assert without_style("\\text{June 20}") == "\\text{June 20}"


@pytest.mark.parametrize(("one", "other"), [("10⁵", "10^4"), ("⅓", "\\frac{1}{4}"), ("√12", "√1")])
def test_other_numbers_stay_different(one, other):
    assert not same(one, other)


@given(st.text(max_size=60))
def test_any_text_is_rewritten_without_an_error(text):
    for rewrite in (plain_signs, one_command, without_style, plain_bases):
        assert isinstance(rewrite(text), str)


@pytest.mark.parametrize(
    "piece", ["√(", "\\textbf{", "⅓", "\\color{", "{\\over ", "\\sqrt[", "_{\\text{", "(1)_", "(1"]
)
def test_a_long_answer_is_rewritten_at_once(piece):
    text = piece * (4000 // len(piece))
    start = time.process_time()
    plain_bases(without_style(one_command(plain_signs(text))))
    assert time.process_time() - start < 1.0
