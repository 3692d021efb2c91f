"""Algorithm 1 of the paper, line by line: one iteration as a function of the state.

`loop.Trainer` repeats `iterate`, whose comments contain the algorithm's line numbers. Randomness
comes from fold_in(run key, step), and with data.order=shuffled from the seed and the state's
cursors, so an iteration can be replayed from a checkpoint.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from bacr_jax.parallel import processes
from bacr_jax.parallel.peers import OnPhase
from bacr_jax.training import grading, stages
from bacr_jax.training.async_rollout import Upcoming, begin
from bacr_jax.training.dynamic_sampling import BatchPlan, Round, choose, sample_rounds
from bacr_jax.training.logging import (
    Clock,
    Iteration,
    grader_totals,
    host_metrics,
    iteration_metrics,
)
from bacr_jax.training.run import Run, RunState, RunStateAhead
from bacr_jax.training.undo import UpdateGuard, shares_of
from bacr_jax.types import Poll, Prompts

# Folded into the run's key for a step that is sampled again after an undo. Larger than any step,
# because steps are folded into the key as well.
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
    """Runs lines 3 to 16 of Algorithm 1 for one batch.

    Args:
      state: state before the iteration. It is donated.
      reference: parameters of the reference policy, for a KL term; None without.
      poll: called while sampling and grading. It may raise; `state` can then still be used.
      on_phase: called with the name and step of each phase that begins.
      guard: undoes the last update if the traces of this step break a bound; None for no bounds.

    Returns:
      The new state, and the results for the logs.
    """
    clock = Clock(step, on_phase)
    graded_before = grader_totals(run.environment)
    # 3 to 11: questions, budgets, traces and answers, in several rounds with dynamic sampling.
    rounds, cursors = sample_step(run, state, step, clock, poll)
    notes: tuple[str, ...] = ()
    if guard is not None:
        state, rounds, cursors, notes = guarded(
            guard, run, state, step, (rounds, cursors), clock, poll
        )
    chosen = choose(rounds)
    # Outcomes weighted by reward.weights. Pass rates and logs use the unweighted outcomes.
    reward_batch = grading.credited(run.config, chosen.group_batch)
    # 3 to 10 of the next iteration run in the background of the remaining lines (rollout.ahead).
    upcoming = sample_ahead(run, state, step + 1, cursors, clock, poll)
    # V(q, b, b_j) of Eq. 11, before psi is updated on this batch.
    values, features = stages.predict_values(run, state.train, chosen)
    # Before the first update V would be 0 everywhere, so it is set to the batch's mean reward.
    train, values = stages.first_step_values(run, state, reward_batch, values, step)
    # 11, 12: dense rewards (Eq. 7-9), advantages (Eq. 10-14), spread over tokens.
    advantages, advantage_metrics = stages.compute_advantages(
        run, state, chosen, reward_batch, values
    )
    # 14: theta and psi by Eq. 16.
    train, update_metrics = stages.update(
        run, train, stages.learner_batch(run, chosen, advantages), features, step, reference
    )
    method_state = stages.update_method(
        state.method_state, reward_batch, advantages.rewards, values, method=run.method
    )
    clock.lap("learn")
    # 16: pass rates rho_k at the full budget, for lines 3 and 4 of the next iteration.
    schedule = stages.adapt_schedule(run, state, rounds[0], step)
    clock.lap("adapt")
    new = replace(
        state,
        train=train,
        curriculum=schedule,
        stream=cursors,
        generated_tokens=state.generated_tokens + chosen.tokens,
        method_state=method_state,
    )
    if isinstance(new, RunStateAhead):
        new = with_upcoming(new, upcoming, clock)
    metrics = {**update_metrics, **advantage_metrics}
    metrics |= iteration_metrics(run, state, new, rounds, chosen)
    metrics |= host_metrics(clock, graded_before, grader_totals(run.environment))
    if guard is not None:
        metrics["train/undone"] = float(bool(notes))
    metrics = clock.timed(metrics, chosen.tokens)
    advantages, values = processes.to_host((advantages, values))
    return new, Iteration(metrics, chosen, advantages, values, notes)


Sampled = tuple[list[Round], Int[np.ndarray, "K"]]


def sample_step(
    run: Run, state: RunState, step: int, clock: Clock, poll: Poll, *, again: bool = False
) -> Sampled:
    """Samples all rounds of a step.

    Args:
      again: True after an undo, which draws with another key.

    Returns:
      The rounds, and the new cursors of the question stream.
    """

    def sample(index: int, cursors: Any) -> tuple[Round, Any]:
        return sample_round(run, state, step, index, cursors, clock, poll, again=again)

    return sample_rounds(sample, state.stream, run.method.dynamic_sampling)


def guarded(
    guard: UpdateGuard,
    run: Run,
    state: RunState,
    step: int,
    sampled: Sampled,
    clock: Clock,
    poll: Poll,
) -> tuple[RunState, list[Round], Int[np.ndarray, "K"], tuple[str, ...]]:
    """Undoes the last update if the traces sampled after it break a bound.

    Parameters, moments and value head are restored to their values before the update, and the step
    is sampled again, once. Pass rates and the method's running means stay, since they describe
    traces of the restored policy. So do the cursors of the question stream. Tokens of the discarded
    traces count as generated.

    Args:
      sampled: rounds and cursors of this step.

    Returns:
      State, rounds and cursors to continue with, and lines to report, none of them without an undo.
    """
    rounds, cursors = sampled
    notes: tuple[str, ...] = ()
    breach = guard.breach(shares_of(rounds[0]))
    if breach is not None and guard.can_undo(state.train):
        wasted = choose(rounds).tokens
        state = replace(
            state,
            train=guard.restored(),
            generated_tokens=state.generated_tokens + wasted,
        )
        notes = (f"undid the update of step {step}, since {breach}; this step is sampled again",)
        rounds, cursors = sample_step(run, state, step, clock, poll, again=True)
        second_breach = guard.breach(shares_of(rounds[0]))
        if second_breach is not None:
            notes += (
                f"without the update of step {step}, {second_breach} as well; training continues. "
                "Write another bound, or lower optimizer.learning_rate",
            )
    guard.keep(state.train, shares_of(rounds[0]))
    return state, rounds, cursors, notes


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
    """Lines 3 to 11 of Algorithm 1: samples one round of questions, traces and outcomes.

    Args:
      index: index of the round in its step.

    Returns:
      The round, and the new cursors of the question stream.
    """
    key = jax.random.fold_in(run.key, _SAMPLED_AGAIN) if again else run.key
    plan_key, rollout_key = stages.round_keys(key, step, index)
    # Restored parameters are the version that the previous step was sampled with.
    version = step - 1 if again else step
    if isinstance(state, RunStateAhead) and state.in_hand.there:
        plan = state.in_hand.plan
        rollout = state.in_hand.rollout
        prompts = stages.prompts_of(run, plan)
    else:
        plan, prompts, cursors = plan_round(run, state, plan_key, cursors)
        clock.lap("plan")
        # 9: a trace under each budget, and an answer at each of its truncation points.
        sample = stages.prepare_sampling(run, state, version, plan, prompts, rollout_key, poll)
        rollout = sample()
    plan = stages.resolve_cuts(run.method, plan, rollout)
    clock.lap("rollout")
    # r(q, t_{:b_j}) of Eq. 7: is each answer correct?
    outcomes, verdicts = grading.verify(run, plan, rollout, rollout_key, poll)
    by_reward = grading.reward_scores(run, plan, rollout, outcomes, poll)
    group_batch = stages.observe(run, state, plan, rollout, outcomes, by_reward, step)
    useful = stages.useful_questions(run.method, group_batch)
    clock.lap("verify")
    return Round(plan, prompts, rollout, group_batch, useful, verdicts), cursors


def plan_round(
    run: Run, state: RunState, key: Array, cursors: Int[np.ndarray, "K"]
) -> tuple[BatchPlan, Prompts, Int[np.ndarray, "K"]]:
    """Lines 3 to 8 and 10 of Algorithm 1: draws questions, budgets and truncation points.

    Returns:
      The plan, its prompts, and the new cursors of the question stream.
    """
    # 3, 4: w_k and p(b | k) follow from the pass rates. 6, 8, 10: questions by w_k, G budgets per
    # question from p(b | k), and M truncation points per budget.
    plan = stages.plan_batch(
        state.curriculum,
        key,
        run.group_of,
        run.group_sizes,
        method=run.method,
        num_questions=run.config.rollout.questions,
    )
    plan, cursors = stages.in_stream_order(run.stream, plan, cursors)
    return plan, stages.prompts_of(run, plan), cursors


def sample_ahead(
    run: Run,
    state: RunState,
    step: int,
    cursors: Int[np.ndarray, "K"],
    clock: Clock,
    poll: Poll,
) -> Upcoming | None:
    """Starts lines 3 to 10 of the next step with the current policy (rollout.ahead).

    Args:
      step: the next step.
      poll: called while the policy is loaded into the sampler, but not while traces are sampled.

    Returns:
      The batch that is being sampled; None without rollout.ahead, or after the last step.
    """
    if not run.config.rollout.ahead or step == run.total_steps:
        return None
    plan_key, rollout_key = stages.round_keys(run.key, step, 0)
    plan, prompts, cursors = plan_round(run, state, plan_key, cursors)
    clock.lap("plan")
    sample = stages.prepare_sampling(
        run, state, step - 1, plan, prompts, rollout_key, poll, in_background=True
    )
    clock.lap("rollout")
    return Upcoming(plan, cursors, begin(sample))


def with_upcoming(state: RunStateAhead, upcoming: Upcoming | None, clock: Clock) -> RunStateAhead:
    """Waits for the batch that is sampled ahead, and returns the state with it.

    If no batch is sampled, or its servers were lost, the state has `in_hand.there` False.
    """
    sampled = None if upcoming is None else upcoming.wait()
    waiting_seconds = clock.lap("rollout")
    if upcoming is None or sampled is None:
        return replace(state, in_hand=replace(state.in_hand, there=np.array(False)))
    batch, sampling_seconds = sampled
    clock.laps["time/overlap"] = max(sampling_seconds - waiting_seconds, 0.0)
    return replace(state, in_hand=batch, stream=upcoming.cursors)
