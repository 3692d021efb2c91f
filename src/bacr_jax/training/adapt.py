"""Line 16 of Algorithm 1: what the outcomes of an iteration do to the schedule.

Pass rates come from the training rollouts (`adapted`), or from a probe: fixed training questions
at one budget, measured when the schedule is due.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import curriculum
from bacr_jax.config import CurriculumConfig
from bacr_jax.curriculum import CurriculumState, difficulty
from bacr_jax.curriculum.difficulty import DifficultyPosterior
from bacr_jax.rollout import generate, sampling_params
from bacr_jax.training.dynamic_sampling import Round
from bacr_jax.training.run import Run, RunState


def adapt_schedule(
    run: Run, state: RunState, params: Any, first: Round, step: int
) -> tuple[CurriculumState, DifficultyPosterior | None, int]:
    """Pass rates at the full budget, and with them Eq. 5 and 6.

    Args:
      run: what stays fixed.
      state: from before the iteration.
      params: the policy as it is now.
      first: the iteration's first round, which nothing was chosen from.
      step: number of the iteration.

    Returns:
      The schedule, the record of problems, and the tokens that a probe has cost.
    """
    settings = run.config.curriculum
    every = settings.update_every
    if every is None:
        every = -(-len(run.environment.train) // run.config.rollout.questions)
    due = (step + 1) % every == 0
    if settings.pass_rate != "probe":
        schedule, posterior = adapted(
            state.curriculum,
            state.difficulty,
            first.plan.groups,
            first.group_batch.outcomes[..., -1],
            due,
            run.coordinate,
            settings=settings,
        )
        return schedule, posterior, 0
    if not due:
        return state.curriculum, state.difficulty, 0
    groups, outcomes, tokens = probe(run, params, step)
    return measured(state.curriculum, groups, outcomes), state.difficulty, tokens


@functools.partial(jax.jit, static_argnames=("settings",))
def adapted(
    schedule: CurriculumState,
    posterior: DifficultyPosterior | None,
    groups: Int[Array, "Q"],
    correct: Float[Array, "Q G"],
    due: Bool[Array, ""] | bool,
    coordinate: Float[Array, "n"],
    *,
    settings: CurriculumConfig,
) -> tuple[CurriculumState, DifficultyPosterior | None]:
    """Records outcomes, and where the schedule is due, moves its pass rates (Eq. 5 and 6).

    Args:
      schedule: of groups, or of problems with continuous difficulty.
      posterior: record of every problem, with continuous difficulty; else None.
      groups: group (or problem) of each question.
      correct: outcomes at the full budget; if one is no number, nothing is recorded.
      due: whether the schedule moves now.
      coordinate: of each problem, with continuous difficulty.
      settings: where pass rates come from.

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


def probe(run: Run, params: Any, step: int) -> tuple[Int[Array, "P"], Float[Array, "P one"], int]:
    """Pass rates of fixed training questions at one budget: groups, outcomes, tokens spent.

    Always finished once begun: the state from before the update is gone by now.
    """
    settings, questions = run.config.curriculum, run.environment.train
    chosen = probe_questions(
        run.levels, run.num_groups, size=settings.probe_size, seed=run.config.seed
    )
    budget = settings.probe_budget or run.config.budget.max
    budgets = np.full(len(chosen), budget, np.int32)
    rollout = generate(
        run.policy.decode_params(params),
        questions.at(chosen, budgets),
        budgets,
        budgets[:, None],
        jax.random.fold_in(jax.random.fold_in(run.key, step), 3),
        spec=run.rollout_spec(1, probe=True),
        rules=run.environment.rules,
        sampling=sampling_params(run.config.rollout.temperature),
        phi_of=run.policy.phi_of(params),
    )
    outcomes = run.environment.verify(
        rollout.branches,
        [questions.set.answers[i] for i in chosen],
        questions=[questions.set.questions[i] for i in chosen],
    )
    tokens = int(rollout.counters["tokens"])
    return jnp.asarray(run.levels[chosen]), jnp.asarray(outcomes), tokens


def measured(
    schedule: CurriculumState, groups: Int[Array, "P"], outcomes: Float[Array, "P one"]
) -> CurriculumState:
    """The schedule after a probe, which measures the policy as it is now.

    What was believed before weighs two pseudo-rollouts (`record_outcomes`), and nothing else does.
    """
    schedule = curriculum.record_outcomes(schedule, groups, outcomes, ema_decay=0.0)
    return curriculum.update_pass_rates(schedule, source="ema")


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
