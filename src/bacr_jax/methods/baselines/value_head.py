"""Contains the baselines that use the value head V(q, b) of Eq. 11.

Some of them correct V by the residuals (reward minus V) of the other responses to the question.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from bacr_jax import advantages
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.baselines.baseline import Baseline, Estimate, State, running
from bacr_jax.methods.method import GroupBatch, PerCut
from bacr_jax.methods.reward_terms import progress_coefficient


def implied_estimate(config: MethodSettings, baseline: PerCut) -> Estimate:
    """Combines a baseline of the rewards R with the correctness that it implies by Eq. 7."""
    coefficient = progress_coefficient(config.reward)
    return Estimate(baseline, advantages.correctness_from_value(baseline, coefficient=coefficient))


def value(config: MethodSettings) -> Baseline:
    """Builds the baseline V(q, b), as in the paper (Eq. 10)."""

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        assert values is not None
        return implied_estimate(config, values)

    return Baseline(estimate, uses_value=True)


def residual_loo(config: MethodSettings) -> Baseline:
    """Builds the baseline that is V plus the mean residual of the question's other responses.

    The residual of a response is its reward minus V.
    """

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        assert values is not None
        return implied_estimate(config, advantages.residual_loo_baseline(reward, values))

    return Baseline(estimate, uses_value=True)


def shrink(config: MethodSettings) -> Baseline:
    """Builds the baseline that is V plus a weighted sum of the other responses' residuals.

    The residual of a response is its reward R minus V. The weight depends on the reliability of V.
    It is derived from two running statistics: the variance of R within groups, and the mean squared
    error of V (`advantages.shrink_baseline`).
    """

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        assert values is not None
        strength = _prior_strength(state)
        baseline = advantages.shrink_baseline(reward, values, prior_strength=strength)
        return implied_estimate(config, baseline)

    def update(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> dict[str, Array]:
        assert values is not None
        sigma2, error2 = advantages.residual_moments(reward, values)
        return {
            "sigma2": running(state["sigma2"], sigma2),
            "error2": running(state["error2"], error2),
        }

    def metrics(state: State) -> dict[str, Array]:
        return {"advantage/prior_strength": _prior_strength(state)}

    return Baseline(
        estimate, uses_value=True, init_state=_shrink_state, update=update, metrics=metrics
    )


def _shrink_state() -> State:
    """Returns the initial statistics, for which the weight n0 of V is 0.

    Until the error of V has been measured, the residuals of the other responses have full weight.
    """
    return {"sigma2": jnp.float32(0.0), "error2": jnp.float32(1e-6)}


def _prior_strength(state: State) -> Float[Array, ""]:
    return advantages.prior_strength(state["sigma2"], state["error2"])
