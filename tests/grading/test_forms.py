"""What an answer leaves undone: the strict mode pays for numbers, not for copied questions."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_grading.forms import operations
from bacr_grading.parsed_answer import read

EVALUATED = (
    """
56;-3;0.5;1{,}000;50\\%;\\frac{3}{4};-\\frac{1}{2};3/4;1\\frac{1}{2};0.1\\overline{6}
10^5;3\\times 10^8;1.5\\cdot 10^{-4};2\\sqrt{3};\\frac{\\sqrt{2}}{2};\\frac{1}{\\sqrt{2}};3\\pi
\\frac{\\pi}{6};1+\\sqrt{2};\\frac{1+\\sqrt5}{2};\\frac12+\\frac{\\sqrt5}{2};3+4i;-i;e^2;1-\\frac1e
\\sqrt[3]{2};2^{1/3};2(3+\\sqrt5);(1,2);[0,\\sqrt{2});\\{1,2\\};(-\\infty,3]\\cup[5,\\infty)
x=5;2\\sqrt{3}\\text{ cm}^2;x=5,y=2;(x,y)=(5,2);8:34 p.m.;(40)_9
\\frac{2}{3}\\text{ m};1\\pm\\sqrt{2};\\text{Monday};40_9;\\$5.50;45^\\circ
""".replace("\n", ";")
    .strip(";")
    .split(";")
)


@pytest.mark.parametrize("answer", EVALUATED)
def test_numbers_in_a_usual_exact_form_leave_nothing_undone(answer):
    assert operations(read(answer)) == frozenset()


@pytest.mark.parametrize(
    ("answer", "undone"),
    [
        ("7\\cdot 8", {"product"}),
        ("50+6", {"sum"}),
        ("112/2", {"quotient"}),
        ("\\frac{2}{4}", {"quotient"}),
        ("\\frac{6}{1}", {"quotient"}),
        ("2^{10}", {"power"}),
        ("5!", {"factorial"}),
        ("\\binom{10}{3}", {"binomial"}),
        ("\\sqrt{25}", {"root"}),
        ("\\sqrt{12}", {"root"}),
        ("\\sqrt{3^2+4^2}", {"power", "sum"}),
        ("\\sin 30^\\circ", {"trigonometry"}),
        ("\\log_2 8", {"logarithm"}),
        ("\\gcd(12,18)", {"divisor"}),
        ("\\lfloor 3.7\\rfloor", {"rounding"}),
        ("2\\sqrt{3}+\\sqrt{3}", {"sum"}),
        ("\\sqrt{2}\\cdot\\sqrt{3}", {"product"}),
        ("(7\\cdot 8, 3)", {"product"}),
        ("58_9-18_9", {"sum"}),
        ("\\tan^{-1}(2)", {"angle"}),
        ("(x,y)=(7\\cdot 8,3)", {"product"}),
    ],
)
def test_arithmetic_with_numbers_is_undone(answer, undone):
    assert operations(read(answer)) == undone


@pytest.mark.parametrize("answer", ["x+1", "2n", "\\int_0^1 x\\,dx", "(x,1)", "\\overline{AB}"])
def test_what_has_a_variable_is_no_constant(answer):
    assert operations(read(answer)) is None


@given(st.text(alphabet="0123456789+-*/^_(){}[]|!,.\\fracsqtbinome ", max_size=60))
def test_any_text_is_read_without_an_error(text):
    operations(read(text))


@pytest.mark.parametrize("piece", ["(", "1+", "\\sqrt{", "2^", "\\frac{1}{", "\\sqrt{999999937}+"])
def test_a_long_answer_is_read_at_once(piece):
    answer = read(piece * (900 // len(piece)))
    start = time.process_time()
    operations(answer)
    assert time.process_time() - start < 1.0
