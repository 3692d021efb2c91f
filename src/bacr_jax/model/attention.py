"""Softmax attention over one or more key/value segments, with grouped query heads.

A query can attend to keys in different arrays (segments). For example, several answers (branches)
continue the same prompt and thinking (the trunk). A query of a branch attends to the cache of the
trunk, which all branches share without modifying it, and to the few tokens of its branch.

Each segment yields a `Partial`, which consists of the maximum score, the sum of exponentials and
the weighted sum of values. Partials can be merged exactly into one softmax over all keys. The
softmax is computed in fp32.
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

# Score of masked keys. Minus infinity would yield NaN instead of zeros for rows without visible
# keys.
_MASKED = -1e30

# Causal attention is computed in blocks of 128 queries. Every block is compiled separately, so the
# number of blocks is limited to 8, and longer rows use larger blocks.
_BLOCK = 128
_MAX_BLOCKS = 8


@pytree
class Partial:
    """Attention of T queries and N heads over one segment, before the softmax division.

    Attributes:
      values: sum over keys of exp(score - maximum) * value, fp32.
      maximum: maximum score of the visible keys, fp32.
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
    """Computes the unnormalized attention of queries over the keys of one segment.

    Of the N query heads, head n uses key/value head n // (N / K). The keys of each head are
    contiguous, as in the KV cache. Query heads with the same key/value head are folded into the
    query axis, so both products are batched matrix products that do not copy the keys.

    Args:
      mask: True for keys that are visible to a query.
      transposed: True if k is [B, K, H, S].

    Returns:
      The partial result. For a query without visible keys, values and denominator are zero.
    """
    chex.assert_rank([q, k, v, mask], [4, 4, 4, 3])
    b, t, n, h = q.shape
    num_kv = k.shape[1]
    group = n // num_kv
    folded = q.reshape(b, t, num_kv, group, h).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(b, num_kv, group * t, h)
    scores = _key_products(folded, k, transposed)
    scores = scores.reshape(b, num_kv, group, t, -1) * h**-0.5
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    maximum = jax.lax.stop_gradient(scores.max(-1))
    # Masked keys underflow to exactly 0 if the query has visible keys. Otherwise, all scores equal
    # the maximum, so 0 is subtracted instead, and they also underflow.
    shift = jnp.where(maximum > _MASKED / 2, maximum, 0.0)
    weights = jnp.exp(scores - shift[..., None])
    denominator = weights.sum(-1)
    weights = weights.astype(v.dtype).reshape(b, num_kv, group * t, -1)
    values = products.times(weights, v, dtype=jnp.float32)
    values = values.reshape(b, num_kv, group, t, h).transpose(0, 3, 1, 2, 4)

    def unfold(x: Float[Array, "B K G T"]) -> Float[Array, "B T N"]:
        return x.transpose(0, 3, 1, 2).reshape(b, t, n)

    return Partial(
        values=values.reshape(b, t, n, h),
        maximum=unfold(maximum),
        denominator=unfold(denominator),
    )


def _key_products(
    q: Float[Array, "B K R H"],
    k: Float[Array, "B K S H"] | Float[Array, "B K H S"],
    transposed: bool,
) -> Float[Array, "B K R S"]:
    """Computes the dot products of R queries per head with all S keys, accumulated in fp32."""
    if transposed:
        return products.times(q, k, dtype=jnp.float32)
    return products.times_transposed(q, k)


def token_attention(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"] | Float[Array, "B K H S"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B S"],
    *,
    transposed: bool = False,
) -> Float[Array, "B 1 N H"]:
    """Computes attention for a single query per sequence, as in a decoding step.

    The softmax is normalized directly, without a `Partial`, and the mask is added to the scores.
    XLA's CPU backend then computes scores and exponentials in one pass and distributes the
    sequences over all threads.

    Args:
      mask: True for keys that are visible to the query. Each query must see at least one key.
      transposed: True if k is [B, K, H, S].
    """
    b, _, n, h = q.shape
    folded = q.reshape(b, k.shape[1], -1, h)
    scores = _key_products(folded, k, transposed) * h**-0.5
    scores = scores + jnp.where(mask, 0.0, _MASKED)[:, None, None]
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    values = products.times(weights.astype(v.dtype), v, dtype=jnp.float32)
    output = values / weights.sum(-1, keepdims=True)
    return output.reshape(b, 1, n, h).astype(q.dtype)


