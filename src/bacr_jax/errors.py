"""Words for what went wrong, on one line.

`UserError` means: this input can not be used, and here is what to write instead. The class is that
of the grader, which needs it where there is no library: commands catch one.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from bacr_grading.errors import UserError, faults_of, printable

__all__ = ["UserError", "attempt", "faults_of", "first_of", "printable", "reason_of"]


def first_of(names: Sequence[str], most: int = 1) -> str:
    """`a, b and 3 more`: the first `most` names, and how many others there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def reason_of(error: BaseException) -> str:
    """The first line of an error; of one without a text its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def attempt(what: str, call: Callable[..., Any], *args: Any) -> bool:
    """Whether a call succeeds on which no result depends; `what` is warned of where it fails."""
    try:
        call(*args)
    # A picture, a font, a disk, a network or a library can fail in any way.
    except Exception as error:
        print(f"warning: {what} ({printable(reason_of(error))})", file=sys.stderr)
        return False
    return True
