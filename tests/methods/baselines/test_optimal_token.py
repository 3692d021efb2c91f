"""The optimal token baseline: weighted means by hand for some tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from bacr_jax.methods.baselines import baseline_of
from methods_world import credit_of, group_batch, load


def test_the_optimal_token_baseline_differs_from_token_to_token(tmp_path):
    own = ["advantage.baseline=optimal_token", "advantage.normalise=none", "cuts.count=1"]
    own += ["cuts.weights=last", "reward.dense=false"]
    config = load(tmp_path, "bacr-full", *own)
    method, batch, *_ = credit_of(load(tmp_path, "bacr-full", *own[1:]))
    method = load_method(resolve(config).method)
    assert method.needs_score_norms and not method.uses_value
    rng, width = np.random.default_rng(5), config.budget.max
    there = np.arange(width) < np.asarray(batch.thinking)[..., None]
    path = np.where(there, np.cumsum(rng.random(there.shape), -1), 0.0).astype(np.float32)
    batch = dataclasses.replace(batch, cumulative_score_norm=jnp.asarray(path))
    credit = method.advantages(None, batch, batch.outcomes, None)
    r = np.asarray(batch.outcomes)
    for t in (0, 3, int(batch.thinking.max()) - 1):
        base = (path[..., t] * r[..., 0]).sum(1) / path[..., t].sum(1).clip(1e-12)
        want = np.where(there[..., t], r[..., 0] - base[:, None], 0.0)
        got = np.where(there[..., t], credit.tokens[..., t], 0.0)
        np.testing.assert_allclose(got, want, atol=1e-6)
    # An answer is compared by the whole path before it.
    whole = path.max(-1)
    base = (whole * r[..., 0]).sum(1) / whole.sum(1)
    np.testing.assert_allclose(credit.answers[..., 0], r[..., 0] - base[:, None], atol=1e-6)


def test_advantages_of_tokens_are_divided_by_the_scale_too(tmp_path):
    """Two traces of equal norms with rewards 1 and 0: residuals of +-1/2, whose RMS is 1/2."""
    keys = ["advantage.baseline=optimal_token", "advantage.normalise=batch_rms", "cuts.count=1"]
    keys += ["cuts.weights=last", "reward.dense=false"]
    config = load(tmp_path, "bacr-full", *keys, "rollout.questions=1", "rollout.group_size=2")
    width = config.budget.max
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [0.0]]])),
        cuts=jnp.full((1, 2, 1), width),
        cumulative_score_norm=jnp.broadcast_to(jnp.arange(1.0, width + 1), (1, 2, width)),
    )
    credit = load_method(resolve(config).method).advantages(None, batch, batch.outcomes, None)
    np.testing.assert_allclose(credit.tokens, [[[1.0] * width, [-1.0] * width]], rtol=1e-5)
    np.testing.assert_allclose(credit.thinking, [[[1.0], [-1.0]]], rtol=1e-5)


def test_a_cut_is_compared_by_the_norms_before_it(tmp_path):
    """Norms 1 and 3 up to the first token, 4 and 4 up to the second: weights of 1/4 and 1/2."""
    keys = ["advantage.baseline=optimal_token", "advantage.normalise=none", "reward.dense=false"]
    keys += ["cuts.count=2", "cuts.weights=uniform", "rollout.questions=1", "rollout.group_size=2"]
    config = load(tmp_path, "bacr-full", *keys)
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0, 1.0], [0.0, 0.0]]])),
        cuts=jnp.array([[[1, 2], [1, 2]]]),
        cumulative_score_norm=jnp.array([[[1.0, 4.0], [3.0, 4.0]]]),
    )
    baseline = baseline_of(resolve(config).method)
    estimate = baseline.estimate({}, batch, batch.outcomes, None)
    np.testing.assert_allclose(estimate.reward, [[[0.25, 0.5]] * 2], rtol=1e-6)
    np.testing.assert_allclose(estimate.correctness, [[[0.25, 0.5]] * 2], rtol=1e-6)
