"""Variants of GRPO that favor short correct answers: Laser, ShorterBetter and GFPO.

Laser and ShorterBetter reward short answers. GFPO only trains on the shortest responses.
"""

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
        "length.keep_fraction": Published(1 / 3, f"8 of 24; {_UNCHECKED}", verified=False),
    },
}


def laser_reward(
    right: Float[Array, "*batch"], lengths: Int[Array, "*batch"], *, target: float, bonus: float
) -> Float[Array, "*batch"]:
    """Computes a reward with a step at the target length L (Laser, arXiv 2505.15612).

        1 + bonus 1[length <= L] if right, else -1/2

    Args:
      right: correctness. Values below 1 count as wrong.
      lengths: number of tokens of each response.
      target: target length L, in tokens.
      bonus: additional reward of correct responses with at most L tokens.
    """
    reward_if_right = 1.0 + bonus * (lengths <= target)
    return jnp.where(right >= 1.0, reward_if_right, -0.5)


def shorter_better_reward(
    right: Float[Array, "Q G"], lengths: Int[Array, "Q G"], *, alpha: float
) -> Float[Array, "Q G"]:
    """Computes rewards relative to the shortest correct response (ShorterBetter, arXiv 2504.21370).

        2 right - alpha |length - n|

    n is the length of the shortest correct response of the group, or the mean length of the group
    if no response is correct.

    Args:
      right: correctness. Values below 1 count as wrong.
      lengths: number of tokens of each response.
      alpha: weight of one token.
    """
    largest_integer = jnp.iinfo(lengths.dtype).max
    is_right = right >= 1.0
    shortest_right = jnp.where(is_right, lengths, largest_integer).min(-1, keepdims=True)
    none_is_right = (right < 1.0).all(-1, keepdims=True)
    mean_length = lengths.mean(-1, keepdims=True)
    optimal = jnp.where(none_is_right, mean_length, shortest_right)
    return 2.0 * right - alpha * jnp.abs(lengths - optimal)


def shortest(lengths: Int[Array, "Q G"], count: int) -> Bool[Array, "Q G"]:
    """Selects the `count` shortest responses of each group.

    Among responses of equal length, the responses with the lower indices are selected first.

    Returns:
      True for selected responses.
    """
    order = jnp.argsort(lengths, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    return rank < count


def filtered_advantage(
    rewards: Float[Array, "Q G"], kept: Bool[Array, "Q G"]
) -> Float[Array, "Q G"]:
    """Computes GRPO's advantage within a subset S of each group (GFPO, arXiv 2508.09726).

        A_i = (R_i - mean_S R) / (std_S R + 1e-6)

    Responses outside S have advantage 0.

    Args:
      rewards: reward R of each response.
      kept: True for responses in S. Each group must have at least one response in S.
    """
    rewards = jax.lax.stop_gradient(rewards)
    # Subtract the largest reward first, so that equal rewards give exactly 0 despite rounding.
    largest_reward = jnp.max(jnp.where(kept, rewards, -jnp.inf), -1, keepdims=True)
    shifted = rewards - largest_reward
    centred = shifted - masked_mean(shifted, kept, -1, keepdims=True)
    spread = masked_std(shifted, kept, -1, keepdims=True)
    return jnp.where(kept, centred / (spread + 1e-6), 0.0)


def make(config: Config) -> Method:
    """Builds the method selected by `length.kind`."""
    settings = config.length
    largest_budget = config.budget.max

    def reward(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
        right = correctness(state, batch)
        if settings.kind == "laser":
            target = settings.target * largest_budget
            return laser_reward(right, batch.lengths, target=target, bonus=settings.weight)
        if settings.kind == "shorter_better":
            alpha = settings.weight / largest_budget
            return shorter_better_reward(right, batch.lengths, alpha=alpha)
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
    # At least two responses, because the advantage within a subset of one is always 0.
    count = max(2, round(settings.keep_fraction * config.rollout.group_size))

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        trace_rewards = rewards[..., 0]
        is_kept = shortest(batch.lengths, count)
        shared = filtered_advantage(trace_rewards, is_kept)[..., None]
        mean = masked_mean(trace_rewards, is_kept, -1, keepdims=True)
        baseline = jnp.broadcast_to(mean[..., None], rewards.shape)
        return Advantages(thinking=shared, answers=shared, baseline=baseline, keep=is_kept)

    return dataclasses.replace(method, advantages=advantages)
