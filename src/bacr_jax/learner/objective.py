"""Computes the training objective (paper Eq. 12, 15 and 16).

`token_scores` computes the log-probabilities of all sampled tokens, from which this module computes
the loss. `train_step` differentiates `objective`. This module does not contain an optimizer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import losses
from bacr_jax.config import LossConfig
from bacr_jax.learner.batch import Batch, joined
from bacr_jax.learner.spec import LearnerSpec, phi_of
from bacr_jax.learner.token_scores import TokenScores, score_tokens_and_questions
from bacr_jax.model import value
from bacr_jax.types import Params, pytree

Metrics = dict[str, Float[Array, ""]]


@pytree
class Minibatch:
    """A batch of traces, and the log-probabilities of their tokens under earlier policies.

    Attributes:
      batch: the traces.
      old: scores under the policy that sampled the traces. None in the first update, because the
        importance ratio is then exactly 1, and if the sampler's log-probabilities are used instead
        (loss.old_logprobs).
      reference: scores under the reference policy, for a KL penalty. None without a KL penalty.
      teacher: scores under the teacher. None without distillation.
    """

    batch: Batch
    old: TokenScores | None = None
    reference: TokenScores | None = None
    teacher: TokenScores | None = None


@pytree
class LossNormalizers:
    """The denominators of the losses, computed on the full batch.

    With these denominators, the loss does not depend on how the batch is split into micro-batches.

    Attributes:
      tokens: denominator of the token losses, which depends on `loss.aggregate`. 1 if the batch has
        no sampled tokens.
      count: number of sampled tokens, at least 1. Used for metrics that are means over tokens.
      rows: number of entries of `Batch.value_targets`, the denominator of the value loss. It is the
        number of traces times the number of answers per trace, also if a truncation point has
        several answers.
      has_tokens: True if any token contributes to the policy loss.
    """

    tokens: Float[Array, ""]
    count: Float[Array, ""]
    rows: Float[Array, ""]
    has_tokens: Bool[Array, ""]


def loss_normalizers(batch: Batch, *, spec: LearnerSpec) -> LossNormalizers:
    """Computes the denominators of the losses from all traces of an update."""
    mask = joined(batch.thinking_mask, batch.answer_mask)
    tokens = losses.loss_denominator(mask, mode=spec.loss.aggregate, constant=spec.b_max)
    has_tokens = mask.any()
    # Use at least 1. Without tokens every numerator is 0, and the losses must be 0 instead of 0/0.
    return LossNormalizers(
        tokens=jnp.where(has_tokens, jnp.asarray(tokens, jnp.float32), 1.0),
        count=jnp.maximum(jnp.asarray(mask.sum(), jnp.float32), 1.0),
        rows=jnp.asarray(batch.value_targets.size, jnp.float32),
        has_tokens=has_tokens,
    )


def importance_ratio(
    scores: TokenScores, before: TokenScores, batch: Batch, *, kind: str
) -> Float[Array, "B T"]:
    """Returns the importance ratio of each sampled token (paper Eq. 15).

    In the result, the thinking tokens of a trace precede the tokens of its answers.

    Args:
      scores: scores under the current policy.
      before: scores under the policy that sampled the tokens.
      kind: "token" computes the ratio of each token. "sequence" computes the product of the ratios
        of a trace's sampled tokens, including answers, as in pi(t | q, b) of the equation. "gspo"
        computes the geometric mean of the token ratios, separately for the thinking and for each
        answer.
    """
    new = joined(scores.thinking, scores.answers)
    old = joined(before.thinking, before.answers)
    mask = joined(batch.thinking_mask, batch.answer_mask)
    if kind == "token":
        return losses.token_ratio(new, old, mask)
    if kind == "sequence":
        return losses.sequence_ratio(new, old, mask)
    thinking = losses.gspo_ratio(scores.thinking, before.thinking, batch.thinking_mask)
    answer_mask = batch.answer_mask
    each_answer = (-1, scores.answers.shape[-1])
    answers = losses.gspo_ratio(
        scores.answers.reshape(each_answer),
        before.answers.reshape(each_answer),
        answer_mask.reshape(each_answer),
    )
    return joined(thinking, answers.reshape(scores.answers.shape))


def _cap_ratio(
    ratio: Float[Array, "B T"], settings: LossConfig
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Clips the importance ratio to `loss.importance_cap` if loss.old_logprobs=sampler.

    Args:
      ratio: importance ratio of each sampled token.
      settings: settings of the loss.

    Returns:
      The clipped ratio, and True for tokens whose ratio exceeds the cap. The ratio is unchanged if
      loss.old_logprobs is not "sampler" or the cap is None.
    """
    is_capped = jnp.zeros(ratio.shape, bool)
    cap = settings.importance_cap
    if settings.old_logprobs != "sampler" or cap is None:
        return ratio, is_capped
    capped = jnp.minimum(ratio, cap)
    is_capped = ratio > cap
    return capped, is_capped


