"""What is never evaluated, and that real answers pass."""

import pytest

from bacr_grading import parse_reference
from bacr_grading.guards import nesting, refuse


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "9^{9^9}",
        "9^9^9",
        "9**9**9**9",
        "10^{1000000000}+1",
        "10^{10^{10}}",
        "2^{20!}",
        "x^{9^{99}}",
        "99999999!",
        "(5!)!",
        "3!!",
        "\\binom{100000000}{50000000}",
        "\\prod_{k=1}^{1000000} k^{k}",
        "\\sum_{k=1}^{99999} k",
        "(a+b+c+d+e+f+g)^{60}",
        "\\frac{1}{1+" * 60 + "1" + "}" * 60,
        "(" * 100 + "1" + ")" * 100,
        "1" * 200,
        "x + " * 400,
        "1\x002",
        "\ud83d42",
        '__import__("os").system("true")',
        "\\frac{1}{",
        "1}",
        "\\begin{pmatrix}" + "\\\\".join("&".join(["x"] * 9) for _ in range(9)) + "\\end{pmatrix}",
    ],
)
def test_dangerous_answers_are_refused(answer):
    assert refuse(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "\\frac{\\sqrt{3}}{2}",
        "2^{99}",
        "12^{1/7}",
        "2^{2^3}",
        "e^{x^2}",
        "15!",
        "\\binom{10}{3}",
        "\\sum_{k=0}^{n-1} F_k F_{n-k-1}",
        "(x+1)^{10}",
        "x**2 + y**2",
        "10^{\\frac{-5+\\sqrt{13}}{6}}",
        "1000!",
    ],
)
def test_ordinary_answers_pass(answer):
    assert not refuse(answer)


def test_no_reference_answer_of_math_is_refused(shared_rows):
    parsed = [parse_reference(row["solution"]) for row in shared_rows("math/train.jsonl")]
    refused = [reference.text for reference in parsed if reference and refuse(reference.text)]
    assert refused == []


def test_nesting_counts_braces_and_brackets():
    assert nesting("\\frac{1}{(2)}") == 2
    assert nesting("(0,1]") == 1
    assert nesting("\\{1\\}") == 0
    assert nesting("{") is None
