"""DLER (arXiv 2510.15110): truncation as the only length penalty, advantages whitened per batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from bacr_jax.advantages import group_advantage
from bacr_jax.config.derived import CORRECT
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.dapo import dynamic_keep
from bacr_jax.methods.grpo_family import NO_ENTROPY, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.method import (
    Advantages,
    DynamicSampling,
    GroupBatch,
    Method,
    PerCut,
    Published,
)

_SCRIPT = "its released script (commit ea7d4f7)"
PUBLISHED = {
    "loss.aggregate": Published("token_mean", _SCRIPT),
    "loss.ratio": Published("token", _SCRIPT),
    "loss.clip_low": Published(0.2, _SCRIPT),
    "loss.clip_high": Published(0.28, _SCRIPT),
    "loss.dual_clip": Published(10.0, _SCRIPT),
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.0005, _SCRIPT),
    "loss.kl_kind": Published("k3", "its released trainer: low_var_kl"),
    "dapo.dynamic_sampling": Published(True, f"{_SCRIPT}: groups without variance are left out"),
    "dapo.max_rounds": Published(10, "DAPO's recipe, whose command the script runs"),
    "train.minibatches": Published(8, f"{_SCRIPT}: mini-batches of 64 of 512 prompts"),
}


def whitened(advantages: Float[Array, "Q G"], tokens: Num[Array, "Q G"]) -> Float[Array, "Q G"]:
    """Normalizes advantages to mean 0 and standard deviation 1 over the tokens of a batch.

        (A - m) / sqrt(v + 1e-8),   m = sum n A / N,   v = sum n (A - m)^2 / (N - 1),   N = sum n

    Args:
      advantages: advantage A of each trace, which all its tokens share.
      tokens: number of tokens n of each trace. It is 0 for traces that are excluded from the loss.
    """
    advantages = jax.lax.stop_gradient(advantages)
    total = tokens.sum()
    mean = (tokens * advantages).sum() / jnp.maximum(total, 1)
    centred = advantages - mean
    variance = (tokens * jnp.square(centred)).sum() / jnp.maximum(total - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def make(config: MethodSettings) -> Method:
    """Builds DLER, with reward 1 for a correct answer whose thinking ended within the budget.

    All other responses have reward 0.
    """
    settings = config.dapo

    def reward(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
        return batch.outcomes[..., -1] * batch.closed

    def useful(batch: GroupBatch) -> Bool[Array, "Q"]:
        right = batch.outcomes
        if batch.by_reward:
            # With several rewards, the outcomes are their weighted sum, but dynamic sampling
            # depends only on correctness.
            right = batch.by_reward[CORRECT].mean(-1)
        return dynamic_keep(right[..., -1] * batch.closed)

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        assert batch.sampled is not None and batch.answer_lengths is not None
        centred = group_advantage(rewards[..., 0])
        # In the publication, a truncated response has no answer. This implementation forces an
        # answer after the truncation, which is ignored here.
        tokens_if_truncated = 0 if config.loss.overlong_filter else batch.thinking
        tokens_if_closed = batch.sampled + batch.answer_lengths[..., -1]
        tokens = jnp.where(batch.closed, tokens_if_closed, tokens_if_truncated)
        if settings.dynamic_sampling:
            tokens = jnp.where(useful(batch)[:, None], tokens, 0)
        shared = whitened(centred, tokens)
        answers = jnp.where(batch.closed, shared, 0.0)
        baseline = rewards - centred[..., None]
        return Advantages(shared[..., None], answers[..., None], baseline)

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        return {
            "dler/truncated_share": jnp.mean(~batch.closed),
            "dler/mixed_share": jnp.mean(useful(batch)),
        }

    dynamic_sampling = None
    if settings.dynamic_sampling:
        dynamic_sampling = DynamicSampling(useful, settings.max_rounds)
    return grpo_family(
        config,
        "DLER",
        reward=reward,
        advantages=advantages,
        metrics=metrics,
        dynamic_sampling=dynamic_sampling,
        published=PUBLISHED,
    )
