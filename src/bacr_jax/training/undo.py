"""Undoes an update if the traces sampled after it exceed a bound (train.undo_*).

`algorithm.guarded` calls an `UpdateGuard` after the traces of each step are sampled. The state
before the last update is kept in host memory. It is not part of checkpoints.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import TrainConfig
from bacr_jax.learner.train_step import TrainState
from bacr_jax.training.dynamic_sampling import Round
from bacr_jax.training.logging import rollout_metrics

# Shares of a step's traces in [0, 1], by metric name.
Shares = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A metric of sampled traces with a bound, such as the share of answers that were closed.

    Attributes:
      key: name of the bound in `TrainConfig`.
      metric: name of the metric.
      sign: 1 if larger values are worse, -1 if smaller values are worse.
    """

    key: str
    metric: str
    sign: int

    def breaks(self, share: float, bound: float) -> bool:
        """True if `share` is worse than `bound`."""
        return self.sign * (share - bound) > 0


WATCHED = (
    Watched("undo_closed_answers", "rollout/closed_answers", -1),
    Watched("undo_filled_budgets", "rollout/forced_share", 1),
)


@dataclasses.dataclass(frozen=True)
class HostArray:
    """A copy of a device array in host memory. Replicated shards are stored only once.

    Attributes:
      shape: shape of the whole array.
      sharding: sharding of the original array. None if the array was not committed to devices.
      shards: data of each distinct shard of this process, by the index of the shard as a string.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    shards: dict[str, np.ndarray]

    @classmethod
    def of(cls, array: jax.Array) -> "HostArray":
        """Copies an array to host memory. Its buffers may be donated afterwards."""
        shards: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:
            name = str(shard.index)
            if name not in shards:
                shards[name] = np.array(shard.data)
        return cls(array.shape, array.sharding if array.committed else None, shards)

    def on_devices(self) -> jax.Array:
        """Copies the array back to its devices.

        The result shares no memory with this copy, so its buffers may be donated.
        """
        if self.sharding is None:
            (value,) = self.shards.values()
            return jnp.array(value, copy=True)
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.shards[str(index)].copy()
        )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The train state at the start of a step, and the watched metrics of the step's traces.

    Attributes:
      train: `TrainState` in which each array is replaced by a `HostArray`.
      updates: number of updates that `train` has received.
      shares: watched metrics of the step's traces, each a share in [0, 1], by metric name.
    """

    train: Any
    updates: int
    shares: Shares


class UpdateGuard:
    """Stores the state before the last update, and compares the traces before and after it."""

    def __init__(self, bounds: dict[str, float]) -> None:
        """Creates a guard without a snapshot, so the first update of a process can't be undone.

        Args:
          bounds: bounds that are set in `TrainConfig`, by their key.
        """
        self._bounds = bounds
        self._before: Snapshot | None = None

    def breach(self, shares: Shares) -> str | None:
        """Describes the first bound that is violated, or returns None if all bounds hold.

        A share that violates its bound is ignored if the share was at least as bad before the
        update, because the update is not the cause.

        Args:
          shares: watched metrics of the traces that were sampled after the update.
        """
        for watched in WATCHED:
            bound = self._bounds.get(watched.key)
            if bound is None or not watched.breaks(shares[watched.metric], bound):
                continue
            share = shares[watched.metric]
            before = None if self._before is None else self._before.shares[watched.metric]
            if before is None or watched.breaks(share, before):
                change = "" if before is None else f" ({before:.3f} before the update)"
                return f"{watched.metric} is {share:.3f}{change}, train.{watched.key}={bound:g}"
        return None

    def can_undo(self, train: TrainState) -> bool:
        """True if the policy has been updated since the snapshot."""
        return self._before is not None and int(train.updates) > self._before.updates

    def restored(self) -> TrainState:
        """Returns the train state before the last update, on its devices."""
        assert self._before is not None
        return jax.tree.map(
            lambda copy: copy.on_devices(),
            self._before.train,
            is_leaf=lambda node: isinstance(node, HostArray),
        )

    def keep(self, train: TrainState, shares: Shares) -> None:
        """Stores the state at the start of a step, and the watched metrics of the step's traces."""
        # Delete the old snapshot first, so that host memory never contains two of them.
        self._before = None
        copies = jax.tree.map(HostArray.of, train)
        self._before = Snapshot(copies, int(train.updates), shares)


def shares_of(first: Round) -> Shares:
    """Returns the watched metrics of the traces of a step's first round."""
    metrics = rollout_metrics(first)
    return {watched.metric: float(metrics[watched.metric]) for watched in WATCHED}


def make_guard(config: TrainConfig) -> UpdateGuard | None:
    """Returns the update guard of a run, or None if no bound is set."""
    bounds = {}
    for watched in WATCHED:
        bound = getattr(config, watched.key)
        if bound is not None:
            bounds[watched.key] = bound
    return UpdateGuard(bounds) if bounds else None
