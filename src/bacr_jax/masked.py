"""Sums, means and standard deviations over the entries selected by a mask.

The results and their gradients are finite, even if the mask is empty or entries outside the mask
are NaN or infinite. All arithmetic is in float32 or wider, regardless of the input dtype. Masks are
boolean or 0/1 and are broadcast to the shape of the values.
"""

import jax.numpy as jnp
from jaxtyping import Array, Num, Shaped

Axis = int | tuple[int, ...] | None


def at_least_float32(x: Num[Array, "*shape"] | float) -> Array:
    """Converts `x` to an array of float32, or of its current dtype if that is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _masked_values(x: Array, mask: Array) -> tuple[Array, Array]:
    """Returns `x` with zeros outside the mask, and the mask as 0/1 in the same dtype and shape."""
    x = at_least_float32(x)
    keep = jnp.broadcast_to(jnp.asarray(mask).astype(bool), x.shape)
    values = jnp.where(keep, x, 0.0)
    return values, keep.astype(x.dtype)


def _safe_sqrt(x: Array) -> Array:
    """Computes the square root with a gradient of 0, instead of infinity, at 0."""
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
    """Computes the sum of the entries inside the mask. An empty mask gives 0."""
    values, _ = _masked_values(x, mask)
    return jnp.sum(values, axis=axis, keepdims=keepdims)


def masked_mean(
    x: Num[Array, "*shape"],
    mask: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    keepdims: bool = False,
) -> Array:
    """Computes the mean of the entries inside the mask. An empty mask gives 0."""
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
    """Computes the standard deviation of the entries inside the mask.

    The result is 0 if the mask selects fewer than two entries. The mean is subtracted
    before squaring, because a large common offset would otherwise lose float32 precision. The
    gradient at zero standard deviation is 0.

    Args:
      ddof: delta degrees of freedom. The sum of squares is divided by n - ddof.
    """
    values, keep = _masked_values(x, mask)
    mean = masked_mean(x, mask, axis, keepdims=True)
    squares = jnp.where(keep > 0.0, jnp.square(values - mean), 0.0)
    count = jnp.sum(keep, axis=axis, keepdims=keepdims)
    total = jnp.sum(squares, axis=axis, keepdims=keepdims)
    return _safe_sqrt(total / jnp.maximum(count - ddof, 1.0))


def masked_rms(x: Num[Array, "*shape"], mask: Shaped[Array, "..."]) -> Array:
    """Computes the root mean square of the entries inside the mask. An empty mask gives 0."""
    values, _ = _masked_values(x, mask)
    mean_square = masked_mean(jnp.square(values), mask)
    return _safe_sqrt(mean_square)
