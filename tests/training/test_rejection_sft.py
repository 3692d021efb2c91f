"""Tests the supervised examples that are built from correct responses of the policy."""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.prompts.encoding import encode_prompts, encode_text
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.questions import ledger
from bacr_jax.rollout import Rollout
from bacr_jax.training import rejection_sft
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, Branches, Trunks
from methods_world import load, run_of


@pytest.fixture(scope="module")
def tokenizer():
    return ledger.ledger_tokenizer()


def rollout_of(tokenizer, texts, closed):
    """A made-up rollout: prompt, thinking and answer of each row, in the plain format."""
    encode = lambda text: encode_text(tokenizer, text)
    prompts = [encode(prompt) for prompt, _, _ in texts]
    rows = [np.concatenate([encode(p), encode(t + "</think>" * c)])
            for (p, t, _), c in zip(texts, closed)]  # fmt: skip
    tokens = np.zeros((len(rows), max(map(len, rows)) + 2), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    suffixes = [encode(("<answer>" if c else "</think><answer>") + a + "</answer>")
               for (_, _, a), c in zip(texts, closed)]  # fmt: skip
    answers = np.zeros((len(rows), 1, 5), np.int32)
    for i, row in enumerate(suffixes):
        answers[i, 0, : len(row)] = row
    thinking = np.array([len(encode(t)) for _, t, _ in texts])
    lengths = np.array([len(p) for p in prompts])
    column = lambda values: np.array(values)[:, None]
    trunks = Trunks(
        tokens=tokens, prompt_lengths=lengths, sampled=thinking + np.array(closed),
        thinking=thinking,
        close=np.where(closed, CLOSED_BY_TAG, CLOSED_BY_BUDGET), budgets=thinking, logprobs=None,
    )  # fmt: skip
    branches = Branches(
        tokens=answers, context=None, forced=column([1 if c else 2 for c in closed]),
        sampled=column([2] * len(rows)), finished=None, source=None, logprobs=None,
    )  # fmt: skip
    return Rollout(trunks, branches, {})


TEXTS = [
    ("<bos>4a2<think>", "a4+2=6", "6"),
    ("<bos>1a1<think>", "a1+1=3", "3"),
    ("<bos>2a1<think>", "a2+1", "3"),
]


def examples(tokenizer, correct):
    questions = ["4a2", "1a1", "2a1"]
    style = FORMATS["ledger_budget"]
    prompts, _ = encode_prompts(tokenizer, questions, style, max_tokens=20)
    task_data = types.SimpleNamespace(
        tokenizer=tokenizer, style=style, train=types.SimpleNamespace(prompts=prompts)
    )
    responses = rejection_sft.Responses(
        rollout_of(tokenizer, TEXTS, [True, True, False]),
        questions=np.arange(3), correct=np.array(correct), lengths=np.array([8, 8, 6]),
    )  # fmt: skip
    start = types.SimpleNamespace(opening=lambda length: f"{length}h")
    return inspect.unwrap(rejection_sft.make_examples)(responses, task_data, start)


def test_correct_responses_that_ended_are_learned_with_their_length_before_them(tokenizer):
    tokens, mask = examples(tokenizer, [1, 0, 1])
    # The second response is wrong, and the third was truncated at its budget.
    assert len(tokens) == 1
    assert tokenizer.decode(tokens[0]) == "<bos>4a2<think>g8ha4+2=6</think><answer>6</answer>"
    learned = tokenizer.decode(tokens[0][mask[0]])
    assert learned == "8ha4+2=6</think>6</answer>"


@pytest.mark.parametrize("correct", [[0, 0, 0], [0, 0, 1]])
def test_a_policy_without_a_response_that_is_right_and_closed_is_refused(tokenizer, correct):
    """The third response is right, but the budget truncated it."""
    with pytest.raises(UserError, match="no training question correctly with thinking closed by"):
        examples(tokenizer, correct)


def test_the_temperature_of_rollouts_does_not_change_what_is_learned(tmp_path, tokenizer):
    tokens = np.random.default_rng(0).integers(0, len(tokenizer), (4, 9))
    mask = np.arange(9) >= np.full((4, 1), 3)
    trained = []
    for temperature in ("1", "0.5"):
        config = load(tmp_path, "selfbudgeter", f"rollout.temperature={temperature}")
        run, state = run_of(config, (tokenizer, len(tokenizer)))
        params = jax.tree.map(jnp.copy, run.params(state.train))
        stage = run.method.rejection_sft
        params = rejection_sft.imitate(run, stage, params, tokens, mask, lambda *_: None, None)
        trained.append(jax.tree.map(np.array, params))
    jax.tree.map(np.testing.assert_array_equal, *trained)
    start = jax.tree.map(np.array, run.params(state.train))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), start, trained[0])
    assert max(jax.tree.leaves(moved)) > 0
