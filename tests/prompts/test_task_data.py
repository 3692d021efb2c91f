"""Questions in, outcomes out, in the formats of Qwen2.5 with its own tokenizer."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from bacr_grading import VerifierGrader, load_verifier
from bacr_jax.config import Config, DataConfig
from bacr_jax.config.method_settings import RewardConfig
from bacr_jax.config.schema import GradingConfig
from bacr_jax.config.settings import resolve
from bacr_jax.config.values import FrozenMap
from bacr_jax.errors import UserError
from bacr_jax.prompts.encoding import encode_text
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.graders import open_rewards
from bacr_jax.prompts.task_data import build_task_data
from bacr_jax.types import Branches, Trunks
from config_world import changed

ROWS = 151_936


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    write = lambda name, rows: (folder / name).write_text("\n".join(map(json.dumps, rows)))
    questions = [
        {"problem": "What is two plus two today?", "level": 1, "answer": "4"},
        {"problem": "word " * 200, "level": 5, "answer": "1"},
        {"problem": "Name a prime.", "level": 3, "answer": ""},
    ]
    write("train.jsonl", questions)
    copy = {"problem": "What is two plus two, today?", "solution": "\\boxed{4}"}
    speed = {"problem": "How fast?", "solution": "\\boxed{3.0e8}"}
    write("test.jsonl", [copy, speed])
    return folder


def build(folder, qwen, prompt_format="auto", **changes):
    data = DataConfig(
        dir=str(folder),
        train="math:train.jsonl",
        eval=("minerva_math:test.jsonl", "jsonl:test.jsonl"),
        prompt_format=prompt_format,
        max_prompt_tokens=160,
    )
    return build_task_data(
        resolve(Config(data=dataclasses.replace(data, **changes))).task, qwen, ROWS
    )


@pytest.fixture(scope="module", params=["think_answer", "boxed"])
def task_data(request, folder, qwen):
    built = build(folder, qwen, request.param)
    yield built
    built.close()


def branches(task_data, texts):
    """One branch a row, as if these texts had been sampled after the suffix."""
    qwen, style = task_data.tokenizer, task_data.style
    suffix = encode_text(qwen, style.forced_suffix)
    answers = [encode_text(qwen, text) for text in texts]
    tokens = np.zeros((len(texts), 1, len(suffix) + max(map(len, answers))), np.int32)
    for row, answer in enumerate(answers):
        tokens[row, 0, : len(suffix) + len(answer)] = [*suffix, *answer]
    sampled = np.array([[len(answer)] for answer in answers], np.int32)
    zeros = np.zeros_like(sampled)
    return Branches(
        tokens=tokens,
        context=zeros,
        forced=zeros + len(suffix),
        sampled=sampled,
        finished=zeros.astype(bool),
        source=zeros,
        logprobs=np.zeros((*sampled.shape, 1), np.float32),
    )


ANSWERS = {
    "think_answer": ["4\n</answer>", "4", "5</answer>", "\\boxed{4}</answer><|im_end|>"],
    "boxed": ["4}\n\n", "4", "5}$\n\n", "4}<|im_end|>"],
}


def test_a_closed_answer_counts_and_an_open_one_does_not(task_data):
    texts = ANSWERS[task_data.style.name]
    outcomes = task_data.verify(None, branches(task_data, texts), ["4"] * 4)
    np.testing.assert_array_equal(outcomes[:, 0], [1.0, 0.0, 0.0, 1.0])


def test_answers_are_shown_with_the_tag_that_the_bridge_opened(task_data):
    texts = ANSWERS[task_data.style.name]
    shown = task_data.answer_texts(branches(task_data, texts[:2]))
    opened = task_data.style.answer_open
    assert [row[0] for row in shown] == [opened + texts[0], opened + texts[1]]


REWARDS = """
import time

def brief(question, response, gold):
    if "hang" in response:
        time.sleep(100)
    if "raise" in response:
        raise KeyError("of mine")
    odd = {"nan": float("nan"), "words": "1"}
    return next((odd[word] for word in odd if word in response), 1 / len(response.split()))

def formal(question, response, gold):
    return 0.5 * response.startswith(question[:2]) + 0.5 * response.endswith(gold + "</answer>")
