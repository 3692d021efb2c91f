"""Tracks the pass rates of K difficulty groups and derives budget locations from them (Eq. 5)."""

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.static_arguments import static_arguments
from bacr_jax.types import Scalar, pytree

# Number of pseudo-rollouts of Beta(1, 1), the uniform prior of a pass rate: one success and one
# failure.
_PRIOR_COUNT = 2.0


@pytree
class CurriculumState:
    """The state of the schedule for K difficulty groups of questions.

    Attributes:
      mu0: location of the budget distribution in tokens before the first update, mu_k(0) in Eq. 5.
      pass_rate: pass rates rho_k in Eq. 5 and 6. Only `update_pass_rates` changes them.
      ema_rate: exponential moving average of the pass rate, updated with every batch.
      measured: True once the group has had a rollout. Until then, its rates are 1/2.
      correct: number of correct rollouts since the last update. It is fractional if outcomes are
        means over several answers.
      seen: number of rollouts since the last update.
      updates: number of updates so far. While it is 0, the budget location is `mu0`.
    """

    mu0: Float[Array, "K"]
    pass_rate: Float[Array, "K"]
    ema_rate: Float[Array, "K"]
    measured: Bool[Array, "K"]
    correct: Float[Array, "K"]
    seen: Float[Array, "K"]
    updates: Int[Array, ""]


@static_arguments("num_groups")
def init_curriculum(num_groups: int, *, mu0: Scalar | Sequence[Scalar]) -> CurriculumState:
    """Returns the initial state, in which every pass rate is 1/2, the mean of Beta(1, 1).

    Args:
      mu0: initial budget location in tokens, either a single value or one per group.

    Raises:
      ValueError: If `mu0` has the wrong number of values or contains a value that is not positive.
        Values are not checked under a JAX transformation.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mu0))
    xp: ModuleType = jnp if traced else np
    locations = xp.asarray(mu0, np.float32)
    if locations.ndim == 1 and locations.shape[0] != num_groups:
        raise ValueError(
            f"`mu0` has {locations.shape[0]} values, but there are {num_groups} difficulty "
            "groups; use one number, or one per group"
        )
    # Skip the check under a JAX transformation, because the values of a tracer are not available.
    if not traced and not (locations > 0.0).all():
        raise ValueError(f"`mu0` must contain positive numbers of tokens, but is {mu0}")

    # The arrays are created by NumPy on the host, because a JAX function would compile a program
    # for each array. Each field has a separate buffer, so that all of them can be donated.
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


@static_arguments("clip")
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
    """Computes the location of each group's budget distribution, in tokens (paper Eq. 5).

        mu_k = mu_k(0) (1 - alpha rho_k) + beta (1 - rho_k) b_max

    The location decreases linearly from mu_k(0) + beta b_max at rho = 0 to (1 - alpha) mu_k(0) at
    rho = 1. Both ends can lie outside the budget range, which is the reason for `clip`. The
    location is the mode of the untruncated normal distribution in Eq. 4, not the mean of the
    budgets.

    Args:
      pass_rate: pass rate rho of each group (or problem), in [0, 1].
      mu0: mu(0) in tokens, either a scalar or one value per group.
      alpha: fraction of mu(0) that is subtracted at a pass rate of 1.
      beta: fraction of `b_max` that is added at a pass rate of 0.
      b_min: smallest budget, in tokens.
      b_max: largest budget, in tokens.
      clip: True to clip the location to [b_min, b_max]. False is Eq. 5 exactly as in the paper.
    """
    chex.assert_rank(pass_rate, 1)
    shortened = mu0 * (1.0 - alpha * pass_rate)
    extension = beta * (1.0 - pass_rate) * b_max
    mu = shortened + extension
    return jnp.clip(mu, b_min, b_max) if clip else mu


@static_arguments("clip")
def scheduled_mean(
    state: CurriculumState,
    *,
    alpha: Scalar,
    beta: Scalar,
    b_min: Scalar,
    b_max: Scalar,
    clip: bool = True,
) -> Float[Array, "K"]:
    """Computes the current budget location of each group in tokens.

    The location is mu_k(0) until the first update of the pass rates, and Eq. 5 afterwards. The
    initial location needs a separate case, because in general there is no pass rate at which Eq. 5
    equals mu_k(0). The arguments are the same as for `budget_mean`, and `clip` also applies to
    mu_k(0).
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
    """Adds a batch of outcomes to the counts and to the moving averages of the pass rates.

        m <- d m + (1 - d) (c + 2 m) / (n + 2)

    For each group, c of its n rollouts in this batch are correct, m is the moving average of its
    pass rate, and d is the decay. The pass rate of the batch is smoothed by two pseudo-rollouts,
    the weight of a Beta(1, 1) prior. The pseudo-rollouts have pass rate m, because a pass rate of
    1/2 would pull m towards 1/2. For the first batch of a group, d is 0, so m becomes the posterior
    mean (c + 1) / (n + 2) of a Beta(1, 1) prior. Groups without rollouts are unchanged, and
    `pass_rate` is never changed.

    Args:
      group: difficulty group of each question.
      correct: outcome of each rollout at its full budget (r(q, t_{:b}) in the paper). Either 0/1 or
        a mean over several answers.
      ema_decay: decay d per call, in [0, 1), after the first batch of a group.
    """
    chex.assert_rank([group, correct], [1, 2])
    chex.assert_equal_shape_prefix([group, correct], 1)
    num_groups = state.mu0.shape[0]
    # Summed in float32 for every input dtype, because bfloat16 cannot represent all integers above
    # 256.
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


@static_arguments("source")
def update_pass_rates(
    state: CurriculumState, *, source: Literal["ema", "epoch"]
) -> CurriculumState:
    """Sets the pass rates used by the schedule (last line of Algorithm 1 in the paper).

    Args:
      source: "ema" uses the smoothed moving averages, which are never exactly 0 or 1. "epoch" uses
        correct / seen since the last update, as in the paper; groups without rollouts keep their
        pass rate.

    Returns:
      The state with new `pass_rate`, with counts reset to zero and `updates` incremented.

    Raises:
      ValueError: If `source` is unknown.
    """
    if source == "ema":
        # Copied, because a buffer shared by two fields cannot be donated.
        rate = jnp.array(state.ema_rate)
    elif source == "epoch":
        measured_rate = state.correct / jnp.maximum(state.seen, 1.0)
        rate = jnp.where(state.seen > 0.0, measured_rate, state.pass_rate)
    else:
        raise ValueError(
            f"the source of pass rates must be ema or epoch, but `source` is {source!r}"
        )
    return dataclasses.replace(
        state,
        pass_rate=rate,
        correct=jnp.zeros_like(state.correct),
        seen=jnp.zeros_like(state.seen),
        updates=state.updates + 1,
    )
