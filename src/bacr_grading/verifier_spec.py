"""Checks the syntax of a verifier spec, `FILE.py:function`, without opening the file.

Called when a config is validated, and by `verifier.load_verifier`.
"""

import re

from bacr_io.errors import printable

_VERIFIER_SPEC = re.compile(r".+\.py:[^\W\d]\w*")


def grader_problem(spec: str, key: str = "grader", other: str = "null") -> str | None:
    """Returns an error message if `spec` does not have the form FILE.py:function, else None.

    Args:
      spec: the value from the config or command line.
      key: name of the config key or command-line option, for the error message.
      other: another value that the key accepts, for the error message.
    """
    if _VERIFIER_SPEC.fullmatch(spec):
        return None
    return (
        f"{key}: expected FILE.py:function, such as examples/verify_unit_tests.py:grade, or "
        f"{other}, but found '{printable(spec)}'"
    )
