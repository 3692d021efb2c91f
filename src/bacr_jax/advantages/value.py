"""Baselines around a value function V(q, b): alone, leave-one-out, and shrunk.

All of them leave the gradient unbiased, because none contains the reward of the trace that it is
subtracted from.
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
    """Reward minus the value predicted for the question, the budget and the cut, paper Eq. 10.

        A = R(q, t, b_j) - V_psi(q, b, b_j)

    It leaves the gradient unbiased as long as V was not fitted on these rewards: values are those
    of the head before this batch's update.

    Args:
      rewards: R of Eq. 7.
      values: V, or any other baseline of R (`residual_loo_baseline`, `shrink_baseline`).
    """
    chex.assert_rank([rewards, values], 3)
    chex.assert_equal_shape([rewards, values])
    return jax.lax.stop_gradient(rewards - values)


def correctness_from_value(
    values: Float[Array, "*batch M"], *, coefficient: Scalar
) -> Float[Array, "*batch M"]:
    """Probabilities of a correct answer that a value of R implies: the inverse of Eq. 7.

        p_j = (V_j + lambda p_{j-1}) / (1 + lambda),  p_0 = 0

    Eq. 7 is linear in the outcomes, so that `rewards.dense_reward` of p is V again.

    Args:
      coefficient: lambda of Eq. 7.

    Returns:
      p, not clipped: a value regressed on R can imply numbers outside [0, 1].
    """
    lag = jnp.arange(values.shape[-1])[:, None] - jnp.arange(values.shape[-1])[None, :]
    decay = jnp.asarray(coefficient / (1.0 + coefficient), values.dtype)
    unrolled = jnp.where(lag >= 0, decay ** jnp.maximum(lag, 0), 0.0) / (1.0 + coefficient)
    return jnp.einsum("ji,...i->...j", unrolled, values, precision="highest")


def residual_loo_baseline(
    rewards: Float[Array, "Q G ..."], values: Float[Array, "Q G ..."]
) -> Float[Array, "Q G ..."]:
    """Value plus the mean residual of the other traces of the group.

        c_i = V_i + mean_{k != i} (R_k - V_k)

    Any error of V that the traces of a question share cancels; budgets may differ inside the group,
    since each trace is compared with its own V. Constant V gives the RLOO baseline, a group of one
    V itself.
    """
    chex.assert_equal_shape([rewards, values])
    return jax.lax.stop_gradient(values + others_mean(rewards - values))


def shrink_baseline(
    rewards: Float[Array, "Q G ..."], values: Float[Array, "Q G ..."], *, prior_strength: Scalar
) -> Float[Array, "Q G ..."]:
    """Value corrected by the other traces' residuals as far as these can be trusted.

        c_i = V_i + sum_{k != i} (R_k - V_k) / (n0 + G - 1)

    For equal V in the group this is (n0 V + sum_{k != i} R_k) / (n0 + G - 1): V counts as n0
    observations. n0 = sigma^2 / v^2, with sigma^2 the variance of R and v^2 the mean squared error
    of V, is the best choice; its excess variance is at most that of V alone (n0 = inf) and of the
    leave-one-out mean alone (n0 = 0). A group of one gives V itself.

    Args:
      prior_strength: n0 >= 0, see `prior_strength`.
    """
    chex.assert_equal_shape([rewards, values])
    others = rewards.shape[1] - 1
    mean = others_mean(rewards - values)
    trust = others / jnp.maximum(prior_strength + others, jnp.finfo(jnp.float32).tiny)
    return jax.lax.stop_gradient(values + trust * mean)


def residual_moments(
    rewards: Float[Array, "Q G ..."], values: Float[Array, "Q G ..."]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Variance of R around its mean, and mean squared error of V, over a batch of groups.

    sigma^2 is the mean variance of residuals inside groups; v^2 is the mean square of the groups'
    mean residuals less sigma^2 / G, the part that sampling alone explains, so that it can come out
    negative. Average both over steps before `prior_strength`: one number for many groups and
    several batches makes its dependence on a single trace negligible.

    Args:
      rewards: R, of groups of at least 2.

    Returns:
      sigma^2 and v^2.
    """
    chex.assert_equal_shape([rewards, values])
    residual = jax.lax.stop_gradient(rewards - values)
    sigma2 = jnp.mean(jnp.var(residual, axis=1, ddof=1))
    error2 = jnp.mean(jnp.square(jnp.mean(residual, axis=1))) - sigma2 / residual.shape[1]
    return sigma2, error2


def prior_strength(sigma2: Scalar, error2: Scalar) -> Float[Array, ""]:
    """How many observations V is worth: n0 = sigma^2 / v^2, from averaged `residual_moments`.

    At most 1e6, where V is exact as far as the moments can tell.
    """
    sigma2, error2 = at_least_float32(sigma2), at_least_float32(error2)
    return jnp.where(error2 > 1e-6 * sigma2, sigma2 / jnp.maximum(error2, 1e-30), 1e6)
