"""The optimal token baseline: weighted means by hand for some tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from methods_world import credit_of, load


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
