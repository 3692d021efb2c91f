"""A decoder layer: normalization, rotary embedding, attention, gated MLP and budget gate.

The learner, prefill and decoding store keys and values in different places. A layer therefore
receives its attention as a function: `attend(q, k, v) -> (output, state)`. The state is any value
that the caller needs from each layer, such as the updated cache.
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
# Cosines and sines of the rotary embedding at the positions of the tokens.
Rotary = tuple[Float[Array, "B T H"], Float[Array, "B T H"]]

_NORMAL = nn.initializers.normal(0.02)
_ZEROS = nn.initializers.zeros
_ONES = nn.initializers.ones


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """Computes the root-mean-square norm, x / rms(x) * scale.

    The normalized value is cast to the dtype of x before it is multiplied by the scale, as the
    released weights expect.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale.astype(x.dtype)


def rotation(
    positions: Int[Array, "B T"], config: Qwen2Config, *, length: int | None = None
) -> Rotary:
    """Computes the cosines and sines of the rotary embedding in fp32.

    Each angle appears twice, in the first and the second half of the last axis.

    Args:
      length: number of entries of a lookup table for positions 0 to length - 1. Positions that are
        only known at run time need the table, because the compiler could otherwise recompute the
        cosines for every attention head. None computes them directly, without a table.
    """
    if length is not None:
        cos_table, sin_table = rotation(jnp.arange(length)[None], config)
        cos = jnp.take(cos_table[0], positions, axis=0, mode="clip")
        sin = jnp.take(sin_table[0], positions, axis=0, mode="clip")
        return cos, sin
    head_dim = config.head_dim
    exponents = -jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.positions * frequencies / (2 * jnp.pi)
        # Fraction of the frequency that is not divided by the factor: 0 for low frequencies, 1 for
        # high frequencies.
        unscaled = (turns - scaling.low) / (scaling.high - scaling.low)
        unscaled = jnp.clip(unscaled, 0.0, 1.0)
        frequencies = frequencies * (unscaled + (1.0 - unscaled) / scaling.factor)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T N H"], rotary: Rotary) -> Float[Array, "B T N H"]:
    """Applies the rotary embedding in half-split layout: component i is paired with i + H/2."""
    cos, sin = (part[:, :, None, :].astype(x.dtype) for part in rotary)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def matmul(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D E"] | Float[Array, "E D"],
    product_dtype: Any = None,
    *,
    transposed: bool = False,
) -> Float[Array, "*B E"]:
    """Multiplies x by a weight matrix, after flattening the leading axes of x.

    With separate leading axes, XLA's CPU backend would transpose the operands of the weight
    gradient, which takes 1.5 times as long.

    Args:
      product_dtype: dtype to which both operands are rounded (see `Compute`), or None for no
        rounding.
      transposed: True if the matrix is [E, D] and already rounded (`kv_cache.transpose_products`).
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
    """Multiplies an input by several matrices that are stored as one, and splits the result.

    `kv_cache.join_products` joins matrices for decoding. The joined matrix is [D, shards, columns],
    where a shard is the tensor-parallel part of a device, or [shards, columns, D] if transposed.

    Args:
      block: layer whose parameters are used.
      y: input of all matrices.
      name: prefix of the joined parameters, such as `qkv`.
      widths: number of output columns of each matrix, over all shards.

    Returns:
      One product per matrix, including biases.
    """
    bias: Array | None = block.get_variable("params", f"{name}_bias")
    transposed: Array | None = block.get_variable("params", f"{name}_transposed")
    if transposed is not None:
        shards = transposed.shape[0]
        matrix = transposed.reshape(-1, y.shape[-1])
        out = matmul(y, matrix, block.product_dtype, transposed=True)
    else:
        kernel: Array = block.get_variable("params", f"{name}_kernel")
        shards = kernel.shape[1]
        matrix = kernel.astype(block.dtype).reshape(kernel.shape[0], -1)
        out = matmul(y, matrix)
    if bias is not None:
        out = out + bias.astype(block.dtype).reshape(-1)
    out = out.reshape(*y.shape[:-1], shards, -1)
    ends = list(itertools.accumulate(width // shards for width in widths))
    parts = jnp.split(out, ends[:-1], axis=-1)
    return [part.reshape(*y.shape[:-1], width) for part, width in zip(parts, widths)]


def add_low_rank(out: Array, y: Array, adapter: Params | None, name: str) -> Array:
    """Adds the low-rank adapter's output to a matrix product, if the matrix has an adapter.

    Args:
      out: product of the input y and the matrix.
      y: input of the matrix.
      adapter: scaled adapters of the layer (`adapters.scaled`).
      name: name of the matrix, such as `q`.
    """
    if adapter is None or f"{name}_a" not in adapter:
        return out
    down = adapter[f"{name}_a"].astype(y.dtype)
    up = adapter[f"{name}_b"].astype(y.dtype)
    return out + matmul(matmul(y, down), up)


class Block(nn.Module):
    """A decoder layer with grouped-query attention and a gated MLP, in pre-norm form.

    Attributes:
      dtype: dtype of activations and of weights in matrix products.
      product_dtype: 16-bit dtype of the operands of matrix products (see `Compute`), or None for
        `dtype`.
    """

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
        """Returns the residual stream after the layer, and the second output of `attend`.

        Args:
          attend: function of rotated q [B, T, N, H], k and v [B, T, K, H]. It returns the attention
            output [B, T, N, H], and a value that is passed on to the caller.
          condition: function that adds the gated budget embedding to the residual stream after the
            layer. None for a model without budget conditioning.
          adapter: scaled low-rank adapters of this layer (`adapters.scaled`), or None.
        """
        q, k, v = self._queries_keys_values(x, rotary, adapter)
        mixed, extra = attend(q, k, v)
        mixed = mixed.reshape(*mixed.shape[:-2], self._head_width("q"))
        mixed = self._product(mixed, "o", adapter)
        x = checkpoint_name(x + mixed, "middle")
        x = x + self._mlp(x, adapter)
        if condition is not None:
            # Named only in this branch, because only the gate's backward pass needs this sum.
            x = condition(checkpoint_name(x, "gated"))
        return x, extra

    def _queries_keys_values(
        self, x: Float[Array, "B T D"], rotary: Rotary, adapter: Params | None
    ) -> tuple[Array, Array, Array]:
        """Computes rotated queries, rotated keys and values from the residual stream."""
        c = self.config
        y = self._norm(x, "attention_norm")
        if self._is_joined():
            widths = (self._head_width("q"), self._head_width("k"), self._head_width("v"))
            flat = joined_products(self, y, "qkv", *widths)
            q, k, v = (part.reshape(*part.shape[:-1], -1, c.head_dim) for part in flat)
        else:
            q = self._project(y, "q", adapter)
            k = self._project(y, "k", adapter)
            v = self._project(y, "v", adapter)
        if c.qk_norm:
            # The backward pass of the norms needs the products before normalization, so these are
            # saved.
            q = checkpoint_name(q, "query")
            k = checkpoint_name(k, "key")
            q = rotate(self._norm(q, "q_norm"), rotary)
            k = rotate(self._norm(k, "k_norm"), rotary)
        else:
            q = checkpoint_name(rotate(q, rotary), "query")
            k = checkpoint_name(rotate(k, rotary), "key")
        return q, k, checkpoint_name(v, "value")

    def _mlp(self, x: Float[Array, "B T D"], adapter: Params | None) -> Float[Array, "B T D"]:
        """Computes the gated MLP of the normalized residual stream: W_down (silu(gate) * up)."""
        width = self.config.intermediate_size
        y = self._norm(x, "mlp_norm")
        if self._is_joined():
            gate, up = joined_products(self, y, "gate_up", width, width)
        else:
            gate = self._product(y, "gate", adapter)
            up = self._product(y, "up", adapter)
        gate = checkpoint_name(gate, "gate")
        up = checkpoint_name(up, "up")
        return self._product(nn.silu(gate) * up, "down", adapter)

    def _is_joined(self) -> bool:
        """True if the parameters were copied for decoding with joined matrices."""
        names = ("qkv_kernel", "qkv_transposed")
        return any(self.has_variable("params", name) for name in names)

    def _head_width(self, name: str) -> int:
        """Returns the total width of all heads of `q`, `k` or `v`."""
        return self.config.matrices[name][1]

    def _weight(self, name: str, init: Any, width: int) -> Float[Array, "D"]:
        """Returns the weight vector called `name` in the dtype of the layer."""
        return self.param(name, init, (width,), jnp.float32).astype(self.dtype)

    def _norm(self, x: Float[Array, "*B D"], name: str) -> Float[Array, "*B D"]:
        """Applies an RMS norm whose scale is the parameter `name`."""
        scale = self._weight(name, _ONES, x.shape[-1])
        return rms_norm(x, scale, self.config.rms_norm_eps)

    def _product(
        self, y: Float[Array, "*B D"], name: str, adapter: Params | None
    ) -> Float[Array, "*B E"]:
        """Multiplies y by the matrix called `name`, including its adapter."""
        transposed: Array | None = self.get_variable("params", f"{name}_transposed")
        if transposed is not None:
            return matmul(y, transposed, self.product_dtype, transposed=True)
        shape = self.config.matrices[name]
        kernel = self.param(f"{name}_kernel", _NORMAL, shape, jnp.float32)
        if self.product_dtype is None:
            kernel = kernel.astype(self.dtype)
        out = matmul(y, kernel, self.product_dtype)
        return add_low_rank(out, y, adapter, name)

    def _project(
        self, y: Float[Array, "B T D"], name: str, adapter: Params | None
    ) -> Float[Array, "B T K H"]:
        """Computes queries, keys or values, including the bias, and splits them into heads."""
        out = self._product(y, name, adapter)
        if self.config.qkv_bias:
            out = out + self._weight(f"{name}_bias", _ZEROS, out.shape[-1])
        return out.reshape(*y.shape[:-1], -1, self.config.head_dim)


# Values of a layer that are saved with remat "selective": the results of all matrix products.
# Norms, silu and attention scores are recomputed, because they cost memory reads but no matrix
# product.
PRODUCTS = ("query", "key", "value", "attention", "middle", "gate", "up", "gated")
_keep_named = jax.checkpoint_policies.save_only_these_names(*PRODUCTS)


def _keep_products(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
    """Decides which results the remat mode "selective" saves: a policy for `jax.checkpoint`.

    Returns True for the values in `PRODUCTS`, and for cuDNN's attention, that is for its output and
    the values that its backward pass needs.
    """
    if primitive.name.startswith("dot_product_attention_fwd"):
        return True
    return _keep_named(primitive, *arguments, **parameters)


def rematerialised(body: Callable, remat: Remat, *, prevent_cse: bool) -> Callable:
    """Wraps a layer so that its backward pass recomputes values according to `Compute.remat`.

    Args:
      body: function that applies the layer.
      remat: which values to recompute.
      prevent_cse: as in `jax.checkpoint`. False for the body of a loop, where the compiler cannot
        merge the recomputation with the forward pass anyway.
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
    """Applies one layer, including its budget gate (see `Block.__call__`).

    Args:
      layer: parameters of the layer.
      conditioned: budget embeddings and gate of the layer, or None without budget conditioning.
    """
    condition = None
    if conditioned is not None:
        condition = functools.partial(budget.add_gated, conditioned=conditioned)
    block = Block(config, x.dtype, product_dtype)
    return block.apply({"params": layer}, x, rotary, attend, condition, adapter)
