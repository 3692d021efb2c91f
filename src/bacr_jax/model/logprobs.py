"""Log-probabilities and entropies of tokens, computed without an array of shape [B, T, V]."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.model import products
from bacr_jax.parallel import DECODE, AnyMesh, constrain, constrain_rows, row_shards

# Logit of tokens that may not be sampled. It is finite, but its probability is exactly 0 in fp32.
_IMPOSSIBLE = -1e30


@jax.custom_vjp
def _rounded_product(
    hidden: Float[Array, "R D"], copy: Float[Array, "V D"], lm_head: Float[Array, "V D"]
) -> Float[Array, "R V"]:
    """Computes fp32 logits from a 16-bit copy of the output matrix.

    The gradient is passed to the fp32 matrix `lm_head`. The backward pass rounds the upstream
    gradient to 16 bits and accumulates in fp32, because products of fp32 matrices are several times
    slower.
    """
    return jnp.einsum("rd,vd->rv", hidden, copy, preferred_element_type=jnp.float32)


def _rounded_product_forward(hidden: Array, copy: Array, lm_head: Array) -> tuple[Array, Any]:
    scores = _rounded_product(hidden, copy, lm_head)
    # The gradient only needs the dtype of the fp32 head, which this scalar carries.
    head_type = jnp.zeros((), lm_head.dtype)
    return scores, (hidden, copy, head_type)


def _rounded_product_gradient(residuals: Any, upstream: Array) -> tuple[Array, None, Array]:
    hidden, copy, head_type = residuals
    upstream = upstream.astype(hidden.dtype)
    hidden_gradient = jnp.einsum("rv,vd->rd", upstream, copy, preferred_element_type=jnp.float32)
    hidden_gradient = hidden_gradient.astype(hidden.dtype)
    head_gradient = jnp.einsum("rv,rd->vd", upstream, hidden, preferred_element_type=jnp.float32)
    return hidden_gradient, None, head_gradient.astype(head_type.dtype)


_rounded_product.defvjp(_rounded_product_forward, _rounded_product_gradient)


def head_copy(lm_head: Float[Array, "V D"], dtype: Any) -> Float[Array, "V D"]:
    """Casts the output matrix to the dtype of its products, with a stopped gradient."""
    return jax.lax.stop_gradient(lm_head.astype(dtype))


def gathered_head(
    lm_head: Float[Array, "V D"], dtype: Any, mesh: AnyMesh | None
) -> tuple[Float[Array, "V D"], Float[Array, "V D"] | None]:
    """Casts and gathers the output matrix, so that devices exchange weights instead of logits.

    Callers should do this once, outside of any loop over chunks. If the matrix is cast, the forward
    pass does not read the fp32 matrix.

    Args:
      lm_head: output matrix.
      dtype: dtype of the hidden states.
      mesh: device mesh, or None for a single device.

    Returns:
      The arguments `lm_head` and `copy` of `masked_logits`.
    """

    def gather(head: Array) -> Array:
        return constrain({"lm_head": head}, mesh, rules=DECODE)["lm_head"]

    copy = None
    if dtype != jnp.float32:
        # Shard the cast matrix before the gather, so that devices exchange the narrower dtype.
        cast = {"lm_head": head_copy(lm_head, dtype)}
        copy = gather(constrain(cast, mesh)["lm_head"])
    return gather(lm_head), copy


def masked_logits(
    hidden: Float[Array, "R D"],
    lm_head: Float[Array, "V D"],
    allowed_tokens: Bool[Array, "V"] | None,
    temperature: float,
    copy: Float[Array, "V D"] | None,
) -> Float[Array, "R V"]:
    """Computes logits / temperature in fp32. Tokens that are not allowed get -1e30.

    Args:
      hidden: final hidden states of R tokens. With 16-bit states, the products of the backward pass
        are in 16 bits too, accumulated in fp32.
      lm_head: output matrix.
      allowed_tokens: True for tokens that may be sampled, or None for all tokens.
      copy: `lm_head` in the dtype of the states (`head_copy`). None for fp32 states.
    """
    if copy is None:
        scores = products.times_transposed(hidden, lm_head.astype(hidden.dtype))
    else:
        scores = _rounded_product(hidden, copy, lm_head)
    scores = scores / temperature
    if allowed_tokens is None:
        return scores
    return jnp.where(allowed_tokens, scores, _IMPOSSIBLE)


@jax.custom_vjp
def logprob_and_entropy(
    scores: Float[Array, "R V"], ids: Int[Array, "R"]
) -> tuple[Float[Array, "R"], Float[Array, "R"]]:
    """Computes the log-probability log p_i of each row's token i, and the entropy H of p, in nats.

    p = softmax(s) is the distribution of a row with logits s. The backward pass only saves the
    logits, and computes the gradient in a single pass over them:

        d log p_i / d s_j = 1[j = i] - p_j          d H / d s_j = -p_j (log p_j + H)

    Forward mode differentiation (`jax.jvp`, `jax.jacfwd`) is not supported.

    Args:
      scores: finite logits. The logits of tokens that may not be sampled must be so low that their
        probability is 0.
      ids: sampled token i of each row.

    Returns:
      (log-probabilities, entropies), both in fp32.
    """
    return _logprob_and_entropy(scores, ids)[0]


def _logprob_and_entropy(scores: Array, ids: Array) -> tuple[tuple[Array, Array], Any]:
    normaliser = jax.nn.logsumexp(scores, axis=-1)
    id_scores = jnp.take_along_axis(scores, ids[:, None], axis=-1)[:, 0]
    # A token that may not be sampled contributes 0, because its probability is 0 and its logit is
    # finite.
    expected_score = jnp.sum(jnp.exp(scores - normaliser[:, None]) * scores, axis=-1)
    entropy = normaliser - expected_score
    logprob = id_scores - normaliser
    return (logprob, entropy), (scores, ids, normaliser, entropy)


def _logprob_and_entropy_gradient(
    residuals: Any, upstream: tuple[Array, Array]
) -> tuple[Array, None]:
    scores, ids, normaliser, entropy = residuals
    logprob_gradient, entropy_gradient = (x[:, None] for x in upstream)
    logp = scores - normaliser[:, None]
    p = jnp.exp(logp)
    is_id = jnp.arange(scores.shape[-1]) == ids[:, None]
    gradient = jnp.where(is_id, logprob_gradient, 0.0) - p * logprob_gradient
    gradient = gradient - p * (logp + entropy[:, None]) * entropy_gradient
    return gradient, None


logprob_and_entropy.defvjp(_logprob_and_entropy, _logprob_and_entropy_gradient)


def score_energy(scores: Float[Array, "R V"], ids: Int[Array, "R"]) -> Float[Array, "R"]:
    """Computes the squared norm of the gradient of each token's log-probability (w.r.t. logits).

        1 - 2 p(i) + sum_v p(v)^2,   where p = softmax(scores) and i is the row's token in `ids`

    The result ranges from 0, for a token with probability 1, to 2.
    """
    p = jax.nn.softmax(scores, axis=-1)
    p_id = jnp.take_along_axis(p, ids[:, None], axis=-1)[:, 0]
    return 1.0 - 2.0 * p_id + jnp.square(p).sum(-1)


def map_logits(
    of_scores: Callable[[Array, Array], Any],
    hidden: Float[Array, "R D"],
    lm_head: Float[Array, "V D"],
    targets: Int[Array, "R"],
    *,
    allowed_tokens: Bool[Array, "V"] | None = None,
    temperature: float = 1.0,
    chunk: int = 512,
    mesh: AnyMesh | None = None,
) -> Any:
    """Applies a function to the logits and target of each row, one chunk of rows at a time.

    If there are several chunks, the backward pass recomputes the logits of each chunk. The peak
    memory is then proportional to chunk x V, where V is the size of the vocabulary.

    Args:
      of_scores: function of logits [R, V] and ids [R], such as `logprob_and_entropy`.
      hidden: final hidden states of the rows that predict a token.
      lm_head: output matrix.
      targets: token that each row predicts.
      allowed_tokens: see `masked_logits`.
      temperature: see `masked_logits`.
      chunk: number of rows per chunk and device.
      mesh: device mesh over which the rows are split, or None for a single device. The number of
        rows must be divisible by `parallel.row_shards`.

    Returns:
      The results of `of_scores`, concatenated along the rows.
    """
    chex.assert_rank([hidden, lm_head, targets], [2, 2, 1])
    shards = row_shards(mesh)
    lm_head, copy = gathered_head(lm_head, hidden.dtype, mesh)

    def of_chunk(inputs: tuple[Array, Array]) -> Any:
        states, ids = constrain_rows(inputs, mesh)
        states = states.reshape(-1, states.shape[-1])
        scores = masked_logits(states, lm_head, allowed_tokens, temperature, copy)
        results = of_scores(scores, ids.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(shards, -1), results)

    # Each chunk contains rows of every device, so that rows stay on their devices.
    inputs = (hidden.reshape(shards, -1, hidden.shape[-1]), targets.reshape(shards, -1))
    results = by_chunks(of_chunk, inputs, chunk, axis=1)
    return jax.tree.map(lambda x: x.reshape(-1), results)


def next_token_logprobs(
    hidden: Float[Array, "R D"],
    lm_head: Float[Array, "V D"],
    allowed_tokens: Bool[Array, "V"] | None = None,
    temperature: float = 1.0,
    mesh: AnyMesh | None = None,
) -> Float[Array, "R V"]:
    """Computes log softmax of all logits, in nats. Tokens that are not allowed get about -1e30."""
    lm_head, copy = gathered_head(lm_head, hidden.dtype, mesh)
    scores = masked_logits(hidden, lm_head, allowed_tokens, temperature, copy)
    return scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)


def by_chunks(of_chunk: Any, inputs: tuple[Array, Array], chunk: int, axis: int = 0) -> Any:
    """Applies a function to arrays, one chunk along an axis at a time.

    The backward pass recomputes each chunk.

    Args:
      of_chunk: function of a tuple like `inputs`. The last axis of its results must be the chunked
        axis.
      inputs: arrays to be split along `axis`. The last chunk is padded with zeros.
      chunk: length of a chunk. Arrays that are not longer than this are not split.

    Returns:
      The results, concatenated along their last axis and truncated to the length of the inputs.
    """
    length = inputs[0].shape[axis]
    if length <= chunk:
        return of_chunk(inputs)

    def split(x: Array) -> Array:
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, -length % chunk)
        padded = jnp.pad(x, pad)
        chunks = padded.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(chunks, axis, 0)

    def join(x: Array) -> Array:
        joined = jnp.moveaxis(x, 0, axis).reshape(*x.shape[1 : axis + 1], -1)
        return joined[..., :length]

    recomputed = jax.checkpoint(of_chunk, prevent_cse=False)
    results = jax.lax.map(recomputed, jax.tree.map(split, inputs))
    return jax.tree.map(join, results)
