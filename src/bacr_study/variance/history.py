"""A value that has also seen the trace's previous outcome, V(q, b, b_j, r_{<j}): an extension."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def history_surprise(r: Float[Array, "Q G M"], p: Float[Array, "Q G M"]) -> Float[Array, "Q G M"]:
    """What the answer before each segment revealed: x_s = r_{s-1} - p_{s-1}, x_0 = 0.

    A segment's own tokens come after that answer's cut, so x_s may enter their baseline.

    Args:
      p: predictions of the outcomes, made without this trace's r.
    """
    chex.assert_equal_shape([r, p])
    surprise = jax.lax.stop_gradient(r - p)[..., :-1]
    return jnp.pad(surprise, ((0, 0), (0, 0), (1, 0)))


def history_moments(
    credit: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"]
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Moments of the regression of a segment's return on the surprise before it."""
    chex.assert_equal_shape([credit, surprise])
    return jnp.mean(credit * surprise, axis=(0, 1)), jnp.mean(jnp.square(surprise), axis=(0, 1))


def history_advantage(
    credit: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"], slope: Float[Array, "M"]
) -> Float[Array, "Q G M"]:
    """Advantage against a value that has also seen the trace's previous outcome.

        A_s - k_s x_s,   k_s = E[x_s A_s] / E[x_s^2]

    It is the linear form of a value V(q, b, b_j, r_{<j}), an extension of the paper's V(q, b):
    where outcomes persist along a trace, the previous one predicts most of what is to come. The
    slope must come from earlier batches for the gradient to stay unbiased.
    """
    chex.assert_equal_shape([credit, surprise])
    return credit - jax.lax.stop_gradient(slope) * surprise
