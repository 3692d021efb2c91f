"""An answer is parsed as a number, words, a list, a ratio or an assignment."""

import re

import pytest

from bacr_grading.parsed_answer import read, split


@pytest.mark.parametrize(
    ("text", "kind", "members"),
    [
        ("1, 2", "list", ["1", "2"]),
        ("3;5", "list", ["3", "5"]),
        ("1\\text{ or }2", "list", ["1", "2"]),
        ("\\{1,2\\}", "set", ["1", "2"]),
        ("(1,2]", "(]", ["1", "2"]),
        ("(1,2),(3,4)", "list", ["(1,2)", "(3,4)"]),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "matrix [2, 2]", ["1", "2", "3", "4"]),
    ],
)
def test_lists_keep_their_kind_and_order(text, kind, members):
    items = read(text).items
    assert items.kind == kind
    assert [part.key for part in items.parts] == members


@pytest.mark.parametrize("text", ["5", "1,000,7", "f(x,y)", "1,2;3"])
def test_other_answers_are_not_lists(text):
    assert read(text).items is None


def test_an_equation_of_a_name_is_an_assignment():
    assignment = read("x_1 = \\frac{1}{2}").assignment
    assert (assignment.name, assignment.value.number.value) == ("x_1", 0.5)
    assert read("2x = 5").assignment is None
    assert read("x = y = 5").assignment is None


def test_a_time_of_day_is_not_a_ratio():
    assert [part.key for part in read("2:3:5").ratio] == ["2", "3", "5"]
    assert read("10:05:00").ratio is None
    assert read("2:3").ratio is None


def test_separators_inside_brackets_do_not_split():
    assert split("f(a,b),c", re.compile(",")) == ["f(a,b)", "c"]
