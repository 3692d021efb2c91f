"""Computes a baseline as the mean reward over the other traces of the same batch.

This baseline needs neither a value head nor statistics of earlier batches. A running mean of
earlier batches lags behind the policy: in a batch without any reward, every trace is below the
mean, and the update lowers the probability of everything that was sampled. The mean of the current
batch cannot lag.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def same_budget_mean(
    rewards: Float[Array, "Q G M"], budgets: Int[Array, "Q G"]
) -> Float[Array, "Q G M"]:
    """Computes the mean reward of the other traces in the batch that have the same budget.

        c_i = mean_{k != i, b_k = b_i} R_k

    b_i is the budget of trace i. If no other trace has this budget, the mean is taken over all
    other traces. The policy gradient stays unbiased, because the baseline of a trace never includes
    the reward of that trace.

    Args:
      rewards: reward R of each trace at each truncation point.
      budgets: thinking budget of each trace, in tokens.

    Returns:
      Baseline c, in units of reward. It is 0 if the batch has only one trace. Gradients through the
      rewards are stopped.
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

    # Use a matrix product over the other traces, because subtracting the trace's reward from a
    # total would leak the rounding error of that reward into its baseline.
    weights = compared.astype(flat_rewards.dtype)
    total = jnp.matmul(weights, flat_rewards, precision="highest")
    count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    mean = total / count
    return mean.reshape(rewards.shape)
