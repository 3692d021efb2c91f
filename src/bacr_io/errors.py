"""The exception for invalid user input, and helpers for one-line error messages and warnings.

Used by all commands of this project. `bacr_io.command` prints the messages.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any


class UserError(ValueError):
    """Raised for invalid input that the user has to fix.

    The message is one line with the location of the mistake, the invalid value and the suggested
    fix. Commands print it without a traceback and exit with code 2.

    Attributes:
      lines: the error messages, one for each mistake in the input.
    """

    def __init__(self, message: str, *others: str):
        # Error messages quote the input, which may contain control characters.
        self.lines = tuple(map(printable, (message, *others)))
        more = f" ({len(others)} more to fix)" if others else ""
        super().__init__(self.lines[0] + more)

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows. IPython calls this method if it exists."""
        return [f"error: {line}" for line in self.lines]


def faults_of(*checks: Callable[[], object]) -> list[str]:
    """Runs all checks and returns the messages of the `UserError`s, without duplicates."""
    lines: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            for line in error.lines:
                if line not in lines:
                    lines.append(line)
    return lines


def printable(text: str) -> str:
    """Escapes line breaks and other unprintable characters, so that the text fits on one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


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
