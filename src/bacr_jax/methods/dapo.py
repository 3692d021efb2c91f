"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-mean loss, overlong punishment."""

from typing import Any

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import grpo_family, problems
from bacr_jax.methods.method import DynamicSampling, GroupBatch, Method

__all__ = ["dynamic_keep", "make", "overlong_penalty", "problems"]

Scalar = int | float | Array


def overlong_penalty(
    lengths: Num[Array, "*batch"], *, max_length: Scalar, buffer: Scalar, factor: Scalar = 1.0
) -> Float[Array, "*batch"]:
    """Soft overlong punishment, added to the task reward (DAPO, arXiv 2503.14476, Eq. 13).

        0 up to L_max - L_c tokens, then linearly down to -factor at L_max, -factor beyond

    Args:
      lengths: response lengths in tokens.
      max_length: L_max, in tokens.
      buffer: L_c, in tokens (4096 of 20480 in the publication).
      factor: largest punishment.

    Returns:
      Penalty in [-factor, 0].
    """
    excess = (lengths - (max_length - buffer)) / buffer
    return -factor * jnp.clip(excess, 0.0, 1.0)


def dynamic_keep(correct: Float[Array, "Q G"]) -> Bool[Array, "Q"]:
    """Questions that dynamic sampling keeps: some but not all traces right (DAPO Eq. 11).

    Outcomes are those before any length penalty. Groups of one are kept, there being nothing to
    compare.

    Args:
      correct: outcomes of the G traces.

    Returns:
      True where the outcomes differ.
    """
    chex.assert_rank(correct, 2)
    if correct.shape[1] == 1:
        return jnp.ones(correct.shape[0], bool)
    return jnp.max(correct, axis=1) > jnp.min(correct, axis=1)


def make(config: Config) -> Method:
    """GRPO advantages of +-1 minus the overlong punishment, on questions with mixed outcomes.

    The punishment starts a fifth before the longest possible response, the publication's 4096 of
    20480 tokens.
    """
    settings = config.dapo
    longest = config.budget.max + config.rollout.answer_tokens

    def punishment(batch: GroupBatch) -> Float[Array, "Q G"]:
        return overlong_penalty(
            batch.lengths,
            max_length=longest,
            buffer=settings.overlong_share * longest,
            factor=settings.overlong_penalty,
        )

    def reward(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
        task = 2.0 * batch.outcomes[..., -1] - 1.0
        return task + punishment(batch)

    def mixed(batch: GroupBatch) -> Bool[Array, "Q"]:
        return dynamic_keep(batch.outcomes[..., -1])

    def complete(batch: GroupBatch) -> Bool[Array, "Q G"]:
        return batch.closed

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        return {
            "dapo/overlong_penalty": jnp.mean(punishment(batch)),
            "dapo/cut_share": jnp.mean(~batch.closed),
            "dapo/mixed_share": jnp.mean(mixed(batch)),
        }

    resample = DynamicSampling(mixed, settings.max_rounds) if settings.dynamic_sampling else None
    return grpo_family(
        config,
        "DAPO",
        advantages.grpo_advantage,
        reward=reward,
        keep=complete if settings.overlong_filter else None,
        metrics=metrics,
        dynamic_sampling=resample,
        loss={"aggregate": "token_mean", "kl_coef": 0.0, "clip_high": (">", "clip_low")},
    )
