"""Command-line options and helpers that several commands share.

Re-exports the argument parser, the entry-point decorator and related helpers of
`bacr_io.command`.
"""

import argparse
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bacr_io.command import (
    STOPPED as STOPPED,
    Parser as Parser,
    check_text as check_text,
    drop_unread_output as drop_unread_output,
    entry_point as entry_point,
    failure as failure,
    print_message as print_message,
    refusal as refusal,
    uninterrupted as uninterrupted,
)
from bacr_jax.config.paths import set_name
from bacr_jax.errors import UserError

# Values of --step in place of a number: the checkpoint with the best evaluation result, and the
# most recently saved checkpoint.
BEST = "best"
NEWEST = "newest"


def checkpoint_step(text: str) -> int | str:
    """Parses the value of --step, which is a step number, `best` or `newest`.

    Raises:
      argparse.ArgumentTypeError: for any other text.
    """
    if text in (BEST, NEWEST):
        return text
    number = whole_number(text, most=2**31 - 1)
    if number is None:
        raise argparse.ArgumentTypeError(
            f"expected the number of a step, {BEST} or {NEWEST}, but found {text!r}"
        )
    return number


def data_set(text: str) -> str:
    """Parses the value of an option that specifies a data set, such as `gsm8k:~/data/test.jsonl`.

    Returns:
      The value as an entry of `data.eval`, with ~ and environment variables in the path expanded.
      If the value is only a path, the result begins with the kind of the table, such as `jsonl:`.

    Raises:
      argparse.ArgumentTypeError: if an environment variable or a user in the path does not exist.
    """
    if not text:
        raise argparse.ArgumentTypeError(
            "the value is empty; use the name of a data set, or leave the option out"
        )
    try:
        return set_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the option --step to a parser."""
    parser.add_argument(
        "--step",
        type=checkpoint_step,
        metavar="N",
        help=f"checkpoint of the run: a step, `{BEST}` (by its evaluations) or `{NEWEST}`; "
        "default: the best, or the newest if no evaluation chose one (docs/evaluation.md)",
    )


def add_saved_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a saved policy: --run and --step, or --model and --download."""
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
    """Checks that the options of `add_saved_policy` select exactly one policy.

    Raises:
      UserError: if neither or both of --run and --model are set, or if an option does not apply to
        the selected kind of policy.
    """
    if (arguments.run is None) == (arguments.model is None):
        raise UserError(
            "command line: exactly one policy is required; pass either --run DIR or --model HFDIR"
        )
    if arguments.model is not None and arguments.step is not None:
        raise UserError(
            "--step can't be used with --model, because only a run has checkpoints of several "
            "steps; leave the option out"
        )
    if arguments.run is not None and arguments.download:
        raise UserError(
            "--download can't be used with --run, because a run contains its weights; leave the "
            "option out"
        )


def whole_number(text: str, *, most: int) -> int | None:
    """Parses an integer from 0 to `most`, written in ASCII digits. Returns None for other text."""
    text = text.strip()
    # isascii is needed because isdecimal also accepts the digits of other scripts. The length is
    # checked before calling int(), which raises ValueError for more than 4300 digits.
    plain = text.isascii() and text.isdecimal() and len(text.lstrip("0")) <= len(str(most))
    return int(text) if plain and int(text) <= most else None


def silence_orbax() -> None:
    """Suppresses log messages and secondary warnings of Orbax, which writes the checkpoints.

    Exceptions are still raised.

    If one write of a checkpoint fails, Orbax closes the event loop that the other writes use. Each
    of these writes would then print a traceback from its thread, or a warning about a coroutine
    that was never awaited.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    never = r"coroutine '.*write_fragment' was never awaited"
    warnings.filterwarnings("ignore", never, RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _ignore_closed_loops:
        sys.unraisablehook = functools.partial(_ignore_closed_loops, sys.unraisablehook)


def _ignore_closed_loops(hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Forwards an unraisable exception to `hook`, unless a closed event loop caused it."""
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)
