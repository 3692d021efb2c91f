"""Computes the metrics of an iteration.

The metrics cover rollouts, the curriculum, dynamic sampling, the grader and time.
`algorithm.iterate` calls these functions, and `loop.Trainer` writes their results. docs/metrics.md
describes every metric.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config.derived import function_name
from bacr_jax.config.settings import MethodSettings, resolve
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods import GroupBatch, Method
from bacr_jax.methods.budget_prior import budget_locations
from bacr_jax.parallel import processes
from bacr_jax.parallel.peers import OnPhase
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.rollout.repetition import ends_in_repetition
from bacr_jax.rollout.rollouts import sampled_counters
from bacr_jax.training.dynamic_sampling import Round
from bacr_jax.training.run import Run, RunState
from bacr_jax.training.stages import TokenAdvantages
from bacr_jax.types import CLOSED_BY_BUDGET

Metrics = dict[str, float]
# Rollout counters about decoding slots, which only exist if the built-in decoder samples.
_OF_SLOTS = ("occupancy", "wasted_share")
# Prefixes of counters that differ between processes, because they depend on the process's cache and
# worker processes.
_OF_PROCESS = ("worker_", "failed", "rewards_", "cache_hits", "timeouts")


@dataclass(frozen=True)
class Iteration:
    """Results of an iteration that are logged.

    Attributes:
      metrics: metrics by name.
      chosen: the batch that the policy was updated on.
      advantages: rewards and advantages of the batch, on the host.
      values: predictions V(q, b, b_j) of the value head for question q, budget b and truncation
        point b_j, on the host. None if the method has no value head.
      notes: messages about an update that was undone (`training.undo`). Empty if no update was
        undone.
    """

    metrics: Metrics
    chosen: Round
    advantages: TokenAdvantages
    values: Float[np.ndarray, "Q G M"] | None
    notes: tuple[str, ...] = ()


def iteration_metrics(
    run: Run,
    state: RunState,
    new: RunState,
    rounds: Sequence[Round],
    chosen: Round,
    tokens: int,
) -> dict[str, Any]:
    """Returns the metrics of the method, the rollouts, dynamic sampling and the curriculum.

    Args:
      state: state before the iteration. The method computes its own metrics from this state.
      new: state after the iteration. The curriculum metrics describe this state.
      rounds: all rounds. Rollout metrics describe the first round, before any questions are
        selected.
      chosen: the batch that the policy was updated on.
      tokens: number of tokens sampled in the step, including the tokens of discarded traces.
    """
    schedule = new.curriculum
    weights = run.method.question_weights(schedule, run.group_sizes)
    metrics: dict[str, Any] = {}
    metrics |= method_metrics(state.method_state, rounds[0].group_batch, method=run.method)
    metrics |= rollout_metrics(rounds[0])
    if run.config.budget.prior == "choices":
        metrics |= closed_answers_by_budget(
            np.asarray(rounds[0].plan.budgets).reshape(-1),
            np.asarray(rounds[0].rollout.branches.finished),
        )
    if run.method.dynamic_sampling is not None:
        metrics |= sampling_metrics(rounds, chosen, tokens)
    metrics |= schedule_metrics(schedule, weights, settings=resolve(run.config).method)
    metrics["rollout/tokens"] = tokens
    metrics["rollout/tokens_total"] = int(new.generated_tokens)
    if state.prefetched is not None:
        metrics["rollout/staleness"] = state.prefetched.is_sampled
    return metrics


@functools.partial(jax.jit, static_argnames=("method",))
def method_metrics(
    method_state: Any, group_batch: GroupBatch, *, method: Method
) -> dict[str, Array]:
    """Returns the metrics that the training method defines, for one round."""
    return method.metrics(method_state, group_batch)


def rollout_metrics(first: Round) -> dict[str, Any]:
    """Returns accuracy by truncation point, response lengths and budgets of the first round."""
    counters = first.rollout.counters
    trunks = first.rollout.trunks
    branches = first.rollout.branches
    forced = np.asarray(trunks.close) == CLOSED_BY_BUDGET
    completed = np.asarray(trunks.close) != CLOSED_BY_BUDGET
    repeated = ends_in_repetition(
        np.asarray(trunks.tokens), np.asarray(trunks.prompt_lengths), np.asarray(trunks.sampled)
    )
    budgets = np.asarray(first.plan.budgets)
    accuracies = np.asarray(first.group_batch.outcomes).mean((0, 1))
    metrics: dict[str, Any] = {}
    for cut, accuracy in enumerate(accuracies, 1):
        metrics[f"reward/cut_{cut}"] = accuracy
    metrics |= {
        "rollout/thinking_mean": float(np.mean(trunks.thinking)),
        "rollout/thinking_max": float(np.max(trunks.thinking)),
        "rollout/forced_share": float(np.mean(forced)),
        "rollout/completion_rate": float(np.mean(completed)),
        "rollout/closed_answers": float(np.mean(branches.finished)),
        "rollout/repetition": float(np.mean(repeated)),
        "rollout/forced_tokens_mean": float(np.mean(branches.forced)),
        "rollout/answer_tokens_mean": float(np.mean(branches.sampled)),
        "rollout/excess_mean": counters["excess_mean"],
        "budget/mean": float(np.mean(budgets)),
    }
    metrics |= thinking_by_verdict(first.group_batch)
    metrics |= budgets_by_group(np.asarray(first.plan.groups), budgets)
    for name in _OF_SLOTS:
        if name in counters:
            metrics[f"rollout/{name}"] = counters[name]
    for name, scores in first.group_batch.by_reward.items():
        metrics[f"rewards/{function_name(name)}"] = float(scores.mean())
    return metrics


def thinking_by_verdict(group_batch: GroupBatch) -> dict[str, float]:
    """Returns the mean thinking tokens of traces with right and with wrong final answers.

    A mean over no traces is omitted. A trace with a score s between 0 and 1 counts as right with
    weight s and as wrong with weight 1 - s.
    """
    lengths = np.asarray(group_batch.thinking, np.float64)
    right = np.asarray(group_batch.outcomes, np.float64)[..., -1]
    metrics = {}
    if right.any():
        metrics["rollout/thinking_right"] = float(np.average(lengths, weights=right))
    if (right < 1.0).any():
        metrics["rollout/thinking_wrong"] = float(np.average(lengths, weights=1.0 - right))
    return metrics


def closed_answers_by_budget(
    budgets: Int[np.ndarray, "B"], closed: Bool[np.ndarray, "B M"]
) -> dict[str, float]:
    """Returns the share of closed answers and the number of traces at each budget.

    Args:
      budgets: budget of each trace.
      closed: True for answers that ended with a closing tag or an end token.
    """
    metrics = {}
    for budget in np.unique(budgets):
        has_budget = budgets == budget
        metrics[f"rollout/closed_answers_{budget}"] = float(closed[has_budget].mean())
        metrics[f"budget/traces_{budget}"] = float(has_budget.sum())
    return metrics


def budgets_by_group(
    groups: Int[np.ndarray, "Q"], budgets: Int[np.ndarray, "Q G"]
) -> dict[str, float]:
    """Returns the median and the 10 % and 90 % quantiles of the budgets of each difficulty group.

    Groups without a question in the batch are omitted.
    """
    metrics = {}
    for group in np.unique(groups):
        quantiles = np.quantile(budgets[groups == group], (0.1, 0.5, 0.9))
        for name, value in zip(("p10", "median", "p90"), quantiles):
            metrics[f"budget/{name}_{group}"] = float(value)
    return metrics


def sampling_metrics(rounds: Sequence[Round], chosen: Round, tokens: int) -> dict[str, Any]:
    """Returns the metrics of dynamic sampling.

    These are the number of rounds, the share of useful questions, the number of questions that only
    fill up the batch, and the number of tokens in discarded traces.

    Args:
      rounds: all rounds.
      chosen: the batch that the policy was updated on.
      tokens: number of tokens sampled in the step, including the tokens of discarded traces.
    """
    batch_tokens = sampled_counters(chosen.rollout.trunks, chosen.rollout.branches)["tokens"]
    return {
        "sampling/rounds": len(rounds),
        "sampling/useful_share": np.mean([one.useful.mean() for one in rounds]),
        "sampling/filled": int((~chosen.useful).sum()),
        "sampling/dropped_tokens": tokens - batch_tokens,
    }


def schedule_metrics(
    schedule: CurriculumState, weights: Float[Array, "K"], *, settings: MethodSettings
) -> dict[str, Any]:
    """Returns each difficulty group's budget location mu_k, pass rate rho_k and weight w_k."""
    mu = budget_locations(settings, schedule)
    metrics = {}
    for group in range(settings.data.num_groups):
        metrics[f"curriculum/mu_{group}"] = float(mu[group])
        metrics[f"curriculum/pass_rate_{group}"] = float(schedule.pass_rate[group])
        metrics[f"curriculum/weight_{group}"] = float(weights[group])
    return metrics


