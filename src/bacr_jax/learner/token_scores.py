"""Computes the log-probabilities of all sampled tokens of a batch, which can be differentiated.

A single forward pass processes all trunks and branches. A trunk is a prompt with its thinking, and
a branch is an answer that continues the thinking from a truncation point (cut).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.learner.batch import Batch, joined
from bacr_jax.learner.spec import LearnerSpec, condition
from bacr_jax.model import logprobs, qwen2, value
from bacr_jax.parallel import constrain_rows, row_shards
from bacr_jax.types import Params, pytree


@pytree
class TokenScores:
    """The log-probabilities and entropies of the sampled tokens of a batch under a policy.

    Attributes:
      thinking, answers: log-probability of each token, in nats.
      thinking_entropy, answers_entropy: entropy of the policy's distribution at each token, in
        nats.
    """

    thinking: Float[Array, "B T"]
    answers: Float[Array, "B M T"]
    thinking_entropy: Float[Array, "B T"]
    answers_entropy: Float[Array, "B M T"]


def chunked_logprobs(
    states: Float[Array, "B T D"],
    lm_head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    allowed_tokens: Bool[Array, "V"] | None,
    spec: LearnerSpec,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes log-probabilities and entropies in chunks, to limit the memory for logits.

    Each chunk has `spec.chunk` tokens per device. It contains a few tokens of each of the B traces,
    so that traces stay on their devices. Chunks are recomputed in the backward pass.

    Args:
      states: final hidden states that predict the targets.
      lm_head: output matrix of the model.
      targets: token ids.
      allowed_tokens: True for ids that can be sampled. None allows all ids.

    Returns:
      Log-probabilities and entropies, in nats.
    """
    b, t, _ = states.shape
    states = states if spec.product_dtype is None else states.astype(spec.product_dtype)
    lm_head, copy = logprobs.gathered_head(lm_head, states.dtype, spec.mesh)
    tokens_per_chunk = spec.chunk * row_shards(spec.mesh, spec.row_axes)
    width = min(max(tokens_per_chunk // b, 1), t)

    def score_chunk(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        states, ids = constrain_rows(inputs, spec.mesh, over=spec.row_axes)
        rows = states.reshape(b * width, -1)
        scores = logprobs.masked_logits(rows, lm_head, allowed_tokens, spec.temperature, copy)
        logp_and_entropy = logprobs.logprob_and_entropy(scores, ids.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(b, width), logp_and_entropy)

    return logprobs.by_chunks(score_chunk, (states, targets), width, axis=1)


def _answer_targets(
    branch: Float[Array, "B M A D"] | Float[Array, "B F D"], batch: Batch
) -> tuple[Float[Array, "B F D"], Int[Array, "B F"], Callable[[Array], Array]]:
    """Selects the hidden states that predict answer tokens.

    A branch consists of a forced suffix of n tokens and an answer. The state at position n - 1 + t
    of a branch predicts answer token t. If branches are packed without padding (`Batch.packing`),
    the states at all positions are selected.

    Args:
      branch: final hidden states of the branches, unpacked or packed.

    Returns:
      The states, the ids of the tokens that they predict, and a function that maps the scores of
      the states to scores of the answer tokens [B, M A].
    """
    b, m, a = batch.answer_logprobs.shape
    within = batch.forced[..., None] + jnp.arange(a)
    if batch.packing is None:
        predicting = (within - 1)[..., None]
        states = jnp.take_along_axis(branch, predicting, axis=2, mode="clip")
        tokens = jnp.take_along_axis(batch.branches, within, axis=2, mode="clip")
        states = states.reshape(b, m * a, states.shape[-1])
        return states, tokens.reshape(b, m * a), lambda scores: scores
    branch_tokens = batch.branches.reshape(b, -1)
    tokens = jnp.take_along_axis(branch_tokens, batch.packing + 1, axis=1, mode="clip")
    lengths = batch.branch_lengths
    start = jnp.cumsum(lengths, axis=1) - lengths
    index = start[..., None] + within - 1
    index = index.reshape(b, -1)
    return branch, tokens, lambda scores: jnp.take_along_axis(scores, index, axis=1, mode="clip")


def score_tokens(
    params: Params, batch: Batch, allowed_tokens: Bool[Array, "V"], *, spec: LearnerSpec
) -> TokenScores:
    """Computes log-probabilities and entropies of all sampled tokens in one forward pass.

    The arguments are as for `score_tokens_and_questions`.
    """
    scores, _ = score_tokens_and_questions(params, batch, allowed_tokens, spec=spec)
    return scores


def score_tokens_and_questions(
    params: Params, batch: Batch, allowed_tokens: Bool[Array, "V"], *, spec: LearnerSpec
) -> tuple[TokenScores, Float[Array, "B D"]]:
    """Computes `score_tokens`, and the inputs of the value head, in one forward pass.

    The state at position prompt_length - 1 + t of a trunk (prompt and thinking) predicts thinking
    token t. The state at position n - 1 + t of a branch (forced suffix of n tokens and answer)
    predicts answer token t. Forced tokens are used as inputs, but are not scored.

    Args:
      params: all parameters of the policy.
      batch: the traces.
      allowed_tokens: True for ids that can be sampled.
      spec: static settings of the learner.

    Returns:
      The scores, and the pooled hidden state h_q of each question in fp32, an input of the value
      head.
    """
    positions = jnp.arange(batch.trunk.shape[1])
    response = positions >= batch.prompt_lengths[:, None]
    tree = qwen2.Tree(
        batch.trunk,
        batch.branches,
        batch.context,
        batch.packing,
        lengths=jnp.maximum(batch.prompt_lengths + batch.sampled, 1),
    )
    conditioned = condition(params, batch.budgets, response, spec)
    if batch.real_tokens is not None:
        states = qwen2.tree_states(
            params,
            tree,
            config=spec.model,
            conditioned=conditioned,
            real=batch.real_tokens,
            compute=spec,
        )
        return _score_listed_tokens(params, states, batch, allowed_tokens, spec)
    trunk, branch = qwen2.forward_tree(
        params, tree, config=spec.model, conditioned=conditioned, compute=spec
    )
    b, t = batch.thinking_mask.shape
    _, m, a = batch.answer_mask.shape
    index = batch.prompt_lengths[:, None] + jnp.arange(t)
    predicting = (index - 1)[..., None]
    thinking_states = jnp.take_along_axis(trunk, predicting, axis=1, mode="clip")
    thinking_tokens = jnp.take_along_axis(batch.trunk, index, axis=1, mode="clip")
    answer_states, answer_tokens, unpack = _answer_targets(branch, batch)
    logp, entropy = chunked_logprobs(
        jnp.concatenate([thinking_states, answer_states], axis=1),
        qwen2.output_head(params),
        jnp.concatenate([thinking_tokens, answer_tokens], axis=1),
        allowed_tokens=allowed_tokens,
        spec=spec,
    )

    def split(x: Array) -> tuple[Array, Array]:
        thinking = x[:, :t]
        answers = unpack(x[:, t:])
        return thinking, answers.reshape(b, m, a)

    question = value.pool_question(trunk, batch.question_start, batch.question_end)
    return TokenScores(*split(logp), *split(entropy)), question


def _score_listed_tokens(
    params: Params,
    states: Float[Array, "1 U D"],
    batch: Batch,
    allowed_tokens: Bool[Array, "V"],
    spec: LearnerSpec,
) -> tuple[TokenScores, Float[Array, "B D"]]:
    """Scores the sampled tokens of a batch without padding (`Batch.real_tokens`).

    Scores of positions without a sampled token are 0. The results are as for
    `score_tokens_and_questions`.

    Args:
      states: final hidden states of all tokens that are not padding.
    """
    real = batch.real_tokens
    scored = batch.scored
    assert real is not None
    b, s = batch.trunk.shape
    _, m, width = batch.branches.shape
    t = batch.thinking_mask.shape[1]
    a = batch.answer_mask.shape[2]
    # Index of each potentially sampled token in the concatenated positions of prompt, thinking and
    # answers.
    thinking_index = batch.prompt_lengths[:, None] + jnp.arange(t)
    thinking_index = jnp.minimum(thinking_index, s - 1)
    within = batch.forced[..., None] + jnp.arange(a)
    within = jnp.minimum(within, width - 1)
    answer_index = width * jnp.arange(m)[:, None] + within
    answer_index = s + answer_index.reshape(b, m * a)
    index = jnp.concatenate([thinking_index, answer_index], axis=1)
    previous = jnp.maximum(index - 1, 0)
    slots = jnp.take_along_axis(real.slot, previous, axis=1)
    before = slots.reshape(-1)[scored]
    branches = batch.branches.reshape(b, -1)
    rows = jnp.concatenate([batch.trunk, branches], axis=1)
    tokens = jnp.take_along_axis(rows, index, axis=1)
    tokens = tokens.reshape(-1)[scored]
    logp, entropy = chunked_logprobs(
        states[:, before],
        qwen2.output_head(params),
        tokens[None],
        allowed_tokens=allowed_tokens,
        spec=spec,
    )
    mask = joined(batch.thinking_mask, batch.answer_mask)
    rank = jnp.cumsum(mask.reshape(-1)) - 1
    rank = rank.reshape(mask.shape)

    def split(x: Array) -> tuple[Array, Array]:
        scores = jnp.where(mask, x[0][rank], 0.0)
        thinking = scores[:, :t]
        answers = scores[:, t:]
        return thinking, answers.reshape(b, m, a)

    trunk = real.spread(states)[:, :s]
    question = value.pool_question(trunk, batch.question_start, batch.question_end)
    return TokenScores(*split(logp), *split(entropy)), question
