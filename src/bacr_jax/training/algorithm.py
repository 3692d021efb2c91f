"""Runs one iteration of Algorithm 1 of the paper, which updates the training state.

`iterate` runs one iteration, and `loop.Trainer` calls it in a loop. Comments refer to the line
numbers of Algorithm 1. All PRNG keys are derived from the run's key and the step. With
data.order=shuffled, the order of the questions also depends on the seed and on the cursors in the
state (number of questions drawn so far from each difficulty group). An iteration can therefore be
replayed exactly from a checkpoint.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bacr_jax import curriculum
from bacr_jax.parallel import processes
from bacr_jax.parallel.peers import OnPhase
from bacr_jax.training import grading, stages
from bacr_jax.training.async_rollout import Upcoming, begin
from bacr_jax.training.dynamic_sampling import (
    BatchPlan,
    Round,
    choose,
    sample_rounds,
    with_shuffled_input,
)
from bacr_jax.training.logging import (
    Clock,
    Iteration,
    grader_totals,
    host_metrics,
    iteration_metrics,
)
from bacr_jax.training.run import Run, RunState, completed_fraction
from bacr_jax.training.undo import MOST_IN_A_ROW, UpdateGuard, shares_of
from bacr_jax.types import Poll, Prompts

# Folded into the run's key when a step is sampled again after an undone update. Steps are folded
# into the key as well, so this number is larger than any step.
_SAMPLED_AGAIN = 2**31 + 1


def iterate(
    run: Run,
    state: RunState,
    step: int,
    *,
    reference: Any = None,
    poll: Poll = None,
    on_phase: OnPhase | None = None,
    guard: UpdateGuard | None = None,
) -> tuple[RunState, Iteration]:
    """Runs lines 3 to 16 of Algorithm 1: samples one batch and updates the policy on it.

    Args:
      run: configuration and functions of the run.
      state: state before the iteration. Its buffers are donated.
      step: number of iterations already done.
      reference: parameters of the reference policy for a KL penalty; None without a KL penalty.
      poll: callback that is called repeatedly while answers are sampled and graded. If it raises an
        exception, `state` is still valid.
      on_phase: callback that receives the name of each phase and the step when the phase begins.
      guard: undoes the previous update if a metric of this step's traces violates a bound. None
        disables this check.

    Returns:
      The state after the iteration, and the results to log.
    """
    clock = Clock(step, on_phase)
    tokens_before = state.generated_tokens
    graded_before = grader_totals(run.task_data)
    # Lines 3 to 11: sample questions, budgets, traces and answers. Dynamic sampling may need
    # several rounds.
    sampled = sample_step(run, state, step, clock, poll)
    state, (rounds, cursors), notes = guarded(guard, run, state, step, sampled, clock, poll)
    chosen = choose(rounds)
    # The schedules of the next batch depend on this count, also if it is sampled ahead.
    state = replace(state, generated_tokens=state.generated_tokens + chosen.tokens)
    # Outcomes weighted by reward.weights are only used for rewards, not for pass rates and logs.
    reward_batch = grading.credited(run.config.reward, chosen.group_batch)
    # Start sampling the next batch (lines 3 to 10) in the background (rollout.async_steps).
    upcoming = sample_ahead(run, state, step + 1, cursors, clock, poll)
    # Compute V(q, b, b_j) of Eq. 11 before the value head (psi) is updated on this batch.
    values, features = stages.predict_values(run, state.train, chosen)
    # Before the first update, V is 0 everywhere. It is therefore initialized to the mean reward of
    # the batch.
    train, values = stages.first_step_values(run, state, reward_batch, values, step)
    if guard is not None:
        guard.keep(train, shares_of(rounds[0]))
    # Lines 11 and 12: compute dense rewards (Eq. 7-9) and the advantages of tokens (Eq. 10-14).
    advantages, advantage_metrics = stages.compute_advantages(
        run, state, chosen, reward_batch, values
    )
    # Line 14: update the policy (theta) and the value head (psi) with Eq. 16.
    train, update_metrics = stages.update(
        run, train, stages.learner_batch(run, chosen, advantages), features, step, reference
    )
    method_state = stages.update_method(
        state.method_state, reward_batch, advantages.rewards, values, method=run.method
    )
    clock.lap("learn")
    # Line 16: update the pass rates rho_k at the full budget, for lines 3 and 4 of the next
    # iteration.
    schedule = stages.adapt_schedule(run, state, rounds[0], step)
    clock.lap("adapt")
    new = replace(
        state, train=train, curriculum=schedule, stream=cursors, method_state=method_state
    )
    if new.prefetched is not None:
        new = with_upcoming(new, upcoming, clock)
    # Includes the traces that an undone update discards.
    tokens = int(new.generated_tokens - tokens_before)
    metrics = {**update_metrics, **advantage_metrics}
    metrics |= iteration_metrics(run, state, new, rounds, chosen, tokens)
    metrics |= host_metrics(clock, graded_before, grader_totals(run.task_data))
    if guard is not None:
        metrics["train/undone"] = float(bool(notes))
    metrics = clock.timed(metrics, tokens)
    advantages, values = processes.to_host((advantages, values))
    return new, Iteration(metrics, chosen, advantages, values, notes)


Sampled = tuple[list[Round], Int[np.ndarray, "K"]]


def sample_step(
    run: Run, state: RunState, step: int, clock: Clock, poll: Poll, *, again: bool = False
) -> Sampled:
    """Samples the questions, traces and answers of a step, in one or more rounds.

    A round is a batch of Q questions with their traces and answers. A step has several rounds only
    with dynamic sampling.

    Args:
      again: True if the step is sampled a second time after an undone update. The sampling then
        uses a different PRNG key.

    Returns:
      The rounds, and the updated cursors of the question stream (number of questions drawn so far
      from each difficulty group).
    """

    def sample(index: int, cursors: Any) -> tuple[Round, Any]:
        return sample_round(run, state, step, index, cursors, clock, poll, again=again)

    return sample_rounds(sample, state.stream, run.method.dynamic_sampling)


def guarded(
    guard: UpdateGuard | None,
    run: Run,
    state: RunState,
    step: int,
    sampled: Sampled,
    clock: Clock,
    poll: Poll,
) -> tuple[RunState, Sampled, tuple[str, ...]]:
    """Undoes the previous update if a share of the traces sampled after it violates a limit.

    `UpdateGuard.breach` checks the limits `train.undo_closed_answers` and
    `train.undo_filled_budgets`. If one is violated, the policy parameters, the optimizer state and
    the value head are restored to their values before the update. The step is then sampled again,
    once. Pass rates and the running means of the method are not restored, because they were
    measured on traces of the restored policy. The cursors of the question stream (number of
    questions drawn so far from each difficulty group) are not restored either. The tokens of the
    discarded traces still count as generated tokens.

    Args:
      guard: snapshot of the state before the previous update, and the limits on the traces. None if
        no limit is set.
      sampled: the traces of this step, as one or more rounds of sampling, and the cursors after
        them. Dynamic sampling needs several rounds.

    Returns:
      The state and the traces to continue with, and log messages about the undone update. The
      messages are empty if the update was kept.
    """
    if guard is None:
        return state, sampled, ()
    rounds, _ = sampled
    breach = guard.breach(shares_of(rounds[0]))
    if breach is None or not guard.can_undo(state.train):
        guard.accept()
        return state, sampled, ()
    state = replace(
        state,
        train=guard.undo(),
        generated_tokens=state.generated_tokens + choose(rounds).tokens,
    )
    notes: tuple[str, ...] = (
        f"undid the update of step {step}, because {breach}; this step is sampled again",
    )
    sampled_again = sample_step(run, state, step, clock, poll, again=True)
    guard.count_undone()
    second_breach = guard.breach(shares_of(sampled_again[0][0]))
    if second_breach is not None:
        notes += (
            f"the traces sampled without the update of step {step} exceed a bound too "
            f"({second_breach}); training continues. Set another bound, or a lower "
            "optimizer.learning_rate",
        )
    if guard.has_stopped:
        notes += (
            f"the updates of {MOST_IN_A_ROW} consecutive steps were undone, so no further update "
            "of this run is undone; set a lower optimizer.learning_rate",
        )
    return state, sampled_again, notes


def sample_round(
    run: Run,
    state: RunState,
    step: int,
    index: int,
    cursors: Int[np.ndarray, "K"],
    clock: Clock,
    poll: Poll,
    *,
    again: bool = False,
) -> tuple[Round, Int[np.ndarray, "K"]]:
    """Samples one round of questions, traces and graded answers (lines 3 to 11 of Algorithm 1).

    Args:
      index: index of the round within the step.
      cursors: number of questions drawn so far from each difficulty group.
      again: True if the step is sampled a second time after an undone update.

    Returns:
      The round, and the updated cursors.
    """
    key = jax.random.fold_in(run.key, _SAMPLED_AGAIN) if again else run.key
    plan_key, rollout_key = stages.round_keys(key, step, index)
    # After an undone update, the policy is the one that sampled the previous step.
    version = step - 1 if again else step
    if state.prefetched is not None and state.prefetched.is_sampled:
        plan = state.prefetched.plan
        rollout = state.prefetched.rollout
        prompts = stages.prompts_of(run, plan)
    else:
        plan, prompts, cursors = plan_round(run, state, step, plan_key, cursors)
        clock.lap("plan")
        # Line 9: sample a trace under each budget, and an answer at each of its truncation points.
        sample = stages.prepare_sampling(run, state, version, plan, prompts, rollout_key, poll)
        rollout = sample()
    plan = stages.resolve_cuts(run, plan, rollout)
    clock.lap("rollout")
    # Grade the answers: r(q, t_{:b_j}) of Eq. 7.
    outcomes, verdicts = grading.verify(run, plan, rollout, rollout_key, poll)
    by_reward = grading.reward_scores(run, plan, rollout, outcomes, poll)
    fraction = float(completed_fraction(run, step, state.generated_tokens))
    group_batch = stages.make_group_batch(run, state, plan, rollout, outcomes, by_reward, fraction)
    useful = stages.useful_questions(run.method, group_batch)
    clock.lap("verify")
    return Round(plan, prompts, rollout, group_batch, useful, verdicts), cursors


def plan_round(
    run: Run, state: RunState, step: int, key: Array, cursors: Int[np.ndarray, "K"]
) -> tuple[BatchPlan, Prompts, Int[np.ndarray, "K"]]:
    """Samples questions, budgets and truncation points (lines 3 to 8 and 10 of Algorithm 1).

    Args:
      step: number of iterations before the step of this round.
      key: PRNG key of the plan.
      cursors: number of questions drawn so far from each difficulty group.

    Returns:
      The plan, one prompt for each of its Q * G traces, and the updated cursors.
    """
    # Lines 3 and 4: w_k and p(b | k) follow from the pass rates. Lines 6, 8 and 10: sample
    # questions with weights w_k, G budgets per question from p(b | k), and M truncation points per
    # budget.
    plan = stages.plan_batch(
        state.curriculum,
        key,
        run.group_of,
        run.group_sizes,
        method=run.method,
        num_questions=run.config.rollout.questions,
        largest_budget=largest_budget(run, step, state.generated_tokens),
    )
    if run.config.budget.shuffle_input:
        plan = with_shuffled_input(plan, key)
    plan, cursors = stages.in_stream_order(run.stream, plan, cursors)
    return plan, stages.prompts_of(run, plan), cursors


def largest_budget(run: Run, step: int, generated_tokens: int) -> Int[Array, ""] | None:
    """Returns the upper limit of the budgets in a step, in tokens.

    Returns None if `budget.stages` is not set.

    Args:
      step: number of iterations before the step.
      generated_tokens: number of tokens generated before the step.
    """
    budget = run.config.budget
    if not budget.stages:
        return None
    # The stage depends on the ratio of two integers, so that it begins exactly at its share.
    fraction = completed_fraction(run, step, generated_tokens)
    limit = curriculum.stage_limit(
        budget.stages,
        step=fraction.numerator,
        total_steps=fraction.denominator,
        b_max=budget.max,
    )
    return jnp.int32(limit)


def sample_ahead(
    run: Run,
    state: RunState,
    step: int,
    cursors: Int[np.ndarray, "K"],
    clock: Clock,
    poll: Poll,
) -> Upcoming | None:
    """Starts sampling the batch of the next step with the current policy (rollout.async_steps).

    Args:
      step: the next step.
      cursors: number of questions drawn so far from each difficulty group.
      poll: callback that is called while the policy is loaded into the sampler. It is not called
        while traces are sampled.

    Returns:
      The batch that is being sampled. None if rollout.async_steps is False or if the run has no
      next step.
    """
    if not run.config.rollout.async_steps or step == run.total_steps:
        return None
    plan_key, rollout_key = stages.round_keys(run.key, step, 0)
    plan, prompts, cursors = plan_round(run, state, step, plan_key, cursors)
    clock.lap("plan")
    sample = stages.prepare_sampling(
        run, state, step - 1, plan, prompts, rollout_key, poll, in_background=True
    )
    clock.lap("rollout")
    return Upcoming(plan, cursors, begin(sample))


def with_upcoming(state: RunState, upcoming: Upcoming | None, clock: Clock) -> RunState:
    """Waits for the batch that is being sampled in the background, and adds it to the state.

    Args:
      state: state of a run with rollout.async_steps.
      upcoming: the batch that is being sampled. None if no batch is being sampled.
      clock: clock of the step, which records the waiting time.

    Returns:
      The state with the batch. Its flag `prefetched.is_sampled` is False if no batch was being
      sampled or if all servers were lost.
    """
    sampled = None if upcoming is None else upcoming.wait()
    waiting_seconds = clock.lap("rollout")
    if upcoming is None or sampled is None:
        assert state.prefetched is not None
        return replace(state, prefetched=replace(state.prefetched, is_sampled=np.array(False)))
    batch, sampling_seconds = sampled
    clock.laps["time/overlap"] = max(sampling_seconds - waiting_seconds, 0.0)
    return replace(state, prefetched=batch, stream=upcoming.cursors)
