"""Drawing the next token, with the log-probability of the distribution it was drawn from."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.types import pytree

_ILLEGAL = -1e30


@pytree
class Sampler:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_p: nucleus mass, 1 keeps everything (only read by the truncated variant).
      top_k: number of candidates kept, 0 keeps everything (only read by the truncated variant).
    """

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    top_k: Int[Array, ""]


def sampler(temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampler:
    """A `Sampler` from Python numbers."""
    return Sampler(jnp.float32(temperature), jnp.float32(top_p), jnp.int32(top_k))


def truncate(scores: Float[Array, "R V"], how: Sampler) -> Float[Array, "R V"]:
    """Pushes tokens outside the top-k and outside the nucleus to the bottom.

    The nucleus is the smallest set of most likely tokens whose mass reaches top_p; it always holds
    the most likely one. Ties at the border are broken by token id.
    """
    order = jnp.argsort(-scores, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    mass = jax.nn.softmax(jnp.take_along_axis(scores, order, axis=-1), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    in_nucleus = jnp.take_along_axis(before < how.top_p, rank, axis=-1)
    limit = jnp.where(how.top_k > 0, how.top_k, scores.shape[-1])
    return jnp.where((in_nucleus & (rank < limit)) | (rank == 0), scores, _ILLEGAL)


def draw(
    keys: Array,
    logits: Float[Array, "R V"],
    *,
    how: Sampler,
    legal: Bool[Array, "V"],
    truncated: bool = False,
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """One token per row.

    Args:
      keys: one PRNG key per row; a row's draw depends on nothing else of the batch.
      logits: raw scores, fp32.
      how: temperature and truncation.
      legal: ids that may be drawn.
      truncated: apply top-k and top-p (static: the sort costs time on large vocabularies).

    Returns:
      Token ids and their log-probability (nats) under the distribution drawn from, which for
      temperature 0 is certain (0).
    """
    chex.assert_rank([logits, legal], [2, 1])
    scores = jnp.where(legal, logits, _ILLEGAL)
    best = jnp.argmax(scores, axis=-1)
    greedy = how.temperature == 0
    scaled = jnp.where(legal, logits / jnp.where(greedy, 1.0, how.temperature), _ILLEGAL)
    if truncated:
        scaled = truncate(scaled, how)
    random = jax.vmap(jax.random.categorical)(keys, scaled)
    token = jnp.where(greedy, best, random).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    logprob = chosen - jax.nn.logsumexp(scaled, axis=-1)
    return token, jnp.where(greedy, 0.0, logprob)


def row_keys(key: Array, rows: Int[Array, "R"], position: Int[Array, "R"], stream: int) -> Array:
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
