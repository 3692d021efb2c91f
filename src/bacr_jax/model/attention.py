"""Softmax attention over one or several key/value segments, grouped query heads, fp32 softmax.

A query may see keys that live in different arrays: a trunk's cache (read only, shared by its
branches) and a branch's own few tokens. Each segment gives a `Partial`: the running maximum, the
sum of exponentials and the weighted values. Partials merge exactly into one softmax over all keys.
"""

import functools
from collections.abc import Sequence
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.errors import UserError
from bacr_jax.model import products
from bacr_jax.types import pytree

Implementation = Literal["xla", "cudnn"]

# A finite stand-in for minus infinity: rows that see no key give zeros, never NaN.
_MASKED = -1e30

# Queries per block of causal attention, and most blocks (each is compiled on its own).
_BLOCK, _MAX_BLOCKS = 128, 8


@pytree
class Partial:
    """Attention over one segment, before the division by the softmax denominator.

    Attributes:
      values: sum over keys of exp(score - maximum) * value, fp32.
      maximum: largest visible score, fp32.
      denominator: sum over keys of exp(score - maximum), fp32.
    """

    values: Float[Array, "*B T N H"]
    maximum: Float[Array, "*B T N"]
    denominator: Float[Array, "*B T N"]


def cached_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"] | Float[Array, "B K H S"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"] | Bool[Array, "1 T S"],
    *,
    transposed: bool = False,
) -> Partial:
    """Unnormalised attention of queries over those keys of one segment that `mask` lets them see.

    Query head n reads key/value head n // (N / K). Each head's keys lie together, as caches hold
    them, and the group is folded into the query axis: both products are plain batched matrix
    products, which copy and transpose no key. A query that sees nothing has zero values and
    denominator.
    """
    chex.assert_rank([q, k, v, mask], [4, 4, 4, 3])
    b, t, n, h = q.shape
    num_kv, weigh = k.shape[1], functools.partial(products.times, dtype=jnp.float32)
    score = weigh if transposed else products.times_transposed
    group = n // num_kv
    folded = q.reshape(b, t, num_kv, group, h).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(b, num_kv, group * t, h)
    scores = score(folded, k).reshape(b, num_kv, group, t, -1) * h**-0.5
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    maximum = jax.lax.stop_gradient(scores.max(-1))
    # Hidden keys underflow to exactly 0, except where a query sees none: there all would count as
    # equal, so the shift is moved far enough up that they vanish too.
    shift = jnp.where(maximum > _MASKED / 2, maximum, 0.0)
    weights = jnp.exp(scores - shift[..., None])
    denominator = weights.sum(-1)
    weights = weights.astype(v.dtype).reshape(b, num_kv, group * t, -1)
    values = weigh(weights, v).reshape(b, num_kv, group, t, h).transpose(0, 3, 1, 2, 4)
    unfold = lambda x: x.transpose(0, 3, 1, 2).reshape(b, t, n)
    return Partial(values.reshape(b, t, n, h), unfold(maximum), unfold(denominator))


def token_attention(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"] | Float[Array, "B K H S"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B S"],
    *,
    transposed: bool = False,
) -> Float[Array, "B 1 N H"]:
    """Attention of one query a row over all keys that it sees, of which there is one at least.

    What a `Partial` is divided by stays inside, and hidden keys get their score by addition: so
    XLA's CPU backend makes one pass of scores and exponentials, in which rows go to all threads.
    """
    b, _, n, h = q.shape
    folded = q.reshape(b, k.shape[1], -1, h)
    times = functools.partial(products.times, dtype=jnp.float32)
    scores = (times if transposed else products.times_transposed)(folded, k) * h**-0.5
    scores = scores + jnp.where(mask, 0.0, _MASKED)[:, None, None]
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    values = times(weights.astype(v.dtype), v)
    return (values / weights.sum(-1, keepdims=True)).reshape(b, 1, n, h).astype(q.dtype)


def merge(partials: Sequence[Partial], dtype: jnp.dtype) -> Float[Array, "*B T N H"]:
    """One softmax over the keys of all segments (log-sum-exp merge in fp32), zeros over none."""
    maximum = functools.reduce(jnp.maximum, [p.maximum for p in partials])
    scales = [jnp.exp(p.maximum - maximum) for p in partials]
    values = sum(p.values * scale[..., None] for p, scale in zip(partials, scales))
    denominator = sum(p.denominator * scale for p, scale in zip(partials, scales))
    # At least one visible key contributes exp(0) = 1, so the guard only meets empty rows.
    return (values / jnp.maximum(denominator, 1e-9)[..., None]).astype(dtype)


