"""Baselines that are means of the same batch: no value head, no memory of earlier batches."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods.baselines.baseline import Baseline, Estimate, State
from bacr_jax.methods.grpo_family import group_mean
from bacr_jax.methods.method import GroupBatch, PerCut


def group(config: Config) -> Baseline:
    """Returns the mean over the question's responses, the response itself included."""

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        return Estimate(group_mean(reward), group_mean(batch.outcomes))

    return Baseline(estimate)


def batch(config: Config) -> Baseline:
    """Returns the mean over the batch's other responses (`advantages.same_budget_mean`)."""

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        return _mean_of_others(batch, reward, jnp.zeros_like(batch.budgets))

    return Baseline(estimate)


def same_budget(config: Config) -> Baseline:
    """Returns the mean over the batch's other responses that have the same budget."""

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        return _mean_of_others(batch, reward, batch.budgets)

    return Baseline(estimate)


def _mean_of_others(batch: GroupBatch, reward: PerCut, classes: Int[Array, "Q G"]) -> Estimate:
    """Returns means over the other responses of the same class."""
    return Estimate(
        advantages.same_budget_mean(reward, classes),
        advantages.same_budget_mean(batch.outcomes, classes),
    )
