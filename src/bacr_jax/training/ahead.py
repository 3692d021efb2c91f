"""The batch of the next iteration, sampled while the learner is at work (rollout.ahead)."""

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
class InHand:
    """A batch that was sampled an iteration ahead: part of a run's state, so of its checkpoints.

    Attributes:
      there: false: none was, and the next one is sampled under the newest policy.
    """

    there: Bool[np.ndarray, ""]
    plan: BatchPlan
    trunks: Trunks
    branches: Branches

    @property
    def rollout(self) -> Rollout:
        """As it was sampled."""
        return Rollout(self.trunks, self.branches, sampled_counters(self.trunks, self.branches))


@dataclass(frozen=True)
class Upcoming:
    """A batch that is being sampled.

    Attributes:
      cursors: questions drawn so far from each group, its own among them.
      sampled: it, and the seconds that it took.
    """

    plan: BatchPlan
    cursors: Int[np.ndarray, "K"]
    sampled: "Future[tuple[Rollout, float]]"

    def wait(self) -> tuple[InHand, float] | None:
        """The batch and its seconds; None: its servers were lost, and it is asked for again.

        A signal is heard when the batch is whole: what is learned from it is then the same in a run
        that goes on later.
        """
        try:
            rollout, seconds = self.sampled.result()
        except ServersLost:
            return None
        plan = jax.tree.map(np.asarray, self.plan)
        return InHand(np.array(True), plan, rollout.trunks, rollout.branches), seconds


def begin(sample: Callable[[], Rollout]) -> "Future[tuple[Rollout, float]]":
    """Calls it in a thread that does not keep the process from ending."""
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
