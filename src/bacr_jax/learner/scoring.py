"""Computes the log-probabilities of given responses in one forward pass, without gradients.

The evaluation, diagnostics and the check of vLLM servers call this module.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.learner.spec import LearnerSpec, condition
from bacr_jax.model import logprobs, qwen2
from bacr_jax.parallel import constrain, constrain_rows, row_shards
from bacr_jax.types import Params, Trunks

# Number of rows scored per call and device, so that the memory does not grow with the size of the
# rollout.
_ROWS = 8


def _logprob(scores: Float[Array, "R V"], ids: Int[Array, "R"]) -> Float[Array, "R"]:
    """Returns the log-probabilities of tokens, in nats."""
    return logprobs.logprob_and_entropy(scores, ids)[0]


@functools.partial(jax.jit, static_argnames=("spec", "of_scores"))
def response_logprobs(
    params: Params,
    tokens: Int[Array, "B T"],
    prompt_lengths: Int[Array, "B"],
    lengths: Int[Array, "B"],
    budgets: Int[Array, "B"],
    allowed_tokens: Bool[Array, "V"],
    *,
    spec: LearnerSpec,
    of_scores: Callable[[Array, Array], Float[Array, "R"]] = _logprob,
) -> Float[Array, "B T"]:
    """Returns log pi(token t | previous tokens, budget) under the sampling distribution.

    Args:
      params: parameters of the policy.
      tokens: prompt and response of each row, right-padded. The number of rows must be divisible by
        `parallel.row_shards` of the mesh.
      prompt_lengths: number of prompt tokens of each row.
      lengths: number of tokens of each row, including the prompt.
      budgets: budget in tokens that the policy receives as input. Negative for rows without a
        budget.
      allowed_tokens: True for ids that can be sampled. All other ids have a log-probability of
        about -1e30.
      spec: static settings of the learner.
      of_scores: function that computes the result from the logits and the token ids. The default
        computes log-probabilities (see `logprobs.map_logits`).

    Returns:
      Log-probabilities in nats. 0 outside the responses.
    """
    positions = jnp.arange(tokens.shape[1])
    response = positions >= prompt_lengths[:, None]
    hidden = qwen2.forward(
        params,
        tokens,
        config=spec.model,
        lengths=lengths,
        conditioned=condition(params, budgets, response, spec),
        compute=dataclasses.replace(spec, remat="none"),
    )
    rows, width = tokens.shape
    before = hidden[:, :-1]
    before = before.reshape(rows * (width - 1), -1)
    if spec.product_dtype is not None:
        before = before.astype(spec.product_dtype)
    scores = logprobs.map_logits(
        of_scores,
        before,
        qwen2.output_head(params),
        tokens[:, 1:].reshape(-1),
        allowed_tokens=allowed_tokens,
        temperature=spec.temperature,
        chunk=spec.chunk,
        mesh=spec.mesh,
    )
    inside = response & (positions < lengths[:, None])
    inside = inside[:, 1:]
    scores = jnp.where(inside, scores.reshape(rows, width - 1), 0.0)
    # The first token of a row has no predecessor and therefore no score.
    scores = jnp.pad(scores, ((0, 0), (1, 0)))
    # Replicate the result on all devices, because the host reads it.
    return constrain(scores, spec.mesh)


@functools.partial(jax.jit, static_argnames=("spec",))
def next_token_logprobs(
    params: Params,
    tokens: Int[Array, "B T"],
    prompt_lengths: Int[Array, "B"],
    lengths: Int[Array, "B"],
    budgets: Int[Array, "B"],
    allowed_tokens: Bool[Array, "V"],
    *,
    spec: LearnerSpec,
) -> Float[Array, "B V"]:
    """Returns the log-probabilities of all possible next tokens after each sequence (row), in nats.

    The arguments are the same as for `response_logprobs`. With several devices, the rows of the
    result are split over the devices.
    """
    positions = jnp.arange(tokens.shape[1])
    hidden = qwen2.forward(
        params,
        tokens,
        config=spec.model,
        lengths=lengths,
        conditioned=condition(params, budgets, positions >= prompt_lengths[:, None], spec),
        compute=dataclasses.replace(spec, remat="none"),
    )
    index = (lengths - 1)[:, None, None]
    last = jnp.take_along_axis(hidden, index, axis=1)[:, 0]
    if spec.product_dtype is not None:
        last = last.astype(spec.product_dtype)
    last = constrain_rows(last, spec.mesh)
    return logprobs.next_token_logprobs(
        last, qwen2.output_head(params), allowed_tokens, spec.temperature, spec.mesh
    )


def in_portions(
    of_rows: Callable[[np.ndarray], Array], rows: Int[np.ndarray, "n"], size: int
) -> Float[np.ndarray, "n ..."]:
    """Applies a function to `size` sequences (rows) at a time and concatenates the results.

    The last call repeats some of its rows to reach this size, so that the function is compiled for
    one size only.

    Args:
      of_rows: function that maps the indices of `size` rows to one result per row.
      rows: indices of all rows.
      size: number of rows per call.
    """
    results = []
    for start in range(0, len(rows), size):
        index = rows[start : start + size]
        result = np.asarray(of_rows(np.resize(index, size)))
        results.append(result[: len(index)])
    return np.concatenate(results)


def thinking_energies(
    params: Params, trunks: Trunks, allowed_tokens: Bool[Array, "V"], *, spec: LearnerSpec
) -> Float[np.ndarray, "B T"]:
    """Returns the squared norm of the score function of each thinking token.

        1 - 2 p + sum_v p(v)^2

    p is the probability of the sampled token, and v runs over the vocabulary. The score function is
    the gradient of the sampled token's log-probability with respect to the logits.

    Args:
      params: parameters of the policy.
      trunks: prompts with their sampled thinking. The policy receives `trunks.budgets` as input.
      allowed_tokens: True for ids that can be sampled.
      spec: static settings of the learner.

    Returns:
      Squared norm for each thinking token. Entries after the thinking are 0.
    """
    start = np.asarray(trunks.prompt_lengths)
    sampled = np.asarray(trunks.sampled)
    tokens = np.asarray(trunks.tokens)
    budgets = np.asarray(trunks.budgets)

    def score_rows(index: np.ndarray) -> Array:
        return response_logprobs(
            params,
            jnp.asarray(tokens[index]),
            jnp.asarray(start[index]),
            jnp.asarray((start + sampled)[index]),
            jnp.asarray(budgets[index]),
            allowed_tokens,
            spec=spec,
            of_scores=logprobs.score_energy,
        )

    num_rows = len(tokens)
    shards = row_shards(spec.mesh)
    rows_per_device = min(_ROWS, math.ceil(num_rows / shards))
    energies = in_portions(score_rows, np.arange(num_rows), rows_per_device * shards)
    index = np.arange(trunks.logprobs.shape[1])
    last = tokens.shape[1] - 1
    positions = np.minimum(start[:, None] + index, last)
    of_thinking = np.take_along_axis(energies, positions, 1)
    is_thinking = index < sampled[:, None]
    return np.where(is_thinking, of_thinking, 0.0).astype(np.float32)
