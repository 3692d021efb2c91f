"""Micro-batches of real tokens: which rows they hold, and the gradient of padded rows."""

import dataclasses

import jax
import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.learner.objective import Minibatch, loss_normalizers
from bacr_jax.learner.padding_free import Allowance, padding_free, planned_rows
from bacr_jax.learner.token_scores import score_tokens_and_questions
from bacr_jax.learner.train_step import gradients, score_batch
from bacr_jax.model.real_tokens import RealTokens
from learner_world import (
    CUTS,
    PROMPTS,
    ROWS,
    RULES,
    SAMPLED,
    SPEC,
    SUFFIX,
    VALUE_HEAD,
    WORLD,
    close,
    make_batch_by_hand,
    state_of,
)
from rollout_world import World


def compiled():
    # A function of its own: what JAX traced of one is not traced again.
    return jax.jit(lambda *rest, spec: gradients(*rest, spec=spec)[0], static_argnames=("spec",))


# Attention over padded rows, and over the list of tokens, which are programs of their own.
COMPILED = {False: compiled(), True: compiled()}
# Tokens of each row: prompt, thinking, and the two branches that have an answer.
TOKENS = [3 + 8 + 5 + 4, 5 + 3 + 3 + 5, 2 + 6 + 4 + 4, 4 + 1 + 5]


@pytest.fixture(scope="module")
def batch():
    return make_batch_by_hand()


@pytest.fixture(scope="module")
def pairs(batch):
    """The same with prompts that two rows each share: of three tokens, and of two."""
    trunk, lengths = np.array(batch.trunk), np.array([3, 3, 2, 2], np.int32)
    trunk[1, :3], trunk[3, :2] = trunk[0, :3], trunk[2, :2]
    moved = lengths - np.asarray(batch.prompt_lengths)
    context = np.asarray(batch.context) + moved[:, None]
    ends = {"prompt_lengths": lengths, "question_end": lengths, "context": context}
    return dataclasses.replace(batch, trunk=trunk, **ends)


def rows_of(batch, tokens, shares=False):
    return [part.tolist() for part in planned_rows(batch, Allowance(tokens, shares))]


class TestWhichRows:
    def test_tokens_of_rows_by_hand(self, batch):
        assert TOKENS == [20, 16, 16, 10]
        assert sum(TOKENS) == PROMPTS.sum() + SAMPLED.sum() + 16 + SUFFIX * (CUTS * ROWS - 1)
        whole, *others = padding_free(batch, Allowance(62, False))
        assert not others and whole.real_tokens.is_source.sum() == sum(TOKENS)

    def test_as_many_as_fit(self, batch):
        assert rows_of(batch, 62) == [[0, 1, 2, 3]]
        assert rows_of(batch, 61) == [[0, 1, 2], [3]]
        assert rows_of(batch, 35) == [[0], [1, 2], [3]]
        assert rows_of(batch, 20) == [[0], [1], [2], [3]]

    def test_a_shared_prompt_counts_once_in_a_micro_batch(self, pairs):
        # 20 + 14 and 16 + 8 tokens, of which the second rows share 3 and 2
        assert rows_of(pairs, 34) == [[0, 1], [2, 3]]
        assert rows_of(pairs, 31, shares=True) == [[0, 1], [2, 3]]
        assert rows_of(pairs, 30, shares=True) == [[0], [1, 2], [3]]
        first, second = padding_free(pairs, Allowance(31, True))
        assert first.real_tokens.is_source.sum() == 31
        assert second.real_tokens.is_source.sum() == 22

    def test_a_group_that_is_split_runs_its_prompt_once_in_each_part(self, batch):
        # Three tokens of prompt, and 17, 11 and 14 others; then a row of its own with 10.
        trunk, lengths = np.array(batch.trunk), np.array([3, 3, 3, 4], np.int32)
        trunk[1:3, :3] = trunk[0, :3]
        alike = dataclasses.replace(batch, trunk=trunk, prompt_lengths=lengths)
        assert rows_of(alike, 3 + 11 + 14, shares=True) == [[0], [1, 2], [3]]

    def test_empty_rows_hold_nothing(self, batch):
        *_, last = padding_free(batch, Allowance(25, False))
        assert last.real_tokens.is_source.sum() == TOKENS[3]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["rows", "list"])
def compiled_gradients(request, monkeypatch):
    """Whichever has fewer pairs of tokens is taken; here the one that is asked for."""
    monkeypatch.setattr(RealTokens, "has_fewer_pairs", request.param)
    return COMPILED[request.param]


def gradient(compiled_gradients, batch, spec, world=WORLD):
    """Of the policy and of the value head, and the metrics."""
    head = None if spec.value is None else VALUE_HEAD
    state = dataclasses.replace(state_of(head), policy=world.params)
    normalizers = loss_normalizers(batch, spec=spec)
    rest = (Minibatch(batch, None), normalizers, RULES.allowed_tokens)
    found = compiled_gradients(state, *rest, spec=spec)
    return found.policy, found.head, found.metrics


CONDITIONINGS = {
    "response": ConditioningConfig(positions="response"),
    "per layer": ConditioningConfig(positions="response", sharing="per_layer"),
    "none": None,
}


@pytest.mark.parametrize(
    "name",
    ["response", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "per layer"))],
)
def test_shared_prompts_have_the_gradient_of_separate_ones(pairs, name, compiled_gradients):
    how = CONDITIONINGS[name]
    world = World(how) if name == "per layer" else WORLD
    spec = dataclasses.replace(SPEC, conditioning=how)
    if how is None:
        spec = dataclasses.replace(spec, value=None)
    # Room for more tokens than there are.
    (whole,) = padding_free(pairs, Allowance(70, True))
    got, want = (gradient(compiled_gradients, x, spec, world) for x in (whole, pairs))
    close(got, want, atol=2e-6)


def test_scores_are_those_of_padded_rows(pairs):
    spec = dataclasses.replace(SPEC, conditioning=CONDITIONINGS["response"])
    score = lambda rows: score_batch(WORLD.params, rows, RULES.allowed_tokens, spec=spec)
    first, second = (score(part) for part in padding_free(pairs, Allowance(31, True)))
    want = score(pairs)
    for name in ("thinking", "thinking_entropy"):
        found = np.concatenate([getattr(part, name)[:2] for part in (first, second)])
        padded = np.where(pairs.thinking_mask, getattr(want, name), 0)
        np.testing.assert_allclose(found, padded, atol=1e-5)
    answers = np.concatenate([part.answers[:2] for part in (first, second)])
    np.testing.assert_allclose(answers, np.where(pairs.answer_mask, want.answers, 0), atol=1e-5)


def test_questions_are_those_of_padded_rows(pairs):
    spec = dataclasses.replace(SPEC, conditioning=CONDITIONINGS["response"])

    @jax.jit
    def questions(rows):
        return score_tokens_and_questions(WORLD.params, rows, RULES.allowed_tokens, spec=spec)[1]

    parts = padding_free(pairs, Allowance(31, True))
    found = np.concatenate([questions(part)[:2] for part in parts])
    np.testing.assert_allclose(found, questions(pairs), atol=1e-5)