"""


@pytest.fixture(scope="module")
def rewarded(folder, qwen):
    """An task_data with two rewards of a file."""
    file = folder / "rewards.py"
    file.write_text(REWARDS)
    weights = {"correct": 1.0, f"{file}:brief": 0.2, f"{file}:formal": 0.2}
    config = Config(
        data=DataConfig(dir=str(folder), train="math:train.jsonl", eval=("jsonl:test.jsonl",)),
        reward=RewardConfig(weights=FrozenMap(weights)),
        grading=GradingConfig(deadline=1),
    )
    built = build_task_data(resolve(config).task, qwen, ROWS)
    yield built, file
    built.close()


def thought(task_data, texts, answer):
    """Trunks that think these texts, and answers after them that say the same."""
    said = branches(task_data, [answer] * len(texts))
    ids = [[7, *encode_text(task_data.tokenizer, text)] for text in texts]
    tokens = np.zeros((len(texts), max(map(len, ids))), np.int32)
    for row, one in enumerate(ids):
        tokens[row, : len(one)] = one
    ones = np.ones(len(texts), np.int32)
    lengths = np.array([len(one) for one in ids], np.int32)
    logprobs = np.zeros((len(texts), 1), np.float32)
    trunks = Trunks(tokens, ones, lengths - 1, lengths - 1, ones, lengths, logprobs)
    return trunks, dataclasses.replace(said, context=lengths[:, None])


def test_rewards_see_the_response_from_the_opening_tag_to_the_closed_answer(rewarded):
    task_data, _ = rewarded
    trunks, said = thought(task_data, ["2 + 2", "é{</answer>"], "4</answer> and on")
    style = task_data.style
    assert [row[0] for row in task_data.responses(trunks, said)] == [
        f"{style.think_open}2 + 2{style.forced_suffix}4</answer>",
        f"{style.think_open}é{{</answer>{style.forced_suffix}4</answer>",
    ]


@pytest.mark.parametrize("of_response", [True, False])
def test_a_grader_gets_responses_or_answers_from_training_also_early(
    task_data, of_response, tmp_path, monkeypatch
):
    (tmp_path / "mine.py").write_text("def check(question, text, gold): return text == question")
    verifier = load_verifier(f"{tmp_path / 'mine.py'}:check")
    trunks, said = thought(task_data, ["2 + 2", "é"], ANSWERS[task_data.style.name][0])
    texts = [row[0] for row in task_data.responses(trunks, said)]
    expected = texts if of_response else ["4", "4"]
    with VerifierGrader(dataclasses.replace(verifier, of_response=of_response)) as grader:
        graded = dataclasses.replace(task_data, graders={task_data.graded_by: grader})
        early = []
        monkeypatch.setattr(grader, "ahead", lambda texts, *_, **__: early.extend(texts))
        graded.early_grading(["4", "4"], expected)(np.arange(2), trunks, said)
        outcomes, verdicts = graded.grade_answers(trunks, said, ["4", "4"], expected, None)
    assert [verifier.graded_text(text) for text in early] == ["4", "4"]
    assert (early == texts) == of_response
    np.testing.assert_array_equal(outcomes, np.ones((2, 1)))
    assert [verdict.extracted for verdict in verdicts[:, 0]] == ["4", "4"]


def test_whatever_a_reward_does_it_scores_0_and_is_counted(rewarded):
    task_data, file = rewarded
    texts = ["a b", "raise", "hang", "nan", "words"]
    trunks, said = thought(task_data, texts, "4</answer>")
    scores = task_data.reward_scores(trunks, said, ["4", "5", *"444"], ["<t?", *["?"] * 4], None)
    assert list(scores) == [f"{file}:brief", f"{file}:formal"]
    brief, formal = (scores[name][:, 0] for name in scores)
    words = len(task_data.responses(trunks, said)[0][0].split())
    np.testing.assert_array_equal(brief, np.float32([1 / words, 0, 0, 0, 0]))
    np.testing.assert_array_equal(formal, [1.0, 0.0, 0.5, 0.5, 0.5])
    assert task_data.counters()["rewards_failed"] == 4
    (line,) = task_data.failures({})
    assert line.startswith(
        f"WARNING: reward.weights={file}:brief returned no score for 4 of 5 answers"
    )
    assert (
        "1 timed out, 1 raised an exception, 1 got a score that is not a number, 1 got the "
        "score NaN" in line
    )


def test_answers_shown_to_a_users_verifiers_and_failed_by_them_are_counted(rewarded, monkeypatch):
    task_data, file = rewarded
    name = f"reward.weights={file}:brief"
    shown, failed = task_data.shown_to_verifiers()[name]
    trunks, said = thought(task_data, ["c d", "raise"], "4</answer>")
    task_data.reward_scores(trunks, said, ["4", "5"], ["?", "?"], None)
    assert task_data.shown_to_verifiers()[name] == (shown + 2, failed + 1)
    assert task_data.last_failure(name).startswith("KeyError")
    # Some scorers of packages raise on whatever they can't read.
    own = task_data.rewards[f"{file}:brief"]
    monkeypatch.setattr(own, "verifier", dataclasses.replace(own.verifier, third_party=True))
    assert name not in task_data.shown_to_verifiers()


def test_the_sources_of_rewards_are_fingerprinted_and_unknown_functions_refused(rewarded, qwen):
    task_data, file = rewarded
    digest = hashlib.sha256(REWARDS.encode()).hexdigest()[:16]
    names = [f"reward.weights={file}:{name}" for name in ("brief", "formal")]
    assert task_data.verifier_digests == dict.fromkeys(names, digest)
    task_data.check_verifier()
    named = lambda name: changed(reward={"weights": {"correct": 1.0, f"{file.parent}/{name}": 0.2}})
    wrong = open_rewards(resolve(named("rewards.py:breif")).task.grader)
    with pytest.raises(UserError) as said:
        dataclasses.replace(task_data, rewards=wrong).check_verifier()
    assert "the file defines no function breif; use brief); check reward.weights=" in str(
        said.value
    )
    for missing in wrong.values():
        missing.close()
    with pytest.raises(
        UserError, match=r"reward.weights=.*/rewads.py:f: there is no file .*/rewards.py"
    ):
        open_rewards(resolve(named("rewads.py:f")).task.grader)


def test_a_shared_grader_keeps_its_seconds_from_call_to_call(rewarded, monkeypatch):
    task_data = dataclasses.replace(rewarded[0])
    monkeypatch.setattr("bacr_jax.parallel.processes.several", lambda: True)
    task_data.grader.own_seconds += 1.5
    for shared in task_data.shared_rewards.values():
        shared.own_seconds += 0.25
    assert task_data.own_seconds == 2.0


def test_without_a_closing_tag_only_the_turn_ends_the_thinking(folder, qwen):
    boxed = build(folder, qwen, "boxed")
    table = np.asarray(boxed.rules.think_close.next_state)
    assert (table[0] == 0).all() and not np.asarray(boxed.rules.think_close.opens).any()
    assert boxed.rules.think_close.accept == 1
    allowed = np.asarray(boxed.rules.allowed_tokens)
    assert allowed[qwen.convert_tokens_to_ids("<|im_end|>")]


def test_what_is_left_out_is_told_with_its_reason(task_data):
    train = task_data.train.set
    assert train.questions == ["What is two plus two today?"]
    assert {(row.id, row.reason) for row in train.left_out} == {
        ("math-train-1", "prompt over 160 tokens"),
        ("math-train-2", "no answer that could be graded"),
    }
    told = "\n".join(task_data.describe_data())
    assert "training on math: 1 questions" in told and "prompt over 160 tokens: 1" in told
    assert "evaluating on minerva_math" in told and "no public set" in told
    assert "evaluating on 1 of minerva_math: 2 questions" in "\n".join(task_data.describe_data(1))


def test_every_set_is_graded_with_its_own_tolerance(task_data):
    style = task_data.style.name
    text = {"think_answer": "2.99e8</answer>", "boxed": "2.99e8}\n\n"}[style]
    sampled = branches(task_data, [text])
    minerva, exact = task_data.eval.values()
    graded = lambda questions: task_data.graded_like(questions).verify(
        None, sampled, [questions.set.answers[1]]
    )
    # a third of a percent off
    assert graded(minerva) == 1.0
    assert graded(exact) == 0.0
    assert task_data.verify(None, sampled, ["3.0e8"]) == 0.0


def test_the_format_follows_the_config(folder, qwen):
    assert build(folder, qwen).style is FORMATS["think_answer"]
    assert build(folder, qwen, "boxed").style is FORMATS["boxed"]
