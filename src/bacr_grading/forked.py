"""Scores rows in processes that are forked from a warm one and end after a batch.

A process that has loaded a package's scorer calls `scores_of_forks`. Each fork gives up its rights
(`confinement`) before it sees an answer, so that an answer which takes over the scorer changes
neither this machine nor the score of an answer of another batch.
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

# A score or None, a fault or "", and what is said of the fault.
Scored = tuple[float | None, str, str]
LATE, DIED = "late", "died"
_DIED: Scored = (None, DIED, "the process of the scorer died")
_LATE: Scored = (None, LATE, "it took longer than grading.deadline")
_REPLIES = 3
# Bytes of a reply: an exception's text is cut at some hundred characters.
_LONGEST = 1 << 16
_MOST_FILES = 1 << 16


def check_confinement() -> None:
    """Confines a fork and has it open a socket; OSError: that is not refused."""
    child = os.fork()
    if child == 0:
        _try_a_socket()
    status = os.waitpid(child, 0)[1]
    if status:
        raise OSError(f"a scorer can't be confined on this machine (status {status})")


def _try_a_socket() -> NoReturn:
    """Ends this process with status 0 if the kernel refuses a socket to it."""
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
    """Scores rows in one fork, or, behind a row that its process did not survive, in another.

    Args:
      seconds: that a row may take.
      confined: the forks give up their rights.
    """
    scores: list[Scored] = []
    while len(scores) < len(rows):
        scores += _scores_of_a_fork(score, rows[len(scores) :], seconds, confined)
    return scores


def _scores_of_a_fork(
    score: Callable[[Any], Scored], rows: Sequence[Any], seconds: float, confined: bool
) -> list[Scored]:
    """Scores of the first rows: of all, or up to one that was late or ended the process."""
    # What else writes into the pipe doesn't know this.
    token = secrets.token_hex(16)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _score_and_exit(score, rows, token, writing, confined)
    os.close(writing)
    try:
        return _replies(reading, token, len(rows), seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _score_and_exit(
    score: Callable[[Any], Scored], rows: Sequence[Any], token: str, pipe: int, confined: bool
) -> NoReturn:
    """Writes a line for each row and ends this process."""
    try:
        os.dup2(pipe, _REPLIES)
        # The worker's own pipes among them.
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
    """Reads the replies of a fork: up to `count`, of which the last can be a failure."""
    scores: list[Scored] = []
    buffer = b""
    late_at = time.monotonic() + seconds
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    while len(scores) < count:
        left = late_at - time.monotonic()
        if left <= 0 or not ready.poll(1000 * left):
            return [*scores, _LATE]
        data = os.read(pipe, _LONGEST)
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            reply = _reply(line, token)
            scores.append(reply)
            if reply == _DIED or len(scores) == count:
                return scores
            late_at = time.monotonic() + seconds
        if not data or len(buffer) > _LONGEST:
            return [*scores, _DIED]
    return scores


def _reply(line: bytes, token: str) -> Scored:
    """What a line holds; a line that doesn't begin with the token counts as a death."""
    try:
        first, value, fault, words = json.loads(line)
    except (RecursionError, TypeError, ValueError):
        return _DIED
    return (value, fault, words) if first == token else _DIED
