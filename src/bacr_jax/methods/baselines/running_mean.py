"""Computes a baseline from earlier batches: the running mean reward at each truncation point.

Optionally, there is a separate mean for each range of budgets (`budget_bins`). The baseline does
not require a value head. It lags behind the policy: in a batch without any reward, every response
is below the running mean.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bacr_jax import advantages
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.baselines.baseline import Baseline, Estimate, State, running
from bacr_jax.methods.baselines.budget_bins import BudgetBins, budget_bins
from bacr_jax.methods.baselines.value_head import implied_estimate
from bacr_jax.methods.method import GroupBatch, PerCut


def constant(config: MethodSettings) -> Baseline:
    """Builds the baseline that is the running mean reward at each truncation point."""
    bins = budget_bins(config)
    moments = config.cuts.count * bins.count

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        return implied_estimate(config, _running_mean(bins, state, batch, reward))

    def init_state() -> State:
        # One counter is sufficient for all truncation points, because every response has all of
        # them. With several budget bins, each bin counts its share of responses.
        seen_shape = () if bins.count == 1 else (moments,)
        return {
            "reward_mean": jnp.zeros(moments, jnp.float32),
            "reward_seen": jnp.zeros(seen_shape, jnp.float32),
        }

    def update(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> dict[str, Array]:
        seen = jnp.float32(1.0)
        if bins.count > 1:
            seen = bins.spread(batch, jnp.ones_like(reward)).mean((0, 1))
        mean = bins.spread(batch, reward).mean((0, 1))
        return {
            "reward_mean": running(state["reward_mean"], mean),
            "reward_seen": running(state["reward_seen"], seen),
        }

    return Baseline(estimate, init_state=init_state, update=update)


def _running_mean(bins: BudgetBins, state: State, batch: GroupBatch, reward: PerCut) -> PerCut:
    """Computes the mean reward over earlier batches for each response at each truncation point.

    For a budget bin without earlier responses, the mean over the other questions of the batch is
    used.
    """
    others = jax.vmap(advantages.other_questions_mean, -1, -1)(reward[..., None, :])
    if bins.count > 1:
        others = jnp.tile(others, bins.count)
    earlier = state["reward_mean"] / jnp.maximum(state["reward_seen"], 1e-6)
    mean = jnp.where(state["reward_seen"] > 0, earlier, others)
    shape = (*reward.shape[:2], mean.shape[-1])
    return bins.select(batch, jnp.broadcast_to(mean[:, None], shape))
