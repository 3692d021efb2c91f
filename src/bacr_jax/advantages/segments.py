"""Thinking tokens between cuts: from an advantage per segment to one per token."""

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def segment_index(
    positions: Int[Array, "*batch T"], cuts: Int[Array, "*batch M"]
) -> Int[Array, "*batch T"]:
    """Segment of each thinking token: the first cut that includes it.

        s(t) = min { j : c_j >= t },  t counted from 1

    So tokens 1..c_1 are segment 0. With equal cuts the first of them owns the tokens.

    Args:
      positions: token numbers, the first thinking token being 1.
      cuts: cuts in tokens, nondecreasing along the last axis.

    Returns:
      Indices in [0, M]; M for tokens after the last cut.
    """
    before = cuts[..., None, :] < positions[..., :, None]
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def scatter_segments(
    advantages: Float[Array, "B M"], cuts: Int[Array, "B M"], num_tokens: int
) -> Float[Array, "B T"]:
    """Gives every thinking token the advantage of its segment.

    Args:
      advantages: one per segment.
      cuts: cuts in tokens, nondecreasing along the last axis.
      num_tokens: T; entry t of the result belongs to thinking token t + 1.

    Returns:
      Advantages per token, 0 after the last cut. Tokens past a trace's natural end are not
      known here: the loss mask leaves them out.
    """
    chex.assert_rank([advantages, cuts], 2)
    chex.assert_equal_shape([advantages, cuts])
    positions = jnp.broadcast_to(jnp.arange(1, num_tokens + 1), (cuts.shape[0], num_tokens))
    padded = jnp.pad(advantages, ((0, 0), (0, 1)))
    return jnp.take_along_axis(padded, segment_index(positions, cuts), axis=1)


def sum_reused(
    advantages: Float[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Adds up the advantages of the cuts that share one answer.

    The answer generated for cut i is scored at every j with source_j = i, and its gradient is the
    sum of those terms.

    Args:
      advantages: one per cut.
      source: the cut whose answer serves cut j (`rewards.distinct_cuts`).

    Returns:
      One per generated answer; 0 at cuts that generated none.
    """
    chex.assert_equal_shape([advantages, source])
    serves = source[..., None, :] == jnp.arange(source.shape[-1])[:, None]
    return jnp.sum(jnp.where(serves, advantages[..., None, :], 0.0), axis=-1)


def first_of_reused(
    advantages: Float[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Counts the advantage of an answer that serves several cuts once.

    Args:
      advantages: one per cut, the same at all cuts that share an answer.
      source: the cut whose answer serves cut j (`rewards.distinct_cuts`).

    Returns:
      The same at cuts with an answer of their own, 0 at the others.
    """
    chex.assert_equal_shape([advantages, source])
    return jnp.where(source == jnp.arange(source.shape[-1]), advantages, 0.0)
