"""The source `verifiers:TASKSET`: single-turn tasks of the package verifiers, by a task set's id.

`bacr_jax.questions.loaders` calls `source`. A task set is refused if its rewards need a runtime,
tools or several turns, because the grader provides none of these.
"""

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bacr_tasks.gym import is_test

SCORER = str(Path(__file__).with_name("verifiers_v1_score.py"))
# The scorers belong to other packages and were not read.
THIRD_PARTY = True
CHECKED = False
# Tasks that are read, because a task set may be endless.
MOST = 20_000
# Characters of an error that are shown.
_SHOWN_CHARACTERS = 200


def tasks(taskset: str) -> Iterator[Any]:
    """Loads the tasks of an installed task set, in its order; verifiers may raise any error."""
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.utils.loaders import load_taskset

    return itertools.islice(load_taskset(TasksetConfig(id=taskset)), MOST)


def source(taskset: str) -> SimpleNamespace:
    """Makes the source of a task set; a hash puts a quarter of the tasks into the test split.

    Raises:
      ValueError: verifiers is not installed. `questions` of the result raises ValueError if the
        task set does not exist or a task can't be scored.
    """
    where = f"verifiers:{taskset}"
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        raise ValueError(f"{where}: needs verifiers; write pip install verifiers==0.4.0") from None

    def questions(split: str) -> list[dict[str, Any]]:
        try:
            return _rows(taskset, split)
        # A task set is another package's code, which can raise any error.
        except Exception as error:
            reason = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
            raise ValueError(f"{where}: {reason}; write another set") from None

    return SimpleNamespace(questions=questions, SCORE=SCORER)


def _rows(taskset: str, split: str) -> list[dict[str, Any]]:
    """Returns the tasks of a split as rows; their metadata contains the task's index.

    Raises:
      ValueError: a task of any split can't be scored here.
    """
    rows = []
    for index, task in enumerate(tasks(taskset)):
        missing = _missing(task)
        if missing:
            raise ValueError(f"its task {index} needs {missing}")
        parts = (task.data.system_prompt, task.data.prompt_text)
        text = "\n\n".join(part for part in parts if part)
        if is_test(text) == (split == "test"):
            metadata = {"taskset": taskset, "place": index}
            rows.append({"question": text, "answer": None, "metadata": metadata})
    return rows


def _missing(task: Any) -> str:
    """Returns what a task needs that the grader does not have, or "" if it can be scored."""
    if task.NEEDS_CONTAINER or task.data.image:
        return "a container"
    if type(task).toolsets(task.config):
        return "tools"
    if task.plugged_judges():
        return "a judge"
    rewards = task.hooks("reward")
    if not rewards:
        return "a reward of its own"
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return "a runtime"
    return ""
