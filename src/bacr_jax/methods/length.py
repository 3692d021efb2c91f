"""GRPO that prefers short right answers: Laser, ShorterBetter, and GFPO, which learns from few."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config import Config
from bacr_jax.masked import masked_mean, masked_std
from bacr_jax.methods.grpo_family import CLIPPED, correctness, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.l1 import GRPO_OF_VERL
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

_LASER = "its released script (commit 78b09dd)"
_UNCHECKED = "unchecked: read in summaries alone"
_NAMES = {"laser": "Laser", "shorter_better": "ShorterBetter", "gfpo": "GFPO"}
PUBLISHED = {
    "laser": {
        **GRPO_OF_VERL,
        "loss.clip_high": Published(0.28, _LASER),
        "length.target": Published(0.25, f"4,096 of 16,384 tokens, one of its three: {_LASER}"),
        "length.weight": Published(0.5, _LASER),
    },
    "shorter_better": {
        **GRPO_OF_VERL,
        "length.weight": Published(6.0, "1e-3 a token, 6,000 at most: its script (commit 751d35f)"),
        "train.minibatches": Published(8, "its script: mini-batches of 16 of 128 prompts"),
    },
    "gfpo": {
        "loss.aggregate": Published("token_mean", _UNCHECKED, verified=False),
        **CLIPPED,
        "loss.entropy_coef": Published(0.001, _UNCHECKED, verified=False),
        "loss.kl_coef": Published(0.001, _UNCHECKED, verified=False),
        "length.kept": Published(1 / 3, f"8 of 24; {_UNCHECKED}", verified=False),
    },
}


def laser_reward(
    right: Float[Array, "*batch"], lengths: Int[Array, "*batch"], *, target: float, bonus: float
) -> Float[Array, "*batch"]:
    """Reward of a response of `lengths` tokens (Laser, arXiv 2505.15612): a step at the target L.

        1 + bonus 1[length <= L] if right, else -1/2

    Args:
      target: L, in tokens.
    """
    return jnp.where(right >= 1.0, 1.0 + bonus * (lengths <= target), -0.5)


def shorter_better_reward(
    right: Float[Array, "Q G"], lengths: Int[Array, "Q G"], *, alpha: float
) -> Float[Array, "Q G"]:
    """Reward by the distance to the shortest right answer (ShorterBetter, arXiv 2504.21370).

        2 right - alpha |length - n|,   n the length of the group's shortest right response,
                                        or its mean length where none is right

    Args:
      alpha: per token.
    """
    longest = jnp.iinfo(lengths.dtype).max
    best = jnp.where(right >= 1.0, lengths, longest).min(-1, keepdims=True)
    none = (right < 1.0).all(-1, keepdims=True)
    optimal = jnp.where(none, lengths.mean(-1, keepdims=True), best)
    return 2.0 * right - alpha * jnp.abs(lengths - optimal)


def shortest(lengths: Int[Array, "Q G"], count: int) -> Bool[Array, "Q G"]:
    """The `count` shortest responses of each group; of equals the earlier ones."""
    rank = jnp.argsort(jnp.argsort(lengths, axis=-1, stable=True), axis=-1, stable=True)
    return rank < count


def filtered_advantage(
    rewards: Float[Array, "Q G"], kept: Bool[Array, "Q G"]
) -> Float[Array, "Q G"]:
    """GRPO's advantage within the responses S that are kept, and 0 outside (GFPO, 2508.09726).

        A_i = (R_i - mean_S R) / (std_S R + 1e-6)

    Args:
      kept: S, at least one of a group.
    """
    rewards = jax.lax.stop_gradient(rewards)
    # Equal rewards are 0 then, and so is their mean, where rounding would leave some of it.
    rewards -= jnp.max(jnp.where(kept, rewards, -jnp.inf), -1, keepdims=True)
    centred = rewards - masked_mean(rewards, kept, -1, keepdims=True)
    spread = masked_std(rewards, kept, -1, keepdims=True)
    return jnp.where(kept, centred / (spread + 1e-6), 0.0)


def make(config: Config) -> Method:
    """The one that `length.kind` names."""
    settings, largest = config.length, config.budget.max

    def reward(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
        right = correctness(state, batch)
        if settings.kind == "laser":
            target = settings.target * largest
            return laser_reward(right, batch.lengths, target=target, bonus=settings.weight)
        if settings.kind == "shorter_better":
            return shorter_better_reward(right, batch.lengths, alpha=settings.weight / largest)
        return right

    method = grpo_family(
        config,
        _NAMES[settings.kind],
        reward=reward,
        pays_by_verdicts=True,
        published=PUBLISHED[settings.kind],
    )
    if settings.kind != "gfpo":
        return method
    count = max(2, round(settings.kept * config.rollout.group_size))

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        kept = shortest(batch.lengths, count)
        shared = filtered_advantage(rewards[..., 0], kept)[..., None]
        mean = masked_mean(rewards[..., 0], kept, -1, keepdims=True)
        baseline = jnp.broadcast_to(mean[..., None], rewards.shape)
        return Advantages(shared, shared, baseline, keep=kept)

    return dataclasses.replace(method, advantages=advantages)
