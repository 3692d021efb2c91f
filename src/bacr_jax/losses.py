"""Policy, value and divergence losses on token log-probabilities.

Losses are elementwise; a sum over a denominator turns [B, T] into a scalar. A batch split into
micro-batches gives the same loss as the whole when every part is divided by the whole's:

    denominator = loss_denominator(whole_mask, mode="constant", constant=b_max)
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

# exp(20) = 5e8 is far outside every clip range and far inside float32; 10 for the GSPO ratio, whose
# log is a mean over tokens. Both are the limits of common open implementations.
_LOG_RATIO_LIMIT = 20.0
_GSPO_LOG_LIMIT = 10.0


# --- importance ratios ----------------------------------------------------------------------------


def _log_ratio(logprobs: Array, others: Array, mask: Array | None) -> Array:
    """Difference of log-probabilities, the others constant; 0, without gradient, outside a mask."""
    logprobs, others = at_least_float32(logprobs), at_least_float32(others)
    if mask is not None:
        # Before the subtraction: of two infinities it is NaN, and so is any gradient through it.
        keep = jnp.asarray(mask).astype(bool)
        logprobs, others = (jnp.where(keep, x, 0.0) for x in (logprobs, others))
    return logprobs - jax.lax.stop_gradient(others)


def token_ratio(
    logprobs: Float[Array, "*batch"],
    old_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Importance ratio of each token.

        rho_t = pi(y_t) / pi_old(y_t), log-ratio clamped to +-20

    Args:
      old_logprobs: those under the policy that sampled, by the same forward computation.
      mask: tokens that count; needed where others may be -inf. Their ratio is 1, without gradient.
    """
    chex.assert_equal_shape([logprobs, old_logprobs])
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    return jnp.exp(jnp.clip(log_ratio, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def sequence_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Shaped[Array, "B T"]
) -> Float[Array, "B T"]:
    """Importance ratio of the whole sequence, paper Eq. 15 to the letter.

        rho = exp(sum_t log pi(y_t) - log pi_old(y_t)), clamped to exp(+-20)

    Summed over a thousand tokens a tiny change per token leaves any clip range; `token_ratio` and
    `gspo_ratio` are the usable forms.
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
    """Length-normalised sequence ratio with token gradients (GSPO-token, arXiv 2507.18071).

        s = exp(mean_t(log pi(y_t) - log pi_old(y_t)));  rho_t = sg[s] pi(y_t) / sg[pi(y_t)]

    Its spread is that of a mean, so its clip range is about 3e-4 / 4e-4, not 0.2.

    Returns:
      rho: value s in every token of the row, gradient s times that of the token's log-probability,
        none outside of the mask.
    """
    chex.assert_rank([logprobs, old_logprobs, mask], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, mask])
    frozen = jax.lax.stop_gradient(logprobs)
    mean = masked_mean(_log_ratio(frozen, old_logprobs, mask), mask, axis=1, keepdims=True)
    return jnp.exp(jnp.minimum(mean + _log_ratio(logprobs, logprobs, mask), _GSPO_LOG_LIMIT))


# --- policy ---------------------------------------------------------------------------------------


def policy_loss(
    ratio: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
) -> Float[Array, "*batch"]:
    """Clipped surrogate loss of each token, paper Eq. 15.

        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))

    Args:
      advantages: A, constants to the gradient.
      clip_high: epsilon above 1; larger than `clip_low` is DAPO's clip-higher.
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
    """Tokens to which `policy_loss` gives no gradient because their ratio left the range."""
    up = (advantages > 0.0) & (ratio > 1.0 + clip_high)
    down = (advantages < 0.0) & (ratio < 1.0 - clip_low)
    return up | down


def truncated_importance_weight(
    logprobs: Float[Array, "*batch"],
    rollout_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"] | None = None,
    *,
    cap: Scalar = 2.0,
) -> Float[Array, "*batch"]:
    """Correction for a sampler whose probabilities differ from the learner's.

        w = min(pi_learner(y) / pi_sampler(y), cap), a constant that multiplies the loss

    Args:
      logprobs: the learner's log-probabilities under the weights that sampled.
      mask: as of `token_ratio`.
      cap: largest weight, 2 to 5.
    """
    return jax.lax.stop_gradient(jnp.minimum(token_ratio(logprobs, rollout_logprobs, mask), cap))


