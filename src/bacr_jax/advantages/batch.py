"""A baseline from the other traces of the batch, without a value head and without a memory.

A running mean of earlier batches lags behind the policy: after a batch without any reward, every
trace of it is below the mean, and the update lowers the probability of all that was sampled. The
mean of the same batch cannot lag.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def same_budget_mean(
    rewards: Float[Array, "Q G M"], budgets: Int[Array, "Q G"]
) -> Float[Array, "Q G M"]:
    """Returns the mean reward of the other traces of the batch that have the same budget.

        c_i = mean_{k != i, b_k = b_i} R_k

    A trace that is alone with its budget is compared with all other traces. Equal budgets for all
    give the mean of the other traces of the batch. No trace's own reward is in its baseline, so the
    policy gradient stays unbiased. A batch of one trace has a baseline of 0.

    Args:
      rewards: R of every trace at every cut.
      budgets: thinking budget of every trace, in tokens.

    Returns:
      c, in units of reward; gradients into the rewards are stopped.
    """
    chex.assert_rank([rewards, budgets], [3, 2])
    chex.assert_equal_shape_prefix([rewards, budgets], 2)
    flat_rewards = jax.lax.stop_gradient(rewards).reshape(-1, rewards.shape[-1])
    flat_budgets = budgets.reshape(-1)
    # A matrix product over the other traces: a total minus the own reward would let the rounding
    # of the own reward into its baseline.
    others = ~jnp.eye(flat_budgets.size, dtype=bool)
    alike = others & (flat_budgets[:, None] == flat_budgets[None, :])
    alone = ~alike.any(axis=1, keepdims=True)
    compared = jnp.where(alone, others, alike).astype(flat_rewards.dtype)
    total = jnp.matmul(compared, flat_rewards, precision="highest")
    mean = total / jnp.maximum(compared.sum(axis=1, keepdims=True), 1.0)
    return mean.reshape(rewards.shape)
