"""Drawing the next token, with the log-probability of the distribution it was drawn from."""

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.types import pytree

_DISALLOWED = -1e30

# Vocabulary entries per block of `categorical`; about the root of real vocabularies.
_BLOCK = 256


@pytree
class SamplingParams:
    """How tokens are drawn; `sampling_params` makes it from numbers.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_p: nucleus mass, 1 keeps everything.
      top_k: number of candidates kept, 0 keeps everything.
      truncated: top-p and top-k are applied; static, since the sort that they take costs time on
        large vocabularies.
    """

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    top_k: Int[Array, ""]
    truncated: bool = struct.field(pytree_node=False)


def sampling_params(temperature: float, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    """A `SamplingParams` from Python numbers, truncated where they cut anything off."""
    return SamplingParams(
        jnp.float32(temperature),
        jnp.float32(top_p),
        jnp.int32(top_k),
        truncated=top_p < 1 or top_k > 0,
    )


def truncate(scores: Float[Array, "R V"], sampling: SamplingParams) -> Float[Array, "R V"]:
    """Pushes tokens outside the top-k and outside the nucleus to the bottom.

    The nucleus is the smallest set of most likely tokens whose mass reaches top_p; it always holds
    the most likely one. Ties at the border are broken by token id.
    """
    ordered = -jnp.sort(-scores, axis=-1)
    mass = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    place = jnp.arange(scores.shape[-1])
    limit = jnp.where(sampling.top_k > 0, sampling.top_k, scores.shape[-1])
    count = jnp.maximum(((before < sampling.top_p) & (place < limit)).sum(-1, keepdims=True), 1)
    # One sort of the scores alone; who is kept follows from the lowest score kept.
    lowest = jnp.take_along_axis(ordered, count - 1, axis=-1)
    above, tied = scores > lowest, scores == lowest
    room = count - above.sum(-1, keepdims=True)
    return jnp.where(above | (tied & (jnp.cumsum(tied, axis=-1) <= room)), scores, _DISALLOWED)


def first_reaching(
    mass: Float[Array, "R n"], share: Float[Array, "R"]
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """Inverse of the cumulative mass: the first index where it exceeds share x total.

    An index without mass is never returned, whatever the rounding of the sums.

    Args:
      mass: not negative, some of it positive in every row.
      share: in [0, 1).

    Returns:
      Indices, and the total mass.
    """
    total = jnp.cumsum(mass, axis=-1)
    positive = mass > 0
    reached = positive & (total > share[:, None] * total[:, -1:])
    # The product can round up to the total: then the last index with mass is meant.
    last = mass.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    index = jnp.where(reached.any(-1), jnp.argmax(reached, axis=-1), last)
    return index.astype(jnp.int32), total[:, -1]


def categorical(
    keys: Array, scores: Float[Array, "R V"]
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """A draw from softmax(scores) and its log-probability, with two random numbers per row.

    Gumbel noise needs a random number per vocabulary entry, which costs more than the head itself.
    Here the vocabulary is cut into blocks: the first number chooses the block by its mass, the
    second the entry within it. Each sees a short sum only, so that fp32 resolves rare entries too.

    Args:
      keys: one PRNG key per row.
      scores: fp32; entries at least some 100 below the largest have no mass.

    Returns:
      Token ids, and their log-probabilities (nats).
    """
    r, v = scores.shape
    top = scores.max(-1, keepdims=True)
    mass = jnp.pad(jnp.exp(scores - top), ((0, 0), (0, -v % _BLOCK))).reshape(r, -1, _BLOCK)
    shares = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block, total = first_reaching(mass.sum(-1), shares[:, 0])
    within = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
    entry, _ = first_reaching(within, shares[:, 1])
    token = block * _BLOCK + entry
    chosen = jnp.take_along_axis(scores, token[:, None], axis=-1)
    return token, (chosen - top)[:, 0] - jnp.log(total)


def sample_tokens(
    keys: Array,
    logits: Float[Array, "R V"],
    *,
    sampling: SamplingParams,
    allowed_tokens: Bool[Array, "V"],
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """One token per row.

    Args:
      keys: one PRNG key per row; a row's draw depends on nothing else of the batch.
      logits: raw scores, fp32.
      sampling: temperature and truncation.
      allowed_tokens: ids that may be drawn.

    Returns:
      Token ids and their log-probability (nats) under the distribution drawn from, which for
      temperature 0 is certain (0). Logits that are not finite give a log-probability of NaN.
    """
    chex.assert_rank([logits, allowed_tokens], [2, 1])
    greedy = sampling.temperature == 0
    scaled = jnp.where(
        allowed_tokens, logits / jnp.where(greedy, 1.0, sampling.temperature), _DISALLOWED
    )
    if sampling.truncated:
        scaled = truncate(scaled, sampling)
    random, logprob = categorical(keys, scaled)
    # The first of the largest; two plain reductions are several times faster than argmax on CPUs.
    v = scaled.shape[-1]
    at_top = scaled == scaled.max(-1, keepdims=True)
    best = jnp.minimum(jnp.where(at_top, jnp.arange(v), v).min(-1), v - 1).astype(jnp.int32)
    token = jnp.where(greedy, best, random)
    healthy = jnp.isfinite(scaled.max(-1)) & jnp.isfinite(scaled.min(-1))
    return token, jnp.where(healthy, jnp.where(greedy, 0.0, logprob), jnp.nan)


def row_keys(
    key: Array, rows: Int[Array, "R"], position: Int[Array, "R"], stream: Int[Array, ""] | int
) -> Array:
    """A key for each (row id, position): a row's text depends on no other row, slot or device.

    Args:
      key: key of this call (already folded with run and step).
      rows: global row ids.
      position: token index within the row.
      stream: 0 for trunks, 1 + cut for branches.
    """
    stream_key = jax.random.fold_in(key, stream)
    one = lambda row, at: jax.random.fold_in(jax.random.fold_in(stream_key, row), at)
    return jax.vmap(one)(rows, position)
