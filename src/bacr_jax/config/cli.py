"""Command lines: options that several commands have, and what a command is made with.

`Parser`, `entry_point` and exit codes are those of `bacr_grading.command`.
"""

import argparse
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bacr_grading.command import (
    STOPPED as STOPPED,
    Parser as Parser,
    check_text as check_text,
    entry_point as entry_point,
    failure as failure,
    refusal as refusal,
    uninterrupted as uninterrupted,
)
from bacr_jax.errors import UserError

# The checkpoint whose evaluation was the best, and the one that was saved last.
BEST = "best"
NEWEST = "newest"


def checkpoint_step(text: str) -> int | str:
    """Reads a step, `best` or `newest`; ArgumentTypeError: it is none of these."""
    if text in (BEST, NEWEST):
        return text
    number = whole_number(text, most=2**31 - 1)
    if number is None:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; write the number of a step, {BEST} or {NEWEST}"
        )
    return number


def add_step(parser: argparse.ArgumentParser) -> None:
    """Option --step."""
    parser.add_argument(
        "--step",
        type=checkpoint_step,
        metavar="N",
        help=f"checkpoint of the run, `{BEST}` (of its evaluations) or `{NEWEST}`; by default the "
        "best, or the newest if no evaluation chose one (docs/evaluation.md)",
    )


def add_saved_policy(parser: argparse.ArgumentParser) -> None:
    """Options that name a policy: --run with --step, or --model with --download."""
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="run folder")
    add("--model", type=Path, metavar="HFDIR", help="Hugging Face folder or name, instead of --run")
    add_step(parser)
    add(
        "--download",
        action="store_true",
        help="get a --model such as Qwen/Qwen2.5-1.5B-Instruct from the hub if it is not in its "
        "cache",
    )


def check_saved_policy(arguments: argparse.Namespace) -> None:
    """Refuses options of `add_saved_policy` that name no policy, or two, by a UserError."""
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


def quieten_orbax() -> None:
    """Keeps what Orbax says beside raising it, and its advice about files, off the terminal.

    Where one of a save's writes fails it ends the loop that the others report to: each of them says
    so, as a traceback of a thread of its own or as a coroutine that was never awaited.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    never = r"coroutine '.*write_fragment' was never awaited"
    warnings.filterwarnings("ignore", never, RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _but_of_closed_loops:
        sys.unraisablehook = functools.partial(_but_of_closed_loops, sys.unraisablehook)


def _but_of_closed_loops(hook: Callable[[Any], Any], lost: Any) -> None:
    if str(lost.exc_value) != "Event loop is closed":
        hook(lost)
