"""Policy, value and divergence losses on token log-probabilities.

Losses are elementwise; a sum over a denominator turns [B, T] into a scalar. Micro-batches give the
same loss as the full batch if every part is divided by the denominator of the full batch:

    denominator = loss_denominator(full_mask, mode="constant", constant=b_max)
    loss = sum(aggregate_sum(x, mask, mode="constant") / denominator for x, mask in parts)

The clipped objective of a token with ratio rho = pi/pi_old and advantage A:

    policy_loss(token_ratio(logprobs, old_logprobs), advantages, clip_low=.2, clip_high=.2)
"""

from typing import Literal, get_args

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from bacr_jax.masked import at_least_float32, masked_mean, masked_sum
from bacr_jax.types import Scalar

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]

# exp(20) = 5e8 is far outside every clip range and far inside the range of float32. The log of the
# GSPO ratio is a mean over tokens, so 10 is enough for it. Common open implementations have both
# limits.
_LOG_RATIO_LIMIT = 20.0
_GSPO_LOG_LIMIT = 10.0


# --- importance ratios ----------------------------------------------------------------------------


def _log_ratio(logprobs: Array, others: Array, mask: Array | None) -> Array:
    """Returns logprobs - others; 0, without gradient, outside the mask. `others` are constants."""
    logprobs = at_least_float32(logprobs)
    others = at_least_float32(others)
    if mask is not None:
        # Masked before the subtraction, because the difference of two infinities is NaN, and so is
        # any gradient through it.
        keep = jnp.asarray(mask).astype(bool)
        logprobs = jnp.where(keep, logprobs, 0.0)
        others = jnp.where(keep, others, 0.0)
    return logprobs - jax.lax.stop_gradient(others)


