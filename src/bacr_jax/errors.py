"""The exception that means: this input can not be used, and here is what to write instead."""


class UserError(ValueError):
    """Bad input. Its message is one line: where, what was found, what to write instead.

    Entry points print the message without a traceback and exit with code 2.
    """
