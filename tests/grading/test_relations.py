"""Lists of equations and inequalities are joined by "and" or by "or"."""

import pytest

from bacr_grading.parsed_answer import read
from bacr_grading.relations import as_union, joined_otherwise, values_by_name


@pytest.mark.parametrize(
    ("pred", "reference", "differ"),
    [
        ("x>1\\text{ and }x<3", "x<3\\text{ or }x>1", True),
        ("x>1, x<3", "x<3\\text{ or }x>1", True),
        ("x>1, x<3", "x>1\\text{ and }x<3", False),
        ("x<1, x>3", "x<1\\text{ or }x>3", False),
        ("x<1, y>3", "x<1\\text{ or }y>3", True),
        ("x\\le 1; x\\ge\\frac{3}{2}", "x\\le 1\\text{ or }x\\ge\\frac{3}{2}", False),
        ("x<1, x>1", "x<1\\text{ or }x>1", False),
        ("x\\le 1, x\\ge 1", "x\\le 1\\text{ or }x\\ge 1", True),
        ("x<a, x>b", "x<a\\text{ or }x>b", True),
        ("x=3, x=5", "x=3\\text{ or }x=5", False),
        ("x=3, 5", "x=3\\text{ or }x=5", False),
        ("x=3, y=5", "x=3\\text{ or }y=5", True),
        ("x>1, x<3", "(-\\infty,3)\\cup(1,\\infty)", True),
        ("x<1, x>3", "(-\\infty,1)\\cup(3,\\infty)", False),
        ("x<1\\text{ and }x>3", "(-\\infty,1)\\cup(3,\\infty)", True),
        ("3, 5", "3\\text{ or }5", False),
        ("3\\text{ and }5", "3\\text{ or }5", False),
    ],
)
def test_a_comma_means_or_only_where_it_can_mean_nothing_else(pred, reference, differ):
    assert joined_otherwise(read(pred), read(reference)) is differ


@pytest.mark.parametrize(
    ("pred", "reference", "values"),
    [
        ("y=1, x=2", "(1,2)", [("2", "1"), ("1", "2")]),
        ("x_{10}=1, x_2=2", "(1,2)", [("2", "1"), ("1", "2")]),
        ("z=3, \\theta=2, r=1", "(1,2,3)", [("1", "1"), ("2", "2"), ("3", "3")]),
        ("k=3, n=10", "(n,k)=(10,3)", [("10", "10"), ("3", "3")]),
        ("(y,x)=(2,1)", "x=1, y=2", [("1", "1"), ("2", "2")]),
        ("(1,2)", "y=1, x=2", [("1", "1"), ("2", "2")]),
        ("2, 1", "x=1, y=2", [("2", "1"), ("1", "2")]),
    ],
)
def test_values_are_compared_by_name(pred, reference, values):
    assert [(p.key, r.key) for p, r in zip(*values_by_name(read(pred), read(reference)))] == values


@pytest.mark.parametrize(
    ("pred", "reference"),
    [
        ("x=1, y=2", "2, 1"),
        ("2, 1", "x_1=1, x_2=2"),
        ("x=1, y=2", "a=1, b=2"),
        ("x=1, x=2", "(1,2)"),
        ("x=1, x=2", "x=1, y=2"),
        ("\\{2,1\\}", "x=1, y=2"),
        ("(x,y)=(1,2)", "(1,2)"),
    ],
)
def test_other_values_have_no_order_by_name(pred, reference):
    assert values_by_name(read(pred), read(reference)) is None


@pytest.mark.parametrize(
    ("text", "union"),
    [
        ("x<-2 or x>3", "x\\in(-\\infty,-2)\\cup(3,\\infty)"),
        ("x \\le -2 \\text{ or } x \\ge 3", "x\\in(-\\infty,-2]\\cup[3,\\infty)"),
        ("3 < t \\vee -2 >= t", "t\\in(3,\\infty)\\cup(-\\infty,-2]"),
        ("-1 < x \\le 1, \\text{ or } x = 5", "x\\in(-1,1]\\cup\\{5\\}"),
        ("5 > x \\ge 1\\text{ or }x_{1}<0", None),
        ("x_1<1, x_1>3", "x_1\\in(-\\infty,1)\\cup(3,\\infty)"),
        ("x<1,000\\text{ or }x>2,000", "x\\in(-\\infty,1,000)\\cup(2,000,\\infty)"),
        *((text, None) for text in ("x<1", "x<3, x>1", "x<1\\text{ and }x>3", "x<1 or y>3")),
        *((text, None) for text in ("3 or 5", "1<x>3 or x<0", "x or x<1", "x<1<3 or x>5")),
    ],
)
def test_alternative_bounds_of_one_variable_are_a_union(text, union):
    assert as_union(text) == (union or text)
