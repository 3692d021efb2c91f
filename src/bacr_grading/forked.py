"""Scores answers in forked, sandboxed processes that exit after one batch.

`verifier_worker` calls `scores_of_forks` after it has loaded the scorer of a third-party package.
Each forked process sandboxes itself (see `confinement`) before it receives an answer. A malicious
answer that exploits the scorer can therefore affect neither the machine nor the scores of other
batches.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from bacr_grading import confinement

# A tuple of the score or None, the reason of a failure or "", and an error message or "".
Scored = tuple[float | None, str, str]
LATE = "late"
DIED = "died"
_DIED: Scored = (None, DIED, "the process of the scorer died")
_LATE: Scored = (None, LATE, "it took longer than grading.deadline")
# File descriptor to which a forked process writes its replies.
_REPLIES = 3
# Maximum size of a reply in bytes. Error messages are truncated to a few hundred characters, so
# real replies are much shorter.
_LONGEST = 1 << 16
# A forked process closes all inherited file descriptors below this number.
_MOST_FILES = 1 << 16


def check_confinement() -> None:
    """Checks in a forked process that a sandboxed process cannot open a socket.

    Raises:
      OSError: if the socket could be opened, or the process could not be sandboxed.
    """
    child = os.fork()
    if child == 0:
        _try_a_socket()
    status = os.waitpid(child, 0)[1]
    if status:
        raise OSError(
            "the process that runs a scorer can't be sandboxed on this machine, because it can "
            f"still open a socket (status {status})"
        )


def _try_a_socket() -> NoReturn:
    """Sandboxes this process and exits, with exit code 0 if opening a socket fails as expected."""
    import socket

    try:
        confinement.confine()
        socket.socket()
    except PermissionError:
        os._exit(0)
    finally:
        os._exit(1)


def scores_of_forks(
    score: Callable[[Any], Scored], rows: Sequence[Any], *, seconds: float, confined: bool
) -> list[Scored]:
    """Scores a batch of answers in a forked process.

    If an answer times out or crashes the process, the remaining answers are scored in a new fork.

    Args:
      score: scores one row.
      rows: the rows of the batch. A row contains an answer and the problem that it answers.
      seconds: timeout of a row in seconds.
      confined: True to sandbox the forked processes.

    Returns:
      One score for each row, or the reason why it has none.
    """
    scores: list[Scored] = []
    while len(scores) < len(rows):
        scores += _scores_of_a_fork(score, rows[len(scores) :], seconds, confined)
    return scores


def _scores_of_a_fork(
    score: Callable[[Any], Scored], rows: Sequence[Any], seconds: float, confined: bool
) -> list[Scored]:
    """Scores rows in a single fork until a row times out or crashes the process.

    In this case, the last item of the result is the failure of this row, and the results of further
    rows are missing. The arguments are as for `scores_of_forks`.
    """
    # Each reply begins with a random token, because other code in the process may also print.
    token = secrets.token_hex(16)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _score_and_exit(score, rows, token, write_end, confined)
    os.close(write_end)
    try:
        return _replies(read_end, token, len(rows), seconds)
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _score_and_exit(
    score: Callable[[Any], Scored], rows: Sequence[Any], token: str, pipe: int, confined: bool
) -> NoReturn:
    """Writes the score of each row to the pipe, then exits this process.

    Each score is one line, which begins with the token as proof of its origin.
    """
    try:
        os.dup2(pipe, _REPLIES)
        # These descriptors include the pipes between the worker and its parent process.
        os.closerange(_REPLIES + 1, _MOST_FILES)
        if confined:
            confinement.end_with_parent()
            confinement.confine()
        for row in rows:
            reply = json.dumps([token, *score(row)])
            os.write(_REPLIES, f"{reply}\n".encode("ascii"))
        os._exit(0)
    finally:
        os._exit(1)


def _replies(pipe: int, token: str, count: int, seconds: float) -> list[Scored]:
    """Reads up to `count` scores from a forked process. The last item can be a failure."""
    scores: list[Scored] = []
    buffer = b""
    deadline = time.monotonic() + seconds
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    while len(scores) < count:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not ready.poll(1000 * remaining):
            return [*scores, _LATE]
        data = os.read(pipe, _LONGEST)
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            reply = _reply(line, token)
            scores.append(reply)
            if reply == _DIED or len(scores) == count:
                return scores
            deadline = time.monotonic() + seconds
        if not data or len(buffer) > _LONGEST:
            return [*scores, _DIED]
    return scores


def _reply(line: bytes, token: str) -> Scored:
    """Parses a line written by a forked process.

    A malformed line, or a line without the token, is treated like a crash of the process.
    """
    try:
        first, value, fault, message = json.loads(line)
    except (RecursionError, TypeError, ValueError):
        return _DIED
    return (value, fault, message) if first == token else _DIED
