"""How a verifier of one's own is named; read before anything is opened."""

import re

from bacr_grading.errors import printable

# FILE.py:function.
_GRADER = re.compile(r".+\.py:[^\W\d]\w*")


def grader_problem(spec: str) -> str | None:
    """What is wrong with the spelling of `grader`, or None."""
    if _GRADER.fullmatch(spec):
        return None
    return (
        f"grader: found '{printable(spec)}'; write FILE.py:function, such as "
        "examples/verify_unit_tests.py:grade, or null"
    )
