"""Loads questions for the config value `verifiers:TASKSET` from the `verifiers` package.

`bacr_jax.questions.loaders` calls `source`. All tasks are single-turn. If a task needs a container,
tools, a judge or a runtime, its task set is rejected, because the grader provides none of these.
"""

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bacr_tasks.gym import is_test

# Path of the script that scores answers.
SCORER = str(Path(__file__).with_name("verifiers_v1_score.py"))
# The scorers come from other packages. CHECKED is False because they were not reviewed.
THIRD_PARTY = True
CHECKED = False
# The scorers receive whole responses, because rewards of the package read `trace.last_reply`.
OF_RESPONSE = True
# Maximum number of tasks to load, because a task set may be infinite.
MOST = 20_000
# Maximum number of characters that an error message quotes from an error of `verifiers`.
_SHOWN_CHARACTERS = 200


def tasks(taskset: str) -> Iterator[Any]:
    """Loads the tasks of an installed task set, in order.

    The package `verifiers` may raise any exception.
    """
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.utils.loaders import load_taskset

    return itertools.islice(load_taskset(TasksetConfig(id=taskset)), MOST)


def source(taskset: str) -> SimpleNamespace:
    """Builds the source of questions for a task set.

    A hash of the question assigns about a quarter of the tasks to the test split.

    Returns:
      An object with the interface described in `bacr_tasks`. Its method `questions` raises a
      ValueError if the task set does not exist or contains a task that cannot be scored.

    Raises:
      ValueError: if `verifiers` is not installed.
    """
    where = f"verifiers:{taskset}"
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        raise ValueError(
            f"{where}: the package verifiers is not installed; run pip install verifiers==0.4.0"
        ) from None

    def questions(split: str) -> list[dict[str, Any]]:
        try:
            return _rows(taskset, split)
        # The task set is code from another package and can raise any exception.
        except Exception as error:
            reason = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
            raise ValueError(
                f"{where}: the task set can't be loaded ({reason}); use another task set"
            ) from None

    return SimpleNamespace(questions=questions, SCORE=SCORER)


def _rows(taskset: str, split: str) -> list[dict[str, Any]]:
    """Returns the tasks of a split as rows. A row's metadata contains the index of its task.

    Raises:
      ValueError: if a task of any split cannot be scored by the grader.
    """
    rows = []
    for index, task in enumerate(tasks(taskset)):
        reason = _unsupported(task)
        if reason:
            raise ValueError(f"task {index} {reason}, which is not supported")
        parts = (task.data.system_prompt, task.data.prompt_text)
        text = "\n\n".join(part for part in parts if part)
        if is_test(text) == (split == "test"):
            metadata = {"taskset": taskset, "place": index}
            rows.append({"question": text, "answer": None, "metadata": metadata})
    return rows


def _unsupported(task: Any) -> str:
    """Describes why a task can't be scored, such as `needs tools`; "" if it can be scored."""
    if task.NEEDS_CONTAINER or task.data.image:
        return "needs a container"
    if type(task).toolsets(task.config):
        return "needs tools"
    if task.plugged_judges():
        return "needs a judge"
    rewards = task.hooks("reward")
    if not rewards:
        return "has no reward function"
    if all(getattr(reward, "_vf_weight", 1.0) <= 0.0 for reward in rewards):
        return "has no reward with a positive weight"
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return "needs a runtime"
    return ""
