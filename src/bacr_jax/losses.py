"""Computes policy, value and divergence losses from token log-probabilities.

All losses are computed per token. `aggregate_sum` and `loss_denominator` reduce the token losses of
a batch, of shape [B, T] (sequences, tokens), to a scalar. Micro-batches give the same loss as the
full batch if each partial sum is divided by the denominator of the full batch:

    denominator = loss_denominator(full_mask, mode="constant", constant=b_max)
    loss = sum(aggregate_sum(x, mask, mode="constant") / denominator for x, mask in parts)

The clipped objective of a token with importance ratio rho = pi / pi_old and advantage A is

    policy_loss(token_ratio(logprobs, old_logprobs), advantages, clip_low=.2, clip_high=.2)
"""

from typing import Literal, get_args

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from bacr_jax.masked import at_least_float32, masked_mean, masked_sum
from bacr_jax.static_arguments import static_arguments
from bacr_jax.types import Scalar

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]

# Upper bounds of |log ratio|, which keep exp() finite in float32. exp(20) = 5e8 is far outside
# every clip range. The log of the GSPO ratio is a mean over tokens, so a bound of 10 is enough.
# Common open-source implementations use the same two bounds.
_LOG_RATIO_LIMIT = 20.0
_GSPO_LOG_LIMIT = 10.0


# --- importance ratios ----------------------------------------------------------------------------


def _log_ratio(logprobs: Array, others: Array, mask: Array | None) -> Array:
    """Returns logprobs - others, with a stopped gradient through `others`.

    Outside the mask, the result is 0 and has no gradient.
    """
    logprobs = at_least_float32(logprobs)
    others = at_least_float32(others)
    if mask is not None:
        # Masked before the subtraction, because the difference of two infinities is NaN and would
        # also make the gradient NaN.
        keep = jnp.asarray(mask).astype(bool)
        logprobs = jnp.where(keep, logprobs, 0.0)
        others = jnp.where(keep, others, 0.0)
    return logprobs - jax.lax.stop_gradient(others)


def token_ratio(
    logprobs: Float[Array, "*batch"],
    old_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Computes the importance ratio of each token.

        rho_t = pi(y_t) / pi_old(y_t), with the log-ratio clamped to [-20, 20]

    y_t is the token at position t, pi the current policy, and pi_old the policy that sampled y_t.

    Args:
      logprobs: log-probabilities under the current policy.
      old_logprobs: log-probabilities under pi_old. They must be computed by the same code as
        `logprobs`.
      mask: tokens to include. Required if the log-probabilities of excluded tokens can be -inf.
        Outside the mask, the ratio is 1 and has no gradient.
    """
    chex.assert_equal_shape([logprobs, old_logprobs])
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    return jnp.exp(jnp.clip(log_ratio, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def sequence_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Shaped[Array, "B T"]
) -> Float[Array, "B T"]:
    """Computes the importance ratio of each sequence, exactly as in Eq. 15 of the paper.

        rho = exp(sum_t log pi(y_t) - log pi_old(y_t)), with the log-ratio clamped to [-20, 20]

    pi is the current policy, and pi_old the policy that sampled the tokens y_t. Over a thousand
    tokens, a tiny change per token adds up to a ratio outside any clip range. Use `token_ratio` or
    `gspo_ratio` in practice.

    Returns:
      rho of each sequence, repeated for every token of the sequence.
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
    """Computes the length-normalized sequence ratio (GSPO-token, arXiv 2507.18071).

        s = exp(mean_t(log pi(y_t) - log pi_old(y_t)));  rho_t = sg[s] pi(y_t) / sg[pi(y_t)]

    pi is the current policy, pi_old the policy that sampled the tokens y_t, and sg[.] stops the
    gradient. The log-ratio is a mean over tokens and varies little, so typical clip ranges are
    about 3e-4 (below 1) and 4e-4 (above 1) instead of 0.2.

    Returns:
      rho, whose value is s at every token of the sequence. The gradient of rho is s times the
      gradient of the token's log-probability, and 0 outside the mask.
    """
    chex.assert_rank([logprobs, old_logprobs, mask], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, mask])
    frozen = jax.lax.stop_gradient(logprobs)
    frozen_log_ratio = _log_ratio(frozen, old_logprobs, mask)
    mean = masked_mean(frozen_log_ratio, mask, axis=1, keepdims=True)
    # The value is always 0, and the gradient equals the gradient of the token's log-probability.
    gradient_carrier = _log_ratio(logprobs, logprobs, mask)
    return jnp.exp(jnp.minimum(mean + gradient_carrier, _GSPO_LOG_LIMIT))


# --- policy ---------------------------------------------------------------------------------------


