"""AnytimeReasoner (arXiv 2505.13438): one trace, scored at several budgets.

The budget is not an input of the policy. Budget-relative policy optimization (BRPO) compares a
trace with its own earlier outcomes (V1) and with its group (V2). With `anytime.baseline: v2`, only
the group is used, as in some descriptions of the method. The name of the method is then
"AnytimeReasoner, simplified BRPO".
"""

from collections.abc import Iterator
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from bacr_jax import rewards as cutting
from bacr_jax.advantages import others_mean, to_go
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import (
    CLIPPED,
    NO_ENTROPY,
    budget_input_problems,
    group_mean,
    grpo_family,
    needs_a_group,
    no_stages,
)
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

_NAMES = {
    "brpo": "AnytimeReasoner",
    "v1": "AnytimeReasoner, V1 alone",
    "v2": "AnytimeReasoner, simplified BRPO",
    "none": "AnytimeReasoner, no baseline",
}

PUBLISHED = {
    "cuts.count": Published(4, "budgets of its training: 2k, 4k, 6k, 8k"),
    "anytime.prior": Published("uniform", "one of three that it reports"),
    "anytime.answer_prior": Published("uniform", "decoupled from the thinking's"),
    "anytime.baseline": Published("brpo", "Eq. 7-9"),
    "anytime.loo": Published(False, "Eq. 8: the group's mean holds the trace itself"),
    "anytime.answers": Published(4, "its released code"),
    "loss.aggregate": Published("constant", "its released code", defining=True),
    **CLIPPED,
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.0, "its released code", defining=True),
    "train.minibatches": Published(2, "its released code: mini-batches of 32 of 64 prompts"),
}


def brpo_prior(
    kind: Literal["base", "uniform", "linear"], budgets: Num[Array, "M"]
) -> Float[Array, "M"]:
    """Returns the weight of each budget in the anytime objective (arXiv 2505.13438, section 3).

        base: 1 for the largest budget, else 0   uniform: 1/M   linear: P_j ~ b_j

    Args:
      budgets: budgets b in tokens, in ascending order.

    Returns:
      Weights P, which sum to 1.

    Raises:
      ValueError: If the kind is unknown.
    """
    chex.assert_rank(budgets, 1)
    budgets = budgets.astype(jnp.float32)
    if kind == "base":
        return jnp.zeros_like(budgets).at[-1].set(1.0)
    if kind == "uniform":
        return jnp.full_like(budgets, 1.0 / budgets.shape[0])
    if kind == "linear":
        return budgets / jnp.sum(budgets)
    raise ValueError(f"the budget prior must be base, uniform or linear, but `prior` is {kind!r}")


def brpo_advantage(
    r: Float[Array, "Q G M"],
    prior: Float[Array, "M"],
    *,
    mode: Literal["brpo", "v1", "v2", "none"] = "brpo",
    loo: bool = False,
) -> Float[Array, "Q G M"]:
    """Computes the BRPO advantage of each thinking segment (arXiv 2505.13438, Eq. 7-9).

    A segment is the thinking between two consecutive budgets, and s = 0..M-1 is its index. The
    return of a segment is the sum of the later outcomes r, weighted by the prior P. Both baselines
    are scaled to the prior mass of these outcomes:

        V1[g,s] = sum_{k<s} 2^{k-s} r[g,k] / sum_{k<s} 2^{k-s} * sum_{k>=s} P_k      (0 at s = 0)
        V2[s]   = mean_g sum_{k>=s} P_k r[g,k]
        A[g,s]  = sum_{k>=s} P_k r[g,k] - (s/M) V1[g,s] - ((M-s)/M) V2[s]

    g is a trace of the group. V1 predicts the later outcomes of a trace from its earlier outcomes.
    V2 predicts them from the group. The advantages are not divided by a standard deviation.

    Args:
      r: outcomes in [0, 1], averaged over the answers for each trace and budget.
      prior: weights P (`brpo_prior`).
      mode: "brpo" subtracts both baselines as above. "v1" and "v2" subtract only one of them, with
        weight 1. "none" subtracts nothing.
      loo: True to exclude the trace from V2 (leave-one-out). This removes the factor 1 -
        (M-s)/(M G) by which the expected gradient is reduced. False is the published form.

    Raises:
      ValueError: If the mode is unknown.
    """
    chex.assert_rank([r, prior], [3, 1])
    chex.assert_axis_dimension(r, 2, prior.shape[0])
    r = jax.lax.stop_gradient(r)
    group_size = r.shape[1]
    num_cuts = r.shape[2]
    returns = to_go(r, prior)
    v1 = _earlier_outcomes(r) * jnp.flip(jnp.cumsum(jnp.flip(prior)))
    # V2 is 0 for a group of one, because there is no other trace to compare with.
    v2 = others_mean(returns) if loo or group_size == 1 else group_mean(returns)
    if mode == "brpo":
        share_of_v1 = jnp.asarray(np.arange(num_cuts) / num_cuts, r.dtype)
        return returns - share_of_v1 * v1 - (1.0 - share_of_v1) * v2
    if mode == "v1":
        return returns - v1
    if mode == "v2":
        return returns - v2
    if mode == "none":
        return returns
    raise ValueError(f"the baseline must be brpo, v1, v2 or none, but `mode` is {mode!r}")


