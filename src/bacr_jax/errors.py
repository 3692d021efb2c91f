"""Helpers for one-line error messages and warnings.

A `UserError` reports invalid input and what to write instead. The class is defined in
`bacr_grading`, which can be used without this package, so that both packages raise the same class.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from bacr_grading.errors import UserError, faults_of, printable

__all__ = ["UserError", "attempt", "faults_of", "first_of", "printable", "reason_of"]


def first_of(names: Sequence[str], most: int = 1) -> str:
    """Joins at most `most` names and appends how many were left out, as in `a, b and 3 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def reason_of(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def attempt(what: str, call: Callable[..., Any], *args: Any) -> bool:
    """Calls a function and turns an exception into a warning on stderr.

    Args:
      what: start of the warning, which describes the failed action.
      call: the function to call.
      *args: arguments of the function.

    Returns:
      True if the call succeeded. Its return value is discarded.
    """
    try:
        call(*args)
    # Callers use `attempt` to plot figures, write files and use the network. The libraries for
    # these tasks can raise any type of exception.
    except Exception as error:
        print(f"warning: {what} ({printable(reason_of(error))})", file=sys.stderr)
        return False
    return True
