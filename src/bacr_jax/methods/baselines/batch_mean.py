"""Contains baselines that are mean rewards over the current batch.

These baselines require neither a value head nor statistics of earlier batches.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from bacr_jax import advantages
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.baselines.baseline import Baseline, Estimate, State
from bacr_jax.methods.grpo_family import group_mean
from bacr_jax.methods.method import GroupBatch, PerCut


def group(config: MethodSettings) -> Baseline:
    """Builds the baseline that is the mean reward over all responses to the question."""

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        return Estimate(group_mean(reward), group_mean(batch.outcomes))

    return Baseline(estimate)


def batch(config: MethodSettings) -> Baseline:
    """Builds a baseline: the mean reward of the other responses in the batch."""

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        return _mean_of_others(batch, reward, jnp.zeros_like(batch.budgets))

    return Baseline(estimate)


def same_budget(config: MethodSettings) -> Baseline:
    """Builds a baseline: the mean reward of the other responses with the same budget."""

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        return _mean_of_others(batch, reward, batch.budgets)

    return Baseline(estimate)


def _mean_of_others(batch: GroupBatch, reward: PerCut, classes: Int[Array, "Q G"]) -> Estimate:
    """Computes the mean over the other responses of the batch with the same class.

    Args:
      classes: class of each response, such as its budget.
    """
    return Estimate(
        advantages.same_budget_mean(reward, classes),
        advantages.same_budget_mean(batch.outcomes, classes),
    )
