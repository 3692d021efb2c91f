"""Scores responses to tasks of the `verifiers` package that do not need a runtime.

`verifiers_v1` exports the path of this script as SCORE. The grader runs it in a worker process and
first calls `prepare`, then `score`.
"""

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls
from verifiers.v1.trace import Trace, TraceTask

from bacr_tasks.verifiers_v1 import tasks

# Rewards up to this amount above 1 are treated as 1, because of rounding errors.
_ROUNDING = 1e-6


@functools.cache
def _tasks(taskset: str) -> list[Any]:
    """Returns all tasks of a task set. The result is cached."""
    return list(tasks(taskset))


def prepare(row: Any) -> None:
    """Loads and caches the tasks of the row's task set, which `score` needs."""
    _tasks(row.metadata["taskset"])


def score(response: str, row: Any) -> float:
    """Returns the score of a conversation that consists of the question and the response.

    Args:
      response: the whole response with its thinking, which rewards read as `trace.last_reply`.
      row: the question.
    """
    task = _tasks(row.metadata["taskset"])[row.metadata["place"]]
    question = MessageNode(message=vf.UserMessage(content=row.question))
    reply = MessageNode(
        parent=0,
        sampled=True,
        message=vf.AssistantMessage(content=response),
    )
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[question, reply],
    )
    asyncio.run(task.score(trace))
    return mean_reward(trace.rewards)


def mean_reward(rewards: Mapping[str, Any]) -> float:
    """Returns the weighted mean of a task's rewards, which is their score in [0, 1].

    The package adds rewards up, so two rewards of weight 1 can have the sum 2. The sum is divided
    by the sum of the positive weights. A negative weight is a penalty. A mean below 0 is 0. A
    reward above 1 is returned unchanged, so that the grader refuses it.

    Args:
      rewards: the rewards with their weights, by name. None is a reward that was not computed.
    """
    computed = [reward for reward in rewards.values() if reward is not None]
    positive = [reward for reward in computed if reward.weight > 0]
    if not positive:
        return 0.0
    highest = max(reward.score for reward in positive)
    if highest > 1.0 + _ROUNDING:
        return highest
    total = sum(reward.score * reward.weight for reward in computed)
    return max(total / sum(reward.weight for reward in positive), 0.0)
