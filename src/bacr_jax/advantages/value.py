"""Computes baselines from a value function V(q, b), optionally corrected by residuals of the group.

All of these baselines leave the policy gradient unbiased, because the baseline of a trace never
includes the reward of that trace.
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
    """Computes the budget-conditioned advantage at each truncation point (paper Eq. 10).

        A = R(q, t, b_j) - V_psi(q, b, b_j)

    q is a question, b the budget of trace t, and b_j a truncation point. The gradient is unbiased
    if V was not fitted to these rewards. The value head (parameters psi) must therefore compute V
    before it is updated on this batch.

    Args:
      rewards: R of Eq. 7.
      values: V, or any other baseline of R (`residual_loo_baseline`, `shrink_baseline`).

    Returns:
      A, with stopped gradients through rewards and values.
    """
    chex.assert_rank([rewards, values], 3)
    chex.assert_equal_shape([rewards, values])
    return jax.lax.stop_gradient(rewards - values)


def correctness_from_value(
    values: Float[Array, "*batch M"], *, coefficient: Scalar
) -> Float[Array, "*batch M"]:
    """Computes the probability of a correct answer implied by a value of R, the inverse of Eq. 7.

        p_j = (V_j + lambda p_{j-1}) / (1 + lambda),  p_0 = 0

    Eq. 7 is linear in the outcomes, so `rewards.dense_reward` of p is V again.

    Args:
      values: V_j at each truncation point j.
      coefficient: lambda of Eq. 7.

    Returns:
      p, not clipped. Values that were fitted by regression can imply p outside [0, 1].
    """
    # The unrolled recursion: p_j = sum_{i <= j} decay^(j - i) V_i / (1 + lambda).
    cut = jnp.arange(values.shape[-1])
    lag = cut[:, None] - cut[None, :]
    decay = jnp.asarray(coefficient / (1.0 + coefficient), values.dtype)
    powers = jnp.where(lag >= 0, decay ** jnp.maximum(lag, 0), 0.0)
    unrolled = powers / (1.0 + coefficient)
    return jnp.einsum("ji,...i->...j", unrolled, values, precision="highest")


def residual_loo_baseline(
    rewards: Float[Array, "Q G ..."], values: Float[Array, "Q G ..."]
) -> Float[Array, "Q G ..."]:
    """Computes V plus the mean residual of the other traces in the group.

        c_i = V_i + mean_{k != i} (R_k - V_k)

    i and k are traces of the group. Any error of V that is common to the traces of a question
    cancels. Budgets can differ within a group, because the residual of each trace uses the V of its
    budget. A constant V gives the RLOO baseline, and a group of one gives V. Gradients are stopped.
    """
    chex.assert_equal_shape([rewards, values])
    mean_residual = others_mean(rewards - values)
    return jax.lax.stop_gradient(values + mean_residual)


def shrink_baseline(
    rewards: Float[Array, "Q G ..."], values: Float[Array, "Q G ..."], *, prior_strength: Scalar
) -> Float[Array, "Q G ..."]:
    """Corrects V by the residuals of the other traces, weighted by the reliability of V.

        c_i = V_i + sum_{k != i} (R_k - V_k) / (n0 + G - 1)

    If V is the same for the whole group, c_i is (n0 V + sum_{k != i} R_k) / (n0 + G - 1), so V
    counts as n0 observations. The optimal value is n0 = sigma^2 / v^2, where sigma^2 is the
    variance of R and v^2 is the mean squared error of V. With this n0, errors of the baseline add
    at most as much gradient variance as with V only (n0 = inf) or with the leave-one-out mean only
    (n0 = 0). A group of one gives V. Gradients are stopped.

    Args:
      prior_strength: n0 >= 0 (see the function `prior_strength`).
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

    sigma^2 / G is the part of the squared mean that is explained by sampling noise. The estimate of
    v^2 can therefore be negative. Average both over training steps before calling `prior_strength`.
    Over many groups and several batches, the dependence on any single trace is negligible.

    Args:
      rewards: R, in groups of at least two traces.

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
    """Computes the number of observations that V is worth, n0 = sigma^2 / v^2.

    Args:
      sigma2: sigma^2 (`residual_moments`), averaged over training steps.
      error2: v^2 (`residual_moments`), averaged over training steps. It can be negative.

    Returns:
      n0, at most 1e6. The maximum is returned if v^2 is not above 1e-6 sigma^2, which means that V
      has no measurable error.
    """
    sigma2 = at_least_float32(sigma2)
    error2 = at_least_float32(error2)
    has_error = error2 > 1e-6 * sigma2
    ratio = sigma2 / jnp.maximum(error2, 1e-30)
    return jnp.where(has_error, ratio, 1e6)
