"""Formats errors on one line.

A `UserError` reports an input that can't be used, and what to write instead. `bacr_grading` defines
the class because it also runs without this package, so that commands catch one class.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from bacr_grading.errors import UserError, faults_of, printable

__all__ = ["UserError", "attempt", "faults_of", "first_of", "printable", "reason_of"]


def first_of(names: Sequence[str], most: int = 1) -> str:
    """Joins the first `most` names and the number of the others, as in `a, b and 3 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def attempt(what: str, call: Callable[..., Any], *args: Any) -> bool:
    """Calls a function; a failure only prints a warning beginning with `what`. True on success."""
    try:
        call(*args)
    # Pictures, fonts, disks, networks and libraries can raise any exception.
    except Exception as error:
        print(f"warning: {what} ({printable(reason_of(error))})", file=sys.stderr)
        return False
    return True
