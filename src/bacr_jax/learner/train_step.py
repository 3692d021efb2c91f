"""Contains the jitted functions of the learner: updates, scores, values and value head training.

`updates` calls the functions for each minibatch of an iteration. `training/stages.py` calls
`question_values` and `fit_value`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import losses
from bacr_jax.learner import copies
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.objective import (
    LossNormalizers,
    Metrics,
    Minibatch,
    head_features,
    loss_normalizers,
    objective,
)
from bacr_jax.learner.spec import LearnerSpec, condition
from bacr_jax.learner.token_scores import TokenScores, score_tokens
from bacr_jax.model import qwen2, value
from bacr_jax.parallel import constrain, constrain_rows
from bacr_jax.types import Params, Prompts, pytree


@pytree
class TrainState:
    """The parameters and optimizer states that an update changes.

    The state does not contain frozen base weights (`model.adapters`). Functions receive the frozen
    weights in a separate argument `frozen`, so that gradients, optimizer moments and checkpoints
    can't contain them.

    Attributes:
      policy: trained parameters of the policy, as fp32 master weights.
      head: parameters of the value head. None if the method has no value head.
      policy_opt, head_opt: optimizer states of the policy and of the value head.
      updates: number of policy updates.
      skipped: number of updates that were skipped because a gradient was non-finite.
      skipped_in_a_row: number of updates skipped since the last finite gradient.
    """

    policy: Params
    head: Params | None
    policy_opt: Any
    head_opt: Any
    updates: Int[Array, ""]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]


def init_state(
    policy: Params,
    value_head: Params | None,
    policy_tx: optax.GradientTransformation,
    head_tx: optax.GradientTransformation,
) -> TrainState:
    """Creates a train state with initialized optimizer states."""
    return TrainState(
        policy=policy,
        head=value_head,
        # Use jit, because XLA would otherwise compile a separate program for each shape of an
        # optimizer moment.
        policy_opt=jax.jit(policy_tx.init)(policy),
        head_opt=None if value_head is None else jax.jit(head_tx.init)(value_head),
        updates=jnp.int32(0),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
    )


@pytree
class Gradients:
    """The gradients and metrics of a batch, summed over the micro-batches processed so far.

    With several data-parallel copies of the policy (mesh.data), `policy` and `head` have a leading
    axis for the copies.

    Attributes:
      policy: gradients of the trained parameters.
      head: gradients of the value head. None if the method has no value head.
      metrics: metrics of the objective.
    """

    policy: Params
    head: Params | None
    metrics: Metrics


def _apply(
    tx: optax.GradientTransformation, grads: Params, opt: Any, params: Params, keep: Bool[Array, ""]
) -> tuple[Params, Any]:
    """Takes an optimizer step, or returns the old parameters and state if `keep` is False.

    Args:
      keep: True to keep the result of the step.
    """

    def step() -> tuple[Params, Any]:
        updates, new_opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), new_opt

    # Use a branch instead of a selection, because a selection needs both states at once.
    return jax.lax.cond(keep, step, lambda: (params, opt))


def gradients(
    state: TrainState,
    minibatch: Minibatch,
    normalizers: LossNormalizers,
    allowed_tokens: Bool[Array, "V"],
    frozen: Params | None = None,
    *,
    spec: LearnerSpec,
) -> tuple[Gradients, TokenScores]:
    """Computes the gradients of the loss (paper Eq. 16) on a part of a batch.

    With several data-parallel copies of the policy, each copy computes gradients on different
    traces (`copies`).

    Args:
      state: train state.
      minibatch, normalizers, allowed_tokens: as for `objective`.
      frozen: parameters of the policy that are not trained. None if all are trained.
      spec: static settings of the learner.

    Returns:
      The gradients, and the scores of the tokens under the policy.
    """

    def differentiate(rows: Minibatch, spec: LearnerSpec) -> tuple[Gradients, TokenScores]:
        def loss(policy: Params, head: Params | None) -> tuple[Array, tuple[Metrics, TokenScores]]:
            all_params = {**(frozen or {}), **policy}
            value, metrics, scores = objective(
                all_params, head, rows, normalizers, allowed_tokens, spec=spec
            )
            return value, (metrics, scores)

        differentiated = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, (metrics, scores)), grads = differentiated(state.policy, state.head)
        policy, value_head = constrain(grads, spec.mesh)
        return Gradients(policy, value_head, metrics), scores

    if copies.num_copies(spec) == 1:
        return differentiate(minibatch, spec)
    copy_spec = dataclasses.replace(spec, row_axes=("fsdp",))
    rows_of_copies = copies.split(minibatch, spec)
    grads, scores = jax.vmap(lambda rows: differentiate(rows, copy_spec), spmd_axis_name="data")(
        rows_of_copies
    )
    metrics = jax.tree.map(lambda x: x.sum(0), grads.metrics)
    return dataclasses.replace(grads, metrics=metrics), _joined_parts(scores, spec)


def apply_update(
    state: TrainState,
    grads: Gradients,
    *,
    spec: LearnerSpec,
    policy_tx: optax.GradientTransformation,
    head_tx: optax.GradientTransformation,
    update_policy: Bool[Array, ""] | bool = True,
    has_tokens: Bool[Array, ""] | bool = True,
) -> tuple[TrainState, Metrics]:
    """Takes one Adam step, or skips and counts the step if a gradient is non-finite.

    If no token contributes to the policy loss, only the value head is updated, because Adam's
    moments would change the policy even with zero gradients. The metric `policy/empty_minibatches`
    counts these updates.

    Args:
      state: train state.
      grads: gradients of the whole batch.
      spec: static settings of the learner.
      policy_tx, head_tx: optimizers of the policy and of the value head.
      update_policy: False updates only the value head.
      has_tokens: True if any token contributes to the policy loss.

    Returns:
      The new state and the metrics of the update.
    """
    policy_grads, head_grads = copies.summed((grads.policy, grads.head), spec)
    norm = optax.global_norm(policy_grads)
    finite = jnp.isfinite(norm)
    finite = finite & jnp.isfinite(optax.global_norm(head_grads))
    moves = finite & update_policy & has_tokens
    policy, policy_opt = _apply(policy_tx, policy_grads, state.policy_opt, state.policy, moves)
    value_head = state.head
    head_opt = state.head_opt
    if value_head is not None:
        value_head, head_opt = _apply(head_tx, head_grads, head_opt, value_head, finite)
    new = TrainState(
        policy=policy,
        head=value_head,
        policy_opt=policy_opt,
        head_opt=head_opt,
        updates=state.updates + moves,
        skipped=state.skipped + ~finite,
        skipped_in_a_row=jnp.where(finite & has_tokens, 0, state.skipped_in_a_row + ~finite),
    )
    new = constrain(new, spec.mesh)
    return new, {
        **grads.metrics,
        "policy/grad_norm": norm,
        "policy/skipped": new.skipped,
        "policy/empty_minibatches": 1.0 - jnp.asarray(has_tokens, jnp.float32),
    }


# Applies gradients that were accumulated over several calls of `accumulate`.
apply_gradients = jax.jit(
    apply_update, static_argnames=("spec", "policy_tx", "head_tx"), donate_argnums=(0,)
)


def _split(rows: Any, parts: int, spec: LearnerSpec) -> Any:
    """Splits the leading axis B into [parts, B / parts].

    The second axis is sharded over devices, so that every device has rows of every part.
    """

    def split_leaf(x: Array) -> Array:
        size = x.shape[0] // parts
        return x.reshape(parts, size, *x.shape[1:])

    return constrain_rows(jax.tree.map(split_leaf, rows), spec.mesh, axis=1)


def _joined_parts(scores: TokenScores, spec: LearnerSpec) -> TokenScores:
    """Joins the first two axes of scores [parts, B / parts, ...], which is the inverse of a split.

    The traces of the result are sharded over devices.
    """
    joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), scores)
    return constrain_rows(joined, spec.mesh)


@functools.partial(
    jax.jit,
    static_argnames=("spec", "policy_tx", "head_tx", "micro_batches", "keep_scores"),
    donate_argnums=(0,),
)
def train_step(
    state: TrainState,
    minibatch: Minibatch,
    allowed_tokens: Bool[Array, "V"],
    frozen: Params | None = None,
    *,
    spec: LearnerSpec,
    policy_tx: optax.GradientTransformation,
    head_tx: optax.GradientTransformation,
    micro_batches: int = 1,
    update_policy: Bool[Array, ""] | bool = True,
    keep_scores: bool = False,
) -> tuple[TrainState, Metrics, TokenScores | None]:
    """Takes one Adam step on a batch, with gradients accumulated over micro-batches.

    Args:
      state: train state. Donated.
      minibatch: the batch, with scores under earlier policies.
      allowed_tokens: True for ids that can be sampled.
      frozen: parameters of the policy that are not trained. None if all are trained.
      spec: static settings of the learner.
      policy_tx, head_tx: optimizers of the policy and of the value head.
      micro_batches: number of micro-batches. It must divide the number of traces.
      update_policy: False updates only the value head (value warm-up).
      keep_scores: True to return the scores of the tokens.

    Returns:
      The new state, the metrics of the update, and the scores of the tokens under the policy before
      the step. The scores are None if `keep_scores` is False.
    """
    normalizers = loss_normalizers(minibatch.batch, spec=spec)

    def differentiate(rows: Minibatch) -> tuple[Gradients, TokenScores | None]:
        grads, scores = gradients(state, rows, normalizers, allowed_tokens, frozen, spec=spec)
        return grads, scores if keep_scores else None

    def add(total: Gradients, rows: Minibatch) -> tuple[Gradients, TokenScores | None]:
        grads, scores = differentiate(rows)
        return jax.tree.map(jnp.add, total, grads), scores

    if micro_batches == 1:
        grads, scores = differentiate(minibatch)
    else:
        split = _split(minibatch, micro_batches, spec)
        first = jax.tree.map(lambda x: x[0], split)
        zeros = no_gradients(state, first, normalizers, allowed_tokens, frozen, spec=spec)
        grads, scores_of_parts = jax.lax.scan(add, zeros, split)
        scores = None if scores_of_parts is None else _joined_parts(scores_of_parts, spec)
    state, metrics = apply_update(
        state,
        grads,
        spec=spec,
        policy_tx=policy_tx,
        head_tx=head_tx,
        update_policy=update_policy,
        has_tokens=normalizers.has_tokens,
    )
    return state, metrics, scores


@functools.partial(jax.jit, static_argnames=("spec", "keep_scores"), donate_argnums=(0,))
def accumulate(
    grads: Gradients,
    state: TrainState,
    minibatch: Minibatch,
    normalizers: LossNormalizers,
    allowed_tokens: Bool[Array, "V"],
    frozen: Params | None = None,
    *,
    spec: LearnerSpec,
    keep_scores: bool = False,
) -> tuple[Gradients, TokenScores | None]:
    """Adds the gradients of a micro-batch to `grads`, which is donated.

    The micro-batches of a sum may have different shapes. The other arguments are as for
    `gradients`.

    Args:
      keep_scores: True to return the scores of the tokens.

    Returns:
      The sum, and the scores of the tokens under the policy, or None without `keep_scores`.
    """
    added, scores = gradients(state, minibatch, normalizers, allowed_tokens, frozen, spec=spec)
    total = jax.tree.map(jnp.add, grads, added)
    return total, scores if keep_scores else None


@functools.partial(jax.jit, static_argnames=("spec",))
def no_gradients(
    state: TrainState,
    minibatch: Minibatch,
    normalizers: LossNormalizers,
    allowed_tokens: Bool[Array, "V"],
    frozen: Params | None = None,
    *,
    spec: LearnerSpec,
) -> Gradients:
    """Returns zero gradients, to which `accumulate` adds the gradients of micro-batches.

    The arguments are as for `gradients`.
    """
    shapes, _ = jax.eval_shape(
        functools.partial(gradients, spec=spec),
        state,
        minibatch,
        normalizers,
        allowed_tokens,
        frozen,
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return copies.laid_out(zeros, spec)


@functools.partial(jax.jit, static_argnames=("spec", "micro_batches"))
def score_batch(
    policy: Params,
    batch: Batch,
    allowed_tokens: Bool[Array, "V"],
    *,
    spec: LearnerSpec,
    micro_batches: int = 1,
) -> TokenScores:
    """Computes log-probabilities and entropies of a batch's sampled tokens under a policy.

    Args:
      policy: all parameters of the policy.
      batch: the traces.
      allowed_tokens: True for ids that can be sampled.
      spec: static settings of the learner.
      micro_batches: number of micro-batches that are scored one after the other.
    """

    def score(rows: Batch) -> TokenScores:
        return score_tokens(policy, rows, allowed_tokens, spec=spec)

    if micro_batches == 1:
        return score(batch)
    scores = jax.lax.map(score, _split(batch, micro_batches, spec))
    return _joined_parts(scores, spec)


@functools.partial(jax.jit, static_argnames=("spec",))
def question_values(
    policy: Params,
    value_head: Params,
    prompts: Prompts,
    budgets: Int[Array, "B"],
    cuts: Int[Array, "B M"],
    *,
    spec: LearnerSpec,
) -> tuple[Float[Array, "B M"], Float[Array, "B M F"]]:
    """Returns the predictions of the value head at each truncation point, and its input features.

    The model only processes the prompts, so the predictions do not depend on the sampled tokens.

    Args:
      policy: all parameters of the policy.
      value_head: parameters of the value head.
      prompts: prompt of each trace, with the position of the question.
      budgets: budget of each trace in tokens. Negative for traces without a budget.
      cuts: number of thinking tokens before each truncation point.
      spec: static settings of the learner.
    """
    no_response = jnp.zeros(prompts.tokens.shape, bool)
    hidden = qwen2.forward(
        policy,
        prompts.tokens,
        config=spec.model,
        lengths=prompts.lengths,
        conditioned=condition(policy, budgets, no_response, spec),
        # Rematerialization is only needed for gradients.
        compute=dataclasses.replace(spec, remat="none"),
    )
    question = value.pool_question(hidden, prompts.question_start, prompts.question_end)
    features = head_features(policy, question, budgets, cuts, spec=spec)
    values = value.values(value_head, features)
    # Replicate the results on all devices, because the host reads them.
    return constrain((values, features), spec.mesh)


@functools.partial(jax.jit, static_argnames=("head_tx", "num_steps"))
def fit_value(
    value_head: Params,
    head_opt: Any,
    features: Float[Array, "B M F"],
    value_targets: Float[Array, "B M"],
    *,
    head_tx: optax.GradientTransformation,
    num_steps: int,
) -> tuple[Params, Any]:
    """Takes additional Adam steps on the loss of the value head (paper Eq. 12).

    The head learns little from the single step per iteration that it takes together with the
    policy. Steps with non-finite gradients are skipped.

    Args:
      value_head: parameters of the value head.
      head_opt: optimizer state of the value head.
      features: input features of the value head, from `question_values`.
      value_targets: reward R at each truncation point, which V predicts.
      head_tx: optimizer of the value head.
      num_steps: number of Adam steps.

    Returns:
      The new parameters and optimizer state of the head.
    """

    def loss(params: Params) -> Array:
        return losses.value_loss(value.values(params, features), value_targets).mean()

    def body(_: Any, carry: tuple[Params, Any]) -> tuple[Params, Any]:
        params, opt = carry
        grads = jax.grad(loss)(params)
        finite = jnp.isfinite(optax.global_norm(grads))
        return _apply(head_tx, grads, opt, params, finite)

    return jax.lax.fori_loop(0, num_steps, body, (value_head, head_opt))
