"""Computes the attention of decoded tokens with cuDNN, which only reads the valid keys of a row.

A row is the cache of one trace (prompt and thinking). XLA's attention reads the full length of the
cache for every row, even for rows that have ended. The cuDNN kernel stops after the number of valid
keys of each row, and its scores stay in on-chip memory. Query heads that share a key/value head are
folded into the query axis, so that the cache [B, K, S, H] is read in place. `trunks` and `branches`
call this module if `spec.attention` is "cudnn".
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import parallel
from bacr_jax.errors import UserError
from bacr_jax.model.attention import Partial
from bacr_jax.model.kv_cache import LayerCache
from bacr_jax.rollout.spec import RolloutSpec


def _kernel(
    q: Float[Array, "B 1 N H"],
    cache: LayerCache,
    lengths: Int[Array, "B"],
    mesh: parallel.AnyMesh | None,
    *,
    logsumexp: bool = False,
) -> Any:
    """Returns the attention output [B, K, G, H] of one token per row (trace).

    K is the number of key/value heads, and G the number of query heads per key/value head.

    Args:
      lengths: number of keys that each row's token attends to.
      logsumexp: if True, also return the log-sum-exp of the attention scores, [B, K, G].
    """
    # Use the private function, because JAX's public function requires the layout [B, S, K, H],
    # which would copy the cache for every token.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    b, _, n, h = q.shape
    heads = cache.v.shape[1]
    lengths = lengths.astype(jnp.int32)
    return cudnn.dot_product_attention(
        parallel.constrain_cache(q.reshape(b, heads, n // heads, h), mesh),
        cache.k,
        cache.v,
        q_seqlen=parallel.constrain_rows(jnp.full_like(lengths, n // heads), mesh),
        kv_seqlen=parallel.constrain_rows(lengths, mesh),
        scale=h**-0.5,
        mask_type=cudnn.MaskType.PADDING,
        qkv_layout="BNTH",
        return_residual=logsumexp,
    )


def attend_rows(
    q: Float[Array, "B 1 N H"],
    cache: LayerCache,
    lengths: Int[Array, "B"],
    mesh: parallel.AnyMesh | None = None,
) -> Float[Array, "B 1 N H"]:
    """Returns the attention output of one token per row (trace).

    Args:
      q: query of each token.
      cache: keys and values of the rows. They include the key and value of the token itself.
      lengths: number of keys, from the start of the row, that each token attends to.
      mesh: devices over which rows are sharded. None for a single device.
    """
    return _kernel(q, cache, lengths, mesh).reshape(q.shape)


def partial_rows(
    q: Float[Array, "B M N H"],
    cache: LayerCache,
    lengths: Int[Array, "B M"],
    mesh: parallel.AnyMesh | None = None,
) -> Partial:
    """Returns the attention output of M answers per trace over prompt and thinking.

    Each answer attends to the tokens before its truncation point. The kernel runs once per answer.

    Args:
      q: query of one token per answer.
      cache: keys and values of prompt and thinking of each trace.
      lengths: number of keys that each answer attends to, at least 1.
      mesh: devices over which traces are sharded. None for a single device.

    Returns:
      A `Partial` to be merged with the attention over other segments. It contains the normalized
      output, and the log-sum-exp in place of the maximum.
    """
    b, m, n, h = q.shape
    outputs = []
    logsumexps = []
    for j in range(m):
        query = q[:, j : j + 1]
        output, logsumexp = _kernel(query, cache, lengths[:, j], mesh, logsumexp=True)
        outputs.append(output)
        logsumexps.append(logsumexp)
    values = jnp.stack([output.reshape(b, n, h) for output in outputs], axis=1)
    values = values.astype(jnp.float32)
    maximum = jnp.stack([logsumexp.reshape(b, n) for logsumexp in logsumexps], axis=1)
    return Partial(values, maximum, jnp.ones_like(maximum))


def check_kernel(spec: RolloutSpec, length: int) -> None:
    """Checks that cuDNN supports the shapes of a rollout, by compiling the attention of one layer.

    Nothing is checked if the rollout does not use cuDNN's attention.

    Args:
      length: number of positions of the longest cache.

    Raises:
      UserError: cuDNN has no kernel for these shapes on this machine.
    """
    if spec.attention != "cudnn":
        return
    tensor = 1 if spec.mesh is None else spec.mesh.shape["tensor"]
    heads = max(spec.config.num_kv_heads // tensor, 1)
    group = spec.config.num_heads // spec.config.num_kv_heads
    rows = spec.slots // spec.row_shards
    _compile(rows, heads, group, length, spec.config.head_dim, spec.dtype)


@functools.cache
def _compile(rows: int, heads: int, group: int, length: int, head_dim: int, dtype: Any) -> None:
    """Compiles the attention kernels for thinking and for answers. Results are cached by shape."""
    keys: Any = jax.ShapeDtypeStruct((rows, heads, length, head_dim), dtype)
    cache = LayerCache(keys, keys)
    q = jax.ShapeDtypeStruct((rows, 1, heads * group, head_dim), dtype)
    trunk_lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    branch_lengths = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    try:
        jax.jit(attend_rows).lower(q, cache, trunk_lengths).compile()
        jax.jit(partial_rows).lower(q, cache, branch_lengths).compile()
    # Catch all exceptions, because cuDNN, JAX's checks and the compiler raise different types.
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise UserError(
            f"rollout.attention=cudnn: on this device, cuDNN has no decoding kernel for {rows} "
            f"sequences of {length} keys with {heads} heads of width {head_dim} in groups of "
            f"{group} ({reason[:200]}); set rollout.attention=xla"
        ) from error
