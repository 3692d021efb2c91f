"""Algorithm 1 of the paper, line by line: one iteration as a function of the state.

`train.py` repeats `iterate`; the numbers in its comments are the algorithm's lines. Randomness
comes from fold_in(run key, step), and under data.order=shuffled from the seed and the state's
cursors, so an iteration can be replayed from a checkpoint.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from bacr_jax.parallel import processes
from bacr_jax.parallel.peers import TellPhase
from bacr_jax.training import grading, stages
from bacr_jax.training.ahead import Upcoming, begin
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

# Folded into the run's key for a step that is sampled again after an undo. Steps are folded in too,
# and no run has this many.
_SAMPLED_AGAIN = 2**31 + 1


def iterate(
    run: Run,
    state: RunState,
    step: int,
    *,
    reference: Any = None,
    poll: Poll = None,
    tell_phase: TellPhase | None = None,
    guard: UpdateGuard | None = None,
) -> tuple[RunState, Iteration]:
    """Lines 3 to 16 of Algorithm 1, for one mini-batch; `state` is donated.

    `poll` is called while sampling and grading; it may raise, and `state` is whole then.
    `reference`: parameters of the reference policy, for a KL term. `guard`: undoes the update of
    the step before, if the traces of this step break a bound.
    """
    clock, graded = Clock(step, tell_phase), grader_totals(run.environment)
    # 3 to 11: questions, budgets, traces and their answers; in several rounds if the method says.
    rounds, cursors = sample_step(run, state, step, clock, poll)
    notes: tuple[str, ...] = ()
    if guard is not None:
        state, rounds, cursors, notes = guarded(
            guard, run, state, step, (rounds, cursors), clock, poll
        )
    chosen = choose(rounds)
    # What reward.weights makes of the outcomes; pass rates and logs have them as they are.
    paid = grading.credited(run.config, chosen.group_batch)
    # 3 to 10 of the next iteration go on beside the rest of this one (rollout.ahead).
    upcoming = sample_ahead(run, state, step + 1, cursors, clock, poll)
    # V(q, b, b_j) of Eq. 11, from before psi learns of this batch.
    values, features = stages.predict_values(run, state.train, chosen)
    # Before the first update V is 0 everywhere: it starts at the batch's mean reward instead.
    train, values = stages.start_values(run, state, paid, values, step)
    # 11, 12: dense rewards (Eq. 7-9), advantages (Eq. 10-14), spread over tokens.
    advantages, advantage_metrics = stages.advantages_of(run, state, chosen, paid, values)
    # 14: theta and psi by Eq. 16.
    train, learned = stages.update(
        run, train, stages.learner_batch(run, chosen, advantages), features, step, reference
    )
    method_state = stages.update_method(
        state.method_state, paid, advantages.rewards, values, method=run.method
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
    metrics = {**learned, **advantage_metrics}
    metrics |= iteration_metrics(run, state, new, rounds, chosen)
    metrics |= host_metrics(clock, graded, grader_totals(run.environment))
    if guard is not None:
        metrics["train/undone"] = float(bool(notes))
    metrics = clock.timed(metrics, chosen.tokens)
    advantages, values = processes.to_host((advantages, values))
    return new, Iteration(metrics, chosen, advantages, values, notes)


Sampled = tuple[list[Round], Int[np.ndarray, "K"]]


def sample_step(
    run: Run, state: RunState, step: int, clock: Clock, poll: Poll, *, again: bool = False
) -> Sampled:
    """Samples all rounds of a step, and moves the place in the stream of questions.

    Args:
      again: True after an undo: draws with another key.
    """
    return sample_rounds(
        lambda index, cursors: sample_round(
            run, state, step, index, cursors, clock, poll, again=again
        ),
        state.stream,
        run.method.dynamic_sampling,
    )


def guarded(
    guard: UpdateGuard,
    run: Run,
    state: RunState,
    step: int,
    sampled: Sampled,
    clock: Clock,
    poll: Poll,
) -> tuple[RunState, list[Round], Int[np.ndarray, "K"], tuple[str, ...]]:
    """Undoes the last update if the traces of the policy that it made break a bound.

    Parameters, moments and value head are restored from before the update, and the step is sampled
    again, once. Pass rates and the method's running means stay, since they describe traces
    of the restored policy. So does the place in the stream of questions. Tokens of the traces that
    are thrown away count as generated.

    Returns:
      State, rounds and place in the stream to go on with, and a line for each thing to report:
      none without an undo.
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
        still = guard.breach(shares_of(rounds[0]))
        if still is not None:
            notes += (
                f"without the update of step {step}, {still} as well; training goes on from there. "
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
    """Lines 3 to 11 of Algorithm 1: one round of questions, with traces and outcomes."""
    key = jax.random.fold_in(run.key, _SAMPLED_AGAIN) if again else run.key
    plan_key, rollout_key = stages.round_keys(key, step, index)
    # Restored parameters are those that the step before was sampled with.
    version = step - 1 if again else step
    if isinstance(state, RunStateAhead) and state.in_hand.there:
        plan, rollout = state.in_hand.plan, state.in_hand.rollout
        prompts = stages.prompts_of(run, plan)
    else:
        plan, prompts, cursors = plan_round(run, state, plan_key, cursors)
        clock.lap("plan")
        # 9: a trace under each budget, and an answer at each of its truncation points.
        rollout = stages.traces_of(run, state, version, plan, prompts, rollout_key, poll)()
    plan = stages.placed_cuts(run.method, plan, rollout)
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
    """Lines 3 to 8 and 10 of Algorithm 1: what is asked in a round."""
    # 3, 4, 6, 8, 10: weights w_k and budgets p(b | k) as the pass rates have it; questions by w_k,
    # G budgets for each from p(b | k), M truncation points of each.
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
    """Begins with lines 3 to 10 of a step under the policy before it, if it is to go ahead.

    `poll` is called while the policy is handed over, and not while it samples.
    """
    if not run.config.rollout.ahead or step == run.total_steps:
        return None
    plan_key, rollout_key = stages.round_keys(run.key, step, 0)
    plan, prompts, cursors = plan_round(run, state, plan_key, cursors)
    clock.lap("plan")
    sample = stages.traces_of(
        run, state, step - 1, plan, prompts, rollout_key, poll, in_background=True
    )
    clock.lap("rollout")
    return Upcoming(plan, cursors, begin(sample))


def with_upcoming(state: RunStateAhead, upcoming: Upcoming | None, clock: Clock) -> RunStateAhead:
    """The state with the batch that was sampled ahead, once it is whole, or without any."""
    sampled = None if upcoming is None else upcoming.wait()
    waited = clock.lap("rollout")
    if upcoming is None or sampled is None:
        return replace(state, in_hand=replace(state.in_hand, there=np.array(False)))
    batch, seconds = sampled
    clock.laps["time/overlap"] = max(seconds - waited, 0.0)
    return replace(state, in_hand=batch, stream=upcoming.cursors)
