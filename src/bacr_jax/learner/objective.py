"""The objective on trunks and branches: one forward pass, then paper Eq. 12, 15 and 16."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import losses
from bacr_jax.learner.batch import Batch, joined
from bacr_jax.learner.spec import LearnerSpec, condition, phi_of
from bacr_jax.model import logprobs, qwen2, value
from bacr_jax.parallel import DECODE, constrain, constrain_rows, row_shards
from bacr_jax.types import Params, pytree

Metrics = dict[str, Float[Array, ""]]


@pytree
class TokenScores:
    """The policy's view of the sampled tokens.

    Attributes:
      thinking_entropy, answers_entropy: at each token, nats.
      question: pooled question states h_q, fp32.
    """

    thinking: Float[Array, "B T"]
    answers: Float[Array, "B M T"]
    thinking_entropy: Float[Array, "B T"]
    answers_entropy: Float[Array, "B M T"]
    question: Float[Array, "B D"]


@pytree
class Minibatch:
    """Rows, and what other policies make of their tokens.

    Attributes:
      old: scores of the policy when the rows were sampled; None on the first update, where the
        ratio is exactly 1, and where the sampler's own are taken (loss.old_logprobs).
      reference: scores of the reference policy; needed with a KL term.
    """

    batch: Batch
    old: TokenScores | None = None
    reference: TokenScores | None = None


@pytree
class LossNormalizers:
    """Denominators of the whole batch, so that a split into micro-batches changes nothing.

    Attributes:
      tokens: of the aggregation of token losses; 1 where no token has a part in them.
      count: sampled tokens, for metrics that are plain token means; likewise at least 1.
      rows: rows times cuts, for the value loss.
      has_tokens: whether any token has a part in the policy's loss.
    """

    tokens: Float[Array, ""]
    count: Float[Array, ""]
    rows: Float[Array, ""]
    has_tokens: Bool[Array, ""]


def chunked_logprobs(
    states: Float[Array, "B T D"],
    lm_head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    allowed_tokens: Bool[Array, "V"] | None,
    spec: LearnerSpec,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probabilities and entropies, `spec.chunk` tokens a device at a time.

    A chunk takes a few tokens of every row, so that rows stay where they are on the mesh. Each is
    recomputed in the backward pass.
    """
    b, t, _ = states.shape
    states = states if spec.product_dtype is None else states.astype(spec.product_dtype)
    # Cast and gathered once, not once per chunk; of the masters no value is read then.
    whole = lambda head: constrain({"lm_head": head}, spec.mesh, rules=DECODE)["lm_head"]
    copy = None
    if states.dtype != jnp.float32:
        # Split first, so that what travels is already cast.
        cast = {"lm_head": logprobs.head_copy(lm_head, states.dtype)}
        copy = whole(constrain(cast, spec.mesh)["lm_head"])
    lm_head = whole(lm_head)
    width = min(max(spec.chunk * row_shards(spec.mesh, spec.row_axes) // b, 1), t)

    def of_chunk(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        states, ids = constrain_rows(inputs, spec.mesh, over=spec.row_axes)
        rows = states.reshape(b * width, -1)
        scores = logprobs.masked_logits(rows, lm_head, allowed_tokens, spec.temperature, copy)
        found = logprobs.logprob_and_entropy(scores, ids.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(b, width), found)

    return logprobs.by_chunks(of_chunk, (states, targets), width, axis=1)


def _answer_targets(
    branch: Float[Array, "B M A D"] | Float[Array, "B F D"], batch: Batch
) -> tuple[Float[Array, "B F D"], Int[Array, "B F"], Callable[[Array], Array]]:
    """States of branches, the tokens they predict, and where each answer token's score is found.

    The state that predicts answer token t stands at suffix - 1 + t of its branch. Of packed
    branches all positions are scored, and the scores of answer tokens picked from them.
    """
    b, m, a = batch.answer_logprobs.shape
    within = batch.forced[..., None] + jnp.arange(a)
    if batch.packing is None:
        states = jnp.take_along_axis(branch, (within - 1)[..., None], axis=2, mode="clip")
        tokens = jnp.take_along_axis(batch.branches, within, axis=2, mode="clip")
        states = states.reshape(b, m * a, states.shape[-1])
        return states, tokens.reshape(b, m * a), lambda scores: scores
    tokens = jnp.take_along_axis(
        batch.branches.reshape(b, -1), batch.packing + 1, axis=1, mode="clip"
    )
    lengths = batch.branch_lengths
    start = jnp.cumsum(lengths, axis=1) - lengths
    at = (start[..., None] + within - 1).reshape(b, -1)
    return branch, tokens, lambda scores: jnp.take_along_axis(scores, at, axis=1, mode="clip")


def score_tokens(
    params: Params, batch: Batch, allowed_tokens: Bool[Array, "V"], *, spec: LearnerSpec
) -> TokenScores:
    """Log-probabilities and entropies of every sampled token, in one pass over trunk and branches.

    The state that predicts thinking token t stands at prompt_length - 1 + t; the one that predicts
    answer token t at suffix - 1 + t of its branch (`_answer_targets`). Forced tokens are inputs
    only.
    """
    response = jnp.arange(batch.trunk.shape[1]) >= batch.prompt_lengths[:, None]
    tree = qwen2.Tree(
        batch.trunk,
        batch.branches,
        batch.context,
        batch.packing,
        lengths=jnp.maximum(batch.prompt_lengths + batch.sampled, 1),
    )
    model, phi = spec.model, condition(params, batch.budgets, response, spec)
    if (real := batch.real_tokens) is not None:
        states = qwen2.tree_states(
            params, tree, config=model, conditioned=phi, real=real, compute=spec
        )
        return _listed_scores(params, states, batch, allowed_tokens, spec)
    trunk, branch = qwen2.forward_tree(params, tree, config=model, conditioned=phi, compute=spec)
    b, t = batch.thinking_mask.shape
    _, m, a = batch.answer_mask.shape
    at = batch.prompt_lengths[:, None] + jnp.arange(t)
    thinking_states = jnp.take_along_axis(trunk, (at - 1)[..., None], axis=1, mode="clip")
    thinking_tokens = jnp.take_along_axis(batch.trunk, at, axis=1, mode="clip")
    answer_states, answer_tokens, unpack = _answer_targets(branch, batch)
    logp, entropy = chunked_logprobs(
        jnp.concatenate([thinking_states, answer_states], axis=1),
        qwen2.output_head(params),
        jnp.concatenate([thinking_tokens, answer_tokens], axis=1),
        allowed_tokens=allowed_tokens,
        spec=spec,
    )
    fold = lambda x: (x[:, :t], unpack(x[:, t:]).reshape(b, m, a))
    question = value.pool_question(trunk, batch.question_start, batch.question_end)
    return TokenScores(*fold(logp), *fold(entropy), question)


def _listed_scores(
    params: Params,
    states: Float[Array, "1 U D"],
    batch: Batch,
    allowed_tokens: Bool[Array, "V"],
    spec: LearnerSpec,
) -> TokenScores:
    """The same of a batch that says which tokens it holds; scores of others are 0."""
    real, scored = batch.real_tokens, batch.scored
    assert real is not None
    (b, s), (_, m, width) = batch.trunk.shape, batch.branches.shape
    t, a = batch.thinking_mask.shape[1], batch.answer_mask.shape[2]
    # Places of all tokens that can be sampled among the positions of trunks and branches.
    of_thinking = jnp.minimum(batch.prompt_lengths[:, None] + jnp.arange(t), s - 1)
    within = jnp.minimum(batch.forced[..., None] + jnp.arange(a), width - 1)
    of_answers = s + (width * jnp.arange(m)[:, None] + within).reshape(b, m * a)
    at = jnp.concatenate([of_thinking, of_answers], axis=1)
    before = jnp.take_along_axis(real.slot, jnp.maximum(at - 1, 0), axis=1).reshape(-1)[scored]
    rows = jnp.concatenate([batch.trunk, batch.branches.reshape(b, -1)], axis=1)
    tokens = jnp.take_along_axis(rows, at, axis=1).reshape(-1)[scored]
    logp, entropy = chunked_logprobs(
        states[:, before],
        qwen2.output_head(params),
        tokens[None],
        allowed_tokens=allowed_tokens,
        spec=spec,
    )
    mask = joined(batch.thinking_mask, batch.answer_mask)
    index = (jnp.cumsum(mask.reshape(-1)) - 1).reshape(mask.shape)

    def fold(x: Array) -> tuple[Array, Array]:
        found = jnp.where(mask, x[0][index], 0.0)
        return found[:, :t], found[:, t:].reshape(b, m, a)

    trunk = real.spread(states)[:, :s]
    question = value.pool_question(trunk, batch.question_start, batch.question_end)
    return TokenScores(*fold(logp), *fold(entropy), question)


def loss_normalizers(batch: Batch, *, spec: LearnerSpec) -> LossNormalizers:
    """What the losses of all rows of an update are divided by."""
    mask = joined(batch.thinking_mask, batch.answer_mask)
    tokens = losses.loss_denominator(mask, mode=spec.loss.aggregate, constant=spec.b_max)
    as_float = lambda x: jnp.asarray(x, jnp.float32)
    has_tokens = mask.any()
    # Every numerator is 0 without tokens: the losses are then 0, not 0/0.
    return LossNormalizers(
        tokens=jnp.where(has_tokens, as_float(tokens), 1.0),
        count=jnp.maximum(as_float(mask.sum()), 1.0),
        rows=as_float(batch.returns.size),
        has_tokens=has_tokens,
    )


def importance_ratio(
    scores: TokenScores, before: TokenScores, batch: Batch, *, kind: str
) -> Float[Array, "B T"]:
    """Importance ratio of every sampled token, thinking then answers (paper Eq. 15).

    "token": each token's own. "sequence": that of all a row sampled, thinking and answers, the
    pi(t | q, b) of the equation. "gspo": the geometric mean over a row's thinking, and over each of
    its answers apart.
    """
    new, old = (joined(x.thinking, x.answers) for x in (scores, before))
    mask = joined(batch.thinking_mask, batch.answer_mask)
    if kind == "token":
        return losses.token_ratio(new, old, mask)
    if kind == "sequence":
        return losses.sequence_ratio(new, old, mask)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    thinking = losses.gspo_ratio(scores.thinking, before.thinking, batch.thinking_mask)
    answers = losses.gspo_ratio(*map(flat, (scores.answers, before.answers, batch.answer_mask)))
    return joined(thinking, answers.reshape(scores.answers.shape))


def policy_terms(
    scores: TokenScores,
    before: TokenScores,
    batch: Batch,
    normalizers: LossNormalizers,
    *,
    spec: LearnerSpec,
) -> tuple[Float[Array, ""], Metrics]:
    """The clipped policy loss (paper Eq. 15) and metrics of the ratios and of the sampler.

    With the sampler's own log-probabilities as the old ones the ratio is at most the importance
    cap: above it a token has no gradient, whatever the sign of its advantage. What sampler and
    learner differ by is then measured with the policy as it is now.

    Args:
      before: of the policy when the batch was sampled, as the learner or the sampler computes them.
    """
    mask = joined(batch.thinking_mask, batch.answer_mask)
    ratio = importance_ratio(scores, before, batch, kind=spec.loss.ratio)
    is_capped = jnp.zeros(ratio.shape, bool)
    if spec.loss.old_logprobs == "sampler" and (cap := spec.loss.importance_cap) is not None:
        ratio, is_capped = jnp.minimum(ratio, cap), ratio > cap
    answers = jnp.broadcast_to(batch.answer_advantages[..., None], scores.answers.shape)
    advantages = joined(batch.thinking_advantages, answers)
    clip = {"clip_low": spec.loss.clip_low, "clip_high": spec.loss.clip_high}
    surrogate = losses.policy_loss(ratio, advantages, **clip)
    sampler = joined(batch.thinking_logprobs, batch.answer_logprobs)
    logp_before = joined(before.thinking, before.answers)
    token_mean = lambda x: jnp.where(mask, x, 0.0).sum() / normalizers.count
    metrics = {}
    if spec.loss.old_logprobs == "sampler":
        logp_before = jax.lax.stop_gradient(joined(scores.thinking, scores.answers))
    elif spec.loss.importance_cap is not None:
        weight = losses.truncated_importance_weight(
            logp_before, sampler, mask, cap=spec.loss.importance_cap
        )
        surrogate = surrogate * weight
        metrics["mismatch/weight"] = token_mean(weight)
    if (bound := spec.loss.sequence_mask) is not None:
        kept = losses.sequence_mask(logp_before, sampler, mask, bound=bound)
        surrogate = jnp.where(kept, surrogate, 0.0)
        metrics["mismatch/masked"] = token_mean(~kept)
    loss = losses.aggregate_sum(surrogate, mask, mode=spec.loss.aggregate) / normalizers.tokens
    gap = jnp.where(mask, logp_before - sampler, 0.0)
    return loss, {
        "loss/policy": loss,
        "policy/clipped_share": token_mean(
            is_capped | losses.is_clipped(ratio, advantages, **clip)
        ),
        "policy/ratio": token_mean(ratio),
        "mismatch/k1": token_mean(-gap),
        "mismatch/k3": token_mean(jnp.exp(gap) - 1 - gap),
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
    """What the value head reads of the policy, without gradient if `value.stop_gradient`."""
    assert spec.value is not None
    kind = spec.value.input
    phi = phi_of(policy, value.phi_budgets(budgets, cuts, kind=kind).reshape(-1), spec)
    if phi is not None:
        # One for each row: the mean over layers where each has its own.
        phi = (phi if phi.ndim == 2 else phi.mean(0)).reshape(*cuts.shape, -1)
    if spec.value.stop_gradient:
        question, phi = jax.lax.stop_gradient((question, phi))
    codes = jnp.maximum(budgets, 0), cuts
    return value.value_features(question, phi, *codes, b_max=spec.b_max, kind=kind)


def value_terms(
    policy: Params,
    value_head: Params | None,
    question: Float[Array, "B D"],
    batch: Batch,
    normalizers: LossNormalizers,
    *,
    spec: LearnerSpec,
) -> tuple[Float[Array, ""], Metrics]:
    """The value loss (paper Eq. 12) and its metrics; zero and none without a value head."""
    if value_head is None:
        return jnp.float32(0.0), {}
    features = head_features(policy, question, batch.budgets, batch.cuts, spec=spec)
    over_rows = lambda x: jnp.where(batch.real[:, None], x, 0.0).sum() / normalizers.rows
    predicted = value.values(value_head, features)
    loss = over_rows(losses.value_loss(predicted, batch.returns))
    return loss, {"value/loss": loss, "value/mean": over_rows(predicted)}


def objective(
    policy: Params,
    value_head: Params | None,
    minibatch: Minibatch,
    normalizers: LossNormalizers,
    allowed_tokens: Bool[Array, "V"],
    *,
    spec: LearnerSpec,
) -> tuple[Float[Array, ""], Metrics]:
    """L = L_pi + c_v L_V - c_h H (paper Eq. 16) on part of a batch.

    Returns:
      This part's share of the loss, and its share of each metric: both add up over micro-batches.
    """
    batch, reference = minibatch.batch, minibatch.reference
    scores = score_tokens(policy, batch, allowed_tokens, spec=spec)
    before = jax.lax.stop_gradient(scores) if minibatch.old is None else minibatch.old
    if spec.loss.old_logprobs == "sampler":
        sampler = {"thinking": batch.thinking_logprobs, "answers": batch.answer_logprobs}
        before = dataclasses.replace(before, **sampler)
    policy_loss, policy_metrics = policy_terms(scores, before, batch, normalizers, spec=spec)
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
        policy, value_head, scores.question, batch, normalizers, spec=spec
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
    return jnp.asarray(total), jax.lax.stop_gradient(metrics)
