"""Supervised next-token training of the plain model: the warm-up before reinforcement learning."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.learner.objective import LearnerSpec, chunked_logprobs
from bacr_jax.model import qwen2
from bacr_jax.parallel import constrain, constrain_rows, row_shards
from bacr_jax.types import Params


def supervised_optimizer() -> optax.GradientTransformation:
    """AdamW before its learning rate, which each step is given: when to decay is measured."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(0.01),
    )


def supervised_loss(
    params: Params, tokens: Int[Array, "B T"], loss_mask: Bool[Array, "B T"], *, spec: LearnerSpec
) -> Float[Array, ""]:
    """Mean negative log-likelihood (nats) of the tokens in the mask, each given those before it."""
    hidden = _hidden(params, tokens, spec)
    logp, _ = chunked_logprobs(
        hidden, qwen2.output_head(params), tokens[:, 1:], allowed_tokens=None, spec=spec
    )
    mask = loss_mask[:, 1:]
    return -jnp.where(mask, logp, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@functools.partial(jax.jit, static_argnames=("spec",))
def rows_right(
    params: Params, tokens: Int[Array, "B T"], judged: Bool[Array, "B T"], *, spec: LearnerSpec
) -> Bool[Array, "B"]:
    """Which rows have the likeliest token wherever they are judged, each given those before it.

    Args:
      judged: which of them must be predicted; the first of a row can't be.
      spec: of the learner, for a small vocabulary: logits of all positions are there at once.
    """
    rows = tokens.shape[0]
    tokens, judged = _filled((tokens, judged), spec.mesh)
    hidden = _hidden(params, tokens, spec)
    likeliest = qwen2.logits(params, hidden).argmax(-1)
    right = (likeliest == tokens[:, 1:]) | ~judged[:, 1:]
    return right.all(1)[:rows]


def _hidden(params: Params, tokens: Int[Array, "B T"], spec: LearnerSpec) -> Array:
    """Last hidden states of all tokens but the last."""
    return qwen2.forward(params, tokens[:, :-1], config=spec.model, compute=spec)


def _filled(rows: tuple[Array, ...], mesh: Mesh | None) -> tuple[Array, ...]:
    """Rows split over the mesh, filled up to a number that it divides with zeros (no target)."""
    pad = -rows[0].shape[0] % row_shards(mesh)
    return constrain_rows(tuple(jnp.pad(x, ((0, pad), (0, 0))) for x in rows), mesh)


@functools.partial(jax.jit, static_argnames=("spec", "tx"), donate_argnums=(0, 1))
def supervised_step(
    params: Params,
    opt_state: Any,
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    learning_rate: Float[Array, ""] | float,
    frozen: Params | None = None,
    *,
    spec: LearnerSpec,
    tx: optax.GradientTransformation,
) -> tuple[Params, Any, Float[Array, ""]]:
    """One AdamW step; trained parameters and optimizer state are donated, `frozen` ones are not."""
    tokens, loss_mask = _filled((tokens, loss_mask), spec.mesh)

    def loss_of(params: Params) -> Float[Array, ""]:
        return supervised_loss({**(frozen or {}), **params}, tokens, loss_mask, spec=spec)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    updates = jax.tree.map(lambda u: -learning_rate * u, updates)
    new = constrain((optax.apply_updates(params, updates), opt_state), spec.mesh)
    return *new, loss