def causal_mask(length: int) -> Bool[Array, "1 T S"]:
    """True where key position <= query position."""
    index = jnp.arange(length)
    return (index[None, :] <= index[:, None])[None]


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    implementation: Implementation = "xla",
    lengths: Int[Array, "B"] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal self-attention over rows padded on the right.

    Padding sits after every real token, so causality alone hides it from real queries. What padded
    queries return is never read.

    Args:
      implementation: `xla` anywhere; `cudnn` needs an NVIDIA GPU and 16-bit floats.
      lengths: real tokens per row; lets cuDNN skip padding.
    """
    chex.assert_rank([q, k, v], 4)
    t = q.shape[1]
    if implementation == "cudnn":
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            raise UserError(
                f"model.attention: cudnn takes bfloat16 or float16, found {q.dtype}; "
                "write model.attention=xla or model.compute_dtype=bfloat16"
            )
        # JAX refuses the gradient of an odd number of positions; one more sits after all others.
        even = lambda x: jnp.pad(x, ((0, 0), (0, t % 2), (0, 0), (0, 0)))
        attended = jax.nn.dot_product_attention(
            even(q),
            even(k),
            even(v),
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
        return attended[:, :t]
    return masked_attention(q, k, v, None)


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visible: Bool[Array, "B T T"] | None,
) -> Float[Array, "B T N H"]:
    """Causal attention in which a query may see some of the keys before it, by XLA.

    Args:
      visible: keys that each query may see, if they are not after it; None: all.
    """
    blocks = jax.lax.split(q, _block_sizes(q.shape[1]), axis=1)
    found = _causal_blocks(blocks, _heads_first(k), _heads_first(v), visible)
    return checkpoint_name(jnp.concatenate(found, axis=1), "attention")


def _heads_first(x: Float[Array, "B S K H"]) -> Float[Array, "B K S H"]:
    """Keys or values as the products read them: moved once, not once per block of queries."""
    return x.transpose(0, 2, 1, 3)


def _block_rows(length: int) -> int:
    """Most queries of a block of causal attention over a row."""
    return max(_BLOCK, -(-length // _MAX_BLOCKS))


def _block_sizes(length: int) -> list[int]:
    rows = _block_rows(length)
    return [min(rows, length - start) for start in range(0, length, rows)]


def _causal_blocks(
    blocks: Sequence[Float[Array, "B _ N H"]],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    visible: Bool[Array, "B T S"] | None,
) -> list[Float[Array, "B _ N H"]]:
    """Causal attention of consecutive blocks of queries from position 0 on.

    Keys after a block's last query are never scored, which saves nearly half of the work.
    """
    found, start = [], 0
    for q in blocks:
        stop = start + q.shape[1]
        mask = (jnp.arange(stop) <= jnp.arange(start, stop)[:, None])[None]
        if visible is not None:
            mask = mask & visible[:, start:stop, :stop]
        partial = cached_attention(q, k[:, :, :stop], v[:, :, :stop], mask)
        found.append(merge([partial], q.dtype))
        start = stop
    return found


def branch_mask(
    context: Int[Array, "B M"], branch_of: Int[Array, "B F"] | None, trunk_length: int, count: int
) -> Bool[Array, "B F T"]:
    """Keys that each branch token sees: of the trunk up to its context, of its branch up to itself.

    Args:
      branch_of: branch of each packed position; None: branches of equal length.
    """
    b, num_cuts = context.shape
    if branch_of is None:
        branch_of = jnp.broadcast_to(jnp.arange(count) // (count // num_cuts), (b, count))
    visible = jnp.take_along_axis(context, branch_of, axis=1, mode="clip")
    of_trunk = jnp.arange(trunk_length) < visible[:, :, None]
    own = branch_of[:, :, None] == branch_of[:, None]
    return jnp.concatenate([of_trunk, own & causal_mask(count)], axis=2)


def tree_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    context: Int[Array, "B M"],
    *,
    trunk_length: int,
    branch_of: Int[Array, "B F"] | None = None,
    implementation: Implementation = "xla",
    lengths: Int[Array, "B"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention over a trunk of S tokens followed by M branches of A tokens, T = S + M A.

    Packed branches lie one after the other in F positions, each as long as it is, T = S + F.

    Trunk tokens are causal among themselves. A branch token sees the trunk up to its branch's
    context and its own branch up to itself; branches do not see each other:

        query            trunk keys          own branch keys
        trunk t          s <= t              -
        branch (m, a)    s < context[m]      a' <= a

    Args:
      branch_of: branch of each packed position, -1 for none; None: M branches of A tokens.
    """
    count = q.shape[1] - trunk_length
    if implementation == "cudnn" or count == 0:
        q_trunk, q_branch = jax.lax.split(q, [trunk_length, count], axis=1)
        trunk = causal_attention(
            q_trunk,
            k[:, :trunk_length],
            v[:, :trunk_length],
            implementation=implementation,
            lengths=lengths,
        )
        if count == 0:
            return trunk
        mask = branch_mask(context, branch_of, trunk_length, count)
        partial = cached_attention(q_branch, _heads_first(k), _heads_first(v), mask)
        branches = checkpoint_name(merge([partial], q.dtype), "attention")
        return jnp.concatenate([trunk, branches], axis=1)
    sizes, last = _block_sizes(trunk_length), 0
    if sizes[-1] + count <= _block_rows(trunk_length):
        # The branches join the trunk's last block where it has room: one slice of the keys less.
        last = sizes.pop()
    # Split at once: the gradient of all blocks is then one concatenation.
    *blocks, q_last = jax.lax.split(q, [*sizes, last + count], axis=1)
    k, v = _heads_first(k), _heads_first(v)
    found = _causal_blocks(blocks, k, v, None)
    mask = branch_mask(context, branch_of, trunk_length, count)
    if last:
        of_trunk = causal_mask(trunk_length + count)[:, trunk_length - last : trunk_length]
        of_trunk = jnp.broadcast_to(of_trunk, (mask.shape[0], *of_trunk.shape[1:]))
        mask = jnp.concatenate([of_trunk, mask], axis=1)
    found.append(merge([cached_attention(q_last, k, v, mask)], q.dtype))
    return checkpoint_name(jnp.concatenate(found, axis=1), "attention")
