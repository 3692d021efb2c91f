"""The process that runs a verifier of one's own: a script, which imports only `worker` of ours.

The first line of its input holds the verifier's source, every further one some answers; a line goes
out for each. It can be killed at any moment. What the verifier prints goes nowhere, and it finds
nothing on its standard input.
"""

import base64
import contextlib
import difflib
import functools
import json
import math
import os
import pickle
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

from bacr_grading.worker import limit, open_pipes, say, serve

# What is wrong with a score; each is a counter (`verifier.FAULTS`).
FAULTS = ("memory", "raised", "text", "nan", "range", "length")
MEMORY, RAISED, TEXT, NAN, RANGE, LENGTH = FAULTS
# Sums of weights come out as 1.0000000000000002.
ROUNDING = 1e-6
MOST_SAID = 300


def main(memory_bytes: int, seconds: int, mark: str) -> None:
    """Answers requests until standard input closes, and ends what has its `mark` then.

    `memory_bytes` limits the address space, also while the verifier is loaded; `seconds` is of one
    answer, and a request has as many for each.
    """
    requests, replies = open_pipes()
    limit(memory_bytes)
    setup = json.loads(requests.readline())
    try:
        function = load(setup)
    # Whatever a file does when it is loaded, the reason for not being ready goes to the parent.
    except BaseException as error:
        say(replies, {"refused": told(error, setup["path"])})
        return
    score = functools.partial(graded, function, setup["batch"], setup["path"])
    serve(requests, replies, score, lambda request: seconds * len(request["rows"]))
    end_offspring(mark)


def end_offspring(mark: str) -> None:
    """Ends all processes that have a variable called `mark`, sessions of their own or not.

    Linux only. A process that was started without that variable is not found.
    """
    found = 1
    while found:
        found = 0
        for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
            # Processes come and go, and those of others can't be looked at.
            with contextlib.suppress(OSError):
                if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                    continue
                with open(f"/proc/{entry.name}/environ", "rb") as file:
                    if f"{mark}=".encode() in file.read():
                        os.kill(int(entry.name), signal.SIGKILL)
                        found += 1
        # One that is killed shows until it is gone; one that it has just started, in the next look.
        time.sleep(0.005 * bool(found))


def load(setup: dict[str, Any]) -> Callable[..., Any]:
    """The function of a file, from its source as it was when the parent read it."""
    module = types.ModuleType("bacr_verifier")
    module.__file__ = setup["path"]
    # Dataclasses and pickle look a module up by its name.
    sys.modules[module.__name__] = module
    exec(compile(setup["source"], setup["path"], "exec"), module.__dict__)
    function = module.__dict__.get(setup["name"])
    if not callable(function):
        near = difflib.get_close_matches(setup["name"], module.__dict__, n=1)
        raise LookupError(f"it has no function {'; write '.join([setup['name'], *near])}")
    if setup.get("of_rows"):
        return lambda question, answer, row: function(answer, unpacked(row))
    return function


def unpacked(text: str) -> types.SimpleNamespace:
    """The row of a question: id, question, answer, metadata, level."""
    return types.SimpleNamespace(**pickle.loads(base64.b64decode(text)))


def told(error: BaseException, path: str) -> str:
    """What an exception says, in one line, and the line of the verifier that it came from."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {said[:MOST_SAID]}{where}"


def graded(
    function: Callable[..., Any], batch: bool, path: str, request: dict[str, Any]
) -> dict[str, Any]:
    """Scores of a request: null where there is none, and then what was wrong."""
    rows = request["rows"]
    count = len(rows)
    try:
        found = function(*map(list, zip(*rows))) if batch else [function(*row) for row in rows]
        found = as_rows(found) if batch else found
    except MemoryError:
        return {**_none(count, MEMORY, "MemoryError"), "memory": True}
    # SystemExit too: a verifier must not end the worker by it.
    except BaseException as error:
        said = told(error, path)
        return {**_none(count, RAISED, said), "error": type(error).__name__}
    if found is None or len(found) != count:
        said = "no list of scores" if found is None else f"{len(found)} scores for {count} answers"
        return _none(count, LENGTH, said)
    pairs = [score_of(value) for value in found]
    said = next((shown(v) for v, (_, fault) in zip(found, pairs) if fault), "")
    return {"scores": [s for s, _ in pairs], "faults": [f for _, f in pairs], "said": said}


def as_rows(found: Any) -> Sequence[Any] | None:
    """What a batch form returned as a list; None where it is none."""
    if isinstance(found, str | bytes | dict):
        return None
    try:
        return list(found)
    except TypeError:
        return None


def score_of(value: Any) -> tuple[float | None, str]:
    """A score and "", or None and what is wrong with it."""
    if value is None or isinstance(value, str | bytes):
        return None, TEXT
    try:
        number = float(value)
    except Exception:  # Whatever an object does when it is asked for a number.
        return None, TEXT
    if math.isnan(number):
        return None, NAN
    if not -ROUNDING <= number <= 1.0 + ROUNDING:
        return None, RANGE
    return min(max(number, 0.0), 1.0), ""


def shown(value: Any) -> str:
    """A value that is no score, for people."""
    try:
        return f"it returned {value!r}"[:MOST_SAID]
    except Exception:
        return f"it returned a {type(value).__name__}"


def _none(count: int, fault: str, said: str) -> dict[str, Any]:
    return {"scores": [None] * count, "faults": [fault] * count, "said": said}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