def policy_loss(
    ratio: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
    dual_clip: Scalar | None = None,
) -> Float[Array, "*batch"]:
    """Computes the clipped surrogate loss of each token (paper Eq. 15).

        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))
        with dual clip c, if A < 0:  min(L, -A c)

    Args:
      ratio: importance ratio rho (`token_ratio`, `sequence_ratio` or `gspo_ratio`).
      advantages: advantages A. Gradients through them are stopped.
      clip_low: clip range below 1.
      clip_high: clip range above 1. A value above `clip_low` is DAPO's clip-higher.
      dual_clip: maximum ratio c > 1 of tokens with a negative advantage (dual-clip PPO, arXiv
        1912.09729). None for no maximum.
    """
    chex.assert_equal_shape([ratio, advantages])
    advantages = jax.lax.stop_gradient(advantages)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is None:
        return loss
    bounded = jnp.minimum(loss, -advantages * dual_clip)
    return jnp.where(advantages < 0.0, bounded, loss)


def is_clipped(
    ratio: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
    dual_clip: Scalar | None = None,
) -> Bool[Array, "*batch"]:
    """True for tokens whose gradient in `policy_loss` is zero because their ratio was clipped."""
    clipped_above = (advantages > 0.0) & (ratio > 1.0 + clip_high)
    clipped_below = (advantages < 0.0) & (ratio < 1.0 - clip_low)
    clipped = clipped_above | clipped_below
    if dual_clip is None:
        return clipped
    return clipped | ((advantages < 0.0) & (ratio > dual_clip))


def truncated_importance_weight(
    logprobs: Float[Array, "*batch"],
    rollout_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"] | None = None,
    *,
    cap: Scalar = 2.0,
) -> Float[Array, "*batch"]:
    """Computes truncated importance weights that correct for the sampler-learner mismatch.

        w = min(pi_learner(y) / pi_sampler(y), cap)

    The sampler and the learner can assign different probabilities to the same token under the same
    weights. The loss is multiplied by w, and the gradient through w is stopped.

    Args:
      logprobs: log-probabilities that the learner computes with the weights that sampled the
        tokens.
      rollout_logprobs: log-probabilities that the sampler computed.
      mask: tokens to include (see `token_ratio`).
      cap: maximum weight, typically 2 to 5.

    Returns:
      Weight w of each token, without a gradient.
    """
    ratio = token_ratio(logprobs, rollout_logprobs, mask)
    return jax.lax.stop_gradient(jnp.minimum(ratio, cap))


def masked_sequence_weight(
    logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Shaped[Array, "B T"],
    *,
    cap: Scalar,
) -> Float[Array, "B 1"]:
    """Computes the importance weight of each sequence, or 0 if the weight exceeds a cap.

        r = exp(sum_t log pi_learner(y_t) - log pi_sampler(y_t));  w = r if r <= cap, else 0

    The loss of all tokens of a sequence is multiplied by w. Without the cap, the expected loss
    equals the expected loss of sequences sampled by the learner. A product over thousands of tokens
    is rarely close to 1, so long sequences are masked more often. The method is called masked
    importance sampling. TRL's GRPOTrainer uses it by default, as `sequence_mask` with a cap of 3
    (trl/trainer/grpo_trainer.py, commit f2cd577).

    Args:
      logprobs: log-probabilities that the learner computes with the weights that sampled the
        tokens.
      rollout_logprobs: log-probabilities that the sampler computed.
      mask: tokens to include.
      cap: maximum weight.

    Returns:
      Weight w of each sequence, without a gradient.
    """
    frozen = jax.lax.stop_gradient(logprobs)
    ratio = sequence_ratio(frozen, rollout_logprobs, mask)[:, :1]
    return jnp.where(ratio <= cap, ratio, 0.0)


def sequence_mask(
    logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Shaped[Array, "B T"],
    *,
    bound: Scalar,
) -> Bool[Array, "B 1"]:
    """Selects sequences on which the learner and the sampler assign similar log-probabilities.

        mean_t |log pi_learner(y_t) - log pi_sampler(y_t)| <= bound

    The bound applies to the mean over tokens y_t instead of the sum, because a sum would exclude
    sequences merely for being long.

    Args:
      logprobs: log-probabilities that the learner computes.
      rollout_logprobs: log-probabilities that the sampler computed.
      mask: tokens to include.
      bound: maximum mean absolute difference, in nats per token.

    Returns:
      True for sequences within the bound.
    """
    gap = jnp.abs(jax.lax.stop_gradient(logprobs - rollout_logprobs))
    return masked_mean(gap, mask, axis=1, keepdims=True) <= bound