def _mismatch_correction(
    logp_before: Float[Array, "B T"],
    sampler: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    settings: LossConfig,
) -> tuple[Array | None, Bool[Array, "B 1"] | None]:
    """Computes weights that correct the loss for the mismatch between sampler and learner.

    Args:
      logp_before: log-probabilities that the learner computes.
      sampler: log-probabilities that the sampler computed.
      mask: True for sampled tokens.
      settings: settings of the loss.

    Returns:
      weight: weight of each token [B, T] or trace [B, 1], or None to weight all tokens equally.
      included: True for traces that are included in the loss, or None to include all traces.
    """
    weight = None
    included = None
    if settings.importance_cap is not None and settings.old_logprobs != "sampler":
        cap = settings.importance_cap
        weight = losses.truncated_importance_weight(logp_before, sampler, mask, cap=cap)
    if settings.sequence_cap is not None:
        cap = settings.sequence_cap
        weight = losses.masked_sequence_weight(logp_before, sampler, mask, cap=cap)
        included = weight > 0.0
    if settings.sequence_mask is not None:
        bound = settings.sequence_mask
        in_bound = losses.sequence_mask(logp_before, sampler, mask, bound=bound)
        included = in_bound if included is None else included & in_bound
    return weight, included


def policy_terms(
    scores: TokenScores,
    before: TokenScores,
    batch: Batch,
    normalizers: LossNormalizers,
    *,
    spec: LearnerSpec,
    teacher: TokenScores | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Computes the clipped policy loss (paper Eq. 15) and its metrics.

    Some metrics describe the importance ratio. Others describe the mismatch between the
    log-probabilities computed by the sampler and by the learner.

    With loss.old_logprobs=sampler, the importance ratio uses the sampler's log-probabilities and is
    clipped to the importance cap. A token above the cap has no gradient, for advantages of either
    sign. With this setting, the mismatch is measured between the sampler and the current policy.

    Args:
      scores: scores under the current policy.
      before: scores under the policy that sampled the batch, computed by the learner or the
        sampler.
      normalizers: denominators of the losses, computed on the full batch.
      teacher: scores under the teacher. None without distillation.
    """
    settings = spec.loss
    uses_sampler = settings.old_logprobs == "sampler"
    mask = joined(batch.thinking_mask, batch.answer_mask)

    def token_mean(x: Array) -> Array:
        return jnp.where(mask, x, 0.0).sum() / normalizers.count

    ratio = importance_ratio(scores, before, batch, kind=settings.ratio)
    ratio, is_capped = _cap_ratio(ratio, settings)
    answers = jnp.broadcast_to(batch.answer_advantages[..., None], scores.answers.shape)
    advantages = joined(batch.thinking_advantages, answers)
    metrics = {}
    if teacher is not None:
        advantages, reverse_kl = losses.distilled_advantages(
            advantages,
            joined(before.thinking, before.answers),
            joined(teacher.thinking, teacher.answers),
            mask,
            weight=spec.distill,
        )
        metrics["distill/reverse_kl"] = token_mean(reverse_kl)
    clip: dict[str, Any] = {
        "clip_low": settings.clip_low,
        "clip_high": settings.clip_high,
        "dual_clip": settings.dual_clip,
    }
    surrogate = losses.policy_loss(ratio, advantages, **clip)
    sampler = joined(batch.thinking_logprobs, batch.answer_logprobs)
    logp_before = joined(before.thinking, before.answers)
    if uses_sampler:
        logp_before = jax.lax.stop_gradient(joined(scores.thinking, scores.answers))
    weight, included = _mismatch_correction(logp_before, sampler, mask, settings)
    if weight is not None:
        surrogate = surrogate * weight
        metrics["mismatch/weight"] = token_mean(weight)
    if included is not None:
        surrogate = jnp.where(included, surrogate, 0.0)
        metrics["mismatch/masked"] = token_mean(~included)
    loss = losses.aggregate_sum(surrogate, mask, mode=settings.aggregate) / normalizers.tokens
    gap = jnp.where(mask, logp_before - sampler, 0.0)
    k3 = losses.kl_penalty(sampler, logp_before, mask, kind="k3")
    is_clipped = is_capped | losses.is_clipped(ratio, advantages, **clip)
    return loss, {
        "loss/policy": loss,
        "policy/clipped_share": token_mean(is_clipped),
        "policy/ratio": token_mean(ratio),
        "mismatch/k1": token_mean(-gap),
        "mismatch/k3": token_mean(k3),
        "mismatch/absolute": token_mean(jnp.abs(gap)),
        **metrics,
    }


def head_features(
    policy: Params,
    question: Float[Array, "B D"],
    budgets: Int[Array, "B"],
    cuts: Int[Array, "B M"],
    *,
    spec: LearnerSpec,
) -> Float[Array, "B M F"]:
    """Computes the input features of the value head at each truncation point (cut).

    If the setting `value.stop_gradient` is true, gradients through the features are stopped.

    Args:
      policy: all parameters of the policy.
      question: pooled hidden state h_q of each question.
      budgets: budget of each trace in tokens. Negative for traces without a budget.
      cuts: number of thinking tokens before each cut (b_j).
    """
    assert spec.value is not None
    kind = spec.value.input
    phi_budgets = value.phi_budgets(budgets, cuts, kind=kind)
    phi = phi_of(policy, phi_budgets.reshape(-1), spec)
    if phi is not None:
        # If each layer has a separate budget embedding, use the mean over layers.
        if phi.ndim > 2:
            phi = phi.mean(0)
        phi = phi.reshape(*cuts.shape, -1)
    if spec.value.stop_gradient:
        question, phi = jax.lax.stop_gradient((question, phi))
    return value.value_features(
        question, phi, jnp.maximum(budgets, 0), cuts, b_max=spec.b_max, kind=kind
    )


def value_terms(
    policy: Params,
    value_head: Params | None,
    question: Float[Array, "B D"],
    batch: Batch,
    normalizers: LossNormalizers,
    *,
    spec: LearnerSpec,
) -> tuple[Float[Array, ""], Metrics]:
    """Computes the loss of the value head (paper Eq. 12) and its metrics.

    Args:
      policy: all parameters of the policy.
      value_head: parameters of the value head. If None, the loss is 0 and the metrics are empty.
      question: pooled hidden state h_q of each question.
      batch: the traces, with the rewards that the value head predicts.
      normalizers: denominators of the losses, computed on the full batch.
    """
    if value_head is None:
        return jnp.float32(0.0), {}
    features = head_features(policy, question, batch.budgets, batch.cuts, spec=spec)

    def mean(x: Array) -> Array:
        of_rows = jnp.where(batch.real[:, None], x, 0.0)
        return of_rows.sum() / normalizers.rows

    predicted = value.values(value_head, features)
    loss = mean(losses.value_loss(predicted, batch.value_targets))
    return loss, {"value/loss": loss, "value/mean": mean(predicted)}


def objective(
    policy: Params,
    value_head: Params | None,
    minibatch: Minibatch,
    normalizers: LossNormalizers,
    allowed_tokens: Bool[Array, "V"],
    *,
    spec: LearnerSpec,
) -> tuple[Float[Array, ""], Metrics, TokenScores]:
    """Computes the loss L = L_pi + c_v L_V - c_h H (paper Eq. 16) on a part of a batch.

    L_pi is the policy loss, L_V the value loss and H the entropy. c_v is `loss.value_coef`, and c_h
    is `loss.entropy_coef`. With a reference policy, a KL penalty is added.

    Args:
      policy: all parameters of the policy, including frozen ones.
      value_head: parameters of the value head, or None if the method has no value head.
      minibatch: the part of the batch, with scores under earlier policies.
      normalizers: denominators of the losses, computed on the full batch.
      allowed_tokens: True for ids that can be sampled.

    Returns:
      The loss and the metrics of this part, and the scores of its tokens under the policy. Summed
      over all parts, the first two equal the loss and the metrics of the batch. The scores are
      constants for differentiation.
    """
    batch = minibatch.batch
    reference = minibatch.reference
    scores, question = score_tokens_and_questions(policy, batch, allowed_tokens, spec=spec)
    before = minibatch.old
    if before is None:
        before = jax.lax.stop_gradient(scores)
    if spec.loss.old_logprobs == "sampler":
        before = dataclasses.replace(
            before, thinking=batch.thinking_logprobs, answers=batch.answer_logprobs
        )
    policy_loss, policy_metrics = policy_terms(
        scores, before, batch, normalizers, spec=spec, teacher=minibatch.teacher
    )
    mask = joined(batch.thinking_mask, batch.answer_mask)

    def aggregate(x: Float[Array, "B N"]) -> Float[Array, ""]:
        return losses.aggregate_sum(x, mask, mode=spec.loss.aggregate) / normalizers.tokens

    entropy = joined(scores.thinking_entropy, scores.answers_entropy)
    kl = jnp.float32(0.0)
    if reference is not None:
        logp = joined(scores.thinking, scores.answers)
        logp_reference = joined(reference.thinking, reference.answers)
        kl = aggregate(losses.kl_penalty(logp, logp_reference, mask, kind=spec.loss.kl_kind))
    value_loss, value_metrics = value_terms(
        policy, value_head, question, batch, normalizers, spec=spec
    )
    total = losses.total_loss(
        policy_loss,
        value_loss,
        aggregate(entropy),
        value_coef=spec.loss.value_coef,
        entropy_coef=spec.loss.entropy_coef,
        kl=kl,
        kl_coef=spec.loss.kl_coef,
    )
    metrics = {
        "loss/total": total,
        "loss/kl": kl,
        "policy/entropy": jnp.where(mask, entropy, 0.0).sum() / normalizers.count,
        **policy_metrics,
        **value_metrics,
    }
    metrics, scores = jax.lax.stop_gradient((metrics, scores))
    return jnp.asarray(total), metrics, scores
