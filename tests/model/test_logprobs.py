"""Chunked log-probabilities against the plain softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.model.logprobs import token_logprobs

HIDDEN = jax.random.normal(jax.random.key(0), (11, 6))
HEAD = jax.random.normal(jax.random.key(1), (9, 6))
TARGETS = jax.random.randint(jax.random.key(2), (11,), 0, 7)
LEGAL = jnp.arange(9) < 7


def plain(hidden, head, temperature):
    logp = jax.nn.log_softmax((hidden @ head.T / temperature)[:, :7], axis=-1)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.take_along_axis(logp, TARGETS[:, None], axis=-1)[:, 0], entropy


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (4, 0.6), (11, 0.6), (100, 1.0)])
def test_values_and_gradients_equal_the_plain_form(chunk, temperature):
    def chunked(hidden, head):
        return token_logprobs(
            hidden, head, TARGETS, allowed_tokens=LEGAL, temperature=temperature, chunk=chunk
        )

    for found, want in zip(chunked(HIDDEN, HEAD), plain(HIDDEN, HEAD, temperature)):
        np.testing.assert_allclose(found, want, atol=1e-5)
    weigh = lambda pair: (pair[0] * jnp.arange(11.0)).sum() + (pair[1] ** 2).sum()
    found = jax.grad(lambda a, b: weigh(chunked(a, b)), (0, 1))(HIDDEN, HEAD)
    want = jax.grad(lambda a, b: weigh(plain(a, b, temperature)), (0, 1))(HIDDEN, HEAD)
    for a, b in zip(found, want):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_illegal_ids_get_no_probability_and_no_gradient():
    grad = jax.grad(
        lambda head: token_logprobs(HIDDEN, head, TARGETS, allowed_tokens=LEGAL)[0].sum()
    )(HEAD)
    assert (grad[7:] == 0).all() and np.isfinite(grad).all()


def test_peak_memory_does_not_grow_with_tokens_times_vocabulary():
    """Four times the tokens: the unchunked logits would grow by 4 x 3/4 x 1024 x 2048 x 4 bytes."""

    def temporaries(rows):
        head = jnp.zeros((2048, 8))
        hidden, targets = jnp.zeros((rows, 8)), jnp.zeros(rows, jnp.int32)
        loss = lambda h: token_logprobs(h, head, targets, chunk=64)[0].sum()
        compiled = jax.jit(jax.grad(loss)).lower(hidden).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    full_logits = 4096 * 2048 * 4
    needed = temporaries(4096)
    assert needed < full_logits / 8
    assert needed - temporaries(1024) < full_logits / 16
