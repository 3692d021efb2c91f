"""Worker process that runs a user's verifier or the scorer of a third-party package.

`pool` starts this module as a script and may kill it at any time. The first line of stdin contains
the source code of the verifier, and every further line is a request with a batch of answers. Each
request is answered by one line on stdout. While the verifier runs, stdin and stdout are redirected
to /dev/null. A user's file runs with the permissions of the user. The scorer of a third-party
package receives answers only in sandboxed forks of this process (see `forked`).
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

# Reasons why a verifier can fail in this process. `verifier.FAULTS` also contains failures of the
# process itself. Each reason has a counter.
FAULTS = ("memory", "raised", "text", "nan", "range", "length")
MEMORY, RAISED, TEXT, NAN, RANGE, LENGTH = FAULTS
# Tolerance for scores outside of [0, 1], because a sum of weights can be 1.0000000000000002. Such
# scores are clipped.
ROUNDING = 1e-6
# Maximum length of an error message in characters.
MESSAGE_CHARS = 300
# Name of the parameter that identifies a TRL reward function.
COMPLETIONS = "completions"
# Name of the parameter by which a TRL reward function receives the token ids of the completions.
IDS = "completion_ids"


def main(memory_bytes: int, seconds: int, spare_seconds: int, mark: str) -> None:
    """Answers requests until stdin is closed, then kills all processes started by the verifier.

    Args:
      memory_bytes: maximum size of the address space. It also applies while the verifier is loaded.
      seconds: time limit of one answer. The kernel kills this process after the time limits of all
        answers of a request and `spare_seconds`.
      spare_seconds: additional time limit of a request, for example to fork and to prepare rows.
      mark: name of the environment variable that identifies the processes of this worker.
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
    # A user's file can raise any exception when it is loaded. The parent process reports it.
    except BaseException as error:
        write_reply(replies, {"refused": describe(error, setup["path"])})
        return

    def time_limit(request: dict[str, Any]) -> int:
        return seconds * len(request["rows"]) + spare_seconds

    serve(requests, replies, answer, time_limit)
    end_offspring(mark)


def end_offspring(mark: str) -> None:
    """Kills all other processes whose environment contains the variable `mark`.

    Also finds processes that moved to another session, but not processes that were started with a
    cleared environment. Linux only; does nothing on other systems.
    """
    if not os.path.isdir("/proc/self"):
        return
    while _kill_marked(f"{mark}=".encode()):
        # Repeat the scan, because a killed process may have started a child after it was scanned.
        # The pause gives killed processes time to exit.
        time.sleep(0.005)


def _kill_marked(mark: bytes) -> int:
    """Kills all other processes whose environment contains `mark` and returns their number."""
    count = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        # A process may have exited since the scan, and processes of other users are not readable.
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                is_marked = mark in file.read()
            if is_marked:
                os.kill(int(entry.name), signal.SIGKILL)
                count += 1
    return count


def run_file(setup: dict[str, Any]) -> types.ModuleType:
    """Executes the source code that the parent process sent, and returns it as a module."""
    module = types.ModuleType("bacr_verifier")
    module.__file__ = setup["path"]
    # Dataclasses and pickle look up modules by name in sys.modules.
    sys.modules[module.__name__] = module
    exec(compile(setup["source"], setup["path"], "exec"), module.__dict__)
    return module


def load(module: types.ModuleType, setup: dict[str, Any]) -> Callable[..., Any]:
    """Returns the verifier as a function of a question, an answer and a reference.

    The returned function takes three lists instead if `setup["batch"]` is True.

    Raises:
      LookupError: if the file does not define the function.
      TypeError: if the function is a TRL reward function that is imported instead of defined in the
        file, or that requires an unknown column.
    """
    function = module.__dict__.get(setup["name"])
    if not callable(function):
        similar_names = difflib.get_close_matches(setup["name"], module.__dict__, n=1)
        raise LookupError(
            f"the file defines no function {'; use '.join([setup['name'], *similar_names])}"
        )
    if setup["of_rows"]:
        return _score_of_row(function)
    if COMPLETIONS in _parameters(function) and setup["trl"] is None:
        raise TypeError(
            f"{setup['name']} is a TRL reward function (it has the parameter `completions`), but "
            "it is imported into the file. A TRL reward function must be defined in the file "
            "itself; define it there with def"
        )
    return function if setup["trl"] is None else trl_form(function, setup)


def _score_of_row(function: Callable[..., Any]) -> Callable[[str, str, str], Any]:
    """Adapts score(answer, row) to the signature verifier(question, answer, reference).

    A row is the dataset entry of one problem. The adapted function expects the serialized row in
    place of the reference.
    """

    def score(question: str, answer: str, row: str) -> Any:
        return function(answer, unpacked(row))

    return score


