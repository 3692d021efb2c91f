"""Baselines around a value function V(q, b): V only, leave-one-out, and shrunk.

They leave the gradient unbiased, because a trace's baseline never contains the trace's reward.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bacr_jax.advantages.group import others_mean
from bacr_jax.masked import at_least_float32
from bacr_jax.types import Scalar


def bcae_advantage(
    rewards: Float[Array, "Q G M"], values: Float[Array, "Q G M"]
) -> Float[Array, "Q G M"]:
    """Subtracts the value of the question, the budget and the cut from rewards (paper Eq. 10).

        A = R(q, t, b_j) - V_psi(q, b, b_j)

    The gradient stays unbiased as long as V was not fitted on these rewards, so V must come from
    the value head before this batch's update.

    Args:
      rewards: R of Eq. 7.
      values: V, or any other baseline of R (`residual_loo_baseline`, `shrink_baseline`).

    Returns:
      A, without gradient into rewards and values.
    """
    chex.assert_rank([rewards, values], 3)
    chex.assert_equal_shape([rewards, values])
    return jax.lax.stop_gradient(rewards - values)


def correctness_from_value(
    values: Float[Array, "*batch M"], *, coefficient: Scalar
) -> Float[Array, "*batch M"]:
    """Returns the probabilities of a correct answer that values of R imply, the inverse of Eq. 7.

        p_j = (V_j + lambda p_{j-1}) / (1 + lambda),  p_0 = 0

    Eq. 7 is linear in the outcomes, so `rewards.dense_reward` of p is V again.

    Args:
      coefficient: lambda of Eq. 7.

    Returns:
      p, not clipped: a value regressed on R can imply numbers outside [0, 1].
    """
    # The recursion, unrolled: p_j = sum_{i <= j} decay^(j - i) V_i / (1 + lambda).
    cut = jnp.arange(values.shape[-1])
    lag = cut[:, None] - cut[None, :]
    decay = jnp.asarray(coefficient / (1.0 + coefficient), values.dtype)
    powers = jnp.where(lag >= 0, decay ** jnp.maximum(lag, 0), 0.0)
    unrolled = powers / (1.0 + coefficient)
    return jnp.einsum("ji,...i->...j", unrolled, values, precision="highest")


def residual_loo_baseline(
    rewards: Float[Array, "Q G ..."], values: Float[Array, "Q G ..."]
) -> Float[Array, "Q G ..."]:
    """Returns the value plus the mean residual of the other traces of the group.

        c_i = V_i + mean_{k != i} (R_k - V_k)

    Any error of V that the traces of a question share cancels. Budgets may differ inside the group,
    because each trace's residual uses the V of its budget. A constant V gives the RLOO baseline; a
    group of one gives V. Gradients are stopped.
    """
    chex.assert_equal_shape([rewards, values])
    mean_residual = others_mean(rewards - values)
    return jax.lax.stop_gradient(values + mean_residual)


def shrink_baseline(
    rewards: Float[Array, "Q G ..."], values: Float[Array, "Q G ..."], *, prior_strength: Scalar
) -> Float[Array, "Q G ..."]:
    """Corrects the value by the other traces' residuals, weighed against the error of V.

        c_i = V_i + sum_{k != i} (R_k - V_k) / (n0 + G - 1)

    If V is equal in the group, c_i is (n0 V + sum_{k != i} R_k) / (n0 + G - 1), so V counts as n0
    observations. The best choice is n0 = sigma^2 / v^2, with sigma^2 the variance of R and v^2 the
    mean squared error of V. Its excess variance is not above the excess variance of V only
    (n0 = inf) or of the leave-one-out mean only (n0 = 0). A group of one gives V. Gradients are
    stopped.

    Args:
      prior_strength: n0 >= 0, see `prior_strength`.
    """
    chex.assert_equal_shape([rewards, values])
    num_others = rewards.shape[1] - 1
    mean_residual = others_mean(rewards - values)
    observations = jnp.maximum(prior_strength + num_others, jnp.finfo(jnp.float32).tiny)
    trust = num_others / observations
    return jax.lax.stop_gradient(values + trust * mean_residual)


def residual_moments(
    rewards: Float[Array, "Q G ..."], values: Float[Array, "Q G ..."]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Estimates the variance of R and the mean squared error of V from a batch of groups.

        sigma^2 = mean over groups of var_G (R - V)
        v^2     = mean over groups of (mean_G (R - V))^2 - sigma^2 / G

    sigma^2 / G is the part of the squared mean that sampling explains, so v^2 can be negative.
    Average both over training steps before `prior_strength`: over many groups and several batches
    the dependence on a single trace is negligible.

    Args:
      rewards: R, of groups of at least 2.

    Returns:
      sigma^2 and v^2.
    """
    chex.assert_equal_shape([rewards, values])
    group_size = rewards.shape[1]
    residual = jax.lax.stop_gradient(rewards - values)
    sigma2 = jnp.mean(jnp.var(residual, axis=1, ddof=1))
    squared_mean = jnp.square(jnp.mean(residual, axis=1))
    error2 = jnp.mean(squared_mean) - sigma2 / group_size
    return sigma2, error2


def prior_strength(sigma2: Scalar, error2: Scalar) -> Float[Array, ""]:
    """Returns the number of observations that V is worth, n0 = sigma^2 / v^2.

    Args:
      sigma2: sigma^2, the average over steps of `residual_moments`.
      error2: v^2, likewise; it may be negative.

    Returns:
      n0, at most 1e6. That is the value if the moments show no error of V.
    """
    sigma2 = at_least_float32(sigma2)
    error2 = at_least_float32(error2)
    has_error = error2 > 1e-6 * sigma2
    ratio = sigma2 / jnp.maximum(error2, 1e-30)
    return jnp.where(has_error, ratio, 1e6)
