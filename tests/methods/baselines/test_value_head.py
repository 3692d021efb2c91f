"""Baselines that read V(q, b): residuals and trust worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods.baselines import baseline_of
from methods_world import group_batch, load

KEYS = ("advantage.normalise=none", "reward.dense=false", "cuts.count=1", "cuts.weights=last")


def world(folder, kind):
    """A baseline, and one question with three responses of which V expects .6, .2 and .4."""
    keys = ("rollout.questions=1", "rollout.group_size=3", f"advantage.baseline={kind}")
    config = load(folder, "bacr-full", *KEYS, *keys)
    reward = jnp.array([1.0, 0.0, 0.5]).reshape(1, 3, 1)
    values = jnp.array([0.6, 0.2, 0.4]).reshape(1, 3, 1)
    batch = group_batch(config, outcomes=np.asarray(reward))
    return baseline_of(resolve(config).method), batch, reward, values


def test_the_papers_baseline_is_the_value(tmp_path):
    baseline, batch, reward, values = world(tmp_path, "value")
    assert baseline.uses_value
    assert baseline.init_state() == {}
    estimate = baseline.estimate({}, batch, reward, values)
    np.testing.assert_array_equal(estimate.reward, values)
    # Without a dense reward R is the outcome itself.
    np.testing.assert_allclose(estimate.correctness, values, rtol=1e-6)


def test_residual_loo_adds_the_mean_residual_of_the_others(tmp_path):
    # Residuals .4, -.2 and .1.
    baseline, batch, reward, values = world(tmp_path, "residual_loo")
    estimate = baseline.estimate({}, batch, reward, values)
    np.testing.assert_allclose(estimate.reward.ravel(), [0.55, 0.45, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("sigma2", "error2", "expected"),
    [
        # n0 = 0 of 2 others: their mean residual in full.
        (0.0, 1.0, [0.55, 0.45, 0.5]),
        # n0 = 2 of 2 others: half of it.
        (0.2, 0.1, [0.575, 0.325, 0.45]),
    ],
)
def test_shrink_trusts_the_others_as_its_moments_say(tmp_path, sigma2, error2, expected):
    baseline, batch, reward, values = world(tmp_path, "shrink")
    state = {"sigma2": jnp.float32(sigma2), "error2": jnp.float32(error2)}
    estimate = baseline.estimate(state, batch, reward, values)
    np.testing.assert_allclose(estimate.reward.ravel(), expected, rtol=1e-5)


def test_the_moments_of_shrink_are_running_means(tmp_path):
    baseline, batch, reward, values = world(tmp_path, "shrink")
    state = baseline.update(baseline.init_state(), batch, reward, values)
    residual = np.array([0.4, -0.2, 0.1])
    sigma2 = residual.var(ddof=1)
    error2 = residual.mean() ** 2 - sigma2 / 3
    np.testing.assert_allclose(state["sigma2"], 0.1 * sigma2, rtol=1e-5)
    np.testing.assert_allclose(state["error2"], 0.9e-6 + 0.1 * error2, rtol=1e-5)
