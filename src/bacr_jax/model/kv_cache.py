"""KV cache for decoding: one array per layer, in which the index equals the token position.

XLA would copy a stacked [L, ...] cache at every layer of every step, but it updates separate arrays
in place.

Keys can be stored transposed, with positions on the last axis. The products of a query with all
keys then access contiguous memory, which makes computing attention scores about three times as fast
on a CPU.
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
    """Keys and values of one layer, for B sequences, K heads of dimension H and S positions.

    Attributes:
      k: keys, after the rotary embedding.
      v: values.
      transposed: True if k is [B, K, H, S].
    """

    k: Float[Array, "B K S H"] | Float[Array, "B K H S"]
    v: Float[Array, "B K S H"]
    transposed: bool = struct.field(pytree_node=False, default=False)

    @property
    def length(self) -> int:
        """Returns the number of positions S."""
        return self.v.shape[-2]


@pytree
class DecodeParams:
    """Parameters in the layout for decoding: cast to the compute dtype, with one entry per layer.

    Attributes:
      layers: parameters of each layer, with joined matrices (`join_products`).
      gates: gate weights w_g of each layer, or None for a model without budget conditioning.
      head: output matrix, from final hidden states to logits.
    """

    embed: Float[Array, "V D"]
    layers: tuple[Params, ...]
    gates: tuple[Array, ...] | None
    final_norm: Float[Array, "D"]
    head: Float[Array, "V D"]


# Matrices with the same input, which are concatenated into one matrix for decoding.
_JOINED = {
    "qkv_kernel": ("q_kernel", "k_kernel", "v_kernel"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up_kernel": ("gate_kernel", "up_kernel"),
}


def join_products(layer: Params, shards: int) -> Params:
    """Joins the query, key and value matrices, and the two input matrices of the MLP.

    Otherwise the compiler would join them itself, and copy the matrices for every decoded token.

    Args:
      shards: number of tensor-parallel shards. The joined matrices are [D, shards, columns /
        shards], so that each shard computes its heads of queries, keys and values.
    """
    joined = {}
    for name, parts in _JOINED.items():
        if parts[0] not in layer:
            continue
        by_shard = []
        for part in parts:
            leaf = layer[part]
            by_shard.append(leaf.reshape(*leaf.shape[:-1], shards, -1))
        joined[name] = jnp.concatenate(by_shard, axis=-1)
    joined_parts = {part for parts in _JOINED.values() for part in parts}
    others = {name: leaf for name, leaf in layer.items() if name not in joined_parts}
    return others | joined


def transpose_products(layer: Params) -> Params:
    """Transposes the matrices of a joined layer (`join_products`), so that the input axis is last.

    XLA's CPU backend rearranges an untransposed 16-bit matrix for every product. With the
    transposed layout, a product takes three quarters of the time.
    """
    transposed = {}
    for name, leaf in layer.items():
        if name.endswith("_kernel"):
            name = name.replace("_kernel", "_transposed")
            leaf = jnp.moveaxis(leaf, 0, -1)
        transposed[name] = leaf
    return transposed


def decode_params(
    params: Params, *, dtype: Any, conditioned: bool, shards: int = 1, product_dtype: Any = None
) -> DecodeParams:
    """Copies parameters into the layout for decoding: split into layers, cast and joined.

    The copy is made once, before the decoding loop. Low-rank adapters are merged into it in fp32
    before the cast. Gates stay in fp32, because their dot product with the residual stream is
    computed in fp32.

    Args:
      dtype: dtype of all parameters except gates. For matrices, `product_dtype` takes precedence.
      conditioned: True if the parameters contain a budget module whose gates are needed.
      shards: number of tensor-parallel shards (`join_products`).
      product_dtype: dtype of the matrices if it differs from `dtype` (see `Compute`). In this case,
        the matrices are stored transposed.
    """
    num_layers = params["layers"]["o_kernel"].shape[0]
    adapter = scaled(params)
    matrix_dtype = dtype if product_dtype is None else product_dtype
    layers = []
    for index in range(num_layers):
        layer = merged_layer(_slice(params["layers"], index), _slice(adapter, index))
        layer = join_products(_cast_layer(layer, dtype, matrix_dtype), shards)
        layers.append(layer)
    if product_dtype is not None:
        layers = [transpose_products(layer) for layer in layers]
    gates = None
    if conditioned:
        gates = tuple(params["budget"]["gate"][index] for index in range(num_layers))
    is_tied = "lm_head" not in params
    embed = _cast(params["embed"], dtype)
    final_norm = _cast(params["final_norm"], dtype)
    if is_tied and matrix_dtype == dtype:
        head = embed
    else:
        head = _cast(params["embed" if is_tied else "lm_head"], matrix_dtype)
    return DecodeParams(
        embed=embed,
        layers=tuple(layers),
        gates=gates,
        final_norm=final_norm,
        head=head,
    )


def _slice(stacked: Any, index: int) -> Any:
    """Returns one layer of stacked parameters, or None if `stacked` is None."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _cast(x: Array, dtype: Any) -> Array:
    """Casts an array. An array that already has the dtype is returned unchanged."""
    return x if x.dtype == dtype else x.astype(dtype)