def distilled_advantages(
    advantages: Float[Array, "*batch"],
    old_logprobs: Float[Array, "*batch"],
    teacher_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"],
    *,
    weight: Scalar,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Adds an advantage that pulls the policy towards a teacher (on-policy distillation).

        A_t + weight (log pi_teacher(y_t) - log pi_old(y_t))

    pi_old is the policy that sampled the token y_t. The advantage increases if the teacher assigns
    y_t a higher probability than pi_old. With A = 0 and pi = pi_old, the expected gradient of the
    policy loss is `weight` times the gradient of the reverse KL divergence KL(pi || pi_teacher)
    between the next-token distributions.

    Args:
      advantages: advantage A_t of each token.
      old_logprobs: log-probabilities under pi_old.
      teacher_logprobs: log-probabilities under the teacher.
      mask: tokens to include.
      weight: weight of the teacher's advantage relative to A.

    Returns:
      The new advantages, and the estimate log pi_old - log pi_teacher of the divergence per token.
      The estimate has no gradient and is 0 outside the mask.
    """
    reverse_kl = _log_ratio(jax.lax.stop_gradient(old_logprobs), teacher_logprobs, mask)
    return advantages - weight * reverse_kl, reverse_kl


# --- aggregation ----------------------------------------------------------------------------------


def _check_mode(mode: str) -> None:
    """Raises a ValueError if `mode` is not one of `Aggregation`."""
    modes = get_args(Aggregation)
    if mode not in modes:
        raise ValueError(
            f"the aggregation must be one of {', '.join(modes)}, but `mode` is {mode!r}"
        )


@static_arguments("mode")
def aggregate_sum(
    x: Float[Array, "B T"], mask: Shaped[Array, "B T"], *, mode: Aggregation
) -> Float[Array, ""]:
    """Computes the numerator of the aggregated loss.

    A row is one sequence of the batch. The numerators of micro-batches and devices can be added,
    because each is a sum over rows.

    Args:
      x: loss of each token.
      mask: tokens to include.
      mode: how the losses are aggregated (see `loss_denominator`).

    Returns:
      Sum over the tokens in the mask. For "seq_mean_token_mean", the sum of the row means.

    Raises:
      ValueError: if the mode is unknown.
    """
    chex.assert_rank([x, mask], 2)
    chex.assert_equal_shape([x, mask])
    _check_mode(mode)
    if mode == "seq_mean_token_mean":
        row_means = masked_mean(x, mask, axis=1)
        return jnp.sum(row_means)
    return masked_sum(x, mask)


@static_arguments("mode")
def loss_denominator(
    mask: Shaped[Array, "B T"], *, mode: Aggregation, constant: Scalar
) -> Float[Array, ""]:
    """Computes the denominator of the loss, which sets the weight of long and short sequences.

    A row is one sequence of the batch. The modes aggregate the loss as follows:

        token_mean           sum over tokens / number of tokens (DAPO): long rows weigh more
        seq_mean_token_sum   sum over tokens / number of rows
        seq_mean_token_mean  mean over rows of row means (GRPO): tokens of long rows weigh less
        constant             sum over tokens / (rows x constant) (Dr.GRPO): no length bias

    Rows without tokens in the mask are not counted. Like the numerators, the denominators of
    micro-batches can be added. The denominator of an empty batch is 0.

    Args:
      mask: tokens to include.
      mode: one of the modes above.
      constant: tokens per row in mode "constant", for example the maximum response length. The
        other modes ignore it.

    Raises:
      ValueError: if the mode is unknown.
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
    values: Float[Array, "*batch"], targets: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Computes the squared error of the value head (paper Eq. 12).

        L = (V - R)^2

    The factor 1/2 of PPO's value loss is absorbed into the loss coefficient.

    Args:
      values: predictions V of the value head.
      targets: rewards R to be predicted. Gradients through them are stopped.
    """
    chex.assert_equal_shape([values, targets])
    return jnp.square(values - jax.lax.stop_gradient(targets))


@static_arguments("kind")
def kl_penalty(
    logprobs: Float[Array, "*batch"],
    reference_logprobs: Float[Array, "*batch"],
    mask: Shaped[Array, "*batch"] | None = None,
    *,
    kind: Literal["k1", "k2", "k3", "k3+"],
) -> Float[Array, "*batch"]:
    """Estimates KL(pi || reference) per token, from tokens sampled from pi.

        d = log pi - log ref;   k1 = d   k2 = d^2 / 2   k3 = exp(-d) + d - 1

    The expected values of k1 and k3 are the divergence, and k2 has a small bias. As a loss term,
    only k2 has the gradient of the divergence in expectation. The expected gradient of k1 is zero,
    and the gradient of k3 is biased. "k3+" has the value of k3 and the gradient of k2.

    Args:
      logprobs: log-probabilities under pi.
      reference_logprobs: log-probabilities under the reference policy. Gradients through them are
        stopped.
      mask: tokens to include. Required if the log-probabilities of excluded tokens can be -inf.
        Outside the mask, the estimate is 0.

    Returns:
      Estimate for each token. For k3, d is clamped to [-20, 20] and the estimate is capped at 10.

    Raises:
      ValueError: if the kind is unknown.
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
    raise ValueError(f"the KL estimator must be k1, k2, k3 or k3+, but `kind` is {kind!r}")


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
    """Computes the total loss of an update (paper Eq. 16).

        L = L_pi + c_v L_V - c_h H (+ c_kl KL)

    Args:
      policy: aggregated `policy_loss`.
      value: aggregated `value_loss`.
      entropy: aggregated token entropy H, in nats. H is subtracted, because it is a bonus.
      value_coef: weight c_v of the value loss.
      entropy_coef: weight c_h of the entropy bonus.
      kl: aggregated `kl_penalty`, which is not part of the paper's loss.
      kl_coef: weight c_kl of the KL penalty.
    """
    return policy + value_coef * value - entropy_coef * entropy + kl_coef * kl
