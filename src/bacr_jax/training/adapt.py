"""Line 16 of Algorithm 1: what the outcomes of an iteration do to the schedule."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import curriculum
from bacr_jax.config import CurriculumConfig
from bacr_jax.curriculum import CurriculumState, difficulty
from bacr_jax.curriculum.difficulty import DifficultyPosterior
from bacr_jax.data.environment import Questions


def adapted(
    schedule: CurriculumState,
    posterior: DifficultyPosterior | None,
    groups: Int[Array, "Q"],
    correct: Float[Array, "Q G"],
    due: Bool[Array, ""] | bool,
    *,
    settings: CurriculumConfig,
    coordinate: Float[Array, "n"],
) -> tuple[CurriculumState, DifficultyPosterior | None]:
    """Records outcomes, and where the schedule is due, moves its pass rates (Eq. 5 and 6).

    Args:
      schedule: of groups, or of problems with continuous difficulty.
      posterior: record of every problem, with continuous difficulty; else None.
      groups: group (or problem) of each question.
      correct: outcomes at the full budget; if one is no number, nothing is recorded.
      due: whether the schedule moves now.
      settings: where pass rates come from.
      coordinate: of each problem, with continuous difficulty.

    Returns:
      The schedule and the record.
    """
    assert settings.pass_rate != "probe"
    before = (schedule, posterior)
    schedule = curriculum.record_outcomes(schedule, groups, correct, ema_decay=settings.ema_decay)
    if posterior is not None:
        posterior = difficulty.record_attempts(
            posterior, groups, correct, decay=settings.forgetting
        )
        rates = difficulty.smoothed_pass_rate(
            posterior, coordinate, bandwidth=settings.bandwidth, strength=settings.strength
        )
        schedule = dataclasses.replace(schedule, ema_rate=rates)
    moved = curriculum.update_pass_rates(schedule, source=settings.pass_rate)
    schedule = jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, schedule)
    # One outcome that is no number would stay in every average to come.
    good = jnp.isfinite(correct).all()
    chosen: tuple[CurriculumState, DifficultyPosterior | None] = jax.tree.map(
        lambda new, old: jnp.where(good, new, old), (schedule, posterior), before
    )
    return chosen


def measured(
    schedule: CurriculumState, groups: Int[Array, "P"], outcomes: Float[Array, "P one"]
) -> CurriculumState:
    """The schedule after a probe, which measures the policy as it is: nothing older counts."""
    schedule = curriculum.record_outcomes(schedule, groups, outcomes, ema_decay=0.0)
    return curriculum.update_pass_rates(schedule, source="ema")


def coordinate(questions: Questions, kind: Literal["level", "prompt_length"]) -> Float[Array, "n"]:
    """Where each problem stands on the scale of difficulty (an unknown level: hardest)."""
    if kind == "prompt_length":
        return jnp.asarray(questions.prompts.lengths, jnp.float32)
    levels = np.asarray(questions.set.levels)
    return jnp.asarray(np.where(levels < 1, max(levels.max(), 1), levels), jnp.float32)


def probe_questions(
    groups: Int[np.ndarray, "n"], num_groups: int, *, size: int, seed: int
) -> Int[np.ndarray, "P"]:
    """Fixed questions to measure pass rates on, taken from the groups in turns."""
    rank = np.random.default_rng([seed, 5]).permutation(len(groups))
    turn = np.zeros(len(groups), np.int64)
    for group in range(num_groups):
        members = rank[groups[rank] == group]
        turn[members] = np.arange(len(members))
    return np.argsort(turn, kind="stable")[:size]
