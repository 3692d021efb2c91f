"""Tasks of the package verifiers, which the tests do not install: what it would give stands in."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from bacr_grading import confinement
from bacr_jax.config import Config, DataConfig
from bacr_jax.errors import UserError
from bacr_jax.prompts.graders import open_graders
from bacr_jax.questions.loaders import load_questions
from bacr_tasks import verifiers_v1

DATA = DataConfig(num_groups=1)


def reward(self, task, trace): ...
def timed(self, task, trace, runtime): ...
def offline(self, task, trace, runtime=None): ...
def penalty(self, task, trace): ...


penalty._vf_weight = -0.5


class Task:
    NEEDS_CONTAINER, config = False, None
    tools, rewards, judges = [], [reward, offline], []

    def __init__(self, n=0, image=None):
        prompt = f"Double {n}."
        self.data = SimpleNamespace(system_prompt="Digits.", prompt_text=prompt, image=image)

    @classmethod
    def toolsets(cls, config):
        return cls.tools

    def hooks(self, kind):
        return self.rewards if kind == "reward" else []

    def plugged_judges(self):
        return self.judges


@pytest.fixture
def installed(monkeypatch):
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return lambda made: monkeypatch.setattr(verifiers_v1, "tasks", lambda taskset: iter(made))


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(
        UserError, match="the package verifiers is not installed; run pip install verifiers==0.4.0"
    ):
        load_questions("verifiers:gsm8k", DATA, 0, "train")


def test_tasks_are_split_by_their_text_and_say_where_they_stand(installed):
    installed([Task(n) for n in [*range(60), *range(60)]])
    train, test = (load_questions("verifiers:doubles", DATA, 0, s) for s in ("train", "test"))
    assert len(train) + len(test) == 60 and 5 < len(test) < 30
    assert set(train.questions).isdisjoint(test.questions)
    assert all(text.startswith("Digits.\n\nDouble ") for text in train.questions)
    for (_, row), text in zip(train.rows, train.questions):
        assert text == f"Digits.\n\nDouble {row.metadata['place']}."
        assert row.metadata["taskset"] == "doubles"


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        (type("T", (Task,), {"rewards": [reward, timed]})(), "needs a runtime"),
        (type("T", (Task,), {"tools": ["search"]})(), "needs tools"),
        (type("T", (Task,), {"NEEDS_CONTAINER": True})(), "needs a container"),
        (type("T", (Task,), {"judges": ["judge"]})(), "needs a judge"),
        (type("T", (Task,), {"rewards": []})(), "has no reward function"),
        (type("T", (Task,), {"rewards": [penalty]})(), "has no reward with a positive weight"),
        (Task(image="box"), "needs a container"),
    ],
)
def test_what_can_not_be_scored_here_is_refused(installed, task, fault):
    installed([Task(0), task])
    with pytest.raises(
        UserError,
        match=f"verifiers:doubles: .*task 1 {fault}, which",
    ):
        load_questions("verifiers:doubles", DATA, 0, "train")


def test_a_machine_that_confines_nothing_is_refused_since_nobody_has_read_the_scorers(
    installed, monkeypatch
):
    installed([Task(0)])
    monkeypatch.setattr(confinement, "is_available", lambda: False)
    with pytest.raises(
        UserError, match=r"verifiers:doubles: .* was not reviewed and must run in a sandbox"
    ):
        load_questions("verifiers:doubles", DATA, 0, "train")


# Reads a box strictly, as rewards of the package do. Scores 2.5 for a response with "bonus".
BOX_SCORER = """
import re

def score(response, row):
    if "bonus" in response:
        return 2.5
    assert response.startswith("<think>")
    return float(re.findall(r"boxed{(.*?)}", response.rpartition("</think>")[2]) == ["7"])
"""


@pytest.fixture
def boxes(installed, tmp_path, monkeypatch):
    """The questions of a task set whose scorer reads boxes, and their grader."""
    installed([Task(n) for n in range(20)])
    scorer = tmp_path / "scorer.py"
    scorer.write_text(BOX_SCORER)
    monkeypatch.setattr(verifiers_v1, "SCORER", str(scorer))
    questions = load_questions("verifiers:boxes", DATA, 0, "train")
    with open_graders(Config(), [questions])[questions.graded_by] as grader:
        yield questions, grader


def grade(boxes, texts):
    questions, grader = boxes
    asked = questions.questions[:1] * len(texts)
    return grader.grade(texts, questions.answers[:1] * len(texts), questions=asked)


def test_rewards_get_the_whole_response_and_logs_the_answer(boxes):
    texts = [
        "<think>So 7.</think>\n\\boxed{7}",
        "<think>So 7.</think><answer>\\boxed{7}</answer>",
        "<think>So 7.</think><answer>7</answer>",
        # Without a closed answer, the rewards are not called.
        "<think>\\boxed{7}</think>\\boxed{7",
        "<think>\\boxed{7}",
    ]
    verdicts = grade(boxes, texts)
    assert [verdict.correct for verdict in verdicts] == [1.0, 1.0, 0.0, 0.0, 0.0]
    extracted = [verdict.extracted for verdict in verdicts]
    assert extracted == ["7", "\\boxed{7}", "7", None, None]
    assert boxes[1].counters()["no_answer"] == 2


def test_a_reward_above_1_ends_the_run_in_one_line(boxes):
    """Without this, the best responses would count as wrong."""
    with pytest.raises(
        UserError,
        match=r"^verifiers:boxes-train-0: a reward of this task is outside \[0, 1\] \(it returned "
        r"2.5\), and the best responses would count as wrong; use another task set$",
    ):
        grade(boxes, ["<think></think>\\boxed{7}", "<think>bonus</think>\\boxed{7}"])
