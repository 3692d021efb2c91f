"""Scores rows in forked processes, which end after a batch.

`verifier_worker` calls `scores_of_forks` after it has loaded a package's scorer. Each fork gives up
its rights (`confinement`) before it receives an answer. If an answer takes over the scorer, it can
change neither the machine nor the scores of other batches.
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

# A score or None, a fault or "", and a message about the fault.
Scored = tuple[float | None, str, str]
LATE = "late"
DIED = "died"
_DIED: Scored = (None, DIED, "the process of the scorer died")
_LATE: Scored = (None, LATE, "it took longer than grading.deadline")
# Descriptor on which a fork writes its replies.
_REPLIES = 3
# Bytes of a reply. The text of an exception is cut at some hundred characters.
_LONGEST = 1 << 16
# Descriptors up to this number are closed in a fork.
_MOST_FILES = 1 << 16


def check_confinement() -> None:
    """Tests in a fork that a confined process cannot open a socket.

    Raises:
      OSError: the socket was opened, or the fork could not be confined.
    """
    child = os.fork()
    if child == 0:
        _try_a_socket()
    status = os.waitpid(child, 0)[1]
    if status:
        raise OSError(f"a scorer can't be confined on this machine (status {status})")


def _try_a_socket() -> NoReturn:
    """Confines this process and ends it, with status 0 if it cannot open a socket."""
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
    """Scores rows in a fork, and in a new fork after every row that ended its process.

    Args:
      score: scores one row.
      rows: the rows.
      seconds: deadline of a row.
      confined: the forks give up their rights.
    """
    scores: list[Scored] = []
    while len(scores) < len(rows):
        scores += _scores_of_a_fork(score, rows[len(scores) :], seconds, confined)
    return scores


def _scores_of_a_fork(
    score: Callable[[Any], Scored], rows: Sequence[Any], seconds: float, confined: bool
) -> list[Scored]:
    """Scores the rows up to one that is late or ends the process; that row gets a fault."""
    # Lines that something else writes into the pipe do not begin with this token.
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
    """Writes a line with the token and the score for each row, then ends this process."""
    try:
        os.dup2(pipe, _REPLIES)
        # These include the pipes between the worker and its parent.
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
    """Reads up to `count` replies of a fork; the last one can be a fault."""
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
    """Parses a line of a fork; a line without the token counts as the end of the process."""
    try:
        first, value, fault, message = json.loads(line)
    except (RecursionError, TypeError, ValueError):
        return _DIED
    return (value, fault, message) if first == token else _DIED
