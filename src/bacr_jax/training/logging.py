"""What an iteration reports: metrics of rollouts, schedule, resampling and time."""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax.config import Config
from bacr_jax.config.derived import function_name
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods import GroupBatch, Method
from bacr_jax.methods.budget_prior import budget_locations
from bacr_jax.parallel import processes
from bacr_jax.parallel.peers import TellPhase
from bacr_jax.prompts.environment import Environment
from bacr_jax.rollout.repetition import ends_in_repetition
from bacr_jax.rollout.rollouts import sampled_counters
from bacr_jax.training.dynamic_sampling import Round
from bacr_jax.training.run import Run, RunState, RunStateAhead
from bacr_jax.training.stages import TokenAdvantages
from bacr_jax.types import CLOSED_BY_BUDGET

Metrics = dict[str, float]
# Counters of a rollout in slots of our own decoder.
_OF_SLOTS = ("occupancy", "wasted_share")


@dataclass(frozen=True)
class Iteration:
    """What an iteration leaves for the logs.

    Attributes:
      chosen: what was learned from.
      advantages: of its tokens, and rewards, on the host.
      values: V(q, b, b_j) that was subtracted, on the host; None without a value head.
      notes: lines to report, about an update that was undone (`training.undo`).
    """

    metrics: Metrics
    chosen: Round
    advantages: TokenAdvantages
    values: Float[np.ndarray, "Q G M"] | None
    notes: tuple[str, ...] = ()


def iteration_metrics(
    run: Run, state: RunState, new: RunState, rounds: Sequence[Round], chosen: Round
) -> dict[str, Any]:
    """Metrics of the method as it was before, rounds, first round's rollout and schedule."""
    schedule = new.curriculum
    return {
        **method_metrics(state.method_state, rounds[0].group_batch, method=run.method),
        **rollout_metrics(rounds[0]),
        **(sampling_metrics(rounds, chosen) if run.method.dynamic_sampling is not None else {}),
        **schedule_metrics(
            schedule, run.method.question_weights(schedule, run.group_sizes), config=run.config
        ),
        "rollout/tokens": chosen.rollout.counters["tokens"],
        "rollout/tokens_total": int(new.generated_tokens),
        **({"rollout/staleness": state.in_hand.there} if isinstance(state, RunStateAhead) else {}),
    }


@functools.partial(jax.jit, static_argnames=("method",))
def method_metrics(
    method_state: Any, group_batch: GroupBatch, *, method: Method
) -> dict[str, Array]:
    """The method's own metrics of a round that nothing was chosen from."""
    return method.metrics(method_state, group_batch)


def rollout_metrics(first: Round) -> dict[str, Any]:
    """Accuracy by cut and lengths of a round that nothing was chosen from."""
    counters = first.rollout.counters
    trunks, branches = first.rollout.trunks, first.rollout.branches
    cuts = np.asarray(first.group_batch.outcomes).mean((0, 1))
    rewards = first.group_batch.by_reward
    repeated = ends_in_repetition(
        *map(np.asarray, (trunks.tokens, trunks.prompt_lengths, trunks.sampled))
    )
    return {
        **{f"reward/cut_{j + 1}": value for j, value in enumerate(cuts)},
        "rollout/thinking_mean": float(np.mean(trunks.thinking)),
        "rollout/thinking_max": float(np.max(trunks.thinking)),
        "rollout/forced_share": float(np.mean(np.asarray(trunks.close) == CLOSED_BY_BUDGET)),
        "rollout/completion_rate": float(np.mean(np.asarray(trunks.close) != CLOSED_BY_BUDGET)),
        "rollout/closed_answers": float(np.mean(branches.finished)),
        "rollout/repetition": float(np.mean(repeated)),
        "rollout/forced_tokens_mean": float(np.mean(branches.forced)),
        "rollout/answer_tokens_mean": float(np.mean(branches.sampled)),
        "rollout/excess_mean": counters["excess_mean"],
        "budget/mean": float(np.mean(np.asarray(first.plan.budgets))),
        **budgets_by_group(np.asarray(first.plan.groups), np.asarray(first.plan.budgets)),
        **{f"rollout/{name}": counters[name] for name in _OF_SLOTS if name in counters},
        **{f"rewards/{function_name(name)}": float(x.mean()) for name, x in rewards.items()},
    }