def token_ratio(
    logprobs: Float[Array, "*batch"],
    old_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Returns the importance ratio of each token.

        rho_t = pi(y_t) / pi_old(y_t), log-ratio clamped to +-20

    Args:
      logprobs: log-probabilities under the current policy.
      old_logprobs: log-probabilities under the policy that sampled, by the same forward
        computation.
      mask: tokens that count; required if log-probabilities of other tokens may be -inf. Outside
        the mask the ratio is 1, without gradient.
    """
    chex.assert_equal_shape([logprobs, old_logprobs])
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    return jnp.exp(jnp.clip(log_ratio, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def sequence_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Shaped[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns the importance ratio of each sequence (paper Eq. 15 to the letter).

        rho = exp(sum_t log pi(y_t) - log pi_old(y_t)), clamped to exp(+-20)

    Over a thousand tokens, a tiny change per token adds up to a ratio outside any clip range.
    `token_ratio` and `gspo_ratio` are the usable forms.

    Returns:
      rho of the row, in every entry of the row.
    """
    chex.assert_rank([logprobs, old_logprobs, mask], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, mask])
    difference = logprobs - jax.lax.stop_gradient(old_logprobs)
    log_ratio = masked_sum(difference, mask, axis=1, keepdims=True)
    ratio = jnp.exp(jnp.clip(log_ratio, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    return jnp.broadcast_to(ratio, logprobs.shape)


def gspo_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Shaped[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns the length-normalised sequence ratio (GSPO-token, arXiv 2507.18071).

        s = exp(mean_t(log pi(y_t) - log pi_old(y_t)));  rho_t = sg[s] pi(y_t) / sg[pi(y_t)]

    sg stops the gradient. The log-ratio is a mean over tokens and varies little, so the clip range
    is about 3e-4 / 4e-4, not 0.2.

    Returns:
      rho, with value s at every token of the row. Its gradient is s times the gradient of the
      token's log-probability, and 0 outside the mask.
    """
    chex.assert_rank([logprobs, old_logprobs, mask], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, mask])
    frozen = jax.lax.stop_gradient(logprobs)
    frozen_log_ratio = _log_ratio(frozen, old_logprobs, mask)
    mean = masked_mean(frozen_log_ratio, mask, axis=1, keepdims=True)
    # Its value is 0; it carries the gradient of the token's log-probability.
    gradient_carrier = _log_ratio(logprobs, logprobs, mask)
    return jnp.exp(jnp.minimum(mean + gradient_carrier, _GSPO_LOG_LIMIT))


# --- policy ---------------------------------------------------------------------------------------


def policy_loss(
    ratio: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
) -> Float[Array, "*batch"]:
    """Returns the clipped surrogate loss of each token (paper Eq. 15).

        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))

    Args:
      ratio: rho (`token_ratio`, `sequence_ratio` or `gspo_ratio`).
      advantages: A, constants to the gradient.
      clip_low: epsilon below 1.
      clip_high: epsilon above 1; a value above `clip_low` is DAPO's clip-higher.
    """
    chex.assert_equal_shape([ratio, advantages])
    advantages = jax.lax.stop_gradient(advantages)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(-advantages * ratio, -advantages * clipped)


def is_clipped(
    ratio: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
) -> Bool[Array, "*batch"]:
    """True for tokens without gradient in `policy_loss` because their ratio left the range."""
    clipped_above = (advantages > 0.0) & (ratio > 1.0 + clip_high)
    clipped_below = (advantages < 0.0) & (ratio < 1.0 - clip_low)
    return clipped_above | clipped_below


def truncated_importance_weight(
    logprobs: Float[Array, "*batch"],
    rollout_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"] | None = None,
    *,
    cap: Scalar = 2.0,
) -> Float[Array, "*batch"]:
    """Returns weights that correct for a sampler whose probabilities differ from the learner's.

        w = min(pi_learner(y) / pi_sampler(y), cap), a constant that multiplies the loss

    Args:
      logprobs: the learner's log-probabilities under the weights that sampled.
      rollout_logprobs: the sampler's log-probabilities.
      mask: tokens that count (see `token_ratio`).
      cap: largest weight, 2 to 5.
    """
    ratio = token_ratio(logprobs, rollout_logprobs, mask)
    return jax.lax.stop_gradient(jnp.minimum(ratio, cap))


def sequence_mask(
    logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Shaped[Array, "B T"],
    *,
    bound: Scalar,
) -> Bool[Array, "B 1"]:
    """True for rows whose log-probabilities are similar for learner and sampler.

        mean_t |log pi_learner(y_t) - log pi_sampler(y_t)| <= bound

    The mean, not the sum, is compared, because a sum would exclude rows for their length.
    """
    gap = jnp.abs(jax.lax.stop_gradient(logprobs - rollout_logprobs))
    return masked_mean(gap, mask, axis=1, keepdims=True) <= bound


# --- aggregation ----------------------------------------------------------------------------------


def _check_mode(mode: str) -> None:
    """Raises a ValueError if the aggregation mode is unknown."""
    modes = get_args(Aggregation)
    if mode not in modes:
        raise ValueError(f"mode: found {mode!r}; write one of {', '.join(modes)}")


def aggregate_sum(
    x: Float[Array, "B T"], mask: Shaped[Array, "B T"], *, mode: Aggregation
) -> Float[Array, ""]:
    """Returns the numerator of the loss.

    It is additive over rows, and therefore over micro-batches and devices.

    Returns:
      Sum of token values; for "seq_mean_token_mean" the sum of row means.

    Raises:
      ValueError: the mode is unknown.
    """
    chex.assert_rank([x, mask], 2)
    chex.assert_equal_shape([x, mask])
    _check_mode(mode)
    if mode == "seq_mean_token_mean":
        row_means = masked_mean(x, mask, axis=1)
        return jnp.sum(row_means)
    return masked_sum(x, mask)


def loss_denominator(
    mask: Shaped[Array, "B T"], *, mode: Aggregation, constant: Scalar
) -> Float[Array, ""]:
    """Returns the denominator of the loss, which sets the weight of long and short rows.

        token_mean           sum over tokens / number of tokens (DAPO): long rows weigh more
        seq_mean_token_sum   sum over tokens / rows
        seq_mean_token_mean  mean over rows of row means (GRPO): tokens of long rows weigh less
        constant             sum over tokens / (rows x constant) (Dr.GRPO): no length bias

    Rows without tokens are not counted. Like the numerator, the denominator is additive over rows.
    It is 0 for an empty batch.

    Args:
      constant: tokens per row in mode "constant", for instance the largest response length; the
        other modes ignore it.

    Raises:
      ValueError: the mode is unknown.
    """
    chex.assert_rank(mask, 2)
    _check_mode(mode)
    keep = jnp.asarray(mask).astype(bool)
    if mode == "token_mean":
        return jnp.sum(keep, dtype=jnp.float32)
    has_tokens = jnp.any(keep, axis=1)
    num_rows = jnp.sum(has_tokens, dtype=jnp.float32)
    return num_rows * constant if mode == "constant" else num_rows


# --- value, divergence, entropy -------------------------------------------------------------------


def value_loss(
    values: Float[Array, "*batch"], returns: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Returns the squared error of the value head (paper Eq. 12).

        L = (V - R)^2

    PPO's factor 1/2 is part of the loss coefficient instead.
    """
    chex.assert_equal_shape([values, returns])
    return jnp.square(values - jax.lax.stop_gradient(returns))


def kl_penalty(
    logprobs: Float[Array, "*batch"],
    reference_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"] | None = None,
    *,
    kind: Literal["k1", "k2", "k3", "k3+"],
) -> Float[Array, "*batch"]:
    """Estimates KL(pi || reference) per token, from tokens sampled from pi.

        d = log pi - log ref;   k1 = d   k2 = d^2 / 2   k3 = exp(-d) + d - 1

    All estimate the divergence's value (k2 with a small bias). As a loss term, only k2 has the
    divergence's gradient in expectation: the gradient of k1 is zero on average, and the gradient of
    k3 is biased. "k3+" has the value of k3 and the gradient of k2.

    Args:
      logprobs: log-probabilities under pi.
      reference_logprobs: log-probabilities under the reference, constants to the gradient.
      mask: tokens that count; required if log-probabilities of other tokens may be -inf. Outside
        the mask the estimate is 0.

    Returns:
      Estimate of each token. In k3, d is clamped to +-20 and the estimate to at most 10.

    Raises:
      ValueError: the kind is unknown.
    """
    chex.assert_equal_shape([logprobs, reference_logprobs])
    d = _log_ratio(logprobs, reference_logprobs, mask)
    if kind == "k1":
        return d
    k2 = 0.5 * jnp.square(d)
    if kind == "k2":
        return k2
    bounded = jnp.clip(d, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    k3 = jnp.minimum(jnp.expm1(-bounded) + bounded, 10.0)
    if kind == "k3":
        return k3
    if kind == "k3+":
        return k2 + jax.lax.stop_gradient(k3 - k2)
    raise ValueError(f"kind: found {kind!r}; write k1, k2, k3 or k3+")


def total_loss(
    policy: Scalar,
    value: Scalar,
    entropy: Scalar,
    *,
    value_coef: Scalar,
    entropy_coef: Scalar,
    kl: Scalar = 0.0,
    kl_coef: Scalar = 0.0,
) -> Scalar:
    """Returns the total loss of an update (paper Eq. 16).

        L = L_pi + c_v L_V - c_h H (+ c_kl KL)

    Args:
      policy: aggregated `policy_loss`.
      value: aggregated `value_loss`.
      entropy: aggregated token entropy; a bonus, hence the minus sign.
      kl: aggregated `kl_penalty`; not in the paper.
    """
    return policy + value_coef * value - entropy_coef * entropy + kl_coef * kl
