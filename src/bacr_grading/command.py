"""Parses command lines and runs commands, so that every error is one line on stderr.

Used by the commands of all packages. Contains no options of a specific command.
"""

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

from bacr_grading.errors import UserError, printable
from bacr_grading.files import expand_home

# Exit code for input that cannot be used, the same as argparse's.
BAD_INPUT = 2
# Exit code for good input that this machine could not process.
FAILED = 1
# Exit code of a command that was asked to stop (EX_TEMPFAIL of sysexits.h): running the same
# command again continues the work.
STOPPED = 75
# Exit codes that shells report after SIGINT and SIGPIPE (128 plus the signal's number).
INTERRUPTED = 130
UNREAD = 141
# A full disk, for which a failed write has no file name.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors that the user can fix by freeing space or changing permissions.
_FIXABLE = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS)
# Words of a command line; None for the arguments of this process.
Arguments = Sequence[str] | None


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError`s and expands ~ in paths.

    Attributes:
      advice: end of every error message.
    """

    def __init__(
        self, *args: Any, advice: str = "--help shows what can be written", **settings: Any
    ):
        super().__init__(*args, **settings)
        self.advice = advice
        self.register("type", None, functools.partial(_convert, str))
        self.register("type", Path, functools.partial(_convert, _path))

    def parse_known_args(  # type: ignore[override]
        self, args: Arguments = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses arguments after a check that all of them are valid text."""
        for word in sys.argv[1:] if args is None else args:
            check_text(word, "command line")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError` instead of printing the usage."""
        raise UserError(f"command line: {message}; {self.advice}")


def _path(text: str) -> Path:
    try:
        return expand_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _convert(convert: Callable[[str], Any], text: str) -> Any:
    """Converts an argument; refuses an empty one, which an unset shell variable leaves."""
    if not text:
        raise argparse.ArgumentTypeError("found nothing; write a value, or leave it out")
    return convert(text)


def check_text(text: str, where: str) -> None:
    """Raises an error for a text with bytes that Python could not decode in this locale.

    Python stores such bytes as halves of surrogate pairs, which files and tokenizers reject.

    Args:
      text: the text.
      where: the place of the text, for the message.

    Raises:
      UserError: the text contains such bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: {ascii(text)} contains bytes that are no text in this locale; write UTF-8, "
            "and set LC_ALL=C.UTF-8"
        ) from None


def refusal(error: UserError | OSError) -> int:
    """Prints an error for the user, one line per mistake, and returns the exit code.

    Raises:
      OSError: `error` itself, if it names no file and is not about a full disk.
    """
    if isinstance(error, UserError):
        for line in error.lines:
            _print_error(line)
        return BAD_INPUT
    if error.filename is None and error.errno not in _FULL:
        raise error
    name = error.filename or "the output, or a file"
    fix = "make room or rights, or " if error.errno in _FIXABLE else ""
    _print_error(f"{name}: {error.strerror}; {fix}write another path")
    return BAD_INPUT


def failure(message: str) -> int:
    """Prints why good input could not be processed, for instance a lack of memory.

    Returns:
      The exit code.
    """
    _print_error(message)
    return FAILED


def _print_error(message: str) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)


def _is_unread() -> bool:
    """True if the reader of standard output has closed it, as `head` does."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block ends, because JAX's import may ignore it or crash."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []

    def note_signal(number: int, frame: object) -> None:
        signals.append(number)

    previous_handler = signal.signal(signal.SIGINT, note_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if signals:
        raise KeyboardInterrupt


def entry_point(main: Callable[[Arguments], int | None]) -> Callable[..., int]:
    """Wraps a command so that errors for the user become one line and exit code 2.

    Args:
      main: the command; takes its arguments and returns an exit code, or None for 0.
    """

    @functools.wraps(main)
    def run(argv: Arguments = None) -> int:
        _prepare_streams()
        try:
            code = main(argv) or 0
            sys.stdout.flush()
            return code
        except (UserError, OSError) as error:
            return _code_after_error(error)
        except KeyboardInterrupt:
            _print_error("interrupted")
            return INTERRUPTED

    return run


def _prepare_streams() -> None:
    """Opens standard streams that are closed, and has stdout escape what it cannot encode."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _code_after_error(error: UserError | OSError) -> int:
    """Prints an error, unless nobody reads the output, and returns the exit code.

    A broken pipe other than standard output is raised again.
    """
    is_unread = isinstance(error, BrokenPipeError) and _is_unread()
    code = UNREAD if is_unread else refusal(error)
    if isinstance(error, OSError) and error.filename is None:
        # The interpreter flushes stdout at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code
