"""One decoder layer: norms, rotary embedding, attention, gated MLP, budget gate.

What differs between the learner, the prefill and decoding is only where keys and values live, so a
block takes its attention as a function: `attend(q, k, v) -> (output, anything)`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from bacr_jax.model import budget, products
from bacr_jax.model.compute import Remat
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
# Cosines and sines of the tokens' positions.
Rotary = tuple[Float[Array, "B T H"], Float[Array, "B T H"]]

_NORMAL, _ZEROS, _ONES = nn.initializers.normal(0.02), nn.initializers.zeros, nn.initializers.ones


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """Root-mean-square norm, x / rms(x) * scale.

    The normalised value is cast back before the product, as released weights expect.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale.astype(x.dtype)


def rotation(
    positions: Int[Array, "B T"], config: Qwen2Config, *, length: int | None = None
) -> Rotary:
    """Cosines and sines of the rotary embedding, halves repeated, fp32.

    Args:
      length: positions are below it, and are looked up in one table. Cosines of positions that are
        known at run time only would be computed again wherever a compiler fuses them into a head.
    """
    if length is not None:
        table = rotation(jnp.arange(length)[None], config)
        cos, sin = (jnp.take(part[0], positions, axis=0, mode="clip") for part in table)
        return cos, sin
    head_dim, scaling = config.head_dim, config.rope_scaling
    frequencies = config.rope_theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        turns = scaling.positions * frequencies / (2 * jnp.pi)
        kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / scaling.factor)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T N H"], rotary: Rotary) -> Float[Array, "B T N H"]:
    """Rotates each head; component i is paired with component i + H/2 (half-split layout)."""
    cos, sin = (a[:, :, None, :].astype(x.dtype) for a in rotary)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def matmul(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D E"] | Float[Array, "E D"],
    product_dtype: Any = None,
    *,
    transposed: bool = False,
) -> Float[Array, "*B E"]:
    """One product of [rows, D] with [D, E], whatever the leading axes of x.

    With the leading axes left apart, XLA's CPU backend transposes the operands of the weight's
    gradient and takes half as long again.

    Args:
      product_dtype: type that both are rounded to (`Compute`); None: theirs.
      transposed: the matrix is [E, D] (`kv_cache.transpose_products`), and rounded already.
    """
    rows = x.reshape(-1, x.shape[-1])
    if transposed:
        rows = products.times_transposed(rows.astype(product_dtype), weight)
    elif product_dtype is None:
        rows = products.times(rows, weight)
    else:
        rows = products.rounded_times(rows, weight, product_dtype)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def joined_products(
    block: "Block", y: Float[Array, "*B D"], name: str, *widths: int
) -> list[Float[Array, "*B E"]]:
    """Several products of one input, whose matrices a decode copy has joined.

    Their columns lie together by tensor shard, [D, shards, columns] (`kv_cache.join_products`), or
    [shards, columns, D] where they are transposed; `widths` are those of each, all shards together.
    """
    bias: Array | None = block.get_variable("params", f"{name}_bias")
    transposed: Array | None = block.get_variable("params", f"{name}_transposed")
    if transposed is not None:
        shards = transposed.shape[0]
        out = matmul(y, transposed.reshape(-1, y.shape[-1]), block.product_dtype, transposed=True)
    else:
        kernel: Array = block.get_variable("params", f"{name}_kernel")
        shards = kernel.shape[1]
        out = matmul(y, kernel.astype(block.dtype).reshape(kernel.shape[0], -1))
    if bias is not None:
        out = out + bias.astype(block.dtype).reshape(-1)
    out = out.reshape(*y.shape[:-1], shards, -1)
    ends = list(itertools.accumulate(width // shards for width in widths))
    parts = jnp.split(out, ends[:-1], axis=-1)
    return [part.reshape(*y.shape[:-1], width) for part, width in zip(parts, widths)]


def add_low_rank(out: Array, y: Array, adapter: Params | None, name: str) -> Array:
    """A product of y with that of its low-rank adapter, if it has one."""
    if adapter is None or f"{name}_a" not in adapter:
        return out
    down, up = (adapter[f"{name}_{part}"].astype(y.dtype) for part in "ab")
    return out + matmul(matmul(y, down), up)


class Block(nn.Module):
    """A decoder layer: grouped-query attention and a gated MLP on normed residual streams."""

    config: Qwen2Config
    dtype: Any = jnp.float32
    product_dtype: Any = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotary: Rotary,
        attend: Attend,
        condition: Callable[[Array], Array] | None = None,
        adapter: Params | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The residual stream after the layer, and what `attend` returned beside its output.

        Args:
          attend: maps rotated q [B, T, N, H], k and v [B, T, K, H] to ([B, T, N, H], anything).
          condition: adds the gated budget embedding after the layer; None: the plain model.
          adapter: scaled low-rank adapters of this layer (`adapters.scaled`); None: none.
        """
        c, d, h = self.config, self.config.hidden_size, self.config.head_dim

        def weight(name: str, init: Any, *shape: int) -> Array:
            return self.param(name, init, shape, jnp.float32).astype(self.dtype)

        def product(y: Array, name: str, width: int) -> Array:
            transposed: Array | None = self.get_variable("params", f"{name}_transposed")
            if transposed is not None:
                return matmul(y, transposed, self.product_dtype, transposed=True)
            kernel = self.param(f"{name}_kernel", _NORMAL, (y.shape[-1], width), jnp.float32)
            kernel = kernel if self.product_dtype is not None else kernel.astype(self.dtype)
            out = matmul(y, kernel, self.product_dtype)
            return add_low_rank(out, y, adapter, name)

        def project(y: Array, name: str, heads: int) -> Array:
            out = product(y, name, heads * h)
            out = out + weight(f"{name}_bias", _ZEROS, heads * h) if c.qkv_bias else out
            return out.reshape(*y.shape[:-1], heads, h)

        joined = functools.partial(joined_products, self)
        is_joined = any(self.has_variable("params", f"qkv_{x}") for x in ("kernel", "transposed"))
        y = rms_norm(x, weight("attention_norm", _ONES, d), c.rms_norm_eps)
        if is_joined:
            widths = (c.num_heads * h, c.num_kv_heads * h, c.num_kv_heads * h)
            q, k, v = (x.reshape(*x.shape[:-1], -1, h) for x in joined(y, "qkv", *widths))
        else:
            q = project(y, "q", c.num_heads)
            k = project(y, "k", c.num_kv_heads)
            v = project(y, "v", c.num_kv_heads)
        if c.qk_norm:
            # The norms' backward pass reads the products themselves: those are kept.
            q, k = checkpoint_name(q, "query"), checkpoint_name(k, "key")
            q = rotate(rms_norm(q, weight("q_norm", _ONES, h), c.rms_norm_eps), rotary)
            k = rotate(rms_norm(k, weight("k_norm", _ONES, h), c.rms_norm_eps), rotary)
        else:
            q = checkpoint_name(rotate(q, rotary), "query")
            k = checkpoint_name(rotate(k, rotary), "key")
        v = checkpoint_name(v, "value")
        mixed, extra = attend(q, k, v)
        mixed = product(mixed.reshape(*mixed.shape[:-2], c.num_heads * h), "o", d)
        x = checkpoint_name(x + mixed, "middle")
        y = rms_norm(x, weight("mlp_norm", _ONES, d), c.rms_norm_eps)
        if is_joined:
            gate, up = joined(y, "gate_up", c.intermediate_size, c.intermediate_size)
        else:
            gate, up = (product(y, name, c.intermediate_size) for name in ("gate", "up"))
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        x = x + product(nn.silu(gate) * up, "down", d)
        if condition is not None:
            # Without a gate nothing in the backward pass asks for this sum.
            x = condition(checkpoint_name(x, "gated"))
        return x, extra


# What `selective` keeps of a layer: everything that a matrix product made. Norms, silu, and the
# scores of attention are made again; they are reads, not products.
PRODUCTS = ("query", "key", "value", "attention", "middle", "gate", "up", "gated")
_keep_named = jax.checkpoint_policies.save_only_these_names(*PRODUCTS)


def _keep_products(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
    """What cuDNN's attention returned is kept too: its output and what its backward pass reads."""
    if primitive.name.startswith("dot_product_attention_fwd"):
        return True
    return _keep_named(primitive, *arguments, **parameters)


def rematerialised(body: Callable, remat: Remat, *, prevent_cse: bool) -> Callable:
    """A layer whose backward pass makes again what its forward pass did not keep (`Compute`).

    Args:
      prevent_cse: False inside of a loop, which already keeps the compiler from merging the two
        computations.
    """
    if remat == "none":
        return body
    policy = _keep_products if remat == "selective" else None
    return jax.checkpoint(body, prevent_cse=prevent_cse, policy=policy)


def apply_block(
    layer: Params,
    x: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Attend,
    *,
    config: Qwen2Config,
    conditioned: budget.Conditioned | None = None,
    adapter: Params | None = None,
    product_dtype: Any = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """One layer with its budget gate; without `conditioned` no budget code is traced at all."""
    condition = None
    if conditioned is not None:
        condition = functools.partial(budget.add_gated, conditioned=conditioned)
    block = Block(config, x.dtype, product_dtype)
    return block.apply({"params": layer}, x, rotary, attend, condition, adapter)
