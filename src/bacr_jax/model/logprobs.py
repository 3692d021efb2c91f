"""Log-probabilities and entropies of given tokens, without ever forming [B, T, V]."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_IMPOSSIBLE = -1e30


def masked_logits(
    hidden: Float[Array, "R D"],
    lm_head: Float[Array, "V D"],
    allowed_tokens: Bool[Array, "V"] | None,
    temperature: float = 1.0,
) -> Float[Array, "R V"]:
    """Logits / temperature in fp32, ids that may never be sampled pushed to the bottom."""
    scores = jnp.einsum(
        "rd,vd->rv", hidden, lm_head.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    scores = scores / temperature
    return scores if allowed_tokens is None else jnp.where(allowed_tokens, scores, _IMPOSSIBLE)


@jax.custom_vjp
def logprob_and_entropy(
    scores: Float[Array, "R V"], ids: Int[Array, "R"]
) -> tuple[Float[Array, "R"], Float[Array, "R"]]:
    """Per row, log softmax(s)[id] and the entropy H of softmax(s).

    Only the scores are kept for the gradient, which is one pass over them:

        d log p_i / d s_j = [j = i] - p_j          d H / d s_j = -p_j (log p_j + H)

    Args:
      scores: finite; an id that can't be drawn has a score so low that its probability is 0.
      ids: chosen id of each row.

    Returns:
      Log-probabilities and entropies in nats, fp32.
    """
    return _logprob_and_entropy(scores, ids)[0]


def _logprob_and_entropy(scores: Array, ids: Array) -> tuple[tuple[Array, Array], Any]:
    normaliser = jax.nn.logsumexp(scores, axis=-1)
    chosen = jnp.take_along_axis(scores, ids[:, None], axis=-1)[:, 0]
    # Ids that can't be drawn have probability exactly 0 and a finite score, so 0 * score stays 0.
    expected = jnp.sum(jnp.exp(scores - normaliser[:, None]) * scores, axis=-1)
    entropy = normaliser - expected
    return (chosen - normaliser, entropy), (scores, ids, normaliser, entropy)


def _logprob_and_entropy_gradient(kept: Any, upstream: tuple[Array, Array]) -> tuple[Array, None]:
    scores, ids, normaliser, entropy = kept
    of_logprob, of_entropy = (x[:, None] for x in upstream)
    logp = scores - normaliser[:, None]
    p = jnp.exp(logp)
    is_chosen = jnp.arange(scores.shape[-1]) == ids[:, None]
    slope = jnp.where(is_chosen, of_logprob, 0.0) - p * of_logprob
    return slope - p * (logp + entropy[:, None]) * of_entropy, None


logprob_and_entropy.defvjp(_logprob_and_entropy, _logprob_and_entropy_gradient)


def token_logprobs(
    hidden: Float[Array, "R D"],
    lm_head: Float[Array, "V D"],
    targets: Int[Array, "R"],
    *,
    allowed_tokens: Bool[Array, "V"] | None = None,
    temperature: float = 1.0,
    chunk: int = 512,
) -> tuple[Float[Array, "R"], Float[Array, "R"]]:
    """Log p(target) and the entropy of p at each row, computed chunk by chunk.

    Of several chunks, each is recomputed in the backward pass, so peak memory is of the order of
    chunk x V, whatever R is.

    Args:
      hidden: final states of the rows that predict a token.
      lm_head: output matrix.
      targets: the token each row must explain.
      allowed_tokens: ids that the sampler may draw; the same mask it uses.
      temperature: divides the logits, as in the sampler.
      chunk: rows per chunk.

    Returns:
      Log-probabilities (nats) and entropies (nats), fp32.
    """
    chex.assert_rank([hidden, lm_head, targets], [2, 2, 1])
    rows, width = hidden.shape

    def of_chunk(inputs: Any) -> tuple[Array, Array]:
        states, ids = inputs
        return logprob_and_entropy(masked_logits(states, lm_head, allowed_tokens, temperature), ids)

    if rows <= chunk:
        return of_chunk((hidden, targets))
    padded = -rows % chunk
    hidden = jnp.pad(hidden, ((0, padded), (0, 0))).reshape(-1, chunk, width)
    targets = jnp.pad(targets, (0, padded)).reshape(-1, chunk)
    recomputed = jax.checkpoint(of_chunk, prevent_cse=False)
    logprobs, entropy = jax.lax.map(recomputed, (hidden, targets))
    return logprobs.reshape(-1)[:rows], entropy.reshape(-1)[:rows]
