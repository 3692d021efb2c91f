"""Has a task of verifiers score an answer, without a runtime; run in a worker."""

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
    return list(tasks(taskset))


def prepare(row: Any) -> None:
    """Loads the tasks of a row's set."""
    _tasks(row.metadata["taskset"])


def score(answer: str, row: Any) -> float:
    """The task's reward of a conversation of two messages."""
    task = _tasks(row.metadata["taskset"])[row.metadata["place"]]
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            MessageNode(message=vf.UserMessage(content=row.question)),
            MessageNode(parent=0, sampled=True, message=vf.AssistantMessage(content=answer)),
        ],
    )
    asyncio.run(task.score(trace))
    return trace.reward
