"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, overlong punishment."""

from collections.abc import Iterator
from typing import Any

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from bacr_jax.config.settings import MethodSettings
from bacr_jax.config.values import written
from bacr_jax.methods import grpo_family as family
from bacr_jax.methods.method import DynamicSampling, GroupBatch, Method, Published
from bacr_jax.types import Scalar

PUBLISHED = {
    "loss.aggregate": Published("token_mean", "Eq. 8", defining=True),
    "loss.ratio": Published("token", "Eq. 9"),
    "loss.clip_low": Published(0.2, "settings of its training"),
    "loss.clip_high": Published(0.28, "settings of its training"),
    "loss.dual_clip": Published(10.0, "its released recipe: clip_ratio_c"),
    **family.NO_ENTROPY,
    "loss.kl_coef": Published(0.0, "removed: the policy may go far", defining=True),
    "dapo.dynamic_sampling": Published(True, "Eq. 11"),
    "dapo.max_rounds": Published(10, "its released recipe"),
    "dapo.overlong_penalty": Published(1.0, "Eq. 13"),
    "dapo.overlong_share": Published(0.2, "4096 of 20480 tokens"),
    "loss.overlong_filter": Published(False, "its released recipe; the publication filters too"),
    "train.minibatches": Published(16, "16 updates per rollout: mini-batches of 32 of 512 prompts"),
}


def overlong_penalty(
    lengths: Num[Array, "*batch"], *, max_length: Scalar, buffer: Scalar, factor: Scalar = 1.0
) -> Float[Array, "*batch"]:
    """Computes the soft overlong punishment, which is added to the task reward (DAPO, Eq. 13).

        0 up to L_max - L_c tokens, then linear down to -factor at L_max tokens, -factor beyond

    Args:
      lengths: number of tokens of each response.
      max_length: maximum length L_max, in tokens.
      buffer: length L_c of the linear part, in tokens (4096 of 20480 in the publication).
      factor: maximum punishment.
    """
    excess = (lengths - (max_length - buffer)) / buffer
    return -factor * jnp.clip(excess, 0.0, 1.0)


def dynamic_keep(correct: Float[Array, "Q G"]) -> Bool[Array, "Q"]:
    """Selects the questions with both correct and incorrect traces (DAPO, Eq. 11).

    Questions with a single trace are always selected, because a comparison needs two traces.

    Args:
      correct: outcomes, without any length penalty.

    Returns:
      True for questions to keep.
    """
    chex.assert_rank(correct, 2)
    if correct.shape[1] == 1:
        return jnp.ones(correct.shape[0], bool)
    return jnp.max(correct, axis=1) > jnp.min(correct, axis=1)


def problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message for each setting that is incompatible with the method."""
    loss = config.loss
    yield from family.problems(config)
    yield from family.no_stages(
        config, "punishes lengths close to budget.max, which stages do not lower"
    )
    if not loss.clip_high > loss.clip_low:
        yield (
            f"loss.clip_high={written(loss.clip_high)}: method=dapo needs a value above "
            f"loss.clip_low={written(loss.clip_low)}; set a larger value "
            "(configs/methods/dapo.yaml has one)"
        )


def make(config: MethodSettings) -> Method:
    """Builds DAPO: GRPO on rewards of +-1 plus overlong punishment, with dynamic sampling.

    By default, the punishment applies to the last fifth of the maximum response length, as in the
    publication (4096 of 20480 tokens). Dynamic sampling only keeps questions that have both correct
    and incorrect traces.
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

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        return {
            "dapo/overlong_penalty": jnp.mean(punishment(batch)),
            "dapo/cut_share": jnp.mean(~batch.closed),
            "dapo/mixed_share": jnp.mean(mixed(batch)),
        }

    dynamic_sampling = None
    if settings.dynamic_sampling:
        dynamic_sampling = DynamicSampling(mixed, settings.max_rounds)
    return family.grpo_family(
        config,
        "DAPO",
        reward=reward,
        metrics=metrics,
        dynamic_sampling=dynamic_sampling,
        published=PUBLISHED,
    )
