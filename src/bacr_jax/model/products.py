"""Matrix products whose gradients XLA's CPU backend makes fast; elsewhere they are plain products.

The gradient of a product's second operand sums outer products over rows, and its CPU backend takes
that sum at about half the rate where the result has more rows than columns. Here the narrower
side comes first, and the result is transposed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def row_products(x: Float[Array, "*B R D"], y: Float[Array, "*B R E"]) -> Float[Array, "*B D E"]:
    """x^T y: outer products of the rows of x and y, summed over the rows.

    Args:
      x: fp32.
      y: fp32, leading axes as those of x.
    """
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
    """The product x y.

    Args:
      dtype: of the result; None: the operands'.
    """
    if _is_fp32(x, y):
        return _times(x, y)
    return jnp.matmul(x, y, preferred_element_type=dtype)


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
