"""Decoding attention that reads each row's own keys: cuDNN's fused kernel with a length per row.

XLA's products read the caches' whole length for every row, ended ones too. cuDNN's kernel takes the
number of keys of every row and stops there; scores never leave the chip. Query heads that share a
key/value head are folded into the query axis, so that the cache, [B, K, S, H], is read in place.
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
    """Attention [B, K, G, H] of a token of each row, with its log-sum-exp [B, K, G] if wanted."""
    # JAX's public function takes [B, S, K, H] only, which would copy the cache at every token.
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
    """Attention of one token per row over the first keys of its own cache, its own among them."""
    return _kernel(q, cache, lengths, mesh).reshape(q.shape)


def partial_rows(
    q: Float[Array, "B M N H"],
    cache: LayerCache,
    lengths: Int[Array, "B M"],
    mesh: parallel.AnyMesh | None = None,
) -> Partial:
    """Attention of a row's M branches over its trunk, each up to its own cut; one pass per branch.

    Args:
      lengths: keys that each branch may see, at least 1.

    Returns:
      The normalised output with the log-sum-exp as its maximum, to be merged with other segments.
    """
    b, m, n, h = q.shape
    branch = lambda j: (q[:, j : j + 1], cache, lengths[:, j], mesh)
    parts = [_kernel(*branch(j), logsumexp=True) for j in range(m)]
    values = jnp.stack([out.reshape(b, n, h) for out, _ in parts], axis=1).astype(jnp.float32)
    maximum = jnp.stack([total.reshape(b, n) for _, total in parts], axis=1)
    return Partial(values, maximum, jnp.ones_like(maximum))


def check_kernel(spec: RolloutSpec, length: int) -> None:
    """Compiles the attention of one layer, where the rollout asks for cuDNN's."""
    if spec.attention != "cudnn":
        return
    tensor = 1 if spec.mesh is None else spec.mesh.shape["tensor"]
    heads = max(spec.config.num_kv_heads // tensor, 1)
    group = spec.config.num_heads // spec.config.num_kv_heads
    _compile(spec.slots // spec.row_shards, heads, group, length, spec.config.head_dim, spec.dtype)


@functools.cache
def _compile(rows: int, heads: int, group: int, length: int, head_dim: int, dtype: Any) -> None:

    def array(*shape: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    lengths = functools.partial(array, dtype=jnp.int32)
    keys = array(rows, heads, length, head_dim)
    cache = LayerCache(keys, keys)
    q = array(rows, 1, heads * group, head_dim)
    try:
        jax.jit(attend_rows).lower(q, cache, lengths(rows)).compile()
        jax.jit(partial_rows).lower(q, cache, lengths(rows, 1)).compile()
    # Whatever cuDNN, JAX's own checks or the compiler have to say.
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"rollout.attention: cuDNN has no attention for {rows} rows of {length} keys, {heads} "
            f"heads of {head_dim} and groups of {group} here ({said[0][:200]}); write "
            "rollout.attention=xla"
        ) from error