def grader_metrics(before: Mapping[str, int], after: Mapping[str, int]) -> Metrics:
    """Returns the grader's counts for an iteration, from its totals before and after the iteration.

    The names of counts that depend on the cache or the worker processes of this process start with
    "process/".
    """
    metrics = {}
    for name in after:
        prefix = "process/grader_" if name.startswith(_OF_PROCESS) else "grader/"
        metrics[f"{prefix}{name}"] = float(after[name] - before[name])
    return metrics


# Maps each phase to the phase that begins after it, whose name is passed to `on_phase`.
_NEXT_PHASE = {"plan": "rollout", "rollout": "grade", "verify": "update", "learn": "adapt"}


class Clock:
    """Measures the wall-clock time of each phase of a step, and returns it as `time/...` metrics.

    Attributes:
      laps: wall-clock seconds of each phase, by metric name.
    """

    def __init__(self, step: int = 0, on_phase: OnPhase | None = None) -> None:
        """Starts the clock.

        Args:
          step: number of iterations already done.
          on_phase: callback that `lap` calls with the name and the step of the phase that begins.
        """
        self._step = step
        self._on_phase = on_phase
        self.laps: Metrics = {}
        self._start = time.perf_counter()
        self._last = self._start

    def lap(self, name: str) -> float:
        """Adds the seconds since the previous call to the metric `time/NAME`, and returns them."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        key = f"time/{name}"
        self.laps[key] = self.laps.get(key, 0.0) + seconds
        if self._on_phase is not None and name in _NEXT_PHASE:
            self._on_phase(_NEXT_PHASE[name], self._step + 1)
        return seconds

    def timed(self, metrics: Mapping[str, Any], tokens: int) -> Metrics:
        """Returns the metrics as floats, plus phase times and throughput in tokens per second."""
        numbers = {name: float(value) for name, value in metrics.items()}
        return numbers | self.laps | {"time/tokens_per_s": tokens / self.total}

    @property
    def total(self) -> float:
        """Returns the wall-clock seconds since the clock was started."""
        return time.perf_counter() - self._start


# Grader counters summed over all processes, and the wall-clock seconds that this process has spent
# grading. The seconds are 0 if only one process grades.
GraderTotals = tuple[Mapping[str, int], float]


def grader_totals(task_data: TaskData) -> GraderTotals:
    """Returns the totals of the graders since the start of the run.

    This is a collective operation, so all processes must call it.
    """
    return task_data.counters(), task_data.own_seconds


def host_metrics(clock: Clock, before: GraderTotals, after: GraderTotals) -> Metrics:
    """Returns the grader's counts of an iteration, and which process was slowest in host work.

    Args:
      clock: clock of the iteration. The time of its phase `plan` counts as host work.
      before: result of `grader_totals` before the iteration.
      after: result of `grader_totals` after the iteration.
    """
    counters_before, seconds_before = before
    counters_after, seconds_after = after
    host_seconds = clock.laps.get("time/plan", 0.0) + seconds_after - seconds_before
    return grader_metrics(counters_before, counters_after) | processes.slowest(host_seconds)
