"""Command lines that refuse like everything else here: in one line."""

import argparse
from typing import Any, NoReturn

from bacr_jax.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s."""

    def __init__(
        self, *args: Any, advice: str = "--help shows what can be written", **settings: Any
    ):
        """Takes what `argparse.ArgumentParser` takes, and what a refusal ends with."""
        super().__init__(*args, **settings)
        self.advice = advice

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage."""
        raise UserError(f"command line: {message}; {self.advice}")
