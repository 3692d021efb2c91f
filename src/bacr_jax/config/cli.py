"""Command lines that refuse like everything else here: in one line."""

import argparse
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bacr_jax.errors import UserError, printable

# Exit codes: input that can't be used (argparse's own), and a machine that could not do the work.
BAD_INPUT, FAILED = 2, 1
# sysexits.h's EX_TEMPFAIL, of a command that was asked to stop: the same command goes on.
STOPPED = 75
# What a shell says of a command that SIGINT ended.
INTERRUPTED = 130
# The words of a command line; None: those of the process.
Arguments = Sequence[str] | None
# The checkpoint whose evaluation was the best.
BEST = "best"


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

    def parse_known_args(  # type: ignore[override]
        self, args: Arguments = None, namespace: Any = None
    ) -> Any:
        """As in argparse, but without NUL, which no file's name and no setting can hold."""
        given = sys.argv[1:] if args is None else list(args)
        for text in given:
            if "\0" in text:
                self.error(f"found {text!r}, which holds NUL")
        return super().parse_known_args(given, namespace)


def checkpoint_step(text: str) -> int | str:
    """The step of a checkpoint, or the word `best`.

    Raises:
      ArgumentTypeError: neither.
    """
    if text == BEST:
        return text
    number = whole_number(text, most=2**31 - 1)
    if number is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; write the number of a step, or {BEST}")
    return number


def add_saved_policy(parser: argparse.ArgumentParser) -> None:
    """Options that name a policy: --run with --step, or --model with --download."""
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="run folder")
    add("--model", type=Path, metavar="HFDIR", help="Hugging Face folder or name, instead of --run")
    add(
        "--step",
        type=checkpoint_step,
        metavar="N",
        help=f"checkpoint of the run, or `{BEST}`; the newest by default",
    )
    add(
        "--download",
        action="store_true",
        help="get a --model such as Qwen/Qwen2.5-1.5B-Instruct from the hub if it is not in its "
        "cache",
    )


def check_saved_policy(arguments: argparse.Namespace) -> None:
    """Refuses options of `add_saved_policy` that name no policy, or two.

    Raises:
      UserError: says what to write.
    """
    if (arguments.run is None) == (arguments.model is None):
        raise UserError("command line: write --run DIR or --model HFDIR")
    if arguments.model is not None and arguments.step is not None:
        raise UserError("--step: only a run has steps; leave it out")
    if arguments.run is not None and arguments.download:
        raise UserError("--download: a run holds its weights; leave it out")


def whole_number(text: str, *, most: int) -> int | None:
    """A whole number from 0 to `most` in plain digits, or None."""
    text = text.strip()
    # isdecimal is true for digits of other scripts too, and Python converts 4300 digits at most.
    plain = text.isascii() and text.isdecimal() and len(text.lstrip("0")) <= len(str(most))
    return int(text) if plain and int(text) <= most else None


def refusal(error: UserError | OSError) -> int:
    """Writes an error as one line on stderr; returns the exit code.

    Raises:
      OSError: one that is not about a file.
    """
    if isinstance(error, OSError):
        if error.filename is None:
            raise error
        message = f"{error.filename}: {error.strerror}; make room or rights, or write another path"
    else:
        message = str(error)
    _say(message)
    return BAD_INPUT


def failure(message: str) -> int:
    """Writes why good input did not help (memory ran out, say) as one line; the exit code."""
    _say(message)
    return FAILED


def _say(message: str) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)


def quieten_orbax() -> None:
    """Keeps what Orbax logs beside raising it, and its advice about files, off the terminal."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def entry_point(main: Callable[[Arguments], int | None]) -> Callable[..., int]:
    """A command's `main`, which ends with one line and exit code 2 if its input can't be used.

    Args:
      main: from the command line to the exit code; None stands for 0.
    """

    @functools.wraps(main)
    def run(argv: Arguments = None) -> int:
        try:
            return main(argv) or 0
        except (UserError, OSError) as error:
            return refusal(error)
        except KeyboardInterrupt:
            _say("interrupted")
            return INTERRUPTED

    return run