def merge(partials: Sequence[Partial], dtype: jnp.dtype) -> Float[Array, "*B T N H"]:
    """Merges partial results into one softmax over the keys of all segments.

    The log-sum-exp merge is computed in fp32 and cast to `dtype`. Queries without visible keys in
    any segment yield zeros.
    """
    maximum = functools.reduce(jnp.maximum, [partial.maximum for partial in partials])
    scales = [jnp.exp(partial.maximum - maximum) for partial in partials]
    values = sum(partial.values * scale[..., None] for partial, scale in zip(partials, scales))
    denominator = sum(partial.denominator * scale for partial, scale in zip(partials, scales))
    # A visible key contributes exp(0) = 1, so the lower bound of 1e-9 only affects rows without
    # one.
    bounded = jnp.maximum(denominator, 1e-9)
    return (values / bounded[..., None]).astype(dtype)


def causal_mask(length: int) -> Bool[Array, "1 T S"]:
    """Returns a mask that is True where key position <= query position."""
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
    """Computes causal self-attention over right-padded rows.

    Padding comes after all real tokens, so real queries cannot attend to it. The outputs of padding
    positions are never used.

    Args:
      implementation: "xla" runs on any device. "cudnn" requires an NVIDIA GPU and 16-bit floats.
      lengths: number of real tokens per row. cuDNN does not compute the padding after them. If
        None, outputs are computed at all positions.

    Raises:
      UserError: If the implementation is "cudnn" and the inputs are 32-bit floats.
    """
    chex.assert_rank([q, k, v], 4)
    if implementation == "cudnn":
        return _cudnn_attention(q, k, v, lengths)
    return masked_attention(q, k, v, None)


