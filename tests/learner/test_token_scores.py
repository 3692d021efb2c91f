"""Scores of sampled tokens: they equal the log-probabilities that the sampler computed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.learner.batch import empty_batch, make_batch
from bacr_jax.learner.objective import head_features
from bacr_jax.learner.token_scores import score_tokens
from bacr_jax.learner.train_step import score_batch
from bacr_jax.model import kv_cache
from bacr_jax.rollout import RolloutRequest, SamplingSetup, generate, sampling_params
from bacr_jax.types import NO_BUDGET
from learner_world import RULES, SPEC, WORLD
from rollout_world import ANSWER, World, make_prompts


def test_rows_without_branches_can_be_scored():
    shapes = {"prompt": 3, "thinking": 4, "cuts": 0, "suffix": 2, "answer": 3}
    score = functools.partial(score_tokens, spec=SPEC)
    found = jax.eval_shape(score, WORLD.params, empty_batch(2, **shapes), RULES.allowed_tokens)
    assert found.thinking.shape == (2, 4) and found.answers.shape == (2, 0, 3)


def test_scores_contain_no_state_of_the_model():
    """A state of every question would be kept in memory, but only the value head reads it."""
    shapes = {"prompt": 3, "thinking": 4, "cuts": 2, "suffix": 2, "answer": 3}
    score = functools.partial(score_batch, spec=SPEC)
    found = jax.eval_shape(score, WORLD.params, empty_batch(5, **shapes), RULES.allowed_tokens)
    assert {leaf.shape for leaf in jax.tree.leaves(found)} == {(5, 4), (5, 2, 3)}


@functools.cache
def rolled(world=WORLD, products=None, told=None):
    """Rollouts of the policy itself; the second row's cuts lie at one token of thinking."""
    types = {"dtype": jnp.float32, "product_dtype": products}
    decode = kv_cache.decode_params(world.params, conditioned=True, **types)
    limits = np.array([12, 1, 7, 4])
    budgets = limits if told is None else np.array(told)
    cuts = np.ceil(limits[:, None] * np.arange(1, 3) / 2).astype(int)
    prompts = make_prompts([3, 5, 2, 4], 5)
    spec = world.spec(4, product_dtype=products)
    sampler = SamplingSetup(spec, RULES, sampling_params(1.0), world.phi_of)
    rows = RolloutRequest(budgets, cuts, limits=limits)
    rollout = generate(decode, prompts, rows, jax.random.key(5), sampler)
    return make_batch(
        prompts,
        rollout.trunks,
        rollout.branches,
        cuts=cuts,
        thinking_advantages=np.zeros((4, 12), np.float32),
        answer_advantages=np.zeros((4, 2), np.float32),
        value_targets=np.zeros((4, 2), np.float32),
        **({} if told is None else {"policy_budgets": budgets}),
    )


def test_the_learner_reproduces_the_samplers_logprobs():
    assert_same_scores(WORLD, rolled(), SPEC)


def test_it_does_so_where_rows_were_told_no_budget_or_another_than_their_limit():
    rows = rolled(told=(NO_BUDGET, 9, NO_BUDGET, 12))
    assert_same_scores(WORLD, rows, SPEC)
    seen = (jnp.asarray(x) for x in (np.zeros((4, 16)), rows.budgets, rows.cuts))
    features = head_features(WORLD.params, *seen, spec=SPEC)
    assert np.isfinite(features).all()


@pytest.mark.slow
def test_it_does_so_where_every_layer_has_its_own_phi():
    conditioning = ConditioningConfig(sharing="per_layer")
    world = World(conditioning)
    spec = dataclasses.replace(SPEC, conditioning=conditioning)
    assert_same_scores(world, rolled(world), spec)


def test_sampler_and_learner_round_the_same_products():
    """To bfloat16, whose last place is 2^-8 of a number; the order of their sums differs."""
    rows = rolled(products=jnp.bfloat16)
    rounded = dataclasses.replace(SPEC, product_dtype=jnp.bfloat16)
    apart = {
        name: gaps_of(score_batch(WORLD.params, rows, RULES.allowed_tokens, spec=spec), rows)
        for name, spec in (("rounded", rounded), ("exact", SPEC))
    }
    assert apart["rounded"].mean() < 0.2 * apart["exact"].mean()
    assert apart["exact"].max() < 0.5


def gaps_of(scores, rows):
    """Sizes of what the learner's log-probabilities of thinking differ by from the sampler's."""
    return np.abs(scores.thinking - rows.thinking_logprobs)[rows.thinking_mask]


def assert_same_scores(world, rows, spec):
    """The learner's log-probabilities are the sampler's own."""
    scores = score_batch(world.params, rows, RULES.allowed_tokens, spec=spec)
    for ours, theirs, mask in (
        (scores.thinking, rows.thinking_logprobs, rows.thinking_mask),
        (scores.answers, rows.answer_logprobs, rows.answer_mask),
    ):
        assert mask.any()
        np.testing.assert_allclose(np.where(mask, ours, 0), np.where(mask, theirs, 0), atol=1e-5)


def test_forced_tokens_are_never_targets():
    """Every branch holds a forced `<answer>`. Scored as if it could not be sampled, it would show
    up as an impossible target; only those that the policy itself sampled may.
    """
    rows, sampled = rolled(), 0
    for i in range(4):
        n, m = int(rows.prompt_lengths[i]), int(rows.sampled[i])
        sampled += int((rows.trunk[i, n : n + m] == ANSWER).sum())
        for j in range(2):
            k, a = int(rows.forced[i, j]), int(rows.answered[i, j])
            assert int(rows.branches[i, j, k - 1]) == ANSWER
            sampled += int((rows.branches[i, j, k : k + a] == ANSWER).sum())
    allowed = RULES.allowed_tokens.at[ANSWER].set(False)
    scores = score_batch(WORLD.params, rows, allowed, spec=SPEC)
    impossible = sum(
        int((np.asarray(logprobs)[np.asarray(mask)] < -1e20).sum())
        for logprobs, mask in (
            (scores.thinking, rows.thinking_mask),
            (scores.answers, rows.answer_mask),
        )
    )
    assert impossible == sampled
