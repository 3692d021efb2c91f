"""Chunked log-probabilities against the plain softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.model.logprobs import logprob_and_entropy, map_logits, score_energy

RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.standard_normal((11, 6), np.float32))
HEAD = jnp.asarray(RNG.standard_normal((9, 6), np.float32))
TARGETS = jnp.asarray(RNG.integers(0, 7, 11))
LEGAL = jnp.asarray(np.arange(9) < 7)


def plain(hidden, head, temperature):
    logp = jax.nn.log_softmax((hidden @ head.T / temperature)[:, :7], axis=-1)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.take_along_axis(logp, TARGETS[:, None], axis=-1)[:, 0], entropy


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (4, 0.6), (11, 0.6), (100, 1.0)])
def test_values_and_gradients_equal_the_plain_form(chunk, temperature):
    def chunked(hidden, head):
        return map_logits(
            logprob_and_entropy,
            hidden,
            head,
            TARGETS,
            allowed_tokens=LEGAL,
            temperature=temperature,
            chunk=chunk,
        )

    @functools.partial(jax.jit, static_argnums=0)
    def pair_and_gradients(form):
        def weighed(hidden, head):
            pair = form(hidden, head)
            return (pair[0] * jnp.arange(11.0)).sum() + (pair[1] ** 2).sum(), pair

        return jax.grad(weighed, (0, 1), has_aux=True)(HIDDEN, HEAD)

    gradients, pair = pair_and_gradients(chunked)
    want_gradients, want = pair_and_gradients(lambda *x: plain(*x, temperature))
    for a, b in zip(pair, want):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for a, b in zip(gradients, want_gradients):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("chunk", [4, 100])
def test_the_gradient_in_bfloat16_is_that_of_fp32_but_for_rounding(chunk):
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.standard_normal((64, 48)), jnp.bfloat16)
    # Values that bfloat16 holds, so that the products alone are rounded.
    head = jnp.asarray(rng.standard_normal((80, 48)), jnp.bfloat16).astype(jnp.float32)
    targets = jnp.asarray(rng.integers(0, 80, 64))

    @jax.jit
    def gradient(hidden):
        def total(hidden, head):
            logp, entropy = map_logits(logprob_and_entropy, hidden, head, targets, chunk=chunk)
            return (logp * jnp.linspace(-1, 1, 64)).sum() + 0.1 * entropy.sum()

        return jax.grad(total, (0, 1))(hidden, head)

    found, want = gradient(hidden), gradient(hidden.astype(jnp.float32))
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float32]
    for one, other in zip(found, want):
        gap = np.asarray(one, np.float32) - np.asarray(other)
        assert 0 < np.linalg.norm(gap) < 0.004 * np.linalg.norm(other)


def test_16_bit_states_make_no_fp32_product_and_cast_the_head_once():
    hidden, head = jnp.zeros((8, 4), jnp.bfloat16), jnp.zeros((6, 4))
    total = lambda h, w: map_logits(logprob_and_entropy, h, w, jnp.zeros(8, int), chunk=2)[0].sum()
    text = jax.jit(jax.grad(total, (0, 1))).lower(hidden, head).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 3
    for line in products:
        operands = line.split(" : ")[-1].split("->")[0]
        assert "bf16" in operands and "f32" not in operands
    casts = [line for line in text.splitlines() if "stablehlo.convert" in line]
    assert sum("tensor<6x4xf32>) -> tensor<6x4xbf16>" in line for line in casts) == 1


def test_illegal_ids_get_no_probability_and_no_gradient():
    total = lambda head: map_logits(
        logprob_and_entropy, HIDDEN, head, TARGETS, allowed_tokens=LEGAL
    )[0].sum()
    grad = jax.jit(jax.grad(total))(HEAD)
    assert (grad[7:] == 0).all() and np.isfinite(grad).all()


def test_peak_memory_does_not_grow_with_tokens_times_vocabulary():
    """Four times the tokens: the unchunked logits would grow by 4 x 3/4 x 1024 x 2048 x 4 bytes."""

    def temporaries(rows):
        head = jnp.zeros((2048, 8))
        hidden, targets = jnp.zeros((rows, 8)), jnp.zeros(rows, jnp.int32)
        loss = lambda h: map_logits(logprob_and_entropy, h, head, targets, chunk=64)[0].sum()
        compiled = jax.jit(jax.grad(loss)).lower(hidden).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    full_logits = 4096 * 2048 * 4
    needed = temporaries(4096)
    assert needed < full_logits / 8
    assert needed - temporaries(1024) < full_logits / 16


def test_energies_are_squared_norms_of_scores_in_the_logits():
    """The gradient of log p(target) by the logits, by automatic differentiation; 3 chunks."""
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(7, 4)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(9, 4)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 6, 7))
    allowed = jnp.asarray(np.arange(9) < 6)
    of_energies = functools.partial(map_logits, score_energy)
    energies = jax.jit(of_energies, static_argnames=("temperature", "chunk"))
    found = energies(hidden, head, targets, allowed_tokens=allowed, temperature=0.5, chunk=3)

    def logprob(scores, target):
        return jax.nn.log_softmax(jnp.where(allowed, scores, -1e30))[target]

    slopes = jax.jit(jax.vmap(jax.grad(logprob)))(hidden @ head.T / 0.5, targets)
    np.testing.assert_allclose(found, jnp.square(slopes).sum(-1), rtol=1e-5)