def trl_form(function: Callable[..., Any], setup: dict[str, Any]) -> Callable[..., Any]:
    """Adapts a TRL reward function to the signature of a verifier that takes lists.

    The adapted function passes questions, answers and references as the keyword arguments that the
    reward function accepts.

    Raises:
      TypeError: if the reward function requires a column that the grader does not provide.
    """
    parameters = _parameters(function).values()
    columns = {*setup["trl"]["references"], *setup["trl"]["questions"], "prompts", COMPLETIONS}
    if setup["trl"]["ids"]:
        columns.add(IDS)
    for parameter in parameters:
        if _is_required(parameter) and parameter.name not in columns:
            raise TypeError(
                f"{setup['name']} has the parameter {parameter.name!r}, but the data has no "
                "column of this name; give the parameter a default, or use one of the columns "
                f"{', '.join(sorted(columns))}"
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
    """True if a parameter has no default and can be passed by keyword."""
    is_single = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return is_single and parameter.default is parameter.empty


def _run_coroutine(coroutine: Any) -> Any:
    """Runs a coroutine and returns its result."""
    import asyncio

    return asyncio.run(coroutine)


def _texts(texts: list[str], role: str, as_messages: bool) -> list[Any]:
    """Returns texts in TRL's standard format (unchanged) or conversational format.

    In the conversational format, each text becomes a list with a single message.

    Args:
      texts: prompts or completions.
      role: role of the messages, "user" or "assistant".
      as_messages: True for the conversational format.
    """
    if not as_messages:
        return texts
    return [[{"role": role, "content": text}] for text in texts]


def reads_messages(source: str) -> bool:
    """True if a file reads the key "content", as functions for TRL's conversational format do.

    Searches the source code for expressions such as `x["content"]` or `x.get("content")`.
    """
    return any(
        isinstance(key, ast.Constant) and key.value == "content"
        for node in ast.walk(ast.parse(source))
        for key in _keys(node)
    )


def _keys(node: ast.AST) -> list[ast.expr]:
    """Returns a list with the key of an expression such as `x[key]` or `x.get(key)`.

    The list is empty for all other expressions.
    """
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.args[:1] if node.func.attr == "get" else []
    return []


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns a function's parameters by name, or an empty dict if it has no signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def scorer(
    module: types.ModuleType, setup: dict[str, Any]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns a function that answers requests by calling score(answer, row) in forked processes.

    A row is the dataset entry of one problem, and a request contains a batch of answers.

    If the file defines a function prepare(row), it is called in this process before forking, so
    that the forks inherit objects that are slow to create. It never receives an answer.

    Raises:
      OSError: if the parent process requires sandboxed forks, but the sandbox does not work.
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
    """Deserializes a dataset row (one problem) that `verifier.packed` serialized.

    Returns:
      An object with the attributes id, question, answer, metadata and level (difficulty level).
    """
    return types.SimpleNamespace(**pickle.loads(base64.b64decode(text)))


def describe(error: BaseException, path: str) -> str:
    """Formats an exception as its type, its first line and the line number in the verifier."""
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
      batch: True if the verifier takes lists.
      path: path of the verifier's file, for error messages.
      request: a dict. "rows" is a list of (question, answer, reference). "ids" contains the token
        ids of the answers, if the verifier takes token ids.

    Returns:
      A dict with three keys. "scores" is a list with the score of each answer, or None after a
      failure. "faults" is a list with the reason of each failure, or "". "message" describes the
      first failure.
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
    # BaseException includes SystemExit, because a verifier must not terminate the worker.
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
    """Converts the result of a verifier that takes lists to a list. Returns None on failure."""
    if isinstance(result, str | bytes | dict):
        return None
    try:
        return list(result)
    except TypeError:
        return None


def score_of(value: Any) -> tuple[float | None, str]:
    """Converts a verifier's return value to a score.

    Returns:
      A pair of the score in [0, 1] and "", or a pair of None and the reason of the failure.
    """
    if value is None or isinstance(value, str | bytes):
        return None, TEXT
    try:
        number = float(value)
    except Exception:
        # An object's __float__ can raise any exception.
        return None, TEXT
    if math.isnan(number):
        return None, NAN
    if not -ROUNDING <= number <= 1.0 + ROUNDING:
        return None, RANGE
    score = min(max(number, 0.0), 1.0)
    return score, ""


def repr_short(value: Any) -> str:
    """Returns an error message that contains an invalid return value of a verifier."""
    try:
        return f"it returned {value!r}"[:MESSAGE_CHARS]
    except Exception:
        return f"it returned a {type(value).__name__}"


def _without_scores(count: int, fault: str, message: str) -> dict[str, Any]:
    return {"scores": [None] * count, "faults": [fault] * count, "message": message}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
