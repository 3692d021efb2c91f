"""The process that runs a verifier of one's own or a package's scorer: a script.

The first line of its input holds the verifier's source, every further one some answers; a line goes
out for each. It can be killed at any moment. What the verifier prints goes nowhere, and it finds
nothing on its standard input. A user's file runs here with the user's rights; a package's
scorer sees answers only in confined forks of it (`forked`).
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
from bacr_grading.worker import limit, open_pipes, say, serve

# What is wrong with a score; each is a counter (`verifier.FAULTS`).
FAULTS = ("memory", "raised", "text", "nan", "range", "length")
MEMORY, RAISED, TEXT, NAN, RANGE, LENGTH = FAULTS
# Sums of weights come out as 1.0000000000000002.
ROUNDING = 1e-6
MOST_SAID = 300
# What a reward function of TRL's form is recognised by, and the token ids that it may ask for.
COMPLETIONS, IDS = "completions", "completion_ids"


def main(memory_bytes: int, seconds: int, mark: str) -> None:
    """Answers requests until standard input closes, and ends what has its `mark` then.

    `memory_bytes` limits the address space, also while the verifier is loaded; `seconds` is of one
    answer, and a request has as many for each.
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
    # Whatever a file does when it is loaded, the reason for not being ready goes to the parent.
    except BaseException as error:
        say(replies, {"refused": told(error, setup["path"])})
        return
    serve(requests, replies, answer, lambda request: seconds * len(request["rows"]))
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


def run_file(setup: dict[str, Any]) -> types.ModuleType:
    """Runs a file, from its source as it was when the parent read it."""
    module = types.ModuleType("bacr_verifier")
    module.__file__ = setup["path"]
    # Dataclasses and pickle look a module up by its name.
    sys.modules[module.__name__] = module
    exec(compile(setup["source"], setup["path"], "exec"), module.__dict__)
    return module


def load(module: types.ModuleType, setup: dict[str, Any]) -> Callable[..., Any]:
    """The function that a run names, as one of questions, answers and references."""
    function = module.__dict__.get(setup["name"])
    if not callable(function):
        near = difflib.get_close_matches(setup["name"], module.__dict__, n=1)
        raise LookupError(f"it has no function {'; write '.join([setup['name'], *near])}")
    if setup["of_rows"]:
        return lambda question, answer, row: function(answer, unpacked(row))
    if COMPLETIONS in _parameters(function) and setup["trl"] is None:
        raise TypeError(
            f"{setup['name']} has TRL's form, which is served if the file itself defines it; write "
            "def there"
        )
    return function if setup["trl"] is None else trl_form(function, setup)


def trl_form(function: Callable[..., Any], setup: dict[str, Any]) -> Callable[..., Any]:
    """A reward function of TRL's form, called by columns, as a batch verifier.

    TypeError: it needs a column that no grader has.
    """
    parameters = _parameters(function).values()
    columns = {*setup["trl"]["references"], *setup["trl"]["questions"], "prompts", COMPLETIONS}
    columns |= {IDS} if setup["trl"]["ids"] else set()
    for one in parameters:
        single = one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)
        if single and one.default is one.empty and one.name not in columns:
            raise TypeError(
                f"{setup['name']} needs the column {one.name!r}; write a default for it, or one of "
                f"{', '.join(sorted(columns))}"
            )
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    wanted = columns if takes_all else columns & {one.name for one in parameters}
    as_messages = reads_messages(setup["source"])

    def batch(
        questions: list[str],
        answers: list[str],
        golds: list[str],
        ids: list[list[int]] | None = None,
    ) -> Any:
        given: dict[str, Any] = dict.fromkeys(setup["trl"]["questions"], questions)
        given |= dict.fromkeys(setup["trl"]["references"], golds)
        given["prompts"] = _texts(questions, "user", as_messages)
        given[COMPLETIONS] = _texts(answers, "assistant", as_messages)
        given[IDS] = ids
        found = function(**{name: given[name] for name in wanted})
        return finished(found) if inspect.iscoroutine(found) else found

    return batch


def finished(coroutine: Any) -> Any:
    """What a coroutine returns."""
    import asyncio

    return asyncio.run(coroutine)


def _texts(texts: list[str], role: str, as_messages: bool) -> list[Any]:
    """Texts as TRL has them: as they are, or each as a list of one message."""
    if not as_messages:
        return texts
    return [[{"role": role, "content": text}] for text in texts]


def reads_messages(source: str) -> bool:
    """True if a file reads `["content"]` or `.get("content")`, as for TRL's conversations."""
    for node in ast.walk(ast.parse(source)):
        keys = [node.slice] if isinstance(node, ast.Subscript) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keys = node.args[:1] if node.func.attr == "get" else []
        if any(isinstance(key, ast.Constant) and key.value == "content" for key in keys):
            return True
    return False


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A function's parameters by name; none where it doesn't tell."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def scorer(
    module: types.ModuleType, setup: dict[str, Any]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers requests by a package's scorer: `score(answer, row)`, in forks.

    `prepare(row)`, which the file may have, is called before in this process, so that forks find
    what is slow to make. It sees no answer.

    OSError: forks can't be confined, which the parent took to be possible.
    """
    if setup["confined"]:
        forked.check_confinement()
    function = load(module, setup)
    prepare = module.__dict__.get("prepare")

    def score(row: Sequence[str]) -> forked.Scored:
        reply = graded(function, False, setup["path"], {"rows": [row]})
        return reply["scores"][0], reply["faults"][0], reply["said"]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        rows = request["rows"]
        try:
            if prepare is not None:
                for _, _, row in rows:
                    prepare(unpacked(row))
        except Exception as error:
            return _none(len(rows), RAISED, told(error, setup["path"]))
        scores = forked.scores_of_forks(
            score, rows, seconds=setup["deadline"], confined=setup["confined"]
        )
        values, faults, words = zip(*scores)
        return {"scores": values, "faults": faults, "said": next(filter(None, words), "")}

    return answer


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
    ids = {"ids": request["ids"]} if "ids" in request else {}
    try:
        if batch:
            found = function(*map(list, zip(*rows)), **ids)
        else:
            found = [function(*row) for row in rows]
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
