"""The metrics of an advantage are about the baseline that the method really subtracts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import rewards
from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from bacr_jax.training.stages import token_advantages
from methods_world import group_batch, load


def leave_one_out(r):
    return (r.sum(1, keepdims=True) - r) / (r.shape[1] - 1)


def brpo(r):
    """V1 + V2 of AnytimeReasoner's released code for four equal weights, written with loops."""
    found = np.zeros_like(r)
    for s in range(4):
        to_go = r[..., s:].sum(-1) / 4
        v2 = to_go.mean(1, keepdims=True)
        weights = 0.5 ** (s - np.arange(s))
        v1 = (r[..., :s] @ weights) / weights.sum() * (4 - s) / 4 if s else 0.0
        found[..., s] = s / 4 * v1 + (4 - s) / 4 * v2
    return found


def metrics_of(config, values=None):
    method = load_method(resolve(config).method)
    batch = group_batch(config, answers=method.answers)
    source = jnp.broadcast_to(
        jnp.arange(batch.cuts.shape[-1] * method.answers),
        (16, batch.cuts.shape[-1] * method.answers),
    )
    _, metrics = token_advantages(
        method.init_state(64), batch, values, source, method=method, max_thinking=12
    )
    return np.asarray(batch.outcomes, np.float64), metrics


@pytest.mark.parametrize(
    ("preset", "baseline"),
    [
        ("grpo", lambda r: np.broadcast_to(r.mean(1, keepdims=True), r.shape)),
        ("rloo", leave_one_out),
    ],
)
def test_one_advantage_a_trace(tmp_path, preset, baseline):
    r, metrics = metrics_of(load(tmp_path, preset))
    residual = r - baseline(r)
    np.testing.assert_allclose(metrics["advantage/residual_std"], residual.std(), rtol=1e-5)
    want = 1 - residual.var() / r.var()
    np.testing.assert_allclose(metrics["advantage/explained"], want, rtol=1e-4, atol=1e-5)


def test_brpo_has_its_own_past_and_its_group(tmp_path):
    r, metrics = metrics_of(load(tmp_path, "anytime"))
    returns = np.cumsum(r[..., ::-1], -1)[..., ::-1] / 4
    residual = returns - brpo(r)
    np.testing.assert_allclose(metrics["advantage/residual_std"], residual.std(), rtol=1e-5)
    want = 1 - residual.var() / returns.var()
    np.testing.assert_allclose(metrics["advantage/explained"], want, rtol=1e-4)


def test_bacr_has_its_value_of_what_is_still_to_come(tmp_path):
    config = load(tmp_path, None, "advantage.credit=to_go")
    values = jax.random.uniform(jax.random.key(0), (4, 4, 4))
    r, metrics = metrics_of(config, values)
    dense = rewards.dense_reward(jnp.asarray(r, jnp.float32), coefficient=0.3)
    to_go = lambda x: np.cumsum(np.asarray(x)[..., ::-1], -1)[..., ::-1] / 4
    residual = to_go(dense) - to_go(values)
    np.testing.assert_allclose(metrics["advantage/residual_std"], residual.std(), rtol=1e-5)
