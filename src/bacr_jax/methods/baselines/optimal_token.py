"""Optimal token baseline (arXiv 2602.07078), with one number per question and token position."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from bacr_jax import advantages
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.baselines.baseline import Baseline, Credit, Estimate, State
from bacr_jax.methods.method import GroupBatch, PerCut


def optimal_token(config: MethodSettings) -> Baseline:
    """Builds the baseline that is a weighted mean reward over the responses to the question.

    The weight of a response at a token is its squared score norm, accumulated up to this token. The
    score norm of a token is the norm of the gradient of its log-probability with respect to the
    logits.
    """

    def estimate(
        state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
    ) -> Estimate:
        weights = _norms_at_cuts(batch)
        reward_mean = advantages.token_baseline(reward, weights)
        correctness_mean = advantages.token_baseline(batch.outcomes, weights)
        return Estimate(
            jnp.broadcast_to(reward_mean, reward.shape),
            jnp.broadcast_to(correctness_mean, batch.outcomes.shape),
        )

    def refine(state: State, batch: GroupBatch, credit: Credit) -> Credit:
        return credit._replace(tokens=_token_advantages(batch, credit.returns))

    return Baseline(estimate, needs_score_norms=True, refine=refine)


def _norms_at_cuts(batch: GroupBatch) -> PerCut:
    """Returns the squared score norm of each response, accumulated up to each truncation point."""
    assert batch.cumulative_score_norm is not None
    before_cut = jnp.arange(batch.cumulative_score_norm.shape[-1]) < batch.cuts[..., None]
    return jnp.where(before_cut, batch.cumulative_score_norm[..., None, :], 0.0).max(-1)


def _token_advantages(batch: GroupBatch, returns: PerCut) -> Float[Array, "Q G T"]:
    """Computes the return of each thinking token minus the optimal token baseline."""
    assert batch.cumulative_score_norm is not None
    cuts = batch.cuts.reshape(-1, batch.cuts.shape[-1])
    flat_returns = returns.reshape(-1, returns.shape[-1])
    by_token = advantages.scatter_segments(
        flat_returns, cuts, batch.cumulative_score_norm.shape[-1]
    )
    token_returns: Array = by_token.reshape(batch.cumulative_score_norm.shape)
    return token_returns - advantages.token_baseline(token_returns, batch.cumulative_score_norm)
