"""Baselines from the group of rollouts of a question, and what advantages are divided by."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bacr_jax.masked import masked_rms, masked_std
from bacr_jax.types import Scalar

# Added to a group's deviation, as in common implementations of GRPO.
_EPSILON = 1e-6


def advantage_scale(
    advantages: Float[Array, "Q ..."], *, mode: Literal["group", "batch_rms", "none"], floor: Scalar
) -> Float[Array, "..."]:
    """The number advantages are divided by, paper Eq. 14.

        group:      max(std over a question's G x M advantages, floor)
        batch_rms:  max(root mean square over all advantages, floor)

    Advantages with a learned baseline are not centred, so a question whose traces all agree has a
    deviation of 0 and an advantage that is not; the floor must be of the order of .1, not 1e-6.

    Args:
      floor: epsilon of Eq. 14, the smallest divisor.

    Returns:
      The divisor, broadcastable against `advantages`.
    """
    everything = jnp.ones((), bool)
    if mode == "none":
        return jnp.ones((), advantages.dtype)
    if mode == "batch_rms":
        return jnp.maximum(masked_rms(advantages, everything), floor)
    if mode == "group":
        axes = tuple(range(1, advantages.ndim))
        return jnp.maximum(masked_std(advantages, everything, axes, keepdims=True), floor)
    raise ValueError(f"mode: found {mode!r}; known are batch_rms, group and none")


def normalize(
    advantages: Float[Array, "Q ..."], *, mode: Literal["group", "batch_rms", "none"], floor: Scalar
) -> Float[Array, "Q ..."]:
    """Advantages divided by `advantage_scale`, paper Eq. 14. Nothing is subtracted."""
    return advantages / advantage_scale(advantages, mode=mode, floor=floor)


def other_questions_mean(rewards: Float[Array, "Q G M"]) -> Float[Array, "Q"]:
    """Mean reward of the other questions, a baseline before any value is known.

        m_q = mean_{p != q} R_p

    Independent of everything that was sampled for q, so it leaves the policy gradient unbiased.

    Returns:
      m, in units of reward; 0 where there is one question only.
    """
    sums = jax.lax.stop_gradient(rewards).sum((1, 2))
    count = max(rewards.size - rewards[0].size, 1)
    apart = ~jnp.eye(rewards.shape[0], dtype=bool)
    # Not total minus own, whose rounding would let a question's rewards into its own mean.
    return jnp.where(apart, sums, 0.0).sum(1) / count


def _check_group(rewards: Float[Array, "..."], axis: int) -> None:
    """Raises a ValueError if an axis of rewards is not a group of at least two traces."""
    rank = rewards.ndim
    if not -rank <= axis < rank:
        raise ValueError(
            f"rewards have shape {rewards.shape}, without the axis {axis} of the group; pass "
            "rewards [Q, G] or [Q, G, M], or write axis="
        )
    if rewards.shape[axis] < 2:
        raise ValueError(
            f"rewards have shape {rewards.shape}, whose axis {axis} is a group of "
            f"{rewards.shape[axis]}: its advantages are undefined; sample at least two traces of a "
            "question, or write axis="
        )


def group_advantage(rewards: Float[Array, "..."], *, axis: int = 1) -> Float[Array, "..."]:
    """Returns each reward minus the group's mean (Dr.GRPO, arXiv 2503.20783).

        A_i = R_i - mean_G R

    The mean includes R_i, which shrinks the expected gradient by 1 - 1/G and leaves its
    signal-to-noise ratio that of RLOO. A group of equal rewards gives exact zeros.

    Args:
      axis: the traces of a group, G; the second axis of [Q, G] and [Q, G, M].

    Raises:
      ValueError: a group has fewer than two traces.
    """
    _check_group(rewards, axis)
    rewards = jax.lax.stop_gradient(rewards)
    # Shifting by one member first makes equal rewards cancel exactly in float32.
    shifted = rewards - jax.lax.slice_in_dim(rewards, 0, 1, axis=axis)
    return shifted - jnp.mean(shifted, axis=axis, keepdims=True)


def grpo_advantage(rewards: Float[Array, "..."], *, axis: int = 1) -> Float[Array, "..."]:
    """Returns group-normalised rewards (GRPO, arXiv 2402.03300).

        A_i = (R_i - mean_G R) / (std_G R + eps),   squares divided by G - 1, eps = 1e-6

    Dividing by the group's deviation weighs questions by 1/std and depends on R_i nonlinearly.

    Args:
      axis: the traces of a group, G; the second axis of [Q, G] and [Q, G, M].

    Raises:
      ValueError: a group has fewer than two traces.
    """
    centred = group_advantage(rewards, axis=axis)
    spread = masked_std(centred, jnp.ones((), bool), axis, ddof=1, keepdims=True)
    return centred / (spread + _EPSILON)


def decoupled_advantage(
    rewards: Float[Array, "Q G R"], weights: Float[Array, "R"]
) -> Float[Array, "Q G"]:
    """Several rewards, each normalised in its group before they are added (GDPO, 2601.05242).

        A_i = sum_k w_k (R_ik - mean_G R_k) / (std_G R_k + eps),  then (A - mean A) / (std A + eps)

    over the whole batch. Added up first, as in GRPO, rewards of different sums can become one
    advantage, and the one that varies most outweighs the others.

    Args:
      weights: w, one for each reward.
    """
    added = jnp.sum(weights * grpo_advantage(rewards), axis=-1)
    return grpo_advantage(added.reshape(-1), axis=0).reshape(added.shape)


def others_mean(x: Float[Array, "Q G ..."]) -> Float[Array, "Q G ..."]:
    """Mean over the other members of the group; 0 in a group of one."""
    return (jnp.sum(x, axis=1, keepdims=True) - x) / max(x.shape[1] - 1, 1)


def rloo_advantage(rewards: Float[Array, "..."], *, axis: int = 1) -> Float[Array, "..."]:
    """Returns each reward minus the mean of the others in the group (RLOO, arXiv 2402.14740).

        A_i = R_i - mean_{k != i} R_k = G / (G - 1) (R_i - mean_G R)

    Args:
      axis: the traces of a group, G; the second axis of [Q, G] and [Q, G, M].

    Raises:
      ValueError: a group has fewer than two traces.
    """
    centred = group_advantage(rewards, axis=axis)
    size = rewards.shape[axis]
    return centred * (size / (size - 1))
