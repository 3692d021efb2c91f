"""Checks the form of a verifier's name, `FILE.py:function`, without opening the file.

Called when a config is checked and by `verifier.load_verifier`.
"""

import re

from bacr_grading.errors import printable

_VERIFIER_SPEC = re.compile(r".+\.py:[^\W\d]\w*")


def grader_problem(spec: str, key: str = "grader", other: str = "null") -> str | None:
    """Returns an error message if `spec` does not have the form FILE.py:function, else None.

    Args:
      spec: the value that the user wrote.
      key: name of the config key or option, for the message.
      other: further value that the key accepts, for the message.
    """
    if _VERIFIER_SPEC.fullmatch(spec):
        return None
    return (
        f"{key}: found '{printable(spec)}'; write FILE.py:function, such as "
        f"examples/verify_unit_tests.py:grade, or {other}"
    )
