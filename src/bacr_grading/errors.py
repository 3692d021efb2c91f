"""The exception that means: this input can not be used, and here is what to write instead."""

from collections.abc import Callable


class UserError(ValueError):
    """Bad input. Its message is one line: where, what was found, what to write instead.

    Entry points print the message without a traceback and exit with code 2.

    Attributes:
      lines: the message, and those of mistakes that were found beside it.
    """

    def __init__(self, message: str, *others: str):
        # The input may be quoted in them, whatever it holds.
        self.lines = tuple(map(printable, (message, *others)))
        more = f" ({len(others)} more to fix)" if others else ""
        super().__init__(self.lines[0] + more)


def faults_of(*looks: Callable[[], object]) -> list[str]:
    """What is refused by functions that are called one after the other, each line once."""
    lines: list[str] = []
    for look in looks:
        try:
            look()
        except UserError as error:
            lines += [line for line in error.lines if line not in lines]
    return lines


def printable(text: str) -> str:
    """Text on one line: what can't be printed is escaped, ends of lines included."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
