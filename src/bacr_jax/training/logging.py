"""What an iteration reports: rollouts, the schedule, resampling, time."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax import curriculum
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.training.dynamic_sampling import Asked, sampled_tokens

Metrics = dict[str, float]


def rollout_metrics(asked: Asked) -> dict[str, Any]:
    """Accuracy by cut and lengths of a round that nothing was chosen from."""
    trunks, branches = asked.rollout.trunks, asked.rollout.branches
    cuts = np.asarray(asked.seen.outcomes).mean((0, 1))
    return {
        **{f"reward/cut_{j + 1}": value for j, value in enumerate(cuts)},
        "rollout/thinking_mean": float(np.mean(trunks.thinking)),
        "rollout/thinking_max": float(np.max(trunks.thinking)),
        "rollout/forced_share": float(np.mean(np.asarray(trunks.close) == 0)),
        "rollout/closed_answers": float(np.mean(branches.finished)),
        "budget/mean": float(np.mean(trunks.budgets)),
        **budgets_by_group(np.asarray(asked.plan.groups), np.asarray(asked.plan.budgets)),
        "rollout/occupancy": asked.rollout.counters["occupancy"],
        "rollout/wasted_share": asked.rollout.counters["wasted_share"],
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


def sampling_metrics(asked: Sequence[Asked], chosen: Asked) -> dict[str, Any]:
    """Rounds, the share of useful questions, places filled up, and tokens that were dropped."""
    return {
        "sampling/rounds": len(asked),
        "sampling/useful_share": np.mean([one.useful.mean() for one in asked]),
        "sampling/filled": int((~chosen.useful).sum()),
        "sampling/dropped_tokens": chosen.rollout.counters["tokens"]
        - sampled_tokens(chosen.rollout),
    }


def schedule_metrics(
    schedule: CurriculumState,
    weights: Float[Array, "n"],
    group_of: Int[np.ndarray, "n"],
    *,
    config: Config,
) -> dict[str, Any]:
    """Location, pass rate and weight of each difficulty group.

    Args:
      schedule: of n groups, or of n problems with continuous difficulty.
      weights: probability of each of the n.
      group_of: difficulty group that each of the n is reported under.
      config: the run's config.

    Returns:
      Means over the members of a group, and the sum of their weights.
    """
    settings, budget = config.curriculum, config.budget
    mu = curriculum.scheduled_mean(
        schedule,
        alpha=settings.alpha,
        beta=settings.beta,
        b_min=budget.min,
        b_max=budget.max,
        clip=settings.clip_mu,
    )
    found = {}
    for group in range(config.data.num_groups):
        here = group_of == group
        # A group without problems has no mean.
        mean = lambda x: float(np.asarray(x)[here].mean()) if here.any() else 0.0  # noqa: B023
        found[f"curriculum/mu_{group}"] = mean(mu)
        found[f"curriculum/pass_rate_{group}"] = mean(schedule.pass_rate)
        found[f"curriculum/weight_{group}"] = float(np.asarray(weights)[here].sum())
    return found


def grader_metrics(before: Mapping[str, int], after: Mapping[str, int]) -> Metrics:
    """What the grader did in an iteration, from its totals before and after.

    What its cache happens to hold, and what befell its workers, belongs to the process.
    """
    found = {}
    for name in after:
        of_process = name.startswith("worker_") or name in ("cache_hits", "timeouts")
        key = f"process/grader_{name}" if of_process else f"grader/{name}"
        found[key] = float(after[name] - before[name])
    return found


class Clock:
    """Seconds spent between laps, as `time/...` metrics."""

    def __init__(self) -> None:
        """Starts the clock."""
        self.laps: Metrics = {}
        self._start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to `name`."""
        now = time.perf_counter()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start
