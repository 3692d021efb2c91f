"""The exception that means: this input can not be used, and here is what to write instead."""


class UserError(ValueError):
    """Bad input. Its message is one line: where, what was found, what to write instead.

    Entry points print the message without a traceback and exit with code 2.
    """

    def __init__(self, message: str):
        """Takes the message, in which the input may be quoted whatever it holds."""
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Text on one line: what can't be printed is escaped, ends of lines included."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
