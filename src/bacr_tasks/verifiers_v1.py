"""Single-turn tasks of the package verifiers: `verifiers:TASKSET`, an installed one by its id.

Tasks whose rewards need a runtime, tools or several turns are refused: nothing here runs them.
"""

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bacr_tasks.gym import is_test

SCORER = str(Path(__file__).with_name("verifiers_v1_score.py"))
# The scorers are packages', which nobody here has read.
CHECKED = False
# Tasks of a set that may be endless.
MOST = 20_000


def tasks(taskset: str) -> Iterator[Any]:
    """Tasks in the order of their set; whatever verifiers raises."""
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.utils.loaders import load_taskset

    return itertools.islice(load_taskset(TasksetConfig(id=taskset)), MOST)


def source(taskset: str) -> SimpleNamespace:
    """The source that `verifiers:` and this name; a quarter of its tasks, by a hash, are for tests.

    Raises:
      ValueError: the package is missing. `questions`: no such set, or tasks that can't be scored.
    """
    where = f"verifiers:{taskset}"
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        raise ValueError(f"{where}: needs verifiers; write pip install verifiers==0.4.0") from None

    def questions(split: str) -> list[dict[str, Any]]:
        rows = []
        try:
            for place, task in enumerate(tasks(taskset)):
                text = "\n\n".join(filter(None, (task.data.system_prompt, task.data.prompt_text)))
                reason = _needs(task)
                if reason:
                    raise ValueError(f"its task {place} needs {reason}")
                if is_test(text) == (split == "test"):
                    metadata = {"taskset": taskset, "place": place}
                    rows.append({"question": text, "answer": None, "metadata": metadata})
        # A taskset is somebody's code, which fails as it likes.
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise ValueError(f"{where}: {said}; write another set") from None
        return rows

    return SimpleNamespace(questions=questions, SCORE=SCORER)


def _needs(task: Any) -> str:
    """Returns what a task needs that this package lacks, or "" if it needs nothing."""
    if task.NEEDS_CONTAINER or task.data.image:
        return "a container"
    if type(task).toolsets(task.config):
        return "tools"
    if not task.hooks("reward") or task.plugged_judges():
        return "a reward of its own" if not task.plugged_judges() else "a judge"
    wants = [inspect.signature(reward).parameters.get("runtime") for reward in task.hooks("reward")]
    needed = any(one is not None and one.default is inspect.Parameter.empty for one in wants)
    return "a runtime" if needed else ""