def _cast_layer(layer: Params, dtype: Any, matrix_dtype: Any) -> Params:
    """Casts the matrices of a layer to `matrix_dtype` and its other parameters to `dtype`."""
    cast = {}
    for name, leaf in layer.items():
        cast[name] = _cast(leaf, matrix_dtype if name.endswith("_kernel") else dtype)
    return cast


def empty(
    config: Qwen2Config, *, rows: int, length: int, dtype: Any, transposed: bool = False
) -> tuple[LayerCache, ...]:
    """Returns a zero-initialized cache per layer for `rows` sequences of up to `length` tokens."""
    value_shape = (rows, config.num_kv_heads, length, config.head_dim)
    key_shape = value_shape
    if transposed:
        key_shape = (rows, config.num_kv_heads, config.head_dim, length)
    caches = []
    for _ in range(config.num_layers):
        keys = jnp.zeros(key_shape, dtype)
        values = jnp.zeros(value_shape, dtype)
        caches.append(LayerCache(keys, values, transposed))
    return tuple(caches)


def make(
    k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], *, transposed: bool = False
) -> LayerCache:
    """Builds a cache from the keys and values computed by a layer."""
    keys = k.transpose(0, 2, 3, 1) if transposed else k.transpose(0, 2, 1, 3)
    values = v.transpose(0, 2, 1, 3)
    return LayerCache(keys, values, transposed)


def write(
    cache: LayerCache, k: Float[Array, "B 1 K H"], v: Float[Array, "B 1 K H"], at: Int[Array, "B"]
) -> LayerCache:
    """Writes the keys and values of one token per sequence (row), at position `at` of the sequence.

    A token whose position is beyond the end of the cache is dropped.
    """
    rows = jnp.arange(k.shape[0])
    key_slots = cache.k.at[rows, :, :, at] if cache.transposed else cache.k.at[rows, :, at]
    value_slots = cache.v.at[rows, :, at]
    keys = key_slots.set(k[:, 0], mode="drop")
    values = value_slots.set(v[:, 0], mode="drop")
    return LayerCache(keys, values, cache.transposed)


def put_rows(cache: LayerCache, new: LayerCache, at: Int[Array, "F"]) -> LayerCache:
    """Copies the F sequences (rows) of the cache `new` to the rows `at` of `cache`.

    Rows whose index in `at` is out of range are dropped. Positions of `new` beyond the length of
    `cache` are dropped too.
    """
    length = min(cache.length, new.length)
    new = resize(new, length)
    key_slots = cache.k.at[at, :, :, :length] if cache.transposed else cache.k.at[at, :, :length]
    value_slots = cache.v.at[at, :, :length]
    keys = key_slots.set(new.k, mode="drop")
    values = value_slots.set(new.v, mode="drop")
    return LayerCache(keys, values, cache.transposed)


def resize(cache: LayerCache, length: int) -> LayerCache:
    """Changes the number of positions of a cache by appending zeros or truncating it."""
    key_axis = 3 if cache.transposed else 2
    keys = _resize_axis(cache.k, length, key_axis)
    values = _resize_axis(cache.v, length, 2)
    return LayerCache(keys, values, cache.transposed)


def _resize_axis(x: Array, length: int, axis: int) -> Array:
    """Changes the length of one axis by appending zeros or truncating it."""
    if length <= x.shape[axis]:
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, pad)
