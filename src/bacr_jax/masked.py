"""Sums, means and spreads over the entries that a mask keeps.

Every function is finite, with finite gradients, when the mask keeps nothing and when a
masked-out entry is NaN or infinite. Arithmetic is at least float32 whatever the input type. A mask
is boolean or 0/1 and broadcast against the values.
"""

import jax.numpy as jnp
from jaxtyping import Array, Num, Shaped

Axis = int | tuple[int, ...] | None


def at_least_float32(x: Num[Array, "*shape"] | float) -> Array:
    """The same numbers in float32, or in their own type where that is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _kept(x: Array, mask: Array) -> tuple[Array, Array]:
    """The values with zeros where the mask is off, and the mask as numbers."""
    x = at_least_float32(x)
    keep = jnp.broadcast_to(jnp.asarray(mask).astype(bool), x.shape)
    return jnp.where(keep, x, 0.0), keep.astype(x.dtype)


def _safe_sqrt(x: Array) -> Array:
    """Square root whose gradient is 0, not infinite, at 0."""
    positive = x > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def masked_sum(
    x: Num[Array, "*shape"],
    mask: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    keepdims: bool = False,
) -> Array:
    """Sum of the entries whose mask is on."""
    values, _ = _kept(x, mask)
    return jnp.sum(values, axis=axis, keepdims=keepdims)


def masked_mean(
    x: Num[Array, "*shape"],
    mask: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    keepdims: bool = False,
) -> Array:
    """Mean of the entries whose mask is on, 0 where there are none."""
    values, keep = _kept(x, mask)
    count = jnp.sum(keep, axis=axis, keepdims=keepdims)
    return jnp.sum(values, axis=axis, keepdims=keepdims) / jnp.maximum(count, 1.0)


def masked_std(
    x: Num[Array, "*shape"],
    mask: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    ddof: int = 0,
    keepdims: bool = False,
) -> Array:
    """Standard deviation of the entries whose mask is on, 0 where there are too few.

    Two passes (deviations from the mean, then their squares), so that a large common offset
    does not eat the float32 digits. The gradient at zero spread is 0.

    Args:
      ddof: 0 divides the squares by n, 1 by n - 1.
    """
    values, keep = _kept(x, mask)
    mean = masked_mean(x, mask, axis, keepdims=True)
    squares = jnp.where(keep > 0.0, jnp.square(values - mean), 0.0)
    count = jnp.sum(keep, axis=axis, keepdims=keepdims)
    total = jnp.sum(squares, axis=axis, keepdims=keepdims)
    return _safe_sqrt(total / jnp.maximum(count - ddof, 1.0))


def masked_rms(x: Num[Array, "*shape"], mask: Shaped[Array, "..."]) -> Array:
    """Root mean square of the entries whose mask is on, 0 where there are none."""
    values, _ = _kept(x, mask)
    return _safe_sqrt(masked_mean(jnp.square(values), mask))
