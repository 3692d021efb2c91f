"""Tracks pass rates of K difficulty groups and derives their budget locations (paper Eq. 5)."""

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.types import Scalar, pytree

# Pseudo-rollouts of Beta(1, 1), the uniform prior over a pass rate: one success and one failure.
_PRIOR_COUNT = 2.0


@pytree
class CurriculumState:
    """State of the schedule for K difficulty groups.

    Attributes:
      mu0: budget location before the first update, mu_k(0) of Eq. 5, in tokens.
      pass_rate: rho_k, the rates of Eq. 5 and 6; only `update_pass_rates` changes them.
      ema_rate: running estimate of the pass rate; every batch changes it.
      measured: True once the group has had a rollout; until then its rates are 1/2.
      correct: correct rollouts since the last update (fractional if an outcome is a mean).
      seen: rollouts since the last update.
      updates: number of updates done; while it is 0 the location is mu0.
    """

    mu0: Float[Array, "K"]
    pass_rate: Float[Array, "K"]
    ema_rate: Float[Array, "K"]
    measured: Bool[Array, "K"]
    correct: Float[Array, "K"]
    seen: Float[Array, "K"]
    updates: Int[Array, ""]


def init_curriculum(num_groups: int, *, mu0: Scalar | Sequence[Scalar]) -> CurriculumState:
    """Returns the state before any outcome: every pass rate is 1/2, the mean of Beta(1, 1).

    Args:
      mu0: initial budget location in tokens, one for all groups or one per group.

    Raises:
      ValueError: `mu0` has the wrong number of values, or a value that is not positive. Values
        are not checked under a JAX transformation.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mu0))
    xp: ModuleType = jnp if traced else np
    locations = xp.asarray(mu0, np.float32)
    if locations.ndim == 1 and locations.shape[0] != num_groups:
        raise ValueError(
            f"mu0: found {locations.shape[0]} values for {num_groups} difficulty "
            "groups; write one number, or one per group"
        )
    # A tracer has no values to check.
    if not traced and not (locations > 0.0).all():
        raise ValueError(f"mu0: found {mu0}; write positive numbers of tokens")

    # Filled by NumPy on the host, because a JAX function would compile a program for each array.
    # Each field gets its own buffer, so that all can be donated.
    half = np.full(num_groups, 0.5, np.float32)
    zero = np.full(num_groups, 0.0, np.float32)
    return CurriculumState(
        mu0=jnp.array(xp.broadcast_to(locations, (num_groups,))),
        pass_rate=jnp.array(half),
        ema_rate=jnp.array(half),
        measured=jnp.array(np.full(num_groups, False)),
        correct=jnp.array(zero),
        seen=jnp.array(zero),
        updates=jnp.array(0, jnp.int32),
    )


def budget_mean(
    pass_rate: Float[Array, "K"],
    mu0: Float[Array, "K"] | Scalar,
    *,
    alpha: Scalar,
    beta: Scalar,
    b_min: Scalar,
    b_max: Scalar,
    clip: bool = True,
) -> Float[Array, "K"]:
    """Returns the location of each group's budget distribution, in tokens (paper Eq. 5).

        mu_k = mu_k(0) (1 - alpha rho_k) + beta (1 - rho_k) b_max

    The location falls linearly from mu_k(0) + beta b_max at rho = 0 to (1 - alpha) mu_k(0) at
    rho = 1. Both values can be outside the budget range, hence `clip`. The location is the mode of
    the untruncated normal in Eq. 4, not the mean of the budgets.

    Args:
      pass_rate: rho, one per group (or per problem), in [0, 1].
      mu0: mu(0) in tokens, scalar or one per group.
      alpha: fraction of mu(0) that a pass rate of 1 subtracts.
      beta: fraction of `b_max` that a pass rate of 0 adds.
      b_min: smallest budget, in tokens.
      b_max: largest budget, in tokens.
      clip: clip the location to [b_min, b_max]; False is Eq. 5 to the letter.
    """
    chex.assert_rank(pass_rate, 1)
    shortened = mu0 * (1.0 - alpha * pass_rate)
    extension = beta * (1.0 - pass_rate) * b_max
    mu = shortened + extension
    return jnp.clip(mu, b_min, b_max) if clip else mu


def scheduled_mean(
    state: CurriculumState,
    *,
    alpha: Scalar,
    beta: Scalar,
    b_min: Scalar,
    b_max: Scalar,
    clip: bool = True,
) -> Float[Array, "K"]:
    """Returns each group's current budget location in tokens: mu_k(0), then Eq. 5.

    mu_k(0) is used until the first update of the pass rates. It needs a separate case, because in
    general Eq. 5 gives mu_k(0) at no pass rate. The arguments are the same as in `budget_mean`;
    `clip` also clips mu_k(0).
    """
    adapted = budget_mean(
        state.pass_rate, state.mu0, alpha=alpha, beta=beta, b_min=b_min, b_max=b_max, clip=clip
    )
    initial = jnp.clip(state.mu0, b_min, b_max) if clip else state.mu0
    return jnp.where(state.updates == 0, initial, adapted)


def record_outcomes(
    state: CurriculumState,
    group: Int[Array, "Q"],
    correct: Float[Array, "Q G"],
    *,
    ema_decay: Scalar,
) -> CurriculumState:
    """Counts a batch of outcomes and moves the running pass rates towards the batch's rates.

        m <- d m + (1 - d) (c + 2 m) / (n + 2)

    c of the n rollouts of a group in this batch are correct, and m is the group's running rate. The
    batch's rate is smoothed by two pseudo-rollouts, the weight of a Beta(1, 1) prior. They have the
    rate m, because a rate of 1/2 would pull m back to 1/2. In a group's first batch d is 0, so m is
    the Beta(1, 1) posterior mean (c + 1) / (n + 2). A group without rollouts keeps its exact rate.
    `pass_rate` does not change.

    Args:
      group: difficulty group of each question.
      correct: outcome of each rollout at its full budget (paper: r(q, t_{:b})), 0/1 or a mean
        over several answers.
      ema_decay: d, in [0, 1), per call after a group's first.
    """
    chex.assert_rank([group, correct], [1, 2])
    chex.assert_equal_shape_prefix([group, correct], 1)
    num_groups = state.mu0.shape[0]
    # In float32 for all types of outcomes, because bfloat16 cannot count beyond 256.
    correct_of_question = jnp.sum(correct, axis=1, dtype=jnp.float32)
    rollouts_of_question = jnp.full(group.shape, correct.shape[1], jnp.float32)
    correct_of_group = jax.ops.segment_sum(correct_of_question, group, num_groups)
    rollouts_of_group = jax.ops.segment_sum(rollouts_of_question, group, num_groups)

    pseudo_correct = _PRIOR_COUNT * state.ema_rate
    smoothed = (correct_of_group + pseudo_correct) / (rollouts_of_group + _PRIOR_COUNT)
    decay = jnp.where(state.measured, ema_decay, 0.0).astype(jnp.float32)
    moved = decay * state.ema_rate + (1.0 - decay) * smoothed
    has_rollouts = rollouts_of_group > 0.0
    return dataclasses.replace(
        state,
        correct=state.correct + correct_of_group,
        seen=state.seen + rollouts_of_group,
        ema_rate=jnp.where(has_rollouts, moved, state.ema_rate),
        measured=state.measured | has_rollouts,
    )


def update_pass_rates(
    state: CurriculumState, *, source: Literal["ema", "epoch"]
) -> CurriculumState:
    """Sets the schedule's pass rates to measured ones (last line of the paper's Algorithm 1).

    Args:
      source: "ema" takes the smoothed running rates, which are never exactly 0 or 1. "epoch"
        takes correct / seen since the last update (paper); a group without rollouts keeps its
        rate.

    Returns:
      The state with new `pass_rate`, counts cleared and one more update.

    Raises:
      ValueError: `source` is unknown.
    """
    if source == "ema":
        # A copy, because a buffer that two fields share cannot be donated.
        rate = jnp.array(state.ema_rate)
    elif source == "epoch":
        measured_rate = state.correct / jnp.maximum(state.seen, 1.0)
        rate = jnp.where(state.seen > 0.0, measured_rate, state.pass_rate)
    else:
        raise ValueError(f"source: found {source!r}; write ema or epoch")
    return dataclasses.replace(
        state,
        pass_rate=rate,
        correct=jnp.zeros_like(state.correct),
        seen=jnp.zeros_like(state.seen),
        updates=state.updates + 1,
    )
