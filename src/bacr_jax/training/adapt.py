"""Line 16 of Algorithm 1: what the outcomes of an iteration do to the schedule."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import curriculum
from bacr_jax.config import CurriculumConfig
from bacr_jax.curriculum import CurriculumState
from bacr_jax.training.dynamic_sampling import Round
from bacr_jax.training.run import Run, RunState


def adapt_schedule(run: Run, state: RunState, first: Round, step: int) -> CurriculumState:
    """Pass rates at the full budget, and with them Eq. 5 and 6.

    Args:
      first: the iteration's first round, which nothing was chosen from.
    """
    settings = run.config.curriculum
    every = settings.update_every
    if every is None:
        every = -(-len(run.environment.train) // run.config.rollout.questions)
    return adapted(
        state.curriculum,
        first.plan.groups,
        first.group_batch.outcomes[..., -1],
        (step + 1) % every == 0,
        settings=settings,
    )


@functools.partial(jax.jit, static_argnames=("settings",))
def adapted(
    schedule: CurriculumState,
    groups: Int[Array, "Q"],
    correct: Float[Array, "Q G"],
    due: Bool[Array, ""] | bool,
    *,
    settings: CurriculumConfig,
) -> CurriculumState:
    """Records outcomes, and where the schedule is due, moves its pass rates (Eq. 5 and 6).

    Args:
      correct: outcomes at the full budget; if one is no number, nothing is recorded.
    """
    before = schedule
    schedule = curriculum.record_outcomes(schedule, groups, correct, ema_decay=settings.ema_decay)
    moved = curriculum.update_pass_rates(schedule, source=settings.pass_rate)
    schedule = jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, schedule)
    # One outcome that is no number would stay in every average to come.
    good = jnp.isfinite(correct).all()
    chosen: CurriculumState = jax.tree.map(
        lambda new, old: jnp.where(good, new, old), schedule, before
    )
    return chosen
