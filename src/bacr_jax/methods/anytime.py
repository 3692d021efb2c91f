"""AnytimeReasoner (arXiv 2505.13438): one trace, scored at every budget of a grid.

The budget is not an input of the policy. Budget-relative policy optimisation (BRPO) compares a
trace with its earlier outcomes (V1) and with its group (V2). `anytime.baseline: v2` only uses the
group, as some descriptions of the method do; its name then contains "simplified BRPO".
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
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import (
    CLIPPED,
    NO_ENTROPY,
    group_mean,
    grpo_family,
    needs_a_group,
    told_nothing,
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
      budgets: b, ascending, in tokens.

    Returns:
      P, which sums to 1.

    Raises:
      ValueError: the kind is unknown.
    """
    chex.assert_rank(budgets, 1)
    budgets = budgets.astype(jnp.float32)
    if kind == "base":
        return jnp.zeros_like(budgets).at[-1].set(1.0)
    if kind == "uniform":
        return jnp.full_like(budgets, 1.0 / budgets.shape[0])
    if kind == "linear":
        return budgets / jnp.sum(budgets)
    raise ValueError(f"prior: found {kind!r}; write base, uniform or linear")


def brpo_advantage(
    r: Float[Array, "Q G M"],
    prior: Float[Array, "M"],
    *,
    mode: Literal["brpo", "v1", "v2", "none"] = "brpo",
    loo: bool = False,
) -> Float[Array, "Q G M"]:
    """Returns the advantage of each thinking segment (arXiv 2505.13438, Eq. 7-9).

    s = 0..M-1 is the segment, and both baselines are scaled to the remaining prior mass:

        V1[g,s] = sum_{k<s} 2^{k-s} r[g,k] / sum_{k<s} 2^{k-s} * sum_{k>=s} P_k      (0 at s = 0)
        V2[s]   = mean_g sum_{k>=s} P_k r[g,k]
        A[g,s]  = sum_{k>=s} P_k r[g,k] - (s/M) V1[g,s] - ((M-s)/M) V2[s]

    V1 predicts a trace's later outcomes from its earlier outcomes, V2 from the group. There is no
    division by a standard deviation.

    Args:
      r: outcomes, averaged over the answers of each (trace, budget), in [0, 1].
      prior: P (`brpo_prior`).
      mode: "brpo" subtracts both baselines as above; "v1" and "v2" subtract one of them with weight
        1; "none" subtracts nothing.
      loo: leave the trace out of its V2, which removes the gradient shrinkage by 1 - (M-s)/(M G);
        False is the published form.

    Raises:
      ValueError: the mode is unknown.
    """
    chex.assert_rank([r, prior], [3, 1])
    chex.assert_axis_dimension(r, 2, prior.shape[0])
    r = jax.lax.stop_gradient(r)
    group_size = r.shape[1]
    num_cuts = r.shape[2]
    returns = to_go(r, prior)
    v1 = _earlier_outcomes(r) * jnp.flip(jnp.cumsum(jnp.flip(prior)))
    # In a group of one V2 is 0, because there is no other trace to compare with.
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
    raise ValueError(f"mode: found {mode!r}; write brpo, v1, v2 or none")


def _earlier_outcomes(r: Float[Array, "Q G M"]) -> Float[Array, "Q G M"]:
    """Averages a trace's outcomes before each segment, the latest with the most weight.

    sum_{k<s} 2^{k-s} r[g,k] / sum_{k<s} 2^{k-s}      (0 at s = 0)
    """
    index = np.arange(r.shape[2])
    lag = index[:, None] - index[None, :]
    weights = np.where(lag > 0, 0.5 ** np.maximum(lag, 0), 0.0)
    total = np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    normalised = jnp.asarray(weights / total, r.dtype)
    return jnp.einsum("sk,qgk->qgs", normalised, r, precision="highest")


def answer_advantage(r: Float[Array, "Q G M A"]) -> Float[Array, "Q G M A"]:
    """Subtracts the mean outcome of the answers at a cut from the outcome of each answer.

        A = r[g,j,a] - mean_a r[g,j,a]      with several answers per cut
        A = r[g,j] - mean_g r[g,j]          with one answer per cut

    Args:
      r: outcome of each of the A answers at cut j of trace g.
    """
    chex.assert_rank(r, 4)
    r = jax.lax.stop_gradient(r)
    has_several_answers = r.shape[-1] > 1
    compared_axis = -1 if has_several_answers else 1
    return r - jnp.mean(r, axis=compared_axis, keepdims=True)


def problems(config: Config) -> Iterator[str]:
    """Yields an error line for each setting that the method cannot train with."""
    yield from told_nothing(config)
    if config.anytime.baseline == "v2":
        yield from needs_a_group(config, "anytime.baseline=v2")
    elif config.anytime.answers == 1:
        yield from needs_a_group(config, "anytime.answers=1")


def make(config: Config) -> Method:
    """Returns BRPO with `anytime.answers` answers at each of `cuts.count` evenly spaced budgets."""
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
        # A separate prior, because the published answer gradient weighs all budgets equally under
        # every prior of the thinking.
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
