"""The exception for invalid user input, and helpers for its error messages.

Used by all commands of this project. `bacr_grading.command` prints the messages.
"""

from collections.abc import Callable


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


def faults_of(*checks: Callable[[], object]) -> list[str]:
    """Runs all checks and returns the messages of the `UserError`s, without duplicates."""
    lines: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            lines += [line for line in error.lines if line not in lines]
    return lines


def printable(text: str) -> str:
    """Escapes line breaks and other unprintable characters, so that the text fits on one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
