"""Log-probabilities and entropies of given tokens, without ever forming [B, T, V]."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.model import products

_IMPOSSIBLE = -1e30


@jax.custom_vjp
def _rounded_product(
    hidden: Float[Array, "R D"], copy: Float[Array, "V D"], lm_head: Float[Array, "V D"]
) -> Float[Array, "R V"]:
    """Scores in fp32 of a copy of the head in the states' type; the gradient is the head's.

    The backward products round what comes from above to that type too, and sum in fp32: without
    this they would be products of fp32 matrices, at a fraction of the rate.
    """
    return jnp.einsum("rd,vd->rv", hidden, copy, preferred_element_type=jnp.float32)


def _rounded_product_forward(hidden: Array, copy: Array, lm_head: Array) -> tuple[Array, Any]:
    # Of the head only the type is kept.
    return _rounded_product(hidden, copy, lm_head), (hidden, copy, jnp.zeros((), lm_head.dtype))


def _rounded_product_gradient(kept: Any, upstream: Array) -> tuple[Array, None, Array]:
    hidden, copy, like = kept
    upstream = upstream.astype(hidden.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    of_hidden = product("rv,vd->rd", upstream, copy).astype(hidden.dtype)
    return of_hidden, None, product("rv,rd->vd", upstream, hidden).astype(like.dtype)


_rounded_product.defvjp(_rounded_product_forward, _rounded_product_gradient)


def head_copy(lm_head: Float[Array, "V D"], dtype: Any) -> Float[Array, "V D"]:
    """The head in the type that products are computed in, outside of any loop; no gradient."""
    return jax.lax.stop_gradient(lm_head.astype(dtype))


def masked_logits(
    hidden: Float[Array, "R D"],
    lm_head: Float[Array, "V D"],
    allowed_tokens: Bool[Array, "V"] | None,
    temperature: float,
    copy: Float[Array, "V D"] | None,
) -> Float[Array, "R V"]:
    """Logits / temperature in fp32, ids that may never be sampled pushed to the bottom.

    In fp32 all products are fp32; in 16-bit types those of the backward pass are 16-bit too, with
    fp32 sums, and `copy` is `head_copy` of the head.
    """
    if copy is None:
        scores = products.times_transposed(hidden, lm_head.astype(hidden.dtype))
    else:
        scores = _rounded_product(hidden, copy, lm_head)
    scores = scores / temperature
    return scores if allowed_tokens is None else jnp.where(allowed_tokens, scores, _IMPOSSIBLE)


@jax.custom_vjp
def logprob_and_entropy(
    scores: Float[Array, "R V"], ids: Int[Array, "R"]
) -> tuple[Float[Array, "R"], Float[Array, "R"]]:
    """Per row, log softmax(s)[id] and the entropy H of softmax(s), both in nats, fp32.

    Only the scores are kept for the gradient, which is one pass over them:

        d log p_i / d s_j = [j = i] - p_j          d H / d s_j = -p_j (log p_j + H)

    Forward mode (`jax.jvp`, `jax.jacfwd`) is not defined.

    Args:
      scores: finite; an id that can't be drawn has a score so low that its probability is 0.
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


def score_energy(scores: Float[Array, "R V"], ids: Int[Array, "R"]) -> Float[Array, "R"]:
    """Squared norm of each token's score in its logits: 1 - 2 p(id) + sum_v p(v)^2, fp32.

    From 0, where the token was certain, to 2.
    """
    p = jax.nn.softmax(scores, axis=-1)
    chosen = jnp.take_along_axis(p, ids[:, None], axis=-1)[:, 0]
    return 1.0 - 2.0 * chosen + jnp.square(p).sum(-1)


def of_tokens(
    of_scores: Callable[[Array, Array], Any],
    hidden: Float[Array, "R D"],
    lm_head: Float[Array, "V D"],
    targets: Int[Array, "R"],
    *,
    allowed_tokens: Bool[Array, "V"] | None = None,
    temperature: float = 1.0,
    chunk: int = 512,
) -> Any:
    """What is made of each row's scores and target, computed chunk by chunk.

    Of several chunks, each is recomputed in the backward pass, so peak memory is of the order of
    chunk x V, whatever R is.

    Args:
      of_scores: from scores [R, V] and ids [R], such as `logprob_and_entropy`.
      hidden: final states of the rows that predict a token.
    """
    chex.assert_rank([hidden, lm_head, targets], [2, 2, 1])
    copy = None if hidden.dtype == jnp.float32 else head_copy(lm_head, hidden.dtype)

    def of_chunk(inputs: Any) -> Any:
        states, ids = inputs
        return of_scores(masked_logits(states, lm_head, allowed_tokens, temperature, copy), ids)

    return by_chunks(of_chunk, (hidden, targets), chunk)


def next_token_logprobs(
    hidden: Float[Array, "R D"],
    lm_head: Float[Array, "V D"],
    allowed_tokens: Bool[Array, "V"] | None = None,
    temperature: float = 1.0,
) -> Float[Array, "R V"]:
    """Returns log softmax of all scores, in nats; about -1e30 for ids that can't be drawn."""
    copy = None if hidden.dtype == jnp.float32 else head_copy(lm_head, hidden.dtype)
    scores = masked_logits(hidden, lm_head, allowed_tokens, temperature, copy)
    return scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)


def by_chunks(of_chunk: Any, inputs: tuple[Array, Array], chunk: int, axis: int = 0) -> Any:
    """Results of tokens, a chunk along an axis at a time, each recomputed in the backward pass."""
    length = inputs[0].shape[axis]
    if length <= chunk:
        return of_chunk(inputs)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, -length % chunk if i == axis else 0) for i in range(x.ndim)])
        pieces = padded.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(pieces, axis, 0)

    recomputed = jax.checkpoint(of_chunk, prevent_cse=False)
    found = jax.lax.map(recomputed, jax.tree.map(split, inputs))
    join = lambda x: jnp.moveaxis(x, 0, axis).reshape(*x.shape[1 : axis + 1], -1)[..., :length]
    return jax.tree.map(join, found)
