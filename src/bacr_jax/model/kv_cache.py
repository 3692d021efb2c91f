"""Keys and values of decoded tokens: one array per layer, position == index.

A stacked [L, ...] cache would be copied by XLA at every layer of every step; one array per layer is
updated in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.model.adapters import merged_layer, scaled
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import pytree

Params = dict[str, Any]


@pytree
class LayerCache:
    """Keys and values of one layer.

    Attributes:
      k: keys, already rotated.
      v: values.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]


@pytree
class DecodeParams:
    """Parameters laid out for decoding: cast to the compute type, one entry per layer.

    Attributes:
      embed: embedding.
      layers: parameters of each block.
      gates: w_g of each layer; None without conditioning.
      final_norm: scale of the last norm.
      head: output matrix.
      adapters: scaled low-rank adapters of each block; None where there are none beside it.
    """

    embed: Float[Array, "V D"]
    layers: tuple[Params, ...]
    gates: tuple[Array, ...] | None
    final_norm: Float[Array, "D"]
    head: Float[Array, "V D"]
    adapters: tuple[Params, ...] | None = None


def decode_params(params: Params, *, dtype: Any, conditioned: bool) -> DecodeParams:
    """Slices stacked layers once, outside the decoding loop, and casts to the compute type.

    Adapters of stacked layers are merged into the copy (W + A B, in fp32, then cast). Layers that
    are a list are read where they lie, with the adapters beside them: where the types agree
    nothing of the base is copied.

    Gates stay fp32: their dot product with the residual stream is taken in fp32.
    """
    layers, adapter = params["layers"], scaled(params)
    apart = not isinstance(layers, dict)
    num_layers = len(layers) if apart else layers["o_kernel"].shape[0]
    each = range(num_layers)
    cast = lambda tree: jax.tree.map(lambda x: x if x.dtype == dtype else x.astype(dtype), tree)
    slice_of = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
    if apart:
        made = tuple(cast(layer) for layer in layers)
    else:
        made = tuple(cast(merged_layer(slice_of(layers, i), slice_of(adapter, i))) for i in each)
    beside = None
    if apart and adapter is not None:
        beside = tuple(cast(slice_of(adapter, i)) for i in each)
    gates = None
    if conditioned:
        gates = tuple(params["budget"]["gate"][i] for i in each)
    embed = cast(params["embed"])
    return DecodeParams(
        embed=embed,
        layers=made,
        gates=gates,
        final_norm=cast(params["final_norm"]),
        head=cast(params["lm_head"]) if "lm_head" in params else embed,
        adapters=beside,
    )


def empty(config: Qwen2Config, *, rows: int, length: int, dtype: Any) -> tuple[LayerCache, ...]:
    """A zeroed cache for `rows` sequences of up to `length` tokens."""
    shape = (rows, config.num_kv_heads, length, config.head_dim)
    make = lambda: LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    return tuple(make() for _ in range(config.num_layers))


def heads_first(x: Float[Array, "B T K H"]) -> Float[Array, "B K T H"]:
    """Keys or values as a block makes them, as a cache holds them."""
    return x.transpose(0, 2, 1, 3)


def write(
    cache: LayerCache,
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    at: Int[Array, "B"],
) -> LayerCache:
    """Stores one token per row at its own position; positions past the end are dropped."""
    rows = jnp.arange(k.shape[0])
    return LayerCache(
        cache.k.at[rows, :, at].set(k[:, 0], mode="drop"),
        cache.v.at[rows, :, at].set(v[:, 0], mode="drop"),
    )


def resize(cache: LayerCache, length: int) -> LayerCache:
    """The same positions in a cache of another length: zeros added or the end cut off."""
    add = length - cache.k.shape[2]
    if add <= 0:
        return LayerCache(cache.k[:, :, :length], cache.v[:, :, :length])
    pad = ((0, 0), (0, 0), (0, add), (0, 0))
    return LayerCache(jnp.pad(cache.k, pad), jnp.pad(cache.v, pad))
