"""Log-probabilities of given responses, in one pass and without a value or a gradient."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.learner.spec import LearnerSpec, Params, phi_of
from bacr_jax.model import logprobs, qwen2


@functools.partial(jax.jit, static_argnames="spec")
def response_logprobs(
    params: Params,
    tokens: Int[Array, "B T"],
    prompt_lengths: Int[Array, "B"],
    lengths: Int[Array, "B"],
    budgets: Int[Array, "B"],
    allowed_tokens: Bool[Array, "V"],
    *,
    spec: LearnerSpec,
) -> Float[Array, "B T"]:
    """Log pi(token t | tokens before it, budget) under the distribution that is sampled from.

    Args:
      params: policy parameters.
      tokens: prompt and response of each row, padded on the right.
      prompt_lengths: tokens of the prompts.
      lengths: tokens of prompt and response.
      budgets: that the policy is told; a negative number: none.
      allowed_tokens: ids that can be drawn; all others have probability 0 (about -1e30).
      spec: model, conditioning, temperature, compute type.

    Returns:
      Nats; 0 outside of the responses.
    """
    phi, mask = phi_of(params, jnp.maximum(budgets, 0), spec), None
    if phi is not None:
        phi = phi * (budgets >= 0)[:, None]
        if spec.conditioning is not None and spec.conditioning.positions == "response":
            mask = jnp.arange(tokens.shape[1]) >= prompt_lengths[:, None]
    hidden = qwen2.forward(
        params,
        tokens,
        config=spec.model,
        lengths=lengths,
        budget_embedding=phi,
        conditioning=spec.conditioning,
        mask=mask,
        dtype=spec.dtype,
        implementation=spec.implementation,
        scan=spec.scan,
    )
    rows, width = tokens.shape
    found, _ = logprobs.token_logprobs(
        hidden[:, :-1].reshape(rows * (width - 1), -1),
        qwen2.output_head(params),
        tokens[:, 1:].reshape(-1),
        allowed_tokens=allowed_tokens,
        temperature=spec.temperature,
        chunk=spec.chunk,
    )
    at = jnp.arange(1, width)
    inside = (at >= prompt_lengths[:, None]) & (at < lengths[:, None])
    scores = jnp.where(inside, found.reshape(rows, width - 1), 0.0)
    return jnp.pad(scores, ((0, 0), (1, 0)))
