"""Sums, means and standard deviations over the entries that a mask selects.

Every function and its gradient are finite, even if the mask selects nothing or if an entry outside
the mask is NaN or infinite. Arithmetic is in float32 or wider for every input type. A mask is
boolean or 0/1 and is broadcast to the values.
"""

import jax.numpy as jnp
from jaxtyping import Array, Num, Shaped

Axis = int | tuple[int, ...] | None


def at_least_float32(x: Num[Array, "*shape"] | float) -> Array:
    """Converts numbers to float32; wider types stay as they are."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _masked_values(x: Array, mask: Array) -> tuple[Array, Array]:
    """Returns the values, set to 0 outside the mask, and the mask as 0/1 of the same type."""
    x = at_least_float32(x)
    keep = jnp.broadcast_to(jnp.asarray(mask).astype(bool), x.shape)
    values = jnp.where(keep, x, 0.0)
    return values, keep.astype(x.dtype)


def _safe_sqrt(x: Array) -> Array:
    """Returns the square root, with a gradient of 0 at 0 instead of an infinite one."""
    positive = x > 0.0
    safe = jnp.where(positive, x, 1.0)
    return jnp.where(positive, jnp.sqrt(safe), 0.0)


def masked_sum(
    x: Num[Array, "*shape"],
    mask: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    keepdims: bool = False,
) -> Array:
    """Returns the sum of the entries inside the mask."""
    values, _ = _masked_values(x, mask)
    return jnp.sum(values, axis=axis, keepdims=keepdims)


def masked_mean(
    x: Num[Array, "*shape"],
    mask: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    keepdims: bool = False,
) -> Array:
    """Returns the mean of the entries inside the mask, 0 if the mask is empty."""
    values, keep = _masked_values(x, mask)
    count = jnp.sum(keep, axis=axis, keepdims=keepdims)
    total = jnp.sum(values, axis=axis, keepdims=keepdims)
    return total / jnp.maximum(count, 1.0)


def masked_std(
    x: Num[Array, "*shape"],
    mask: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    ddof: int = 0,
    keepdims: bool = False,
) -> Array:
    """Returns the standard deviation of the entries inside the mask, 0 if they are too few.

    The mean is subtracted before squaring, because a large common offset would otherwise use up the
    float32 digits. The gradient at zero spread is 0.

    Args:
      ddof: 0 divides the squares by n, 1 by n - 1.
    """
    values, keep = _masked_values(x, mask)
    mean = masked_mean(x, mask, axis, keepdims=True)
    squares = jnp.where(keep > 0.0, jnp.square(values - mean), 0.0)
    count = jnp.sum(keep, axis=axis, keepdims=keepdims)
    total = jnp.sum(squares, axis=axis, keepdims=keepdims)
    return _safe_sqrt(total / jnp.maximum(count - ddof, 1.0))


def masked_rms(x: Num[Array, "*shape"], mask: Shaped[Array, "..."]) -> Array:
    """Returns the root mean square of the entries inside the mask, 0 if the mask is empty."""
    values, _ = _masked_values(x, mask)
    mean_square = masked_mean(jnp.square(values), mask)
    return _safe_sqrt(mean_square)
