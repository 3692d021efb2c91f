"""Contains the baselines of budget-conditioned advantages, selected by `advantage.baseline`.

The paper subtracts the prediction V(q, b) of a value head from the reward (Eq. 10). This project
adds the other baselines, and a correction that reduces the gradient variance of any baseline
(`score_weighting`). A residual is the reward of a response minus V. The score norm of a token is
the norm of the gradient of its log-probability.

value          the value head V(q, b) of Eq. 11
residual_loo   V plus the mean residual of the other responses to the question
shrink         V plus these residuals, weighted by the reliability of V
group          mean reward of the responses to the question
batch          mean reward of the other responses in the batch
same_budget    mean reward of the other responses in the batch that have the same budget
constant       running mean over earlier batches
optimal_token  mean over the responses to the question, weighted by score norms, per token
"""

from collections.abc import Callable

from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.baselines import batch_mean, optimal_token, running_mean, value_head
from bacr_jax.methods.baselines.baseline import (
    Baseline as Baseline,
    Credit as Credit,
    Estimate as Estimate,
    State as State,
)
from bacr_jax.methods.baselines.score_weighting import with_score_weights

BASELINES: dict[str, Callable[[MethodSettings], Baseline]] = {
    "value": value_head.value,
    "residual_loo": value_head.residual_loo,
    "shrink": value_head.shrink,
    "group": batch_mean.group,
    "batch": batch_mean.batch,
    "same_budget": batch_mean.same_budget,
    "constant": running_mean.constant,
    "optimal_token": optimal_token.optimal_token,
}


def baseline_of(config: MethodSettings) -> Baseline:
    """Builds the baseline selected by `advantage.baseline` and `advantage.score_weighted`."""
    baseline = BASELINES[config.advantage.baseline](config)
    if config.advantage.score_weighted:
        return with_score_weights(config, baseline)
    return baseline
