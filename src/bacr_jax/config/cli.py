"""Command-line options that several commands share.

Re-exports `Parser`, `entry_point` and the exit codes of `bacr_grading.command`.
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

# Values of --step: the checkpoint with the best evaluation, and the checkpoint saved last.
BEST = "best"
NEWEST = "newest"


def checkpoint_step(text: str) -> int | str:
    """Parses a step number, `best` or `newest`; raises ArgumentTypeError for other text."""
    if text in (BEST, NEWEST):
        return text
    number = whole_number(text, most=2**31 - 1)
    if number is None:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; write the number of a step, {BEST} or {NEWEST}"
        )
    return number


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the option --step."""
    parser.add_argument(
        "--step",
        type=checkpoint_step,
        metavar="N",
        help=f"checkpoint of the run: a step, `{BEST}` (by its evaluations) or `{NEWEST}`; "
        "default: the best, or the newest if no evaluation chose one (docs/evaluation.md)",
    )


def add_saved_policy(parser: argparse.ArgumentParser) -> None:
    """Adds options that name a policy: --run with --step, or --model with --download."""
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="run folder")
    add("--model", type=Path, metavar="HFDIR", help="Hugging Face folder or name, instead of --run")
    add_step(parser)
    add(
        "--download",
        action="store_true",
        help="download a --model such as Qwen/Qwen2.5-1.5B-Instruct from the hub if it is not in "
        "the local cache",
    )


def check_saved_policy(arguments: argparse.Namespace) -> None:
    """Raises a UserError if the options of `add_saved_policy` name no policy or two."""
    if (arguments.run is None) == (arguments.model is None):
        raise UserError("command line: write --run DIR or --model HFDIR")
    if arguments.model is not None and arguments.step is not None:
        raise UserError("--step: only a run has steps; leave it out")
    if arguments.run is not None and arguments.download:
        raise UserError("--download: a run contains its weights; leave it out")


def whole_number(text: str, *, most: int) -> int | None:
    """Parses a whole number from 0 to `most` in ASCII digits; returns None for other text."""
    text = text.strip()
    # isdecimal is True for digits of other scripts too. The length is checked before int(), because
    # Python converts at most 4300 digits.
    plain = text.isascii() and text.isdecimal() and len(text.lstrip("0")) <= len(str(most))
    return int(text) if plain and int(text) <= most else None


def quieten_orbax() -> None:
    """Hides Orbax's log messages and follow-up warnings; its exceptions still reach the caller.

    If one write of a save fails, Orbax closes the event loop of the other writes. Each of them then
    prints a traceback from its thread, or a warning about a coroutine that was never awaited.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    never = r"coroutine '.*write_fragment' was never awaited"
    warnings.filterwarnings("ignore", never, RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _ignore_closed_loops:
        sys.unraisablehook = functools.partial(_ignore_closed_loops, sys.unraisablehook)


def _ignore_closed_loops(hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Passes an unraisable exception to `hook`, unless it comes from a closed event loop."""
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)
