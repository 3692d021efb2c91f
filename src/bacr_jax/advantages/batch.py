"""Baseline that is the mean of the other traces of the same batch.

It needs no value head and no memory of earlier batches. A running mean of earlier batches lags
behind the policy: after a batch without any reward, every trace of that batch is below the mean,
and the update lowers the probability of everything that was sampled. The mean of the same batch
cannot lag.
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

    If no other trace has the budget, the mean is over all other traces. If all budgets are equal,
    it is the mean over the other traces of the batch. The gradient stays unbiased, because a
    trace's reward is never in its baseline.

    Args:
      rewards: R of every trace at every cut.
      budgets: thinking budget of every trace, in tokens.

    Returns:
      c, in units of reward; 0 for a batch of one trace. Gradients into the rewards are stopped.
    """
    chex.assert_rank([rewards, budgets], [3, 2])
    chex.assert_equal_shape_prefix([rewards, budgets], 2)
    num_cuts = rewards.shape[-1]
    flat_rewards = jax.lax.stop_gradient(rewards).reshape(-1, num_cuts)
    flat_budgets = budgets.reshape(-1)

    is_other_trace = ~jnp.eye(flat_budgets.size, dtype=bool)
    has_same_budget = flat_budgets[:, None] == flat_budgets[None, :]
    candidates = is_other_trace & has_same_budget
    has_no_candidate = ~candidates.any(axis=1, keepdims=True)
    compared = jnp.where(has_no_candidate, is_other_trace, candidates)

    # A matrix product over the other traces, because a total minus the trace's reward would let
    # the rounding of that reward into its baseline.
    weights = compared.astype(flat_rewards.dtype)
    total = jnp.matmul(weights, flat_rewards, precision="highest")
    count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    mean = total / count
    return mean.reshape(rewards.shape)
