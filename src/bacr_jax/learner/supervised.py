"""Trains a model on given texts with next-token prediction, without budget conditioning.

`training/warmup.py` (supervised training before reinforcement learning) and
`training/rejection_sft.py` call this module and set the learning rate.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.token_scores import chunked_logprobs
from bacr_jax.model import qwen2
from bacr_jax.parallel import constrain, constrain_rows, row_shards
from bacr_jax.types import Params


def supervised_optimizer() -> optax.GradientTransformation:
    """Builds AdamW without a learning rate, which is passed to each step instead.

    A fixed schedule is not possible, because the warm-up decides during training when to decay the
    learning rate.
    """
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(0.01),
    )


def supervised_loss(
    params: Params, tokens: Int[Array, "B T"], loss_mask: Bool[Array, "B T"], *, spec: LearnerSpec
) -> Float[Array, ""]:
    """Returns the mean negative log-likelihood of the tokens in the loss mask, in nats.

    Each token is predicted from all tokens before it.
    """
    hidden = _hidden(params, tokens, spec)
    logp, _ = chunked_logprobs(
        hidden, qwen2.output_head(params), tokens[:, 1:], allowed_tokens=None, spec=spec
    )
    mask = loss_mask[:, 1:]
    total = -jnp.where(mask, logp, 0.0).sum()
    return total / jnp.maximum(mask.sum(), 1)


@functools.partial(jax.jit, static_argnames=("spec",))
def rows_right(
    params: Params, tokens: Int[Array, "B T"], judged: Bool[Array, "B T"], *, spec: LearnerSpec
) -> Bool[Array, "B"]:
    """Returns True for rows (texts) whose tokens in the mask `judged` are all predicted correctly.

    A token is predicted correctly if it is the most likely token, given the correct tokens before
    it. The logits of all positions are in memory at once, so the vocabulary must be small.

    Args:
      params: parameters of the policy.
      tokens: token ids of each row.
      judged: True for tokens that must be predicted correctly. The first token of a row is never
        checked.
      spec: static settings of the learner.
    """
    rows = tokens.shape[0]
    tokens, judged = _pad_to_mesh((tokens, judged), spec.mesh)
    hidden = _hidden(params, tokens, spec)
    most_likely = qwen2.logits(params, hidden).argmax(-1)
    is_right = most_likely == tokens[:, 1:]
    is_right = is_right | ~judged[:, 1:]
    # Replicated, because with several processes the host can't read shards of other processes.
    return constrain([is_right.all(1)[:rows]], spec.mesh)[0]


def _hidden(params: Params, tokens: Int[Array, "B T"], spec: LearnerSpec) -> Array:
    """Returns the final hidden states of all tokens except the last."""
    inputs = tokens[:, :-1]
    return qwen2.forward(params, inputs, config=spec.model, compute=spec)


def _pad_to_mesh(rows: tuple[Array, ...], mesh: Mesh | None) -> tuple[Array, ...]:
    """Adds rows of zeros until the mesh divides the number of rows, and shards the rows over it.

    The added rows have no target tokens, so they do not contribute to the loss.

    Args:
      rows: arrays with the same number of rows.
      mesh: devices. None for a single device, in which case nothing changes.
    """
    num_added = -rows[0].shape[0] % row_shards(mesh)
    padding = ((0, num_added), (0, 0))
    padded = tuple(jnp.pad(x, padding) for x in rows)
    return constrain_rows(padded, mesh)


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
    """Takes one AdamW step on the supervised loss.

    Args:
      params: trained parameters. Donated.
      opt_state: state of `tx`. Donated.
      frozen: parameters of the policy that are not trained.

    Returns:
      The new parameters, the new optimizer state, and the loss before the step.
    """
    tokens, loss_mask = _pad_to_mesh((tokens, loss_mask), spec.mesh)

    def loss_of(params: Params) -> Float[Array, ""]:
        return supervised_loss({**(frozen or {}), **params}, tokens, loss_mask, spec=spec)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    updates = jax.tree.map(lambda u: -learning_rate * u, updates)
    new_params, new_opt_state = constrain(
        (optax.apply_updates(params, updates), opt_state), spec.mesh
    )
    return new_params, new_opt_state, loss
