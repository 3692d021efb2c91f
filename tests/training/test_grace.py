"""Training with a grace window: tokens after the budget are learned from, too."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import io as config_io
from bacr_jax.methods import load_method
from bacr_jax.questions.ledger import ledger_tokenizer
from bacr_jax.rollout import Rollout
from bacr_jax.training import stages
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.types import Branches, Trunks
from methods_world import Odd, group_batch, load, run_of


def test_the_last_segment_goes_on_to_the_end_of_the_grace_window(tmp_path):
    config = load(tmp_path, "bacr-full", "budget.prior=fixed", "advantage.baseline=group")
    method, batch = load_method(config), group_batch(config)
    rows, cuts = batch.cuts.shape[0] * batch.cuts.shape[1], batch.cuts.shape[2]
    source = jnp.broadcast_to(jnp.arange(cuts, dtype=jnp.int32), (rows, cuts))

    def of_tokens(grace):
        found, _ = stages.token_advantages(
            method.init_state(64), batch, None, source, method=method, max_thinking=15, grace=grace
        )
        return np.asarray(found.thinking)

    plain, graced = of_tokens(0), of_tokens(3)
    for row, b in enumerate(np.asarray(batch.budgets).reshape(-1)):
        np.testing.assert_array_equal(graced[row, :b], plain[row, :b])
        np.testing.assert_array_equal(graced[row, b : b + 3], np.repeat(plain[row, b - 1], 3))
        assert (plain[row, b:] == 0).all() and (graced[row, b + 3 :] == 0).all()
    assert (graced != plain).any()


def test_the_scores_of_the_grace_window_count_in_the_last_segment(tmp_path):
    config = config_io.override(load(tmp_path, "bacr-weighted"), ["budget.grace=3"])
    tokenizer = ledger_tokenizer()
    run, _ = run_of(config, (tokenizer, len(tokenizer)), Odd())
    one = {"questions": jnp.zeros(1, int), "groups": jnp.zeros(1, int)}
    plan = BatchPlan(**one, budgets=jnp.array([[4, 4]]), cuts=jnp.array([[[4], [4]]]))
    # Probability one half at each token: .25 each. Seven tokens, three of them after the budget.
    trunks = Trunks(
        tokens=np.zeros((2, 9), int),
        prompt_lengths=np.array([1, 1]),
        sampled=np.array([7, 2]),
        thinking=np.array([7, 2]),
        close=np.array([0, 1]),
        budgets=np.array([4, 4]),
        logprobs=np.full((2, 8), np.log(0.5), np.float32),
    )
    branches = Branches(*4 * [np.ones((2, 1), int)], *3 * [None])
    rollout = Rollout(trunks, branches, {})
    batch = stages.observe(run, None, plan, rollout, np.ones((1, 2, 1, 1), np.float32), {}, 0)
    np.testing.assert_allclose(batch.surprise, [[[7 / 4], [2 / 4]]], rtol=1e-6)


@pytest.mark.slow
def test_a_step_with_a_grace_window(tmp_path):
    config = config_io.override(load(tmp_path, "grpo"), ["budget.grace=3"])
    tokenizer = ledger_tokenizer()
    run, state = run_of(config, (tokenizer, len(tokenizer)), Odd())
    # The ledger has no line breaks; some of its digits stand for them.
    rules = run.environment.rules
    breaks = jnp.zeros_like(rules.line_breaks).at[jnp.array([8, 9])].set(True)
    rules = dataclasses.replace(rules, line_breaks=breaks)
    run = dataclasses.replace(run, environment=dataclasses.replace(run.environment, rules=rules))
    _, iteration = iterate(run, state, 0)
    trunks = iteration.chosen.rollout.trunks
    excess = np.maximum(np.asarray(trunks.thinking) - np.asarray(trunks.budgets), 0)
    assert 0 < excess.max() <= 3
    assert iteration.metrics["rollout/excess_mean"] == excess.mean()
    assert iteration.metrics["rollout/forced_tokens_mean"] >= 1
    assert all(np.isfinite(value) for value in iteration.metrics.values())
