"""What advantages are divided by (paper Eq. 14)."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from bacr_jax.errors import UserError
from bacr_jax.masked import masked_rms, masked_std

Scalar = int | float | Array


def advantage_scale(
    advantages: Float[Array, "Q ..."],
    *,
    mode: Literal["group", "batch_rms", "none"],
    floor: Scalar,
    mask: Shaped[Array, "Q ..."] | None = None,
) -> Float[Array, "..."]:
    """The number advantages are divided by, paper Eq. 14.

        group:      max(std over a question's G x M advantages, floor)
        batch_rms:  max(root mean square over all advantages, floor)

    Advantages with a learned baseline are not centred, so a question whose traces all agree has a
    deviation of 0 and an advantage that is not; the floor must be of the order of .1, not 1e-6.

    Args:
      advantages: question axis first.
      mode: "group" (paper), "batch_rms" or "none".
      floor: epsilon of Eq. 14, the smallest divisor.
      mask: entries that count, all by default.

    Returns:
      The divisor, broadcastable against `advantages`.

    Raises:
      UserError: an unknown mode.
    """
    keep = jnp.ones_like(advantages, bool) if mask is None else mask
    if mode == "none":
        return jnp.ones((), advantages.dtype)
    if mode == "batch_rms":
        return jnp.maximum(masked_rms(advantages, keep), floor)
    if mode == "group":
        axes = tuple(range(1, advantages.ndim))
        return jnp.maximum(masked_std(advantages, keep, axes, keepdims=True), floor)
    raise UserError(f"advantage.normalise: found {mode!r}; write batch_rms, group or none")


def normalize(
    advantages: Float[Array, "Q ..."],
    *,
    mode: Literal["group", "batch_rms", "none"],
    floor: Scalar,
    mask: Shaped[Array, "Q ..."] | None = None,
) -> Float[Array, "Q ..."]:
    """Advantages divided by `advantage_scale`, paper Eq. 14. Nothing is subtracted.

    Args:
      advantages: question axis first.
      mode: "group" (paper), "batch_rms" or "none".
      floor: epsilon of Eq. 14, the smallest divisor.
      mask: entries that count for the scale, all by default.

    Returns:
      Scaled advantages, same shape.
    """
    return advantages / advantage_scale(advantages, mode=mode, floor=floor, mask=mask)
