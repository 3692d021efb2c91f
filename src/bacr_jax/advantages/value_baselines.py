"""Baselines around a value function V(q, b): leave-one-out, shrunk, and aware of the trace's past.

All of them leave the gradient unbiased, because none contains the reward of the trace that it is
subtracted from. `advantages` gives these names too; that module is where they are put to use.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Scalar = int | float | Array


def _others_mean(x: Array, axis: int) -> Array:
    """Mean over the other members of the group; 0 in a group of one."""
    size = x.shape[axis]
    return (jnp.sum(x, axis=axis, keepdims=True) - x) / max(size - 1, 1)


def residual_loo_baseline(
    rewards: Float[Array, "..."], values: Float[Array, "..."], *, axis: int = -1
) -> Float[Array, "..."]:
    """Value plus the mean residual of the other traces of the group.

        c_i = V_i + mean_{k != i} (R_k - V_k)

    Any error of V that the traces of a question share cancels; budgets may differ inside the group,
    since each trace is compared with its own V. Constant V gives the RLOO baseline.

    Args:
      rewards: R, group along `axis`.
      values: V, same shape.
      axis: the group axis (1 for [Q, G, M]).

    Returns:
      Baseline c; V itself in a group of one.
    """
    chex.assert_equal_shape([rewards, values])
    return jax.lax.stop_gradient(values + _others_mean(rewards - values, axis))


def shrink_baseline(
    rewards: Float[Array, "..."],
    values: Float[Array, "..."],
    *,
    prior_strength: Scalar,
    axis: int = -1,
) -> Float[Array, "..."]:
    """Value corrected by the other traces' residuals as far as these can be trusted.

        c_i = V_i + sum_{k != i} (R_k - V_k) / (n0 + G - 1)

    For equal V in the group this is (n0 V + sum_{k != i} R_k) / (n0 + G - 1): V counts as n0
    observations. n0 = sigma^2 / v^2, with sigma^2 the variance of R and v^2 the mean squared error
    of V, is the best choice; its excess variance is at most that of V alone (n0 = inf) and of the
    leave-one-out mean alone (n0 = 0).

    Args:
      rewards: R, group along `axis`.
      values: V, same shape.
      prior_strength: n0 >= 0, see `prior_strength`.
      axis: the group axis (1 for [Q, G, M]).

    Returns:
      Baseline c; V itself in a group of one.
    """
    chex.assert_equal_shape([rewards, values])
    others = rewards.shape[axis] - 1
    mean = _others_mean(rewards - values, axis)
    trust = others / jnp.maximum(prior_strength + others, jnp.finfo(jnp.float32).tiny)
    return jax.lax.stop_gradient(values + trust * mean)


def residual_moments(
    rewards: Float[Array, "..."], values: Float[Array, "..."], *, axis: int = -1
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Variance of R around its mean, and mean squared error of V, over a batch of groups.

    sigma^2 is the mean variance of residuals inside groups; v^2 is the mean square of the groups'
    mean residuals less sigma^2 / G, the part that sampling alone explains, so that it can come out
    negative. Average both over steps before `prior_strength`: one number for many groups and
    several batches makes its dependence on a single trace negligible.

    Args:
      rewards: R, group along `axis` with at least 2 members.
      values: V, same shape.
      axis: the group axis.

    Returns:
      sigma^2 and v^2.
    """
    chex.assert_equal_shape([rewards, values])
    residual = jax.lax.stop_gradient(rewards - values)
    size = residual.shape[axis]
    sigma2 = jnp.mean(jnp.var(residual, axis=axis, ddof=1))
    error2 = jnp.mean(jnp.square(jnp.mean(residual, axis=axis))) - sigma2 / size
    return sigma2, error2


def prior_strength(sigma2: Scalar, error2: Scalar) -> Float[Array, ""]:
    """How many observations V is worth: n0 = sigma^2 / v^2.

    Args:
      sigma2: variance of R around its mean.
      error2: v^2, mean squared error of V.

    Returns:
      n0, capped at 1e6 (V exact, as far as the moments can tell).
    """
    sigma2, error2 = jnp.asarray(sigma2), jnp.asarray(error2)
    return jnp.where(error2 > 1e-6 * sigma2, sigma2 / jnp.maximum(error2, 1e-30), 1e6)


def estimate_prior_strength(
    rewards: Float[Array, "..."], values: Float[Array, "..."], *, axis: int = -1
) -> Float[Array, ""]:
    """n0 of one batch: `prior_strength` of its `residual_moments`.

    Args:
      rewards: R, group along `axis` with at least 2 members.
      values: V, same shape.
      axis: the group axis.

    Returns:
      n0, capped at 1e6.
    """
    return prior_strength(*residual_moments(rewards, values, axis=axis))


# --- history: an extension ---------------------------------------------------------------------


def history_surprise(r: Float[Array, "Q G M"], p: Float[Array, "Q G M"]) -> Float[Array, "Q G M"]:
    """What the answer before each segment revealed: x_s = r_{s-1} - p_{s-1}, x_0 = 0.

    A segment's own tokens come after that answer's cut, so x_s may enter their baseline.

    Args:
      r: outcomes.
      p: predictions of the outcomes, made without this trace's r.

    Returns:
      x, one per segment.
    """
    chex.assert_equal_shape([r, p])
    surprise = jax.lax.stop_gradient(r - p)[..., :-1]
    return jnp.pad(surprise, ((0, 0), (0, 0), (1, 0)))


def history_moments(
    credit: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"]
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Moments of the regression of a segment's return on the surprise before it.

    Args:
      credit: reward-to-go less its baseline, one per segment (`thinking_credit`).
      surprise: x (`history_surprise`).

    Returns:
      mean x A and mean x^2, per segment; their ratio is the slope. Average both over steps.
    """
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

    Args:
      credit: A, reward-to-go less its baseline (`thinking_credit`).
      surprise: x (`history_surprise`).
      slope: k, one per segment.

    Returns:
      Advantages per segment.
    """
    chex.assert_equal_shape([credit, surprise])
    return credit - jax.lax.stop_gradient(slope) * surprise
