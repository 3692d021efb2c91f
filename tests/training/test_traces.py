"""A trace tells the whole story of a row: question, budget, tokens, verdict, advantages."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from bacr_jax.grading.judge import Verdict
from bacr_jax.rollout import Rollout
from bacr_jax.training.logging import Iteration
from bacr_jax.training.run import Run
from bacr_jax.training.traces import write_traces
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, Branches, Trunks

# One question, two rollouts: the first closes its thinking after 3 of 8 tokens, the second is cut.
# Cuts at 2, 2 and 8 tokens; the closing tag is the fourth sampled token of the first.
CUTS = np.array([[[2, 2, 8], [2, 4, 6]]])
THINKING = np.array([[1.0, 1.0, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5], [0.5, 0.5, 2, 2, 3, 3, 0, 0]])


def bare(kind, **fields):
    """One of its kind with no more in it than is asked of it."""
    one = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(one, name, value)
    return one


def decided(text, path="string", timed_out=False):
    return Verdict(text == "6", text, path, timed_out)


@pytest.fixture
def world(ledger_tokens):
    """A run and an iteration of what traces are made of."""
    ids = lambda text: ledger_tokens(text, add_special_tokens=False)["input_ids"]
    tokens = np.array([[*ids("<bos>4a2<think>a4+2=6")[:11], 0, 0]] * 2)
    trunks = Trunks(
        tokens, np.array([5, 5]), np.array([4, 6]), np.array([3, 6]),
        np.array([CLOSED_BY_TAG, CLOSED_BY_BUDGET]), np.array([8, 6]), np.zeros((2, 8)),
    )  # fmt: skip
    branches = Branches(
        np.zeros((2, 3, 1), int), np.array([[7, 7, 9], [7, 9, 11]]),
        np.array([[2, 2, 1], [2, 2, 2]]), np.array([[2, 2, 1], [2, 2, 2]]),
        np.ones((2, 3), bool), np.array([[0, 0, 2], [0, 1, 2]]), np.zeros((2, 3, 1)),
    )  # fmt: skip
    verdicts = np.empty((2, 3), object)
    verdicts[0] = [decided("4"), decided("4"), decided("6")]
    verdicts[1] = [decided(None, "none"), decided("4", "symbolic", True), decided("6", "number")]
    questions = SimpleNamespace(
        ids=["ledger-0", "ledger-9"], levels=np.array([1, 3]), questions=["", "4a2"],
        answers=["", "6"],
    )  # fmt: skip
    run = bare(
        Run,
        environment=SimpleNamespace(
            tokenizer=ledger_tokens,
            train=SimpleNamespace(set=questions, told=None),
            answer_texts=lambda one: [[f"answer at {c}" for c in one.context[0]]],
        ),
        method=SimpleNamespace(conditioned=True),
        config=SimpleNamespace(budget=SimpleNamespace(grace=0), output=SimpleNamespace(rollouts=2)),
    )
    plan = SimpleNamespace(
        rows=np.array([1, 1]), groups=np.array([2]), budgets=np.array([[8, 6]]), cuts=CUTS
    )
    outcomes = np.array([[[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]])
    batch = SimpleNamespace(
        plan=plan, rollout=Rollout(trunks, branches, {}), outcomes=outcomes, verdicts=verdicts,
        useful=np.array([True]),
        group_batch=SimpleNamespace(extra={"declared": np.array([[7, 9]])}),
    )  # fmt: skip
    credit = SimpleNamespace(
        thinking=THINKING, answers=np.array([[-1.0, 0.0, 1.5], [0.0, np.nan, 0.25]]),
        rewards=np.array([[[0.0, 0.0, 1.3], [0.0, 0.0, 1.3]]]),
        keep=np.array([[True, False]]),
    )  # fmt: skip
    values = np.array([[[0.1, 0.1, 0.4], [0.1, 0.2, 0.3]]])
    return run, bare(Iteration, batch=batch, credit=credit, values=values)


def written(tmp_path, world, count=2):
    run, done = world
    path = tmp_path / "traces.jsonl"
    run.config.output.rollouts = count
    write_traces(path, 3, run, done)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trace_is_cut_where_its_answers_were_asked(tmp_path, world):
    (first,) = written(tmp_path, world, count=1)
    assert first["prompt"] == "<bos>4a2<think>" and first["thinking"] == "a4+2"
    assert first["segments"] == ["a4", "", "+2", ""] and first["context"] == [2, 2, 4]
    assert first["closed_by"] == "tag" and first["step"] == 3 and first["budget"] == 8
    assert first["answers"] == ["answer at 7", "answer at 7", "answer at 9"]


def test_the_question_is_known_by_its_name_and_what_the_policy_was_told(tmp_path, world):
    first, second = written(tmp_path, world)
    asked = {"id": "ledger-9", "level": 3, "group": 2, "question": "4a2", "gold": "6"}
    assert asked.items() <= first.items() and asked.items() <= second.items()
    assert (first["told"], first["told_by"]) == (8, "embedding") and second["told"] == 6
    assert first["read"] == {"declared": 7.0} and second["read"] == {"declared": 9.0}
    run, done = world
    run.method.conditioned = False
    (silent,) = written(tmp_path, (run, done), count=1)
    assert (silent["told"], silent["told_by"]) == (None, "nothing")
    run.environment.train.told = "the prompts"
    assert written(tmp_path, (run, done), count=1)[0]["told_by"] == "words"


def test_tokens_of_the_parts_add_up(tmp_path, world):
    first, second = written(tmp_path, world)
    assert (first["prompt_tokens"], first["thinking_tokens"], first["closing_tokens"]) == (5, 3, 1)
    # Seen by the answer, forced, sampled: 2 + 2 + 2 at the first cut, 4 + 1 + 1 at the last.
    assert first["total_tokens"] == [6, 6, 6] and second["total_tokens"] == [6, 8, 10]
    assert second["closing_tokens"] == 0


def test_the_verdict_says_what_decided_it(tmp_path, world):
    first, second = written(tmp_path, world)
    assert first["outcomes"] == [0.0, 0.0, 1.0] and first["extracted"] == ["4", "4", "6"]
    assert second["decided_by"] == ["none", "deadline", "number"]
    assert second["extracted"] == [None, "4", "6"]
    run, done = world
    done.batch.verdicts = None
    assert "decided_by" not in written(tmp_path, (run, done))[0]


def test_each_segment_has_the_advantage_of_its_tokens(tmp_path, world):
    first, second = written(tmp_path, world)
    # Tokens 1 and 2; none between the equal cuts; tokens 3 and 4 of 8.
    assert first["segment_advantages"] == [1.0, None, -0.5]
    assert second["segment_advantages"] == [0.5, 2.0, 3.0]
    assert first["values"] == [0.1, 0.1, 0.4] and first["rewards"] == [0.0, 0.0, 1.3]
    assert first["in_loss"] and not second["in_loss"]
    # What is no number is written as text that reads back.
    assert second["answer_advantages"] == [0.0, "nan", 0.25]


def test_a_segment_past_the_end_of_the_thinking_has_no_advantage(tmp_path, world):
    run, done = world
    done.batch.rollout.trunks.sampled[0] = 2
    assert written(tmp_path, world)[0]["segment_advantages"] == [1.0, None, None]


def test_the_last_segment_has_the_tokens_of_a_grace_window(tmp_path, world):
    run, done = world
    done.batch.plan.cuts = np.array([[[1, 2, 2], [2, 4, 6]]])
    assert written(tmp_path, world)[0]["segment_advantages"] == [1.0, 1.0, None]
    run.config.budget.grace = 2
    assert written(tmp_path, world)[0]["segment_advantages"] == [1.0, 1.0, -0.5]
