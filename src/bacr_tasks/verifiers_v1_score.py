"""Scores answers to tasks of the `verifiers` package that do not need a runtime.

`verifiers_v1` exports the path of this script as SCORE. The grader runs it in a worker process and
first calls `prepare`, then `score`.
"""

import asyncio
import functools
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls
from verifiers.v1.trace import Trace, TraceTask

from bacr_tasks.verifiers_v1 import tasks


@functools.cache
def _tasks(taskset: str) -> list[Any]:
    """Returns all tasks of a task set. The result is cached."""
    return list(tasks(taskset))


def prepare(row: Any) -> None:
    """Loads and caches the tasks of the row's task set, which `score` needs."""
    _tasks(row.metadata["taskset"])


def score(answer: str, row: Any) -> float:
    """Returns the task's reward for a conversation that consists of the question and the answer."""
    task = _tasks(row.metadata["taskset"])[row.metadata["place"]]
    question = MessageNode(message=vf.UserMessage(content=row.question))
    response = MessageNode(
        parent=0,
        sampled=True,
        message=vf.AssistantMessage(content=answer),
    )
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[question, response],
    )
    asyncio.run(task.score(trace))
    return trace.reward
