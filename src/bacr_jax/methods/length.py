"""Variants of GRPO that favor short correct answers.

Laser and ShorterBetter reward short answers. GFPO only trains on the shortest responses. Two
variants come from training libraries and compare a correct response only with the other correct
responses of its group: the gated bonus (prime-rl) and the gated penalty (miles).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.advantages import group_advantage, grpo_advantage
from bacr_jax.config.settings import MethodSettings
from bacr_jax.masked import masked_mean, masked_std
from bacr_jax.methods.grpo_family import CLIPPED, NO_ENTROPY, correctness, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.l1 import GRPO_OF_VERL
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

_LASER = "its released script (commit 78b09dd)"
_UNCHECKED = "unchecked: read in summaries alone"
_PRIME_RL = "prime-rl, commit f8a1460"
_MILES = "miles, examples/search-r1 at commit 2c53078"
_NAMES = {
    "laser": "Laser",
    "shorter_better": "ShorterBetter",
    "gfpo": "GFPO",
    "gated_bonus": "Gated bonus",
    "gated_penalty": "Gated penalty",
}
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
        "loss.kl_kind": Published("k3", "GRPO's", verified=False),
        "length.keep_fraction": Published(1 / 3, f"8 of 24; {_UNCHECKED}", verified=False),
    },
    # The trust region of prime-rl is a mask over differences of probabilities, which no key
    # expresses, so the clip range is not listed.
    "gated_bonus": {
        "loss.aggregate": Published("token_mean", f"{_PRIME_RL}: trainer/rl/loss.py"),
        **NO_ENTROPY,
        "loss.kl_coef": Published(0.0, f"{_PRIME_RL}: no reference policy"),
        "length.weight": Published(1.0, f"{_PRIME_RL}: orchestrator/advantage.py"),
    },
    "gated_penalty": {
        "loss.aggregate": Published("seq_mean_token_mean", "miles: default of its trainer"),
        "loss.ratio": Published("token", "miles: GRPO's ratio"),
        "loss.clip_low": Published(0.2, f"{_MILES}: run_qwen2.5_3B.sh"),
        "loss.clip_high": Published(0.28, f"{_MILES}: run_qwen2.5_3B.sh"),
        "loss.entropy_coef": Published(0.0, f"{_MILES}: run_qwen2.5_3B.sh"),
        "loss.kl_coef": Published(0.001, f"{_MILES}: run_qwen2.5_3B.sh"),
        "loss.kl_kind": Published("k3", f"{_MILES}: run_qwen2.5_3B.sh, low_var_kl"),
        "train.minibatches": Published(1, f"{_MILES}: run_qwen2.5_3B.sh, batches of all 256"),
        "length.weight": Published(0.1, f"{_MILES}: length_reward.py"),
        "length.cap": Published(0.2, f"{_MILES}: length_reward.py"),
        "length.quantile": Published(0.25, f"{_MILES}: length_reward.py"),
        "length.relative_slack": Published(0.1, f"{_MILES}: length_reward.py"),
        "length.absolute_slack": Published(0.03125, f"16 of 512 tokens: {_MILES}"),
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


def gated_bonus_reward(
    right: Float[Array, "Q G"], lengths: Int[Array, "Q G"], *, weight: float
) -> Float[Array, "Q G"]:
    """Adds a bonus to correct responses that are shorter than the mean correct response.

        R_i = right_i (1 + weight clip(1 - length_i / m, 0, 1)) if i is correct, else right_i

    m is the mean length of the correct responses of the group. Incorrect responses and correct
    responses of at least the mean length are unchanged, and the rewards of a group without a
    correct response are unchanged.

    The source is the "correctness-gated efficiency length shaping" of prime-rl (pull request 2265,
    commit f8a1460, src/prime_rl/orchestrator/advantage.py), where the weight is 1. Later versions
    of prime-rl subtract a linear penalty instead.

    Args:
      right: correctness. The responses with the largest positive value of a group are correct.
      lengths: number of tokens of each response.
      weight: bonus of a correct response with length 0.
    """
    best = right.max(-1, keepdims=True)
    is_right = (right >= best) & (best > 0.0)
    mean_length = masked_mean(lengths.astype(right.dtype), is_right, -1, keepdims=True)
    brevity = jnp.clip(1.0 - lengths / jnp.maximum(mean_length, 1.0), 0.0, 1.0)
    return jnp.where(is_right, right * (1.0 + weight * brevity), right)


def masked_quantile(
    x: Int[Array, "Q G"], mask: Bool[Array, "Q G"], q: float
) -> Float[Array, "Q 1"]:
    """Computes a quantile of the masked entries of each row, with linear interpolation.

    The result is infinite for rows without masked entries.
    """
    ordered = jnp.sort(jnp.where(mask, x, jnp.inf), axis=-1)
    count = mask.sum(-1, keepdims=True)
    position = q * jnp.maximum(count - 1, 0)
    lower = jnp.floor(position).astype(jnp.int32)
    upper = jnp.ceil(position).astype(jnp.int32)
    below = jnp.take_along_axis(ordered, lower, axis=-1)
    above = jnp.take_along_axis(ordered, upper, axis=-1)
    fraction = position - lower
    # Groups without correct responses would otherwise give infinity times 0, which is NaN.
    return jnp.where(count > 0, below + fraction * (above - below), jnp.inf)


def gated_penalty_reward(
    right: Float[Array, "Q G"],
    succeeded: Bool[Array, "Q G"],
    lengths: Int[Array, "Q G"],
    *,
    weight: float,
    cap: float,
    quantile: float,
    relative_slack: float,
    absolute_slack: float,
) -> Float[Array, "Q G"]:
    """Subtracts a penalty from successful responses much longer than the group's other successes.

        R_i = right_i - min(cap, weight max(0, length_i - allowed) / n)
        allowed = n (1 + relative_slack) + absolute_slack

    n is a quantile of the lengths of the group's successful responses, at least 1. All other
    responses, and groups with fewer than two successful responses, are unchanged.

    The source is the group-relative length penalty of miles (pull request 1573, commit 2c53078,
    examples/search-r1/length_reward.py). Its lower bound of .8 for the reward of a success is
    implied by its cap of .2, and is therefore omitted.

    Args:
      right: correctness.
      succeeded: True for correct responses that were not truncated.
      lengths: number of tokens of each response.
      weight: penalty of a response that exceeds the allowed length by n tokens.
      cap: maximum penalty.
      quantile: quantile of the successful lengths that gives n.
      relative_slack: tolerance, as a fraction of n.
      absolute_slack: tolerance, in tokens.
    """
    reference = jnp.maximum(masked_quantile(lengths, succeeded, quantile), 1.0)
    excess = jnp.maximum(lengths - (reference * (1.0 + relative_slack) + absolute_slack), 0.0)
    penalty = jnp.minimum(weight * excess / reference, cap)
    is_compared = succeeded & (succeeded.sum(-1, keepdims=True) >= 2)
    return jnp.where(is_compared, right - penalty, right)


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

    Responses outside S have advantage 0. The standard deviation is that of a sample (its divisor
    is |S| - 1), as for GRPO, and as in TRL's GFPOTrainer.

    Args:
      rewards: reward R of each response.
      kept: True for responses in S. Each group must have at least one response in S.
    """
    rewards = jax.lax.stop_gradient(rewards)
    # Subtract the largest reward first, so that equal rewards give exactly 0 despite rounding.
    largest_reward = jnp.max(jnp.where(kept, rewards, -jnp.inf), -1, keepdims=True)
    shifted = rewards - largest_reward
    centred = shifted - masked_mean(shifted, kept, -1, keepdims=True)
    spread = masked_std(shifted, kept, -1, ddof=1, keepdims=True)
    return jnp.where(kept, centred / (spread + 1e-6), 0.0)


def make(config: MethodSettings) -> Method:
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
        if settings.kind == "gated_bonus":
            return gated_bonus_reward(right, batch.lengths, weight=settings.weight)
        if settings.kind == "gated_penalty":
            return gated_penalty_reward(
                right,
                (right >= 1.0) & batch.closed,
                batch.lengths,
                weight=settings.weight,
                cap=settings.cap,
                quantile=settings.quantile,
                relative_slack=settings.relative_slack,
                absolute_slack=settings.absolute_slack * largest_budget,
            )
        return right

    # prime-rl does not divide by the standard deviation of the group.
    advantage = group_advantage if settings.kind == "gated_bonus" else grpo_advantage
    method = grpo_family(
        config,
        _NAMES[settings.kind],
        advantage,
        reward=reward,
        pays_by_verdicts=True,
        published=PUBLISHED[settings.kind],
    )
    if settings.kind != "gfpo":
        return method
    # Keep at least two responses, because the advantage within a subset of one is always 0.
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
