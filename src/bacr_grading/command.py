"""Command lines that refuse like everything else here: in one line."""

import argparse
import contextlib
import errno
import functools
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bacr_grading.documents import expand_home
from bacr_grading.errors import UserError, printable

# Exit codes: input that can't be used (argparse's own), and a machine that could not do the work.
BAD_INPUT, FAILED = 2, 1
# sysexits.h's EX_TEMPFAIL, of a command that was asked to stop: the same command goes on.
STOPPED = 75
# What a shell says of a command that SIGINT ended, and of one that SIGPIPE did.
INTERRUPTED, UNREAD = 130, 141
# Room is missing, of which a write says no file; or rights.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MENDED = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS)
# The words of a command line; None: those of the process.
Arguments = Sequence[str] | None


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s, and whose paths may begin with ~."""

    def __init__(
        self, *args: Any, advice: str = "--help shows what can be written", **settings: Any
    ):
        super().__init__(*args, **settings)
        self.advice = advice
        self.register("type", None, functools.partial(_written, str))
        self.register("type", Path, functools.partial(_written, _path))

    def parse_known_args(  # type: ignore[override]
        self, args: Arguments = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuses words that are no text, before anything is made of them."""
        for word in sys.argv[1:] if args is None else args:
            check_text(word, "command line")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage."""
        raise UserError(f"command line: {message}; {self.advice}")


def _path(text: str) -> Path:
    try:
        return expand_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def check_text(text: str, where: str) -> None:
    """Refuses a text with bytes that Python could not read in the locale's encoding.

    Python holds such bytes as halves of surrogate pairs, which no file and no tokenizer takes.

    UserError: `where` and the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: {ascii(text)} contains bytes that are no text in this locale; write UTF-8, "
            "and set LC_ALL=C.UTF-8"
        ) from None


def _written(convert: Callable[[str], Any], text: str) -> Any:
    """The value of a word; an empty one, as of a variable without one, is no choice."""
    if not text:
        raise argparse.ArgumentTypeError("found nothing; write a value, or leave it out")
    return convert(text)


def refusal(error: UserError | OSError) -> int:
    """Writes an error, a line a mistake; the exit code. Raises an OSError of no file or disk."""
    if isinstance(error, OSError):
        if error.filename is None and error.errno not in _FULL:
            raise error
        named = error.filename or "the output, or a file"
        made = "make room or rights, or " if error.errno in _MENDED else ""
        _say(f"{named}: {error.strerror}; {made}write another path")
    else:
        for line in error.lines:
            _say(line)
    return BAD_INPUT


def failure(message: str) -> int:
    """Writes why good input did not help (memory ran out, say) as one line; the exit code."""
    _say(message)
    return FAILED


def _say(message: str) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)


def _is_unread() -> bool:
    """Whether whoever read the output has left, as `head` does."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until what is inside is done: JAX's import may swallow it, or crash of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def entry_point(main: Callable[[Arguments], int | None]) -> Callable[..., int]:
    """Has `main` end with a line and exit code 2 if its input can't be used; its None is code 0."""

    @functools.wraps(main)
    def run(argv: Arguments = None) -> int:
        for name in ("stdin", "stdout", "stderr"):
            if getattr(sys, name) is None:  # Closed by whoever started it.
                setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # For what a terminal can't show.
        try:
            code = main(argv) or 0
            sys.stdout.flush()
            return code
        except (UserError, OSError) as error:
            unread = isinstance(error, BrokenPipeError) and _is_unread()
            code = UNREAD if unread else refusal(error)  # A broken pipe of ours is raised.
            if isinstance(error, OSError) and error.filename is None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # For what is flushed at the end.
            return code
        except KeyboardInterrupt:
            _say("interrupted")
            return INTERRUPTED

    return run
