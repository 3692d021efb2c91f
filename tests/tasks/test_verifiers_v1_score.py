"""The scorer of tasks of the package verifiers, with a stand-in for the package.

The stand-in has the names that the scorer imports. Its rewards are recorded, and the last reply is
read, as in version 0.4.0.
"""

import importlib.util
import re
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bacr_tasks import verifiers_v1


@dataclass
class Message:
    content: str


@dataclass
class Node:
    message: Any
    parent: int | None = None
    sampled: bool = False


@dataclass
class Reward:
    score: float
    weight: float = 1.0


@dataclass
class Trace:
    task: Any
    state: Any
    agent: Any
    nodes: list[Node]
    rewards: dict[str, Reward | None] = field(default_factory=dict)

    @property
    def last_reply(self):
        return [node.message.content for node in self.nodes if node.sampled][-1].strip()

    @property
    def reward(self):
        rewards = [reward for reward in self.rewards.values() if reward is not None]
        return sum(reward.score * reward.weight for reward in rewards)


class Task:
    """A task whose rewards are functions of the reply, each with a weight."""

    def __init__(self, **rewards):
        self.rewards = rewards
        self.data = SimpleNamespace()

    async def score(self, trace):
        assert [node.parent for node in trace.nodes] == [None, 0]
        for name, (weight, function) in self.rewards.items():
            score = function(trace.last_reply)
            trace.rewards[name] = None if score is None else Reward(score, weight)


@pytest.fixture
def score(monkeypatch):
    """Returns a function that scores a response to a task by the module under test."""
    names = ("verifiers", "verifiers.v1", "verifiers.v1.graph", "verifiers.v1.state")
    packages = {name: ModuleType(name) for name in (*names, "verifiers.v1.trace")}
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    packages["verifiers"].v1 = packages["verifiers.v1"]
    packages["verifiers.v1"].__dict__.update(
        UserMessage=Message,
        AssistantMessage=Message,
        AgentInfo=SimpleNamespace,
        AgentConfig=SimpleNamespace,
    )
    packages["verifiers.v1.graph"].MessageNode = Node
    packages["verifiers.v1.state"].state_cls = lambda task_class: SimpleNamespace
    packages["verifiers.v1.trace"].Trace = Trace
    packages["verifiers.v1.trace"].TraceTask = SimpleNamespace
    # Not imported by its name, because other tests must not find a module with stand-ins.
    spec = importlib.util.spec_from_file_location("scorer_with_stand_ins", verifiers_v1.SCORER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def score_response(task, response):
        module._tasks.cache_clear()
        monkeypatch.setattr(module, "tasks", lambda taskset: iter([None, task]))
        row = SimpleNamespace(question="Q", metadata={"taskset": "boxes", "place": 1})
        module.prepare(row)
        return module.score(response, row)

    return score_response


def seven_in_a_box(reply):
    """Reads a box after the thinking, as the package's `verify_boxed_math_answer`."""
    if "<think>" in reply and "</think>" not in reply:
        return 0.0
    found = re.findall(r"\\boxed\{(.*?)\}", reply.rpartition("</think>")[2])
    return float(found[-1:] == ["7"])


def is_short(reply):
    return float(len(reply) < 40)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>\nIt is 7.\n</think>\n\n**Final Answer**\n\\boxed{7}", 1.0),
        ("<think>\nIt is 7.\n</think>\n<answer>\n\\boxed{7}\n</answer>", 1.0),
        ("<think>\n\\boxed{7}\n</think>\n<answer>\n8\n</answer>", 0.0),
        ("<think>\n\\boxed{7}", 0.0),
        ("7", 0.0),
    ],
)
def test_a_strict_reader_of_boxes_gets_the_whole_response(score, response, expected):
    assert score(Task(boxed=(1.0, seven_in_a_box)), response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [("\\boxed{7}", 1.0), ("\\boxed{8}", 0.2), ("\\boxed{7}" + "," * 40, 0.8), ("," * 40, 0.0)],
)
def test_the_score_is_the_mean_of_weighted_rewards(score, response, expected):
    task = Task(
        boxed=(2.0, seven_in_a_box), short=(0.5, is_short), unused=(1.0, lambda reply: None)
    )
    assert score(task, response) == pytest.approx(expected)


def test_a_single_reward_of_any_weight_is_a_score_from_0_to_1(score):
    for weight in (0.5, 1.0, 3.0):
        assert score(Task(boxed=(weight, seven_in_a_box)), "\\boxed{7}") == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [("\\boxed{7}", 0.75), ("\\boxed{8}", 0.0), ("\\boxed{7}" + "," * 40, 1.0)],
)
def test_a_negative_weight_is_a_penalty_and_no_score_is_below_0(score, response, expected):
    task = Task(boxed=(1.0, seven_in_a_box), short=(-0.25, is_short))
    assert score(task, response) == expected


def test_a_reward_of_minus_1_is_a_score_of_0(score):
    task = Task(boxed=(1.0, lambda reply: 2 * seven_in_a_box(reply) - 1))
    assert [score(task, response) for response in ("\\boxed{7}", "\\boxed{8}")] == [1.0, 0.0]


def test_a_reward_above_1_stays_outside_of_the_interval_of_scores(score):
    """The grader refuses it, even if another reward lowers the mean."""
    task = Task(points=(1.0, len), boxed=(9.0, seven_in_a_box))
    assert score(task, "ab") > 1.0


def test_a_task_that_returns_no_reward_scores_0(score):
    assert score(Task(), "\\boxed{7}") == 0.0