def _earlier_outcomes(r: Float[Array, "Q G M"]) -> Float[Array, "Q G M"]:
    """Computes the weighted mean of a trace's outcomes before each segment.

    Later outcomes have larger weights:

        sum_{k<s} 2^{k-s} r[g,k] / sum_{k<s} 2^{k-s}      (0 at s = 0)
    """
    index = np.arange(r.shape[2])
    lag = index[:, None] - index[None, :]
    weights = np.where(lag > 0, 0.5 ** np.maximum(lag, 0), 0.0)
    total = np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    normalised = jnp.asarray(weights / total, r.dtype)
    return jnp.einsum("sk,qgk->qgs", normalised, r, precision="highest")


def answer_advantage(r: Float[Array, "Q G M A"]) -> Float[Array, "Q G M A"]:
    """Computes the advantage of each answer relative to other answers at the same truncation point.

        A = r[g,j,a] - mean_a r[g,j,a]      with several answers per cut
        A = r[g,j] - mean_g r[g,j]          with one answer per cut

    Args:
      r: outcome, in [0, 1], of each of the A answers at truncation point (cut) j of trace g.
    """
    chex.assert_rank(r, 4)
    r = jax.lax.stop_gradient(r)
    has_several_answers = r.shape[-1] > 1
    compared_axis = -1 if has_several_answers else 1
    return r - jnp.mean(r, axis=compared_axis, keepdims=True)


def problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message for each setting that is incompatible with the method."""
    yield from budget_input_problems(config)
    yield from no_stages(
        config, "truncates traces at fixed fractions of budget.max, which stages do not lower"
    )
    if config.anytime.baseline == "v2":
        yield from needs_a_group(config, "anytime.baseline=v2")
    elif config.anytime.answers == 1:
        yield from needs_a_group(config, "anytime.answers=1")


def make(config: MethodSettings) -> Method:
    """Builds AnytimeReasoner with `anytime.answers` answers at each of `cuts.count` budgets.

    The budgets are evenly spaced up to `budget.max`.
    """
    settings = config.anytime
    count = config.cuts.count

    def grid() -> Int[Array, "M"]:
        return cutting.cut_points(jnp.int32(config.budget.max), num_cuts=count)

    def cuts(key: Array, budgets: Int[Array, "Q G"]) -> Int[Array, "Q G M"]:
        return jnp.broadcast_to(grid(), (*budgets.shape, count))

    def rewards(state: Any, batch: GroupBatch) -> PerCut:
        return batch.outcomes

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        prior = brpo_prior(settings.prior, grid())
        # The answers have a separate prior, because in the publication, the gradient of the answers
        # weights all budgets equally, whatever the prior of the thinking is.
        answer_prior = brpo_prior(settings.answer_prior, grid()) * count
        thinking = brpo_advantage(rewards, prior, mode=settings.baseline, loo=settings.loo)
        returns = to_go(rewards, prior)
        return Advantages(
            thinking=thinking,
            answers=answer_advantage(batch.by_answer) * answer_prior[:, None],
            baseline=returns - thinking,
            returns=returns,
        )

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        prior = brpo_prior(settings.prior, grid())
        return {
            "anytime/accuracy": batch.outcomes.mean(),
            "anytime/objective": (batch.outcomes * prior).sum(-1).mean(),
        }

    return grpo_family(
        config,
        _NAMES[settings.baseline],
        cuts=cuts,
        rewards=rewards,
        advantages=advantages,
        metrics=metrics,
        answers=settings.answers,
        published=PUBLISHED,
    )
