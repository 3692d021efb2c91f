"""Shifts any baseline towards the baseline that minimizes the variance of the gradient.

The setting `advantage.score_weighted` enables the shift. The minimum-variance baseline weights
returns by squared score norms, where the score of a token is the gradient of its log-probability. A
running regression, fitted only to earlier batches, shifts the baseline of each thinking segment
towards the minimum-variance baseline (`advantages.optimal_shift`). The gradient stays unbiased.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from bacr_jax import advantages
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.baselines.baseline import Baseline, Credit, State, running
from bacr_jax.methods.baselines.budget_bins import budget_bins
from bacr_jax.methods.method import GroupBatch, PerCut
from bacr_jax.methods.reward_terms import cut_weights, progress_coefficient


def with_score_weights(config: MethodSettings, baseline: Baseline) -> Baseline:
    """Wraps a baseline so that it is shifted towards the minimum-variance baseline.

    The shift of each thinking segment is an affine function of the baseline's expected return V,
    fitted by a running regression. With `advantage.same_shift_for_batch`, the mean shift over the
    batch is applied to all responses.
    """
    bins = budget_bins(config)
    is_constant = config.advantage.baseline == "constant"

    def regressor(expected: PerCut) -> PerCut:
        # For a constant baseline, the intercept is the only useful regressor.
        return jnp.zeros_like(expected) if is_constant else expected

    def init_state() -> State:
        return baseline.init_state() | _zero_moments(config.cuts.count * bins.count)

    def refine(state: State, batch: GroupBatch, credit: Credit) -> Credit:
        expected = credit.returns - credit.thinking
        predicted = bins.spread(batch, regressor(expected))
        shift = bins.select(batch, advantages.optimal_shift(predicted, _slopes(state)))
        if is_constant:
            shift = _within_reach(config, shift, expected)
        if config.advantage.same_shift_for_batch:
            shift = jnp.broadcast_to(shift.mean((0, 1)), shift.shape)
        return credit._replace(thinking=credit.thinking - shift)

    def update(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> dict[str, Array]:
        estimate = baseline.estimate(state, batch, reward, values)
        residual = advantages.bcae_advantage(reward, estimate.reward)
        weights = cut_weights(config.cuts)
        mode = config.advantage.credit
        thinking = advantages.thinking_credit(residual, weights, mode=mode)
        returns = advantages.thinking_credit(reward, weights, mode=mode)
        square, product, spread = advantages.optimal_moments(
            bins.spread(batch, thinking),
            bins.spread(batch, regressor(returns - thinking)),
            bins.spread(batch, batch.score_norm_proxy),
        )
        return {
            **baseline.update(state, batch, reward, values),
            "optimal_square": running(state["optimal_square"], square),
            "optimal_product": running(state["optimal_product"], product),
            # This moment is a sum of squared weights, so the decay is squared too.
            "optimal_spread": running(state["optimal_spread"], spread, power=2),
        }

    def metrics(state: State) -> dict[str, Any]:
        offset, slope = _slopes(state).mean(0)
        slopes = {"advantage/score_offset": offset, "advantage/score_slope": slope}
        return baseline.metrics(state) | slopes

    return dataclasses.replace(
        baseline, init_state=init_state, update=update, refine=refine, metrics=metrics
    )


def _zero_moments(count: int) -> State:
    """Returns the initial statistics of the regression.

    The coefficients of the regression are 0 with these statistics, so the baseline is unchanged.
    """
    return {
        "optimal_square": jnp.zeros((count, 2, 2), jnp.float32),
        "optimal_product": jnp.zeros((count, 2), jnp.float32),
        "optimal_spread": jnp.zeros(count, jnp.float32),
    }


def _slopes(state: State) -> Float[Array, "N 2"]:
    """Computes the two coefficients (offset, slope) of each segment's regression.

    The regression estimates from earlier batches how the baseline of a segment must be shifted.
    """
    square = state["optimal_square"]
    traces = advantages.effective_traces(square, state["optimal_spread"])
    return advantages.optimal_slopes(square, state["optimal_product"], traces)


def _within_reach(config: MethodSettings, shift: PerCut, expected: PerCut) -> PerCut:
    """Clips a shift so that the shifted baseline is a return that a response can attain.

    The running mean and the statistics of the regression lag behind the policy by different
    amounts, so baseline plus shift can leave the range of attainable returns.

    Args:
      config: config of the run.
      shift: shift of the baseline of each segment.
      expected: baseline of each segment before the shift.
    """
    coefficient = progress_coefficient(config.reward)
    weights = cut_weights(config.cuts)
    # In the worst case, every truncation point after the first has the progress reward -lambda.
    worst_rewards = jnp.full_like(weights, -coefficient).at[0].set(0.0)
    lowest = advantages.to_go(worst_rewards, weights)
    highest = advantages.to_go(jnp.full_like(weights, 1.0 + coefficient), weights)
    return jnp.clip(shift, lowest - expected, highest - expected)
