"""Samples the next batch while the learner updates the policy (`rollout.async_steps`).

`algorithm.sample_ahead` starts a sampling thread. `algorithm.with_upcoming` waits for its batch and
stores it in the state of the run, so that checkpoints contain it.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.rollout import Rollout
from bacr_jax.rollout.fleet import ServersLost
from bacr_jax.rollout.rollouts import sampled_counters
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.types import Branches, Trunks, pytree


@pytree
class PrefetchedBatch:
    """A batch that was sampled one iteration ahead. It is part of the state of the run.

    Attributes:
      is_sampled: True if the batch was sampled. If False, the other fields are unused, and the next
        batch is sampled with the newest policy.
      plan: questions, budgets and truncation points (cuts) of the batch.
      trunks: prompts and sampled thinking, one row per trace.
      branches: sampled answers, each of which continues the thinking from a truncation point.
    """

    is_sampled: Bool[np.ndarray, ""]
    plan: BatchPlan
    trunks: Trunks
    branches: Branches

    @property
    def rollout(self) -> Rollout:
        """Returns the batch as a rollout, with counters recomputed from the arrays."""
        return Rollout(self.trunks, self.branches, sampled_counters(self.trunks, self.branches))


@dataclass(frozen=True)
class Upcoming:
    """A batch that a background thread is sampling.

    Attributes:
      plan: questions, budgets and truncation points (cuts) of the batch.
      cursors: number of questions drawn so far from each difficulty group, including this batch.
      sampled: future of a tuple (rollout, wall-clock seconds that sampling took).
    """

    plan: BatchPlan
    cursors: Int[np.ndarray, "K"]
    sampled: "Future[tuple[Rollout, float]]"

    def wait(self) -> tuple[PrefetchedBatch, float] | None:
        """Waits until the batch has been sampled.

        Signals are only handled after the wait. A checkpoint that is saved because of a signal
        therefore contains the batch, and the resumed run learns from it.

        Returns:
          The batch and the wall-clock seconds that sampling took. None if all servers were lost, in
          which case the batch must be sampled again.
        """
        try:
            rollout, seconds = self.sampled.result()
        except ServersLost:
            return None
        plan = jax.tree.map(np.asarray, self.plan)
        batch = PrefetchedBatch(np.array(True), plan, rollout.trunks, rollout.branches)
        return batch, seconds


def begin(sample: Callable[[], Rollout]) -> "Future[tuple[Rollout, float]]":
    """Starts to run `sample` in a daemon thread.

    Returns:
      A future of a tuple (rollout, wall-clock seconds that sampling took).
    """
    sampled: Future[tuple[Rollout, float]] = Future()

    def work() -> None:
        started = time.perf_counter()
        try:
            rollout = sample()
        except BaseException as error:
            sampled.set_exception(error)
        else:
            sampled.set_result((rollout, time.perf_counter() - started))

    threading.Thread(target=work, daemon=True).start()
    return sampled
