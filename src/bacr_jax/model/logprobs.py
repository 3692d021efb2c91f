"""Log-probabilities and entropies of given tokens, without ever forming [B, T, V]."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_ILLEGAL = -1e30


def masked_logits(
    hidden: Float[Array, "R D"],
    head: Float[Array, "V D"],
    legal: Bool[Array, "V"] | None,
    temperature: float = 1.0,
) -> Float[Array, "R V"]:
    """Logits / temperature in fp32, ids that may never be sampled pushed to the bottom."""
    scores = jnp.einsum(
        "rd,vd->rv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    scores = scores / temperature
    return scores if legal is None else jnp.where(legal, scores, _ILLEGAL)


def token_logprobs(
    hidden: Float[Array, "R D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "R"],
    *,
    legal: Bool[Array, "V"] | None = None,
    temperature: float = 1.0,
    chunk: int = 512,
) -> tuple[Float[Array, "R"], Float[Array, "R"]]:
    """Log p(target) and the entropy of p at each row, computed chunk by chunk.

    Each chunk is recomputed in the backward pass, so peak memory is chunk x V, whatever R is.

    Args:
      hidden: final states of the rows that predict a token.
      head: output matrix.
      targets: the token each row must explain.
      legal: ids that the sampler may draw; the same mask it uses.
      temperature: divides the logits, as in the sampler.
      chunk: rows per chunk.

    Returns:
      Log-probabilities (nats) and entropies (nats), fp32.
    """
    chex.assert_rank([hidden, head, targets], [2, 2, 1])
    rows, width = hidden.shape

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(inputs: Any) -> tuple[Array, Array]:
        states, ids = inputs
        scores = masked_logits(states, head, legal, temperature)
        normaliser = jax.nn.logsumexp(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, ids[:, None], axis=-1)[:, 0]
        # Illegal ids have probability exactly 0 and a finite score, so 0 * score stays 0.
        expected = jnp.sum(jnp.exp(scores - normaliser[:, None]) * scores, axis=-1)
        return chosen - normaliser, normaliser - expected

    if rows <= chunk:
        return of_chunk((hidden, targets))
    padded = -rows % chunk
    hidden = jnp.pad(hidden, ((0, padded), (0, 0))).reshape(-1, chunk, width)
    targets = jnp.pad(targets, (0, padded)).reshape(-1, chunk)
    logprobs, entropy = jax.lax.map(of_chunk, (hidden, targets))
    return logprobs.reshape(-1)[:rows], entropy.reshape(-1)[:rows]
