"""One update of the policy and the value head, and the value head's own extra steps."""

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
    LearnerSpec,
    LossNormalizers,
    Metrics,
    Minibatch,
    TokenScores,
    head_features,
    loss_normalizers,
    objective,
    score_tokens,
)
from bacr_jax.learner.spec import condition
from bacr_jax.model import qwen2, value
from bacr_jax.parallel import constrain, constrain_rows
from bacr_jax.types import Params, Prompts, pytree


@pytree
class TrainState:
    """Everything an update changes.

    A frozen base (`model.adapters`) is not in it: every function that needs it takes it as
    `frozen`, so that no gradient, moment or checkpoint can hold it.

    Attributes:
      policy: policy parameters that are trained, fp32 masters.
      head: value head parameters; None when the method has none.
      skipped: updates skipped because a gradient was not finite.
      skipped_in_a_row: those since the last one whose gradient was finite.
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
    """Fresh optimizer states around given parameters."""
    return TrainState(
        policy=policy,
        head=value_head,
        # Each one program, where moment by moment it would be one for each shape.
        policy_opt=jax.jit(policy_tx.init)(policy),
        head_opt=None if value_head is None else jax.jit(head_tx.init)(value_head),
        updates=jnp.int32(0),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
    )


@pytree
class Gradients:
    """Sums over the micro-batches seen so far.

    Attributes:
      head: gradients of the value head; None without one. With several data-parallel copies
        (mesh.data) both are each copy's own, with a leading axis of copies.
    """

    policy: Params
    head: Params | None
    metrics: Metrics


def _apply(
    tx: optax.GradientTransformation, grads: Params, opt: Any, params: Params, keep: Bool[Array, ""]
) -> tuple[Params, Any]:
    """An optimizer step, undone entirely where `keep` is False."""
    updates, new_opt = tx.update(grads, opt, params)
    new = optax.apply_updates(params, updates)
    return optax.tree.where(keep, (new, new_opt), (params, opt))


def gradients(
    state: TrainState,
    minibatch: Minibatch,
    normalizers: LossNormalizers,
    allowed_tokens: Bool[Array, "V"],
    frozen: Params | None = None,
    *,
    spec: LearnerSpec,
) -> Gradients:
    """Gradients of Eq. 16 on part of a batch; see `objective` for the arguments.

    Data-parallel copies take rows of their own and keep the policy's gradients apart (`copies`).
    """

    def part(rows: Minibatch, spec: LearnerSpec) -> Gradients:
        def loss(policy: Params, head: Params | None) -> tuple[Array, Metrics]:
            whole = {**(frozen or {}), **policy}
            return objective(whole, head, rows, normalizers, allowed_tokens, spec=spec)

        (_, metrics), (policy, value_head) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            state.policy, state.head
        )
        policy, value_head = constrain((policy, value_head), spec.mesh)
        return Gradients(policy, value_head, metrics)

    if copies.num_copies(spec) == 1:
        return part(minibatch, spec)
    own = dataclasses.replace(spec, row_axes=("fsdp",))
    of_copies = copies.split(minibatch, spec)
    each = jax.vmap(lambda rows: part(rows, own), spmd_axis_name="data")(of_copies)
    return dataclasses.replace(each, metrics=jax.tree.map(lambda x: x.sum(0), each.metrics))


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
    """One Adam step, or none and a count where a gradient is not finite.

    Without a token in the loss, which is counted too, the value head alone learns: Adam would move
    the policy by its moments.
    """
    of_policy, of_head = copies.summed((grads.policy, grads.head), spec)
    norm = optax.global_norm(of_policy)
    finite = jnp.isfinite(norm) & jnp.isfinite(optax.global_norm(of_head))
    moves = finite & update_policy & has_tokens
    policy, policy_opt = _apply(policy_tx, of_policy, state.policy_opt, state.policy, moves)
    value_head, head_opt = state.head, state.head_opt
    if value_head is not None:
        value_head, head_opt = _apply(head_tx, of_head, head_opt, value_head, finite)
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


# Of gradients that were accumulated one micro-batch at a time.
apply_gradients = jax.jit(
    apply_update, static_argnames=("spec", "policy_tx", "head_tx"), donate_argnums=(0,)
)


def _split(rows: Any, parts: int, spec: LearnerSpec) -> Any:
    """Leading axis B as [parts, B / parts]; every device has a share of every part."""
    split = lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:])
    return constrain_rows(jax.tree.map(split, rows), spec.mesh, axis=1)


@functools.partial(
    jax.jit, static_argnames=("spec", "policy_tx", "head_tx", "micro_batches"), donate_argnums=(0,)
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
) -> tuple[TrainState, Metrics]:
    """Minimises Eq. 16 on one batch: gradients added up over micro-batches, one `apply_update`.

    Args:
      state: donated.
      frozen: parameters beside `state.policy` that are not trained.
      update_policy: False moves only the value head (its warm-up).
    """
    normalizers = loss_normalizers(minibatch.batch, spec=spec)

    def part(rows: Minibatch) -> Gradients:
        return gradients(state, rows, normalizers, allowed_tokens, frozen, spec=spec)

    if micro_batches == 1:
        grads = part(minibatch)
    else:
        split = _split(minibatch, micro_batches, spec)
        first = jax.tree.map(lambda x: x[0], split)
        zeros = no_gradients(state, first, normalizers, allowed_tokens, frozen, spec=spec)
        add = lambda total, rows: (jax.tree.map(jnp.add, total, part(rows)), None)
        grads, _ = jax.lax.scan(add, zeros, split)
    return apply_update(
        state,
        grads,
        spec=spec,
        policy_tx=policy_tx,
        head_tx=head_tx,
        update_policy=update_policy,
        has_tokens=normalizers.has_tokens,
    )


@functools.partial(jax.jit, static_argnames=("spec",), donate_argnums=(0,))
def accumulate(
    grads: Gradients,
    state: TrainState,
    minibatch: Minibatch,
    normalizers: LossNormalizers,
    allowed_tokens: Bool[Array, "V"],
    frozen: Params | None = None,
    *,
    spec: LearnerSpec,
) -> Gradients:
    """Adds the gradients of one more micro-batch, of whatever shape; `grads` is donated."""
    part = gradients(state, minibatch, normalizers, allowed_tokens, frozen, spec=spec)
    return jax.tree.map(jnp.add, grads, part)


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
    """Zeros in the form of `gradients` of the same arguments, to start accumulating from."""
    given = (state, minibatch, normalizers, allowed_tokens, frozen)
    shapes = jax.eval_shape(functools.partial(gradients, spec=spec), *given)
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
    """Scores under given parameters: old log-probabilities by the learner's own forward pass."""
    score = lambda rows: score_tokens(policy, rows, allowed_tokens, spec=spec)
    if micro_batches == 1:
        return score(batch)
    scores = jax.lax.map(score, _split(batch, micro_batches, spec))
    return constrain_rows(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), scores), spec.mesh)


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
    """V before the update, and the features it was read from.

    Only the question is run through the model, so values can be had before any token is sampled.
    """
    no_response = jnp.zeros(prompts.tokens.shape, bool)
    hidden = qwen2.forward(
        policy,
        prompts.tokens,
        config=spec.model,
        lengths=prompts.lengths,
        conditioned=condition(policy, budgets, no_response, spec),
        # Nothing is differentiated through this pass.
        compute=dataclasses.replace(spec, remat="none"),
    )
    question = value.pool_question(hidden, prompts.question_start, prompts.question_end)
    features = head_features(policy, question, budgets, cuts, spec=spec)
    values = value.values(value_head, features)
    # Whole everywhere: the host reads them.
    return constrain((values, features), spec.mesh)


@functools.partial(jax.jit, static_argnames=("head_tx", "num_steps"))
def fit_value(
    value_head: Params,
    head_opt: Any,
    features: Float[Array, "B M F"],
    returns: Float[Array, "B M"],
    *,
    head_tx: optax.GradientTransformation,
    num_steps: int,
) -> tuple[Params, Any]:
    """Extra Adam steps of the head on Eq. 12: one joint step an iteration hardly teaches it."""

    def loss(params: Params) -> Array:
        return losses.value_loss(value.values(params, features), returns).mean()

    def body(_: Any, carry: tuple[Params, Any]) -> tuple[Params, Any]:
        params, opt = carry
        grads = jax.grad(loss)(params)
        finite = jnp.isfinite(optax.global_norm(grads))
        return _apply(head_tx, grads, opt, params, finite)

    return jax.lax.fori_loop(0, num_steps, body, (value_head, head_opt))
