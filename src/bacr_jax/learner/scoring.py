"""Scores of given responses, in one pass and without a value or a gradient."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.learner.spec import LearnerSpec, condition
from bacr_jax.model import logprobs, qwen2
from bacr_jax.types import Params, Trunks

# Rows whose thinking is scored in one call: what a pass holds must not grow with a rollout.
_ROWS = 8


def _logprob(scores: Float[Array, "R V"], ids: Int[Array, "R"]) -> Float[Array, "R"]:
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
    """Log pi(token t | tokens before it, budget) under the distribution that is sampled from.

    Args:
      tokens: prompt and response of each row, padded on the right.
      budgets: that the policy is told; a negative number: none.
      allowed_tokens: ids that can be drawn; all others have probability 0 (about -1e30).
      of_scores: another number of each token (`logprobs.of_tokens`).

    Returns:
      Nats; 0 outside of the responses.
    """
    at = jnp.arange(tokens.shape[1])
    response = at >= prompt_lengths[:, None]
    hidden = qwen2.forward(
        params,
        tokens,
        config=spec.model,
        lengths=lengths,
        conditioned=condition(params, budgets, response, spec),
        compute=dataclasses.replace(spec, remat="none", mesh=None),
    )
    rows, width = tokens.shape
    before = hidden[:, :-1].reshape(rows * (width - 1), -1)
    found = logprobs.of_tokens(
        of_scores,
        before if spec.product_dtype is None else before.astype(spec.product_dtype),
        qwen2.output_head(params),
        tokens[:, 1:].reshape(-1),
        allowed_tokens=allowed_tokens,
        temperature=spec.temperature,
        chunk=spec.chunk,
    )
    inside = (response & (at < lengths[:, None]))[:, 1:]
    return jnp.pad(jnp.where(inside, found.reshape(rows, width - 1), 0.0), ((0, 0), (1, 0)))


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
    """Returns log pi of every token after each row, in nats.

    Arguments are those of `response_logprobs`.
    """
    at = jnp.arange(tokens.shape[1])
    hidden = qwen2.forward(
        params,
        tokens,
        config=spec.model,
        lengths=lengths,
        conditioned=condition(params, budgets, at >= prompt_lengths[:, None], spec),
        compute=dataclasses.replace(spec, remat="none", mesh=None),
    )
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    if spec.product_dtype is not None:
        last = last.astype(spec.product_dtype)
    return logprobs.next_token_logprobs(
        last, qwen2.output_head(params), allowed_tokens, spec.temperature
    )


def in_portions(
    of_rows: Callable[[np.ndarray], Array], rows: Int[np.ndarray, "n"], size: int
) -> Float[np.ndarray, "n ..."]:
    """What a function makes of rows, always called with `size` of them; some repeat at the end."""
    parts = []
    for start in range(0, len(rows), size):
        index = rows[start : start + size]
        parts.append(np.asarray(of_rows(np.resize(index, size)))[: len(index)])
    return np.concatenate(parts)


def thinking_energies(
    params: Params, trunks: Trunks, allowed_tokens: Bool[Array, "V"], *, spec: LearnerSpec
) -> Float[np.ndarray, "B T"]:
    """Squared norm of each thinking token's score in its logits, 1 - 2 p + sum_v p(v)^2.

    A few rows are computed at a time, as told `trunks.budgets`. 0 after a row's thinking.
    """
    start, sampled = np.asarray(trunks.prompt_lengths), np.asarray(trunks.sampled)
    tokens, budgets = np.asarray(trunks.tokens), np.asarray(trunks.budgets)

    def of_rows(index: np.ndarray) -> Array:
        given = (jnp.asarray(x[index]) for x in (tokens, start, start + sampled, budgets))
        energy = logprobs.score_energy
        return response_logprobs(params, *given, allowed_tokens, spec=spec, of_scores=energy)

    energies = in_portions(of_rows, np.arange(len(tokens)), min(_ROWS, len(tokens)))
    place = np.arange(trunks.logprobs.shape[1])
    own = np.take_along_axis(energies, np.minimum(start[:, None] + place, tokens.shape[1] - 1), 1)
    return np.where(place < sampled[:, None], own, 0.0).astype(np.float32)
