"""An answer is parsed as a number, words, a list, a ratio or an assignment."""

import re

import pytest

from bacr_grading.parsed_answer import both_signs, read, split


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
    assert read("20:34, 8:34 p.m.").ratio is None
    assert read("2:3").ratio is None


@pytest.mark.parametrize(
    ("text", "clock"),
    [
        ("10:30", ((10, 30, 0), None)),
        ("05\\!:\\!00", ((5, 0, 0), None)),
        ("10:30 AM", ((10, 30, 0), "a")),
        ("10:30\\text{ a.m.}", ((10, 30, 0), "a")),
        ("5 pm", ((5, 0, 0), "p")),
        ("4:51:06 p.m.", ((4, 51, 6), "p")),
        ("10:05:00", ((10, 5, 0), None)),
        *((other, None) for other in ("5", "1:2", "1:15:30", "25:75", "10:60", "x:30", "a.m.")),
    ],
)
def test_a_time_of_day_has_two_digits_after_the_colon(text, clock):
    assert read(text).clock == clock


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("x = 1, y = 2", {"x": "1", "y": "2"}),
        ("(x, y) = \\left(1, 2\\right)", {"x": "1", "y": "2"}),
        ("(y=2,x=1)", {"y": "2", "x": "1"}),
        ("x_{1}=3\\text{ and }x_2=4", {"x_1": "3", "x_2": "4"}),
        *((other, None) for other in ("x=1", "x=1,x=2", "x=1,2", "x=1 or y=2", "(x+1,y)=(1,2)")),
        ("(x,y)=(1,2,3)", None),
        ("f(x,y)=(1,2)", None),
    ],
)
def test_values_of_several_variables_have_names(text, values):
    named = read(text).named
    assert values == (named and {name: value.key for name, value in named.items()})


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1 \\pm \\sqrt{2}", "1+\\sqrt{2},1-\\sqrt{2}"),
        ("x=\\pm 2", "x=2,x=-2"),
        ("x \\ne \\pm 2", "x \\ne2,x \\ne-2"),
        ("\\frac{\\pm 1}{2}", "\\frac{1}{2},\\frac{-1}{2}"),
        ("3, 1\\pm 2", "3, 1+2, 1-2"),
        ("\\pm 1,\\pm 2", "1,-1,2,-2"),
        ("\\left\\{1\\pm\\sqrt5,-2\\right\\}", "\\{1+\\sqrt5,1-\\sqrt5,-2\\}"),
        ("x\\in\\{\\pm 2\\}", "x\\in\\{2,-2\\}"),
        ("(1,\\pm 2)", "(1,2),(1,-2)"),
        ("1,000\\pm 5", "1,000+5,1,000-5"),
    ],
)
def test_a_plus_minus_sign_stands_for_two_values(text, written):
    assert both_signs(text) == written


@pytest.mark.parametrize(
    "text",
    ["1\\pm 2\\pm 3", "(\\pm 1,\\pm 2)", "1\\pm 2, 1\\mp 2", "x=1\\pm 2, y=1\\pm 3", "\\pmod 5"],
)
def test_signs_that_may_depend_on_each_other_stay(text):
    assert both_signs(text) == text


@pytest.mark.parametrize(
    ("text", "based"),
    [
        ("(1010)_2", ("1010", "2")),
        ("-(1010)_{2}", ("-1010", "2")),
        ("(101.1)_2", ("101.1", "2")),
        ("\\text{2A}_{16}", ("2a", "16")),
        ("\\mathrm{FF}_{16}", ("ff", "16")),
        *((other, None) for other in ("(x)_2", "f(2)_3", "(5)_3", "\\text{V}_1", "(10)")),
    ],
)
def test_digits_with_a_base_may_have_parentheses_or_a_font(text, based):
    assert read(text).based == based


def test_separators_inside_brackets_do_not_split():
    assert split("f(a,b),c", re.compile(",")) == ["f(a,b)", "c"]
