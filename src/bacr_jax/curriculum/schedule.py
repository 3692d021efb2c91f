"""Pass rates of K difficulty groups, and where their budgets lie (paper Eq. 5)."""

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

# Evidence of Beta(1, 1), the uniform prior over a pass rate: one success and one failure.
_PRIOR_COUNT = 2.0


@pytree
class CurriculumState:
    """What the schedule remembers about K difficulty groups.

    Attributes:
      mu0: budget location before the first update, mu_k(0) of Eq. 5, in tokens.
      pass_rate: rho_k, the rates that Eq. 5 and 6 use; they only move at an update.
      ema_rate: running estimate of the pass rate, moved by every batch.
      measured: whether the group has had a rollout yet; until then its rates are 1/2.
      correct: correct rollouts since the last update (fractional when an outcome is a mean).
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
    """State before any outcome: every pass rate is 1/2, the mean of Beta(1, 1).

    Args:
      mu0: initial budget location in tokens, one for all groups or one per group.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mu0))
    xp: ModuleType = jnp if traced else np
    locations = xp.asarray(mu0, np.float32)
    if locations.ndim == 1 and locations.shape[0] != num_groups:
        raise ValueError(
            f"mu0: found {locations.shape[0]} values for {num_groups} difficulty "
            "groups; give one number, or one per group"
        )
    # What is traced has no numbers yet.
    if not traced and not (locations > 0.0).all():
        raise ValueError(f"mu0: found {mu0}; give positive numbers of tokens")
    # Filled on the host: a few numbers are no programs.
    full = lambda value, dtype=np.float32: jnp.array(np.full(num_groups, value, dtype))
    return CurriculumState(
        mu0=jnp.array(xp.broadcast_to(locations, (num_groups,))),
        pass_rate=full(0.5),
        ema_rate=full(0.5),
        measured=full(False, bool),
        correct=full(0.0),
        seen=full(0.0),
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
    """Location of each group's budget distribution, paper Eq. 5.

        mu_k = mu_k(0) (1 - alpha rho_k) + beta (1 - rho_k) b_max

    It falls linearly from mu_k(0) + beta b_max at rho = 0 to (1 - alpha) mu_k(0) at rho = 1; both
    ends can lie outside the budget range, hence `clip`. It is the location of Eq. 4, not its mean.

    Args:
      pass_rate: rho, one per group (or per problem), in [0, 1].
      mu0: mu(0) in tokens, scalar or one per group.
      alpha: how much a high pass rate shortens budgets.
      beta: how much a low pass rate lengthens them, as a fraction of `b_max`.
      b_max: in tokens, as `b_min`.
      clip: keep the location inside [b_min, b_max]; False is Eq. 5 to the letter.
    """
    chex.assert_rank(pass_rate, 1)
    mu = mu0 * (1.0 - alpha * pass_rate) + beta * (1.0 - pass_rate) * b_max
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
    """Location (tokens) of the budget distribution now: mu_k(0) until the first update, then Eq. 5.

    Eq. 5 does not return mu_k(0) for any pass rate in general, so the first period, in which
    nothing has been measured, is a case of its own. See `budget_mean`; `clip` keeps the initial
    location, too, inside [b_min, b_max], in tokens.
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
    """Counts a batch of outcomes and moves the running pass rates towards it.

    With c correct among n rollouts of a group in this batch, and m its running rate,

        m <- d m + (1 - d) (c + 2 m) / (n + 2)

    The batch's rate is smoothed by the weight of a Beta(1, 1) prior, two pseudo-rollouts, centred
    on what is believed so far, so that it does not drag the rate back to 1/2. The first batch of a
    group has nothing to move: m is then the Beta(1, 1) posterior mean (c + 1) / (n + 2) itself. A
    group without rollouts keeps its rate exactly. `pass_rate` is untouched.

    Args:
      correct: outcome of each rollout at its full budget (paper: r(q, t_{:b})), 0/1 or a mean
        over several answers.
      ema_decay: d, in [0, 1), per call after a group's first.
    """
    chex.assert_rank([group, correct], [1, 2])
    chex.assert_equal_shape_prefix([group, correct], 1)
    num_groups = state.mu0.shape[0]
    # In float32 whatever the outcomes are: bfloat16 can't count beyond 256.
    right = jnp.sum(correct, axis=1, dtype=jnp.float32)
    right = jax.ops.segment_sum(right, group, num_groups)
    rollouts = jax.ops.segment_sum(
        jnp.full(group.shape, correct.shape[1], jnp.float32), group, num_groups
    )
    smoothed = (right + _PRIOR_COUNT * state.ema_rate) / (rollouts + _PRIOR_COUNT)
    decay = jnp.where(state.measured, ema_decay, 0.0).astype(jnp.float32)
    moved = decay * state.ema_rate + (1.0 - decay) * smoothed
    return dataclasses.replace(
        state,
        correct=state.correct + right,
        seen=state.seen + rollouts,
        ema_rate=jnp.where(rollouts > 0.0, moved, state.ema_rate),
        measured=state.measured | (rollouts > 0.0),
    )


def update_pass_rates(
    state: CurriculumState, *, source: Literal["ema", "epoch"]
) -> CurriculumState:
    """Hands the measured rates to the schedule (the last line of the paper's Algorithm 1).

    Args:
      source: "ema" takes the smoothed running rates, which are never exactly 0 or 1. "epoch"
        takes correct / seen since the last update (paper); groups without rollouts keep theirs.

    Returns:
      The state with new `pass_rate`, counts cleared and one more update.
    """
    if source == "ema":
        rate = jnp.array(state.ema_rate)  # a copy: no buffer stands twice, so all can be donated
    elif source == "epoch":
        measured = state.correct / jnp.maximum(state.seen, 1.0)
        rate = jnp.where(state.seen > 0.0, measured, state.pass_rate)
    else:
        raise ValueError(f"source: found {source!r}; known are ema and epoch")
    correct, seen = jnp.zeros_like(state.correct), jnp.zeros_like(state.seen)
    return dataclasses.replace(
        state, pass_rate=rate, correct=correct, seen=seen, updates=state.updates + 1
    )
