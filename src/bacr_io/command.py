"""Command-line parsing and error handling shared by the commands of all packages.

Errors that the user can fix are printed to stderr as one line each, without a traceback. Options of
specific commands are not defined here.
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

from bacr_io.errors import UserError, printable
from bacr_io.files import expand_home

# Exit code for invalid input, the same as in argparse.
BAD_INPUT = 2
# Exit code for valid input that this machine could not process, for example out of memory.
FAILED = 1
# Exit code of a command that was asked to stop and can be resumed by running the same command again
# (EX_TEMPFAIL in sysexits.h).
STOPPED = 75
# Exit codes that shells report after SIGINT and SIGPIPE (128 plus the signal number). A command
# that displays its progress continues without a reader of stdout, because its results are in files.
INTERRUPTED = 130
UNREAD = 141
# Values of `OSError.errno` for a full disk. A failed write raises an error without a file name.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Values of `OSError.errno` for a closed pipe and for a terminal that was disconnected.
_NO_READER = (errno.EPIPE, errno.EIO)
# Values of `OSError.errno` that the user can fix by freeing disk space or changing permissions.
_FIXABLE = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS)
# Command-line arguments. None means the arguments of the current process.
Arguments = Sequence[str] | None


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` on errors and expands ~ in paths.

    Attributes:
      advice: hint that is appended to every error message.
    """

    def __init__(
        self, *args: Any, advice: str = "run it with --help to see the options", **settings: Any
    ):
        super().__init__(*args, **settings)
        self.advice = advice
        self.register("type", None, functools.partial(_convert, str))
        self.register("type", Path, functools.partial(_convert, _path))

    def parse_known_args(  # type: ignore[override]
        self, args: Arguments = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Checks that all arguments are valid text, then parses them."""
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
    """Converts an argument and rejects an empty one, which is usually an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError(
            "the value is empty; pass a value, or leave out the option"
        )
    return convert(text)


def check_text(text: str, where: str) -> None:
    """Checks that a text contains no bytes that Python could not decode in this locale.

    Python represents such bytes as unpaired surrogates, which files and tokenizers reject.

    Args:
      text: the text.
      where: where the text comes from, for the error message.

    Raises:
      UserError: if the text contains such bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: {ascii(text)} contains bytes that are not valid in the encoding of this "
            "locale; use UTF-8 text and set the environment variable LC_ALL=C.UTF-8"
        ) from None


def refusal(error: UserError | OSError) -> int:
    """Prints the message of an error that the user can correct, and returns the exit code.

    Args:
      error: a `UserError`, which may contain several messages, or an `OSError` about a file or a
        full disk.

    Raises:
      OSError: `error` itself if it concerns neither a file nor a full disk.
    """
    if isinstance(error, UserError):
        for line in error.lines:
            _print_error(line)
        return BAD_INPUT
    if error.filename is None and error.errno not in _FULL:
        raise error
    name = error.filename or "the output, or a file"
    fix = "free disk space or change the permissions, or " if error.errno in _FIXABLE else ""
    _print_error(f"{name}: {error.strerror}; {fix}use another path")
    return BAD_INPUT


def failure(message: str) -> int:
    """Prints why valid input could not be processed, for example out of memory.

    Returns:
      The exit code.
    """
    _print_error(message)
    return FAILED


def _print_error(message: str) -> None:
    print_message(f"error: {printable(message)}")


def print_message(line: str) -> None:
    """Prints a line to stderr. The line is dropped if stderr has lost its reader."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError as error:
        drop_unread_output(error)


def drop_unread_output(error: OSError) -> None:
    """Redirects stdout and stderr to /dev/null if they have lost their reader.

    Their later writes succeed then, and so does the flush of the interpreter at exit.

    Args:
      error: error of a write to an output stream, which may be another stream than these two.

    Raises:
      OSError: `error` itself, if it has another cause, such as a full disk.
    """
    if error.errno not in _NO_READER:
        raise error
    for descriptor in (1, 2):
        if _is_unread(descriptor):
            _discard_output(descriptor)


def _is_unread(descriptor: int) -> bool:
    """True if a pipe was closed by its reader, as by `head`, or a terminal was disconnected."""
    output = select.poll()
    output.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))


def _discard_output(descriptor: int) -> None:
    """Redirects a file descriptor to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays SIGINT until the end of the block.

    It is used while JAX is imported. A SIGINT during the import may be lost, or crash the process.
    """
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
    """Wraps the main function of a command with error handling.

    A `UserError`, or an `OSError` with a file name, is printed as one line per mistake, and the
    exit code is 2. After Ctrl-C, the exit code is 130. If stdout has lost its reader, it is 141.

    Args:
      main: function that takes the command-line arguments and returns an exit code, or None for 0.
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
    """Reopens closed standard streams, and makes stdout escape characters it cannot encode."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _code_after_error(error: UserError | OSError) -> int:
    """Prints an error and returns the exit code.

    Nothing is printed if stdout has lost its reader. A `BrokenPipeError` of another pipe is
    re-raised.
    """
    if isinstance(error, UserError) or error.filename is not None:
        return refusal(error)
    is_unread = error.errno in _NO_READER and _is_unread(1)
    code = UNREAD if is_unread else refusal(error)
    # The interpreter flushes stdout at exit, which would fail again. With /dev/null in its place,
    # the flush succeeds.
    _discard_output(1)
    return code
