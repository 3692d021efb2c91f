"""The exception for input that the user has to fix, and helpers for its messages.

Used by every package of this project; entry points (`bacr_grading.command`) print it.
"""

from collections.abc import Callable


class UserError(ValueError):
    """Input that cannot be used.

    The message is one line: the place, what was found there, and what to write instead. Entry
    points print it without a traceback and exit with code 2.

    Attributes:
      lines: the message, then the messages of further mistakes in the same input.
    """

    def __init__(self, message: str, *others: str):
        # Messages quote the input, which may contain control characters.
        self.lines = tuple(map(printable, (message, *others)))
        more = f" ({len(others)} more to fix)" if others else ""
        super().__init__(self.lines[0] + more)


def faults_of(*checks: Callable[[], object]) -> list[str]:
    """Runs checks and returns the messages of all `UserError`s that they raise, each once."""
    lines: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            lines += [line for line in error.lines if line not in lines]
    return lines


def printable(text: str) -> str:
    """Returns the text on one line, with escapes for unprintable characters and line ends."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
