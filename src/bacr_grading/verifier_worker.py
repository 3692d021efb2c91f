"""Runs a user's verifier or a package's scorer in a process that `pool` starts as a script.

The first line of standard input contains the verifier's source, and every further line a request
with some answers. Each request gets one line of reply. The process may be killed at any moment. The
verifier's own standard input and output are null. A user's file runs with the user's rights. A
package's scorer receives answers only in confined forks of this process (`forked`).
"""

import ast
import base64
import contextlib
import difflib
import functools
import inspect
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

from bacr_grading import forked
from bacr_grading.worker import limit, open_pipes, serve, write_reply

# Faults of a verifier; `verifier.FAULTS` adds faults of the process. Each has a counter.
FAULTS = ("memory", "raised", "text", "nan", "range", "length")
MEMORY, RAISED, TEXT, NAN, RANGE, LENGTH = FAULTS
# Scores may be outside of [0, 1] by this much, because sums of weights can be 1.0000000000000002.
ROUNDING = 1e-6
# Characters of a message.
MESSAGE_CHARS = 300
# Parameter by which a reward function of TRL's form is recognised.
COMPLETIONS = "completions"
# Parameter by which such a function takes the token ids of the completions.
IDS = "completion_ids"


def main(memory_bytes: int, seconds: int, mark: str) -> None:
    """Answers requests until standard input closes, then ends all processes with its mark.

    Args:
      memory_bytes: limit of the address space, also while the verifier is loaded.
      seconds: limit of one answer, after which the kernel ends the process.
      mark: name of the environment variable of this worker's processes.
    """
    requests, replies = open_pipes()
    limit(memory_bytes)
    setup = json.loads(requests.readline())
    try:
        module = run_file(setup)
        if setup["third_party"]:
            answer = scorer(module, setup)
        else:
            function = load(module, setup)
            answer = functools.partial(graded, function, setup["batch"], setup["path"])
    # A file can raise anything when it is loaded; the parent prints the reason.
    except BaseException as error:
        write_reply(replies, {"refused": describe(error, setup["path"])})
        return
    serve(requests, replies, answer, lambda request: seconds * len(request["rows"]))
    end_offspring(mark)


def end_offspring(mark: str) -> None:
    """Kills all other processes with an environment variable called `mark`, in any session.

    Works on Linux only. Processes that were started without the variable stay.
    """
    if not os.path.isdir("/proc/self"):
        return
    while _kill_marked(f"{mark}=".encode()):
        # A killed process is visible until its end, and its newest child only in the next scan.
        time.sleep(0.005)


def _kill_marked(mark: bytes) -> int:
    """Kills the other processes whose environment contains `mark`; returns their number."""
    count = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        # Processes end meanwhile, and those of other users cannot be read.
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                is_marked = mark in file.read()
            if is_marked:
                os.kill(int(entry.name), signal.SIGKILL)
                count += 1
    return count


def run_file(setup: dict[str, Any]) -> types.ModuleType:
    """Runs the source that the parent read, and returns it as a module."""
    module = types.ModuleType("bacr_verifier")
    module.__file__ = setup["path"]
    # Dataclasses and pickle find a module by its name.
    sys.modules[module.__name__] = module
    exec(compile(setup["source"], setup["path"], "exec"), module.__dict__)
    return module


def load(module: types.ModuleType, setup: dict[str, Any]) -> Callable[..., Any]:
    """Returns the verifier as a function of question, answer and reference, or of their lists.

    Raises:
      LookupError: the file has no such function.
      TypeError: the function has TRL's form but is imported, or needs an unknown column.
    """
    function = module.__dict__.get(setup["name"])
    if not callable(function):
        similar_names = difflib.get_close_matches(setup["name"], module.__dict__, n=1)
        raise LookupError(f"it has no function {'; write '.join([setup['name'], *similar_names])}")
    if setup["of_rows"]:
        return _score_of_row(function)
    if COMPLETIONS in _parameters(function) and setup["trl"] is None:
        raise TypeError(
            f"{setup['name']} has TRL's form, which is served if the file itself defines it; write "
            "def there"
        )
    return function if setup["trl"] is None else trl_form(function, setup)


def _score_of_row(function: Callable[..., Any]) -> Callable[[str, str, str], Any]:
    """Adapts score(answer, row) to the form of other verifiers, with a packed row as reference."""

    def score(question: str, answer: str, row: str) -> Any:
        return function(answer, unpacked(row))

    return score


def trl_form(function: Callable[..., Any], setup: dict[str, Any]) -> Callable[..., Any]:
    """Returns a function of lists that calls a reward function of TRL's form by its columns.

    Raises:
      TypeError: the function needs a column that no grader has.
    """
    parameters = _parameters(function).values()
    columns = {*setup["trl"]["references"], *setup["trl"]["questions"], "prompts", COMPLETIONS}
    if setup["trl"]["ids"]:
        columns.add(IDS)
    for parameter in parameters:
        if _is_required(parameter) and parameter.name not in columns:
            raise TypeError(
                f"{setup['name']} needs the column {parameter.name!r}; write a default for it, or "
                f"one of {', '.join(sorted(columns))}"
            )
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        columns &= {parameter.name for parameter in parameters}
    as_messages = reads_messages(setup["source"])

    def batch(
        questions: list[str],
        answers: list[str],
        golds: list[str],
        ids: list[list[int]] | None = None,
    ) -> Any:
        values: dict[str, Any] = dict.fromkeys(setup["trl"]["questions"], questions)
        values |= dict.fromkeys(setup["trl"]["references"], golds)
        values["prompts"] = _texts(questions, "user", as_messages)
        values[COMPLETIONS] = _texts(answers, "assistant", as_messages)
        values[IDS] = ids
        result = function(**{name: values[name] for name in columns})
        return _run_coroutine(result) if inspect.iscoroutine(result) else result

    return batch


