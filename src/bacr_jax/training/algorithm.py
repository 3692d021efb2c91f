"""Algorithm 1 of the paper, line by line: one iteration as a function of the state.

`train.py` repeats `iterate`; the numbers in its comments are the algorithm's lines. Randomness
comes from fold_in(run key, step) alone, so an iteration can be replayed from a checkpoint.
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from bacr_jax.parallel import processes
from bacr_jax.parallel.peers import TellPhase
from bacr_jax.training import stages
from bacr_jax.training.adapt import adapt_schedule
from bacr_jax.training.dynamic_sampling import Round, choose, sample_rounds
from bacr_jax.training.logging import Clock, Iteration, iteration_metrics
from bacr_jax.training.run import Run, RunState
from bacr_jax.types import Poll


def iterate(
    run: Run,
    state: RunState,
    step: int,
    *,
    reference: Any = None,
    poll: Poll = None,
    tell_phase: TellPhase | None = None,
) -> tuple[RunState, Iteration]:
    """Lines 3 to 16 of Algorithm 1, for one mini-batch.

    Args:
      state: donated.
      step: number of the iteration; with the run's seed it fixes all randomness.
      reference: parameters of the reference policy, for a KL term; None without one.
      poll: called while sampling and grading; it may raise, and `state` is whole then.
      tell_phase: hears what begins.

    Returns:
      The next state, and for the logs the metrics, what was learned from and its advantages.
    """
    clock, graded = Clock(step, tell_phase), run.environment.grader.counters()
    own_seconds = getattr(run.environment.grader, "own_seconds", 0.0)
    # 3 to 10: questions, budgets, traces and their answers; in several rounds if the method says.
    rounds, cursors = sample_rounds(
        lambda index, cursors: sample_round(run, state, step, index, cursors, clock, poll),
        state.stream,
        run.method.dynamic_sampling,
    )
    chosen = choose(rounds)
    # V(q, b, b_j) of Eq. 11, from before psi learns of this batch.
    values, features = stages.predict_values(run, state.train, chosen)
    # Before the first update V is 0 everywhere: it starts at the batch's mean reward instead.
    train, values = stages.start_values(run, state, chosen.group_batch, values, step)
    # 11, 12: dense rewards (Eq. 7-9), advantages (Eq. 10-14), spread over tokens.
    advantages, advantage_metrics = stages.token_advantages(
        state.method_state,
        chosen.group_batch,
        values,
        chosen.rollout.branches.source,
        method=run.method,
        max_thinking=run.policy.rollout.max_sampled,
        grace=run.config.budget.grace,
    )
    # 14: theta and psi by Eq. 16.
    train, learned = stages.update(
        run, train, stages.learner_batch(run, chosen, advantages), features, step, reference
    )
    method_state = stages.update_method(
        state.method_state, chosen.group_batch, advantages.rewards, values, method=run.method
    )
    clock.lap("learn")
    # 16: pass rates rho_k at the full budget, for lines 3 and 4 of the next iteration.
    schedule = adapt_schedule(run, state, rounds[0], step)
    clock.lap("adapt")
    new = RunState(
        train=train,
        curriculum=schedule,
        stream=cursors,
        generated_tokens=state.generated_tokens + chosen.tokens,
        method_state=method_state,
    )
    metrics = {**learned, **advantage_metrics}
    metrics |= stages.score_metrics(advantages.returns, chosen.group_batch.surprise)
    metrics |= iteration_metrics(run, state, new, rounds, chosen, graded)
    own_seconds = getattr(run.environment.grader, "own_seconds", 0.0) - own_seconds
    metrics |= processes.slowest(clock.laps["time/plan"] + own_seconds)
    metrics = clock.timed(metrics, chosen.tokens)
    return new, Iteration(metrics, chosen, *processes.to_host((advantages, values)))


def sample_round(
    run: Run,
    state: RunState,
    step: int,
    index: int,
    cursors: Int[np.ndarray, "K"],
    clock: Clock,
    poll: Poll,
) -> tuple[Round, Int[np.ndarray, "K"]]:
    """Lines 3 to 10 of Algorithm 1: one round of questions, with traces and outcomes.

    Args:
      cursors: questions drawn so far from each group.

    Returns:
      The round, and the new cursors.
    """
    plan_key, rollout_key = stages.round_keys(run.key, step, index)
    # 3, 4, 6, 8, 10: weights w_k and budgets p(b | k) as the pass rates have it; questions by w_k,
    # G budgets for each from p(b | k), M truncation points of each.
    plan = stages.plan_batch(
        state.curriculum,
        plan_key,
        run.group_of,
        run.group_sizes,
        method=run.method,
        num_questions=run.config.rollout.questions,
    )
    plan, cursors = stages.in_stream_order(run.stream, plan, cursors)
    prompts = run.environment.train.at(plan.rows, np.asarray(plan.budgets).reshape(-1))
    clock.lap("plan")
    # 9: a trace under each budget, and an answer at each of its truncation points.
    rollout = stages.generate_traces(run, state, step, plan, prompts, rollout_key, poll)
    plan = stages.placed_cuts(run.method, plan, rollout)
    clock.lap("rollout")
    # r(q, t_{:b_j}) of Eq. 7: is each answer correct?
    outcomes, verdicts = stages.verify(run, plan, rollout, rollout_key, poll)
    group_batch = stages.observe(run, state, plan, rollout, outcomes, step)
    useful = stages.useful_questions(run.method, group_batch)
    clock.lap("verify")
    return Round(plan, prompts, rollout, group_batch, useful, verdicts), cursors
