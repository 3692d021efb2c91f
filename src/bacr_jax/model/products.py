"""Matrix products whose gradients are fast on XLA's CPU backend.

On other backends, they are plain products. The gradient of the second operand of a product is a sum
of outer products over rows. XLA's CPU backend computes this sum at about half the speed if the
result has more rows than columns. In this case, the narrower operand is placed first and the result
is transposed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16


def row_products(x: Float[Array, "*B R D"], y: Float[Array, "*B R E"]) -> Float[Array, "*B D E"]:
    """Computes x^T y in fp32: the outer products of the rows of x and y, summed over rows."""
    if x.shape[-1] <= y.shape[-1]:
        return _sum_outer_products(x, y)

    def narrow_first(x: Array, y: Array) -> Array:
        product = _sum_outer_products(y, x)
        # The barrier prevents the compiler from folding the transposition into the product, which
        # would undo the reordering.
        return jax.lax.optimization_barrier(product).swapaxes(-1, -2)

    return jax.lax.platform_dependent(x, y, cpu=narrow_first, default=_sum_outer_products)


def _sum_outer_products(
    x: Float[Array, "*B R D"], y: Float[Array, "*B R E"]
) -> Float[Array, "*B D E"]:
    return jnp.einsum("...rd,...re->...de", x, y)


def _is_fp32(*arrays: Array) -> bool:
    return all(array.dtype == jnp.float32 for array in arrays)


@jax.custom_vjp
def _times(x: Array, y: Array) -> Array:
    return x @ y


def _times_forward(x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ y, (x, y)


def _times_gradient(operands: tuple[Array, Array], upstream: Array) -> tuple[Array, Array]:
    x, y = operands
    x_gradient = upstream @ y.swapaxes(-1, -2)
    y_gradient = row_products(x, upstream)
    return x_gradient, y_gradient


_times.defvjp(_times_forward, _times_gradient)


def times(
    x: Float[Array, "*B R D"], y: Float[Array, "*B D E"], *, dtype: Any = None
) -> Float[Array, "*B R E"]:
    """Computes the product x y.

    Args:
      dtype: dtype of the result if the operands are not both fp32. None uses the dtype of the
        operands.
    """
    if _is_fp32(x, y):
        return _times(x, y)
    return jnp.matmul(x, y, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rounded_times(
    x: Float[Array, "R D"], y: Float[Array, "D E"], dtype: Any
) -> Float[Array, "R E"]:
    """Computes x y with operands rounded to 16 bits, accumulated in fp32, as well as its gradient.

    Args:
      x: fp32 matrix.
      y: fp32 matrix, which gets an fp32 gradient, or an already rounded matrix.
      dtype: 16-bit dtype to which the operands are rounded.
    """
    return _rounded_einsum("rd,de->re", x, y, dtype)


def _rounded_einsum(subscripts: str, x: Array, y: Array, dtype: Any) -> Array:
    """Rounds both operands and computes their einsum, accumulated in fp32."""
    x = x.astype(dtype)
    y = y.astype(dtype)
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _bits(x: Float[Array, "*B"]) -> UInt16[Array, "*B"]:
    """Reinterprets 16-bit floats as integers.

    XLA's CPU backend copies 16-bit floats by converting each of them to fp32 and back. It copies
    integers as they are, which is several times as fast.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _rounded_row_products(
    bits: UInt16[Array, "R D"], y: Float[Array, "R E"], dtype: Any
) -> Float[Array, "D E"]:
    """Computes x^T y with rounded operands, accumulated in fp32.

    On CPUs, x is transposed by a gather of its columns. XLA could move a plain transposition behind
    the product, which would then be computed in fp32 at half the speed. It does not move a gather.

    Args:
      bits: the rounded matrix x (see `_bits`).
      y: fp32 matrix.
      dtype: 16-bit dtype of x, to which y is rounded.
    """

    def product(columns: Array, y: Array) -> Array:
        columns = jax.lax.bitcast_convert_type(columns, dtype)
        return _rounded_einsum("dr,re->de", columns, y, dtype)

    def gathered(bits: Array, y: Array) -> Array:
        columns = bits.T[jnp.arange(bits.shape[1])]
        return jax.lax.optimization_barrier(product(columns, y))

    def transposed(bits: Array, y: Array) -> Array:
        return product(bits.T, y)

    return jax.lax.platform_dependent(bits, y, cpu=gathered, default=transposed)


def _rounded_times_forward(x: Array, y: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    # A scan over layers copies the saved operands into arrays of all layers.
    return _rounded_einsum("rd,de->re", x, y, dtype), (_bits(x.astype(dtype)), y)


def _rounded_times_gradient(
    dtype: Any, operands: tuple[Array, Array], upstream: Array
) -> tuple[Array, Array]:
    bits, y = operands
    x_gradient = _rounded_einsum("re,de->rd", upstream, y, dtype)
    y_gradient = _rounded_row_products(bits, upstream, dtype)
    return x_gradient, y_gradient.astype(y.dtype)


rounded_times.defvjp(_rounded_times_forward, _rounded_times_gradient)


_TRANSPOSED = "...rd,...ed->...re"


@jax.custom_vjp
def _times_transposed(x: Array, y: Array) -> Array:
    return jnp.einsum(_TRANSPOSED, x, y)


def _times_transposed_forward(x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.einsum(_TRANSPOSED, x, y), (x, y)


def _times_transposed_gradient(
    operands: tuple[Array, Array], upstream: Array
) -> tuple[Array, Array]:
    x, y = operands
    x_gradient = upstream @ y
    y_gradient = row_products(upstream, x)
    return x_gradient, y_gradient


_times_transposed.defvjp(_times_transposed_forward, _times_transposed_gradient)


def times_transposed(
    x: Float[Array, "*B R D"], y: Float[Array, "*B E D"]
) -> Float[Array, "*B R E"]:
    """Computes the product x y^T, accumulated in fp32."""
    if _is_fp32(x, y):
        return _times_transposed(x, y)
    return jnp.einsum(_TRANSPOSED, x, y, preferred_element_type=jnp.float32)