def _cudnn_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int[Array, "B"] | None,
) -> Float[Array, "B T N H"]:
    """Computes causal self-attention with cuDNN's kernel (see `causal_attention`)."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(
            "model.attention=cudnn supports only bfloat16 and float16, but the model computes in "
            f"{q.dtype}; set model.attention=xla or model.compute_dtype=bfloat16"
        )
    length = q.shape[1]

    def pad_to_even(x: Array) -> Array:
        # JAX does not support the gradient for an odd number of positions. The padding position is
        # the last one, so real queries cannot attend to it.
        return jnp.pad(x, ((0, 0), (0, length % 2), (0, 0), (0, 0)))

    output = jax.nn.dot_product_attention(
        pad_to_even(q),
        pad_to_even(k),
        pad_to_even(v),
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return output[:, :length]


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visible: Bool[Array, "B T T"] | None,
) -> Float[Array, "B T N H"]:
    """Computes causal attention with an additional mask, using XLA.

    Args:
      visible: True for keys that each query may attend to, in addition to the causal mask. None for
        no additional mask.
    """
    blocks = jax.lax.split(q, _block_sizes(q.shape[1]), axis=1)
    outputs = _causal_blocks(blocks, _heads_first(k), _heads_first(v), visible)
    return checkpoint_name(jnp.concatenate(outputs, axis=1), "attention")


def _heads_first(x: Float[Array, "B S K H"]) -> Float[Array, "B K S H"]:
    """Transposes keys or values to the layout that `cached_attention` expects.

    Callers transpose once, before they loop over blocks of queries.
    """
    return x.transpose(0, 2, 1, 3)


def _block_rows(length: int) -> int:
    """Returns the maximum number of queries per block of causal attention."""
    return max(_BLOCK, -(-length // _MAX_BLOCKS))


def _block_sizes(length: int) -> list[int]:
    """Returns the number of queries in each block of a sequence. The last block may be smaller."""
    rows = _block_rows(length)
    return [min(rows, length - start) for start in range(0, length, rows)]


def _causal_blocks(
    blocks: Sequence[Float[Array, "B _ N H"]],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    visible: Bool[Array, "B T S"] | None,
) -> list[Float[Array, "B _ N H"]]:
    """Computes causal attention for consecutive blocks of queries, starting at position 0.

    Keys after the last query of a block are skipped, which saves nearly half of the work.

    Args:
      visible: additional mask, as in `masked_attention`.
    """
    outputs = []
    start = 0
    for q in blocks:
        stop = start + q.shape[1]
        mask = (jnp.arange(stop) <= jnp.arange(start, stop)[:, None])[None]
        if visible is not None:
            mask = mask & visible[:, start:stop, :stop]
        partial = cached_attention(q, k[:, :, :stop], v[:, :, :stop], mask)
        outputs.append(merge([partial], q.dtype))
        start = stop
    return outputs


def branch_mask(
    context: Int[Array, "B M"], branch_of: Int[Array, "B F"] | None, trunk_length: int, count: int
) -> Bool[Array, "B F T"]:
    """Returns the mask of the keys that are visible to each token of an answer (branch).

    A branch continues the prompt and its thinking (the trunk) after `context` tokens. Its tokens
    attend to these trunk tokens, and to the tokens of the same branch up to themselves.

    Args:
      context: number of trunk tokens visible to each branch.
      branch_of: branch index of each packed position. None if all branches have the same length.
      trunk_length: number of trunk positions S.
      count: number of branch positions F.
    """
    b, num_cuts = context.shape
    if branch_of is None:
        branch_length = count // num_cuts
        branch_of = jnp.broadcast_to(jnp.arange(count) // branch_length, (b, count))
    seen_length = jnp.take_along_axis(context, branch_of, axis=1, mode="clip")
    sees_trunk = jnp.arange(trunk_length) < seen_length[:, :, None]
    same_branch = branch_of[:, :, None] == branch_of[:, None]
    return jnp.concatenate([sees_trunk, same_branch & causal_mask(count)], axis=2)


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
    """Computes attention over token trees: a trunk of S tokens, followed by M branches of A tokens.

    The trunk is a prompt and its thinking. A branch is an answer that continues the trunk from a
    truncation point. A row has T = S + M A tokens. Alternatively, the branches are packed into F
    positions without padding between them, T = S + F.

    Trunk tokens attend causally to the trunk. A branch token attends to the trunk up to the context
    of its branch, and to its branch up to itself. Branches are not visible to each other:

        query            trunk keys          keys of its branch
        trunk t          s <= t              -
        branch (m, a)    s < context[m]      a' <= a

    Args:
      context: number of trunk tokens visible to each branch.
      branch_of: branch index of each packed position, -1 for unused positions. None for M branches
        of A tokens.
      implementation: kernel for the attention of the trunk (`causal_attention`).
      lengths: number of real tokens of each trunk, with which cuDNN skips padding. None computes
        padding too.
    """
    count = q.shape[1] - trunk_length
    if implementation == "xla" and count > 0:
        return _tree_attention_by_blocks(q, k, v, context, branch_of, trunk_length)
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


def _tree_attention_by_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    context: Int[Array, "B M"],
    branch_of: Int[Array, "B F"] | None,
    trunk_length: int,
) -> Float[Array, "B T N H"]:
    """Computes `tree_attention` with XLA, in blocks of queries.

    The queries of prompt and thinking (trunk) form several blocks, and the queries of all answers
    (branches) form one block.
    """
    count = q.shape[1] - trunk_length
    sizes = _block_sizes(trunk_length)
    trunk_rows = 0
    if sizes[-1] + count <= _block_rows(trunk_length):
        # The branches are added to the last block of the trunk if they fit, which saves one slice
        # of the keys.
        trunk_rows = sizes.pop()
    # A single split for all blocks, whose gradient is a single concatenation.
    *blocks, q_last = jax.lax.split(q, [*sizes, trunk_rows + count], axis=1)
    k = _heads_first(k)
    v = _heads_first(v)
    outputs = _causal_blocks(blocks, k, v, None)
    mask = branch_mask(context, branch_of, trunk_length, count)
    if trunk_rows:
        first = trunk_length - trunk_rows
        trunk_mask = causal_mask(trunk_length + count)[:, first:trunk_length]
        trunk_mask = jnp.broadcast_to(trunk_mask, (mask.shape[0], *trunk_mask.shape[1:]))
        mask = jnp.concatenate([trunk_mask, mask], axis=1)
    partial = cached_attention(q_last, k, v, mask)
    outputs.append(merge([partial], q.dtype))
    return checkpoint_name(jnp.concatenate(outputs, axis=1), "attention")
