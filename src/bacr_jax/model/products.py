"""Matrix products whose gradients XLA's CPU backend makes fast; elsewhere they are plain products.

The gradient of a product's second operand sums outer products over rows, and its CPU backend takes
that sum at about half the rate where the result has more rows than columns. Here the narrower
side comes first, and the result is transposed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def row_products(x: Float[Array, "*B R D"], y: Float[Array, "*B R E"]) -> Float[Array, "*B D E"]:
    """x^T y of fp32 numbers: outer products of the rows of x and y, summed over the rows."""
    plain = lambda x, y: jnp.einsum("...rd,...re->...de", x, y)
    if x.shape[-1] <= y.shape[-1]:
        return plain(x, y)

    def narrow_first(x: Array, y: Array) -> Array:
        # Without the barrier the compiler folds the swap into the product, which undoes it.
        return jax.lax.optimization_barrier(plain(y, x)).swapaxes(-1, -2)

    return jax.lax.platform_dependent(x, y, cpu=narrow_first, default=plain)


def _is_fp32(*arrays: Array) -> bool:
    return all(array.dtype == jnp.float32 for array in arrays)


@jax.custom_vjp
def _times(x: Array, y: Array) -> Array:
    return x @ y


_times.defvjp(
    lambda x, y: (x @ y, (x, y)),
    lambda kept, g: (g @ kept[1].swapaxes(-1, -2), row_products(kept[0], g)),
)


def times(
    x: Float[Array, "*B R D"], y: Float[Array, "*B D E"], *, dtype: Any = None
) -> Float[Array, "*B R E"]:
    """The product x y, in the operands' type or in `dtype`."""
    if _is_fp32(x, y):
        return _times(x, y)
    return jnp.matmul(x, y, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rounded_times(
    x: Float[Array, "R D"], y: Float[Array, "D E"], dtype: Any
) -> Float[Array, "R E"]:
    """The product x y of rounded operands, summed in fp32; so are the products of its gradient.

    Args:
      x: fp32.
      y: fp32, whose gradient is fp32 then, or rounded already.
      dtype: 16-bit type that operands are rounded to.
    """
    return _rounded("rd,de->re", x, y, dtype)


def _rounded(sums: str, x: Array, y: Array, dtype: Any) -> Array:
    return jnp.einsum(sums, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)


def _rounded_row_products(
    x: Float[Array, "R D"], y: Float[Array, "R E"], dtype: Any
) -> Float[Array, "D E"]:
    """x^T y of rounded operands, summed in fp32.

    XLA's CPU backend takes a product in fp32, at half the rate, where it has transposed an operand
    late. So the columns of x are gathered, which it leaves where it stands, and the result keeps
    its axes.
    """
    plain = lambda columns, y: _rounded("dr,re->de", columns, y, dtype)

    def gathered(x: Array, y: Array) -> Array:
        columns = x.astype(dtype).T[jnp.arange(x.shape[1])]
        return jax.lax.optimization_barrier(plain(columns, y))

    return jax.lax.platform_dependent(x, y, cpu=gathered, default=lambda x, y: plain(x.T, y))


rounded_times.defvjp(
    lambda x, y, dtype: (_rounded("rd,de->re", x, y, dtype), (x.astype(dtype), y)),
    lambda dtype, kept, g: (
        _rounded("re,de->rd", g, kept[1], dtype),
        _rounded_row_products(kept[0], g, dtype).astype(kept[1].dtype),
    ),
)


_TRANSPOSED = "...rd,...ed->...re"


@jax.custom_vjp
def _times_transposed(x: Array, y: Array) -> Array:
    return jnp.einsum(_TRANSPOSED, x, y)


_times_transposed.defvjp(
    lambda x, y: (jnp.einsum(_TRANSPOSED, x, y), (x, y)),
    lambda kept, g: (g @ kept[1], row_products(g, kept[0])),
)


def times_transposed(
    x: Float[Array, "*B R D"], y: Float[Array, "*B E D"]
) -> Float[Array, "*B R E"]:
    """The product x y^T, summed in fp32."""
    if _is_fp32(x, y):
        return _times_transposed(x, y)
    return jnp.einsum(_TRANSPOSED, x, y, preferred_element_type=jnp.float32)
