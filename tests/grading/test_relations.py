"""Lists of equations and inequalities are joined by "and" or by "or"."""

import pytest

from bacr_grading.parsed_answer import read
from bacr_grading.relations import joined_otherwise


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
        ("3, 5", "3\\text{ or }5", False),
        ("3\\text{ and }5", "3\\text{ or }5", False),
    ],
)
def test_a_comma_means_or_only_where_it_can_mean_nothing_else(pred, reference, differ):
    assert joined_otherwise(read(pred), read(reference)) is differ