def budgets_by_group(
    groups: Int[np.ndarray, "Q"], budgets: Int[np.ndarray, "Q G"]
) -> dict[str, float]:
    """Median, 10 % and 90 % quantile of the budgets of each difficulty group that was asked."""
    found = {}
    for group in np.unique(groups):
        ends = np.quantile(budgets[groups == group], (0.1, 0.5, 0.9))
        for name, value in zip(("p10", "median", "p90"), ends):
            found[f"budget/{name}_{group}"] = float(value)
    return found


def sampling_metrics(rounds: Sequence[Round], chosen: Round) -> dict[str, Any]:
    """Rounds, the share of useful questions, places filled up, and tokens that were dropped."""
    kept = sampled_counters(chosen.rollout.trunks, chosen.rollout.branches)["tokens"]
    return {
        "sampling/rounds": len(rounds),
        "sampling/useful_share": np.mean([one.useful.mean() for one in rounds]),
        "sampling/filled": int((~chosen.useful).sum()),
        "sampling/dropped_tokens": chosen.tokens - kept,
    }


def schedule_metrics(
    schedule: CurriculumState, weights: Float[Array, "K"], *, config: Config
) -> dict[str, Any]:
    """Location, pass rate and weight of each difficulty group."""
    mu = budget_locations(config, schedule)
    found = {}
    for group in range(config.data.num_groups):
        found[f"curriculum/mu_{group}"] = float(mu[group])
        found[f"curriculum/pass_rate_{group}"] = float(schedule.pass_rate[group])
        found[f"curriculum/weight_{group}"] = float(weights[group])
    return found


def grader_metrics(before: Mapping[str, int], after: Mapping[str, int]) -> Metrics:
    """What the grader did in an iteration, from its totals before and after.

    What its cache happens to hold, and what befell its workers, belongs to the process.
    """
    found = {}
    for name in after:
        of_process = name.startswith(("worker_", "failed", "rewards_", "cache_hits", "timeouts"))
        key = f"process/grader_{name}" if of_process else f"grader/{name}"
        found[key] = float(after[name] - before[name])
    return found


# What comes after each lap, as the other processes are told.
_NEXT = {"plan": "rollout", "rollout": "grade", "verify": "update", "learn": "adapt"}


class Clock:
    """Seconds spent between laps, as `time/...` metrics."""

    def __init__(self, step: int = 0, tell_phase: TellPhase | None = None) -> None:
        """Starts the clock; `tell_phase` hears what begins with each lap."""
        self._step, self._tell = step, tell_phase
        self.laps: Metrics = {}
        self._start = self._last = time.perf_counter()

    def lap(self, name: str) -> float:
        """Adds the time since the last lap to `name`, and gives it."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + seconds
        if self._tell is not None and name in _NEXT:
            self._tell(_NEXT[name], self._step + 1)
        return seconds

    def timed(self, metrics: Mapping[str, Any], tokens: int) -> Metrics:
        """Metrics as numbers, with the laps and the pace of so many tokens."""
        numbers = {name: float(value) for name, value in metrics.items()}
        return numbers | self.laps | {"time/tokens_per_s": tokens / self.total}

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start


# Counters of the graders of all processes, and seconds of this one's share; 0: it grades alone.
GraderTotals = tuple[Mapping[str, int], float]


def grader_totals(environment: Environment) -> GraderTotals:
    """What the graders have done so far; all processes must ask at the same places."""
    return environment.counters(), environment.own_seconds


def host_metrics(clock: Clock, before: GraderTotals, after: GraderTotals) -> Metrics:
    """What the grader did in an iteration, and whose host took longest to draw and grade."""
    (counters, seconds), (counters_now, seconds_now) = before, after
    slowest = processes.slowest(clock.laps.get("time/plan", 0.0) + seconds_now - seconds)
    return grader_metrics(counters, counters_now) | slowest