def _is_required(parameter: inspect.Parameter) -> bool:
    """True if a parameter needs an argument with its name."""
    is_single = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return is_single and parameter.default is parameter.empty


def _run_coroutine(coroutine: Any) -> Any:
    """Runs a coroutine and returns its result."""
    import asyncio

    return asyncio.run(coroutine)


def _texts(texts: list[str], role: str, as_messages: bool) -> list[Any]:
    """Returns texts in TRL's form: unchanged, or each as a list of one message."""
    if not as_messages:
        return texts
    return [[{"role": role, "content": text}] for text in texts]


def reads_messages(source: str) -> bool:
    """True if a file contains `["content"]` or `.get("content")`, as for TRL's conversations."""
    return any(
        isinstance(key, ast.Constant) and key.value == "content"
        for node in ast.walk(ast.parse(source))
        for key in _keys(node)
    )


def _keys(node: ast.AST) -> list[ast.expr]:
    """Returns the key of an expression such as `x[key]` or `x.get(key)`."""
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.args[:1] if node.func.attr == "get" else []
    return []


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns a function's parameters by name; an empty dict if it has no signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def scorer(
    module: types.ModuleType, setup: dict[str, Any]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns a function that answers requests by a package's score(answer, row), in forks.

    If the file has a function prepare(row), it is called first in this process, so that forks
    inherit objects that are slow to make. It does not receive an answer.

    Raises:
      OSError: the parent expects confined forks, but forks cannot be confined.
    """
    if setup["confined"]:
        forked.check_confinement()
    function = load(module, setup)
    prepare = module.__dict__.get("prepare")

    def score(row: Sequence[str]) -> forked.Scored:
        reply = graded(function, False, setup["path"], {"rows": [row]})
        return reply["scores"][0], reply["faults"][0], reply["message"]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        rows = request["rows"]
        try:
            if prepare is not None:
                for _, _, row in rows:
                    prepare(unpacked(row))
        except Exception as error:
            return _without_scores(len(rows), RAISED, describe(error, setup["path"]))
        scores = forked.scores_of_forks(
            score, rows, seconds=setup["deadline"], confined=setup["confined"]
        )
        return {
            "scores": [value for value, _, _ in scores],
            "faults": [fault for _, fault, _ in scores],
            "message": next((message for _, _, message in scores if message), ""),
        }

    return answer


def unpacked(text: str) -> types.SimpleNamespace:
    """Returns a packed row as an object with its fields: id, question, answer, metadata, level."""
    return types.SimpleNamespace(**pickle.loads(base64.b64decode(text)))


def describe(error: BaseException, path: str) -> str:
    """Returns the type and first line of an exception, and the verifier's line that raised it."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            where = f" (line {frame.lineno})"
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line[:MESSAGE_CHARS]}{where}"


def graded(
    function: Callable[..., Any], batch: bool, path: str, request: dict[str, Any]
) -> dict[str, Any]:
    """Scores the answers of a request.

    Args:
      function: the verifier.
      batch: the verifier takes lists.
      path: the verifier's file, for messages.
      request: "rows" of question, answer and reference, and "ids" if the verifier takes token ids.

    Returns:
      A dict with "scores", in which an answer without a score has None; its "faults"; and a
      "message" about the first fault.
    """
    rows = request["rows"]
    count = len(rows)
    ids = {"ids": request["ids"]} if "ids" in request else {}
    try:
        if batch:
            values = as_list(function(*map(list, zip(*rows)), **ids))
        else:
            values = [function(*row) for row in rows]
    except MemoryError:
        return {**_without_scores(count, MEMORY, "MemoryError"), "memory": True}
    # SystemExit too, because a verifier must not end the worker.
    except BaseException as error:
        reply = _without_scores(count, RAISED, describe(error, path))
        return {**reply, "error": type(error).__name__}
    if values is None:
        return _without_scores(count, LENGTH, "no list of scores")
    if len(values) != count:
        return _without_scores(count, LENGTH, f"{len(values)} scores for {count} answers")
    scores: list[float | None] = []
    faults: list[str] = []
    message = ""
    for value in values:
        score, fault = score_of(value)
        scores.append(score)
        faults.append(fault)
        if fault and not message:
            message = repr_short(value)
    return {"scores": scores, "faults": faults, "message": message}


def as_list(result: Any) -> list[Any] | None:
    """Returns the result of a verifier of lists as a list; None if it is not a sequence."""
    if isinstance(result, str | bytes | dict):
        return None
    try:
        return list(result)
    except TypeError:
        return None


def score_of(value: Any) -> tuple[float | None, str]:
    """Returns a score in [0, 1] and "", or None and a fault."""
    if value is None or isinstance(value, str | bytes):
        return None, TEXT
    try:
        number = float(value)
    except Exception:
        # The conversion of an object to a number can raise anything.
        return None, TEXT
    if math.isnan(number):
        return None, NAN
    if not -ROUNDING <= number <= 1.0 + ROUNDING:
        return None, RANGE
    score = min(max(number, 0.0), 1.0)
    return score, ""


def repr_short(value: Any) -> str:
    """Returns a message with a value that is not a score."""
    try:
        return f"it returned {value!r}"[:MESSAGE_CHARS]
    except Exception:
        return f"it returned a {type(value).__name__}"


def _without_scores(count: int, fault: str, message: str) -> dict[str, Any]:
    return {"scores": [None] * count, "faults": [fault] * count, "message": message}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
