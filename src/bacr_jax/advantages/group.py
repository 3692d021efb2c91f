"""Computes group-based advantages and baselines, and the scale by which advantages are divided.

A group consists of the G traces that were sampled for one question. A trace is graded at M
truncation points of its thinking (cuts).
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bacr_jax.masked import masked_rms, masked_std
from bacr_jax.static_arguments import static_arguments
from bacr_jax.types import Scalar

# Added to a group's standard deviation, as in common implementations of GRPO.
_EPSILON = 1e-6


@static_arguments("mode")
def advantage_scale(
    advantages: Float[Array, "Q ..."], *, mode: Literal["group", "batch_rms", "none"], floor: Scalar
) -> Float[Array, "..."]:
    """Computes the divisor that normalizes advantages (paper Eq. 14).

        group:      max(std over a question's G x M advantages, floor)
        batch_rms:  max(root mean square over all advantages, floor)
        none:       1

    Advantages with a learned baseline are not centered. If all traces of a question have the same
    reward, the standard deviation can be 0 although the advantages are not 0. A floor of about .1
    instead of 1e-6 prevents very large results.

    Args:
      advantages: advantages to be normalized, grouped by question.
      mode: scope over which the scale is computed, as above.
      floor: lower bound of the divisor, epsilon in Eq. 14.

    Returns:
      The divisor, which can be broadcast against `advantages`.

    Raises:
      ValueError: If the mode is unknown.
    """
    all_entries = jnp.ones((), bool)
    if mode == "none":
        return jnp.ones((), advantages.dtype)
    if mode == "batch_rms":
        spread = masked_rms(advantages, all_entries)
        return jnp.maximum(spread, floor)
    if mode == "group":
        chex.assert_shape(advantages, (None, None, ...))
        axes = tuple(range(1, advantages.ndim))
        spread = masked_std(advantages, all_entries, axes, keepdims=True)
        return jnp.maximum(spread, floor)
    raise ValueError(f"the normalisation must be batch_rms, group or none, but `mode` is {mode!r}")


@static_arguments("mode")
def normalize(
    advantages: Float[Array, "Q ..."], *, mode: Literal["group", "batch_rms", "none"], floor: Scalar
) -> Float[Array, "Q ..."]:
    """Divides advantages by `advantage_scale` (paper Eq. 14), without subtracting a mean."""
    scale = advantage_scale(advantages, mode=mode, floor=floor)
    return advantages / scale


def other_questions_mean(rewards: Float[Array, "Q G M"]) -> Float[Array, "Q"]:
    """Computes the mean reward of the other questions in the batch.

        m_q = mean_{p != q} R_p

    This is a baseline for the time before any value estimate is available. The policy gradient
    stays unbiased, because the mean does not depend on anything sampled for q.

    Returns:
      m, in units of reward. It is 0 if the batch contains only one question.
    """
    chex.assert_rank(rewards, 3)
    num_questions = rewards.shape[0]
    rewards_per_question = rewards[0].size
    sums = jax.lax.stop_gradient(rewards).sum((1, 2))
    count = max(rewards.size - rewards_per_question, 1)
    is_other_question = ~jnp.eye(num_questions, dtype=bool)
    # Sum over the other questions, because subtracting the question's sum from a total would leak
    # the rounding error of its rewards into its baseline.
    return jnp.where(is_other_question, sums, 0.0).sum(1) / count


def _check_group(rewards: Float[Array, "..."], axis: int) -> None:
    """Raises a ValueError if `axis` does not exist or contains fewer than two traces."""
    rank = rewards.ndim
    if not -rank <= axis < rank:
        raise ValueError(
            f"`rewards` has the shape {rewards.shape} and therefore no group axis {axis}; pass "
            "rewards of shape [Q, G] or [Q, G, M], or the right `axis`"
        )
    if rewards.shape[axis] < 2:
        raise ValueError(
            f"`rewards` has the shape {rewards.shape}, so the groups on axis {axis} have "
            f"{rewards.shape[axis]} members and their advantages are undefined; sample at least "
            "two traces per question, or pass the right `axis`"
        )


@static_arguments("axis")
def group_advantage(rewards: Float[Array, "..."], *, axis: int = 1) -> Float[Array, "..."]:
    """Computes rewards minus the group mean (Dr.GRPO, arXiv 2503.20783).

        A_i = R_i - mean_G R

    The mean includes R_i, which shrinks the expected gradient by a factor of 1 - 1/G. The
    signal-to-noise ratio is the same as for RLOO. If all rewards of a group are equal, the
    advantages are exactly zero.

    Args:
      axis: axis of the G traces of a group. The default is correct for [Q, G] and [Q, G, M].

    Raises:
      ValueError: If a group has fewer than two traces.
    """
    _check_group(rewards, axis)
    rewards = jax.lax.stop_gradient(rewards)
    # Subtract the first reward before the mean, so that equal rewards cancel exactly in float32.
    first_member = jax.lax.slice_in_dim(rewards, 0, 1, axis=axis)
    shifted = rewards - first_member
    return shifted - jnp.mean(shifted, axis=axis, keepdims=True)


@static_arguments("axis")
def grpo_advantage(rewards: Float[Array, "..."], *, axis: int = 1) -> Float[Array, "..."]:
    """Computes rewards normalized by the mean and standard deviation of the group (GRPO).

        A_i = (R_i - mean_G R) / (std_G R + eps),   std with divisor G - 1, eps = 1e-6

    See arXiv 2402.03300. Dividing by the group's standard deviation weights each question by 1/std
    and makes the advantage a nonlinear function of R_i.

    Args:
      axis: axis of the G traces of a group. The default is correct for [Q, G] and [Q, G, M].

    Raises:
      ValueError: If a group has fewer than two traces.
    """
    centred = group_advantage(rewards, axis=axis)
    all_entries = jnp.ones((), bool)
    spread = masked_std(centred, all_entries, axis, ddof=1, keepdims=True)
    return centred / (spread + _EPSILON)


def decoupled_advantage(
    rewards: Float[Array, "Q G R"], weights: Float[Array, "R"]
) -> Float[Array, "Q G"]:
    """Normalizes each of several rewards within its group and sums them (GDPO, arXiv 2601.05242).

        A_i = sum_k w_k (R_ik - mean_G R_k) / (std_G R_k + eps),  then (A - mean A) / (std A + eps)

    i is a trace, k a reward, and eps = 1e-6. The second normalization uses the mean and standard
    deviation of the whole batch. If the rewards were summed before normalizing, as in GRPO,
    different combinations of rewards could have the same advantage, and the reward with the largest
    variance would dominate.

    Args:
      rewards: each of the R rewards of each trace.
      weights: weight w of each reward.
    """
    chex.assert_rank([rewards, weights], [3, 1])
    chex.assert_axis_dimension(weights, 0, rewards.shape[2])
    weighted_sum = jnp.sum(weights * grpo_advantage(rewards), axis=-1)
    normalised = grpo_advantage(weighted_sum.reshape(-1), axis=0)
    return normalised.reshape(weighted_sum.shape)


def others_mean(x: Float[Array, "Q G ..."]) -> Float[Array, "Q G ..."]:
    """Computes, for each trace, the mean of `x` over the other traces of its question.

    The result is 0 if the question has only one trace.
    """
    chex.assert_shape(x, (None, None, ...))
    num_others = x.shape[1] - 1
    sum_of_others = jnp.sum(x, axis=1, keepdims=True) - x
    return sum_of_others / max(num_others, 1)


@static_arguments("axis")
def rloo_advantage(rewards: Float[Array, "..."], *, axis: int = 1) -> Float[Array, "..."]:
    """Computes rewards minus the mean of the group's other traces (RLOO, arXiv 2402.14740).

        A_i = R_i - mean_{k != i} R_k = G / (G - 1) (R_i - mean_G R)

    Args:
      axis: axis of the G traces of a group. The default is correct for [Q, G] and [Q, G, M].

    Raises:
      ValueError: If a group has fewer than two traces.
    """
    centred = group_advantage(rewards, axis=axis)
    size = rewards.shape[axis]
    return centred * (size / (size - 1))
