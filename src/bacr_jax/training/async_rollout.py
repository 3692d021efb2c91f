"""Samples the batch of the next iteration while the learner updates the policy (rollout.ahead).

`algorithm.sample_ahead` starts the thread that samples; `algorithm.with_upcoming` stores its batch
in the state of the run, and so in the checkpoints.
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
    """A batch that was sampled one iteration ahead: a part of a run's state.

    Attributes:
      there: False if no batch was sampled ahead. The other arrays are then unused, and the next
        batch is sampled with the newest policy.
    """

    there: Bool[np.ndarray, ""]
    plan: BatchPlan
    trunks: Trunks
    branches: Branches

    @property
    def rollout(self) -> Rollout:
        """Returns the rollout of this batch, with counters computed from its arrays."""
        return Rollout(self.trunks, self.branches, sampled_counters(self.trunks, self.branches))


@dataclass(frozen=True)
class Upcoming:
    """A batch that a thread is sampling.

    Attributes:
      cursors: questions drawn so far from each group, including the questions of this batch.
      sampled: future with the rollout and the seconds that sampling took.
    """

    plan: BatchPlan
    cursors: Int[np.ndarray, "K"]
    sampled: "Future[tuple[Rollout, float]]"

    def wait(self) -> tuple[PrefetchedBatch, float] | None:
        """Waits for the batch, and returns it with the seconds that sampling took.

        Signals are not polled during the wait, so that a resumed run learns from the same batch.

        Returns:
          None if all servers were lost; the batch must then be sampled again.
        """
        try:
            rollout, seconds = self.sampled.result()
        except ServersLost:
            return None
        plan = jax.tree.map(np.asarray, self.plan)
        batch = PrefetchedBatch(np.array(True), plan, rollout.trunks, rollout.branches)
        return batch, seconds


def begin(sample: Callable[[], Rollout]) -> "Future[tuple[Rollout, float]]":
    """Calls `sample` in a daemon thread, and returns a future with its rollout and its seconds."""
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
