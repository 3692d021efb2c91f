"""AnytimeReasoner (arXiv 2505.13438): one trace, scored at every budget of a grid.

The policy is not told a budget. Budget-relative policy optimisation (BRPO) compares a trace with
its own earlier outcomes (V1) and with its group (V2); `anytime.baseline: v2` keeps the group alone,
which is how the method is sometimes described, and is labelled so.
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
    """Weight of each budget in the anytime objective (arXiv 2505.13438, section 3).

        base: all on the largest.   uniform: 1/M.   linear: P_j ~ b_j

    Returns:
      P, summing to 1.
    """
    chex.assert_rank(budgets, 1)
    budgets = budgets.astype(jnp.float32)
    if kind == "base":
        return jnp.zeros_like(budgets).at[-1].set(1.0)
    if kind == "uniform":
        return jnp.full_like(budgets, 1.0 / budgets.shape[0])
    if kind == "linear":
        return budgets / jnp.sum(budgets)
    raise ValueError(f"no prior {kind!r}; there are base, uniform and linear")


def brpo_advantage(
    r: Float[Array, "Q G M"],
    prior: Float[Array, "M"],
    *,
    mode: Literal["brpo", "v1", "v2", "none"] = "brpo",
    loo: bool = False,
) -> Float[Array, "Q G M"]:
    """Advantage of each thinking segment (arXiv 2505.13438, Eq. 7-9).

    With s = 0..M-1 the segment, and both baselines scaled to the remaining prior mass,

        V1[g,s] = sum_{k<s} 2^{k-s} r[g,k] / sum_{k<s} 2^{k-s} * sum_{k>=s} P_k      (0 at s = 0)
        V2[s]   = mean_g sum_{k>=s} P_k r[g,k]
        A[g,s]  = sum_{k>=s} P_k r[g,k] - (s/M) V1[g,s] - ((M-s)/M) V2[s]

    V1 predicts a trace's later outcomes from its own earlier ones, V2 from the group. Nothing is
    divided by a deviation.

    Args:
      r: outcomes, averaged over the answers of each (trace, budget), in [0, 1].
      loo: leave the trace itself out of V2, which removes the gradient shrinkage by
        1 - (M-s)/(M G); False is the published form.
    """
    chex.assert_rank([r, prior], [3, 1])
    chex.assert_axis_dimension(r, 2, prior.shape[0])
    r = jax.lax.stop_gradient(r)
    cuts = r.shape[2]
    index = np.arange(cuts)
    remaining = jnp.flip(jnp.cumsum(jnp.flip(prior)))
    returns = to_go(r, prior)

    lag = index[:, None] - index[None, :]
    past = np.where(lag > 0, 0.5 ** np.maximum(lag, 0), 0.0)
    average = jnp.asarray(past / np.maximum(past.sum(-1, keepdims=True), 1e-30), r.dtype)
    v1 = jnp.einsum("sk,qgk->qgs", average, r, precision="highest") * remaining

    # 0 for a trace alone, which has no group.
    v2 = others_mean(returns) if loo or r.shape[1] == 1 else group_mean(returns)
    mix = jnp.asarray(index / cuts, r.dtype)
    if mode == "brpo":
        return returns - mix * v1 - (1.0 - mix) * v2
    if mode == "v1":
        return returns - v1
    if mode == "v2":
        return returns - v2
    if mode == "none":
        return returns
    raise ValueError(f"no mode {mode!r}; there are brpo, v1, v2 and none")


def answer_advantage(r: Float[Array, "Q G M A"]) -> Float[Array, "Q G M A"]:
    """Advantage of each answer against the other answers from the same cut.

        A = r[g,j,a] - mean_a r[g,j,a],   or with one answer per cut   r[g,j] - mean_g r[g,j]

    Args:
      r: outcome of each of the A answers given at cut j of trace g.
    """
    chex.assert_rank(r, 4)
    r = jax.lax.stop_gradient(r)
    return r - jnp.mean(r, axis=-1 if r.shape[-1] > 1 else 1, keepdims=True)


def problems(config: Config) -> Iterator[str]:
    """What is wrong with the settings of this method."""
    yield from told_nothing(config)
    if config.anytime.baseline == "v2":
        yield from needs_a_group(config, "anytime.baseline=v2")
    elif config.anytime.answers == 1:
        yield from needs_a_group(config, "anytime.answers=1")


def make(config: Config) -> Method:
    """BRPO on `cuts.count` even budgets up to the largest, several answers at each."""
    settings, count = config.anytime, config.cuts.count

    def grid() -> Int[Array, "M"]:
        return cutting.cut_points(jnp.int32(config.budget.max), num_cuts=count)

    def cuts(key: Array, budgets: Int[Array, "Q G"]) -> Int[Array, "Q G M"]:
        return jnp.broadcast_to(grid(), (*budgets.shape, count))

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        prior = brpo_prior(settings.prior, grid())
        # The published answer gradient weighs budgets alike whatever the thinking's prior is.
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
        rewards=lambda state, batch: batch.outcomes,
        advantages=advantages,
        metrics=metrics,
        answers=settings.answers,
        published=PUBLISHED,
    )
