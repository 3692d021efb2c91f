"""The budget embedding and its gate (Eq. 2 and 3) by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import budget


def test_phi_equation_by_hand():
    """Width 2: one frequency, 1. W1 = identity, W2 = 2: phi = 2 SiLU([sin b, cos b])."""
    params = {"w1": jnp.eye(2), "w2": 2 * jnp.eye(2), "gate": jnp.zeros((1, 2))}
    phi = budget.embed(params, jnp.array([3]), conditioning=ConditioningConfig(), b_max=64)
    s = np.array([np.sin(3.0), np.cos(3.0)])
    np.testing.assert_allclose(phi[0], 2 * s / (1 + np.exp(-s)), rtol=1e-5)


def test_sinusoids_have_the_norm_of_half_the_width():
    s = budget.sinusoids(jnp.array([1, 300, 4096]), width=64)
    np.testing.assert_allclose((s**2).sum(-1), 32.0, rtol=1e-5)


@pytest.mark.parametrize(("scale", "of_512"), [("log", 750.2), ("normalised", 125.0)])
def test_scaled_budgets_end_at_a_thousand(scale, of_512):
    """The first frequency is 1: the sine of the scaled budget itself."""
    s = budget.sinusoids(jnp.array([512, 4096]), width=8, scale=scale, b_max=4096)
    np.testing.assert_allclose(s[1, 0], np.sin(1000.0), atol=1e-3)
    np.testing.assert_allclose(s[0, 0], np.sin(of_512), atol=0.1)


def test_gate_equation_by_hand():
    x = jnp.array([[[1.0, 2.0]]])
    gate, phi = jnp.array([0.5, -0.25]), jnp.array([[10.0, 20.0]])
    # w.h = 0, sigmoid 1/2
    found = budget.add_gated(x, budget.Conditioned(phi, gate))
    np.testing.assert_allclose(found[0, 0], [6.0, 12.0])
    masked = budget.add_gated(x, budget.Conditioned(phi, gate, mask=jnp.array([[False]])))
    np.testing.assert_array_equal(masked, x)


@pytest.mark.parametrize("sharing", ["shared", "per_layer"])
def test_phi_starts_at_zero_with_one_embedding_or_one_a_layer(sharing):
    conditioning = ConditioningConfig(sharing=sharing)
    params = budget.init(jax.random.key(0), conditioning, width=4, layers=3)
    phi = budget.embed(params, jnp.array([8, 64]), conditioning=conditioning, b_max=64)
    assert phi.shape == ((2, 4) if sharing == "shared" else (3, 2, 4))
    assert not phi.any() and params["gate"].shape == (3, 4) and params["w1"].any()


def test_frequencies_by_hand():
    """Width 4: the frequencies are 10000^0 = 1 and 10000^(-2/4) = 1/100."""
    found = budget.sinusoids(jnp.array([3]), width=4)
    want = [[np.sin(3), np.sin(0.03), np.cos(3), np.cos(0.03)]]
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_a_normed_gate_with_a_bias_by_hand():
    """h = (1, 7) has the root mean square 5; w . h / 5 - 1 = (.5 + 3.5) / 5 - 1 = -.2."""
    settings = ConditioningConfig(gate="sigmoid_normed", gate_bias=-1.0)
    gate, phi = jnp.array([0.5, 0.5]), jnp.array([[10.0, 20.0]])
    conditioned = budget.Conditioned(phi, gate, settings=settings)
    hidden = budget.add_gated(jnp.array([[[1.0, 7.0]]]), conditioned)
    opened = 1 / (1 + np.exp(0.2))
    np.testing.assert_allclose(hidden[0, 0], [1 + 10 * opened, 7 + 20 * opened], rtol=1e-5)
