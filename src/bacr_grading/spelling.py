"""How a verifier of one's own is named; read before anything is opened."""

import re

from bacr_grading.errors import printable

# FILE.py:function.
_GRADER = re.compile(r".+\.py:[^\W\d]\w*")


def grader_problem(spec: str, key: str = "grader", other: str = "null") -> str | None:
    """What is wrong with the spelling of `key`, which can name `other` too; or None."""
    if _GRADER.fullmatch(spec):
        return None
    return (
        f"{key}: found '{printable(spec)}'; write FILE.py:function, such as "
        f"examples/verify_unit_tests.py:grade, or {other}"
    )
