"""Keys and values of decoded tokens: one array per layer, position == index.

A stacked [L, ...] cache would be copied by XLA at every layer of every step; one array per layer is
updated in place.

Keys may be held the other way round, positions last: then a query's products with all of them run
along memory, which makes the scores of a token about three times as fast on a CPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from bacr_jax.model.adapters import merged_layer, scaled
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params, pytree


@pytree
class LayerCache:
    """Keys and values of one layer.

    Attributes:
      k: already rotated.
      transposed: keys are held [B, K, H, S].
    """

    k: Float[Array, "B K S H"] | Float[Array, "B K H S"]
    v: Float[Array, "B K S H"]
    transposed: bool = struct.field(pytree_node=False, default=False)

    @property
    def length(self) -> int:
        """Positions S."""
        return self.v.shape[-2]


@pytree
class DecodeParams:
    """Parameters laid out for decoding: cast to the compute type, one entry per layer.

    Attributes:
      gates: w_g of each layer; None without conditioning.
    """

    embed: Float[Array, "V D"]
    layers: tuple[Params, ...]
    gates: tuple[Array, ...] | None
    final_norm: Float[Array, "D"]
    head: Float[Array, "V D"]


# Matrices that read the same input; in the decode copy they are one.
_JOINED = {
    "qkv_kernel": ("q_kernel", "k_kernel", "v_kernel"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up_kernel": ("gate_kernel", "up_kernel"),
}


def join_products(layer: Params, shards: int) -> Params:
    """A layer whose queries, keys and values, and whose two MLP inputs, are one product each.

    The compiler would join them anyway, by a copy of the matrices at every decoded token. Columns
    of one tensor shard stand together, [D, shards, columns / shards], so that every shard's product
    holds heads of all three.
    """
    apart = {name for names in _JOINED.values() for name in names}
    by_shard = lambda x: x.reshape(*x.shape[:-1], shards, -1)
    joined = {
        name: jnp.concatenate([by_shard(layer[part]) for part in parts], axis=-1)
        for name, parts in _JOINED.items()
        if parts[0] in layer
    }
    return {name: x for name, x in layer.items() if name not in apart} | joined


def transpose_products(layer: Params) -> Params:
    """A joined layer whose matrices are held [E, D], as x W^T takes them.

    XLA's CPU backend rearranges a 16-bit matrix for every product with it, and takes three quarters
    of the time for one that is transposed.
    """
    transpose = lambda name, x: (name.replace("_kernel", "_transposed"), jnp.moveaxis(x, 0, -1))
    return dict(transpose(*one) if one[0].endswith("_kernel") else one for one in layer.items())


def decode_params(
    params: Params, *, dtype: Any, conditioned: bool, shards: int = 1, product_dtype: Any = None
) -> DecodeParams:
    """Slices stacked layers once, outside the decoding loop, and casts to the compute type.

    Adapters are merged into the copy (W + A B, in fp32, then cast). Gates stay fp32: their dot
    product with the residual stream is taken in fp32.

    Args:
      product_dtype: type of the matrices, if it is another one (`Compute`); the copy then holds
        them transposed.
    """
    layers, adapter = params["layers"], scaled(params)
    each = range(layers["o_kernel"].shape[0])
    matrices = dtype if product_dtype is None else product_dtype

    def cast(tree: Any, to: Any = dtype) -> Any:
        return jax.tree.map(lambda x: x if x.dtype == to else x.astype(to), tree)

    def cast_layer(layer: Params) -> Params:
        to = lambda name: matrices if name.endswith("_kernel") else dtype
        return {name: cast(leaf, to(name)) for name, leaf in layer.items()}

    slice_of = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
    merged = (merged_layer(slice_of(layers, i), slice_of(adapter, i)) for i in each)
    made = tuple(join_products(cast_layer(layer), shards) for layer in merged)
    if product_dtype is not None:
        made = tuple(map(transpose_products, made))
    gates = tuple(params["budget"]["gate"][i] for i in each) if conditioned else None
    embed, tied = cast(params["embed"]), "lm_head" not in params
    output = params["embed" if tied else "lm_head"]
    return DecodeParams(
        embed=embed,
        layers=made,
        gates=gates,
        final_norm=cast(params["final_norm"]),
        head=embed if matrices == dtype and tied else cast(output, matrices),
    )


def empty(
    config: Qwen2Config, *, rows: int, length: int, dtype: Any, transposed: bool = False
) -> tuple[LayerCache, ...]:
    """A zeroed cache for `rows` sequences of up to `length` tokens."""
    shape = (rows, config.num_kv_heads, length, config.head_dim)
    keys = (*shape[:2], *shape[:1:-1]) if transposed else shape
    return tuple(
        LayerCache(jnp.zeros(keys, dtype), jnp.zeros(shape, dtype), transposed)
        for _ in range(config.num_layers)
    )


def make(
    k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], *, transposed: bool = False
) -> LayerCache:
    """A cache of the keys and values that a block made."""
    return LayerCache(
        k.transpose((0, 2, 3, 1) if transposed else (0, 2, 1, 3)),
        v.transpose(0, 2, 1, 3),
        transposed,
    )


def write(
    cache: LayerCache, k: Float[Array, "B 1 K H"], v: Float[Array, "B 1 K H"], at: Int[Array, "B"]
) -> LayerCache:
    """Stores one token per row at its own position; positions past the end are dropped."""
    rows = jnp.arange(k.shape[0])
    keys = cache.k.at[rows, :, :, at] if cache.transposed else cache.k.at[rows, :, at]
    values = cache.v.at[rows, :, at]
    return LayerCache(
        keys.set(k[:, 0], mode="drop"), values.set(v[:, 0], mode="drop"), cache.transposed
    )


def put_rows(cache: LayerCache, new: LayerCache, at: Int[Array, "F"]) -> LayerCache:
    """Rows of another cache, as many of their positions as there is room for; see `write`."""
    length = min(cache.length, new.length)
    new = resize(new, length)
    keys = cache.k.at[at, :, :, :length] if cache.transposed else cache.k.at[at, :, :length]
    values = cache.v.at[at, :, :length]
    return LayerCache(
        keys.set(new.k, mode="drop"), values.set(new.v, mode="drop"), cache.transposed
    )


def resize(cache: LayerCache, length: int) -> LayerCache:
    """The same positions in a cache of another length: zeros added or the end cut off."""

    def fit(x: Array, axis: int) -> Array:
        if length <= x.shape[axis]:
            return jax.lax.slice_in_dim(x, 0, length, axis=axis)
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, length - x.shape[axis])
        return jnp.pad(x, pad)

    return LayerCache(fit(cache.k, 3 if cache.transposed else 2), fit(cache.v, 2), cache.transposed)