def sequence_mask(
    logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Shaped[Array, "B T"],
    *,
    bound: Scalar,
) -> Bool[Array, "B 1"]:
    """Rows about whose tokens learner and sampler agree.

        mean_t |log pi_learner(y_t) - log pi_sampler(y_t)| <= bound

    A mean, so that a long row is not left out for its length.
    """
    gap = jnp.abs(jax.lax.stop_gradient(logprobs - rollout_logprobs))
    return masked_mean(gap, mask, axis=1, keepdims=True) <= bound


# --- aggregation ----------------------------------------------------------------------------------


def _row_means(mode: str) -> bool:
    """Whether rows are averaged over their tokens before being added up."""
    if mode not in (known := get_args(Aggregation)):
        raise ValueError(f"mode: found {mode!r}; known are {', '.join(known)}")
    return mode == "seq_mean_token_mean"


def aggregate_sum(
    x: Float[Array, "B T"], mask: Shaped[Array, "B T"], *, mode: Aggregation
) -> Float[Array, ""]:
    """Numerator of the loss: additive over rows, hence over micro-batches and devices.

    Returns:
      Sum of token values, or of row means for "seq_mean_token_mean".
    """
    chex.assert_rank([x, mask], 2)
    chex.assert_equal_shape([x, mask])
    if _row_means(mode):
        return jnp.sum(masked_mean(x, mask, axis=1))
    return masked_sum(x, mask)


def loss_denominator(
    mask: Shaped[Array, "B T"], *, mode: Aggregation, constant: Scalar
) -> Float[Array, ""]:
    """Denominator of the loss: how long and short rows share it is the mode.

        token_mean           sum over tokens / number of tokens (DAPO): long rows weigh more
        seq_mean_token_sum   sum over tokens / rows
        seq_mean_token_mean  mean over rows of row means (GRPO): tokens of long rows weigh less
        constant             sum over tokens / (rows x constant) (Dr.GRPO): no length bias

    Rows without tokens are not counted. Like the numerator it is additive over rows; of an empty
    batch it is 0.

    Args:
      constant: tokens per row of mode "constant", for instance the largest response length; no
        other mode reads it.
    """
    chex.assert_rank(mask, 2)
    _row_means(mode)
    keep = jnp.asarray(mask).astype(bool)
    if mode == "token_mean":
        return jnp.sum(keep, dtype=jnp.float32)
    rows = jnp.sum(jnp.any(keep, axis=1), dtype=jnp.float32)
    return rows * constant if mode == "constant" else rows


# --- value, divergence, entropy -------------------------------------------------------------------


def value_loss(
    values: Float[Array, "*batch"], returns: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Squared error of the value head, paper Eq. 12.

        L = (V - R)^2

    PPO's factor 1/2 is left to the loss coefficient.
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
    """Per-token estimate of KL(pi || reference) from tokens sampled from pi.

        d = log pi - log ref;   k1 = d   k2 = d^2 / 2   k3 = exp(-d) + d - 1

    All estimate the divergence's value (k2 with a small bias). As a loss term only k2 has the
    divergence's gradient in expectation: that of k1 is zero on average, that of k3 is biased. "k3+"
    has the value of k3 and the gradient of k2.

    Args:
      reference_logprobs: under the reference, constants to the gradient.
      mask: tokens that count; needed where others may be -inf. Their estimate is 0.

    Returns:
      Estimate, elementwise; in k3's value d is clamped to +-20, and it to at most 10.
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
    raise ValueError(f"kind: found {kind!r}; known are k1, k2, k3 and k3+")


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
    """Loss of the whole update, paper Eq. 16.

        L = L_pi + c_v L_V - c_h H (+ c_kl KL)

    Args:
      entropy: aggregated entropy of each token; it is a bonus, hence the minus sign.
      kl: aggregated `kl_penalty`; not in the paper.
    """
    return policy + value_coef * value - entropy_coef * entropy + kl_coef * kl
