"""Undoes an update if the traces that are sampled after it break a bound (train.undo_*).

`algorithm.guarded` calls an `UpdateGuard` after the traces of each step are sampled. The state
before the last update is stored in host memory, not in checkpoints.
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

# Shares of a step's traces, in [0, 1], by the names of metrics.
Shares = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A share of a step's traces that has a bound.

    Attributes:
      key: name of the bound in `TrainConfig`.
      metric: name of the share.
      sign: 1 if larger shares are worse, -1 if smaller ones are.
    """

    key: str
    metric: str
    sign: int

    def breaks(self, share: float, bound: float) -> bool:
        """True if a share is beyond a bound."""
        return self.sign * (share - bound) > 0


WATCHED = (
    Watched("undo_closed_answers", "rollout/closed_answers", -1),
    Watched("undo_filled_budgets", "rollout/forced_share", 1),
)


@dataclasses.dataclass(frozen=True)
class HostArray:
    """A copy of an array in host memory, with one copy of each distinct shard of this process.

    Attributes:
      sharding: None if the array was never put on particular devices.
      shards: data of each shard, by the text of its index.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    shards: dict[str, np.ndarray]

    @classmethod
    def of(cls, array: jax.Array) -> "HostArray":
        """Copies an array; the original may be donated afterwards."""
        shards: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:
            name = str(shard.index)
            if name not in shards:
                shards[name] = np.array(shard.data)
        return cls(array.shape, array.sharding if array.committed else None, shards)

    def on_devices(self) -> jax.Array:
        """Returns the array on its devices. The result may be donated, so it shares no memory."""
        if self.sharding is None:
            (value,) = self.shards.values()
            return jnp.array(value, copy=True)
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.shards[str(index)].copy()
        )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state at the start of a step, and the shares of the step's traces.

    Attributes:
      train: `TrainState` with a `HostArray` for each array.
      updates: number of updates in `train`.
    """

    train: Any
    updates: int
    shares: Shares


class UpdateGuard:
    """Stores the state before the last update, and compares the traces before and after it."""

    def __init__(self, bounds: dict[str, float]) -> None:
        """Starts without a snapshot, so the first update of a process cannot be undone.

        Args:
          bounds: the bounds that are set in `TrainConfig`, by the names of their keys.
        """
        self._bounds = bounds
        self._before: Snapshot | None = None

    def breach(self, shares: Shares) -> str | None:
        """Describes how the shares of a step's traces break a bound; None if they don't.

        A share that is beyond its bound but not worse than before the update does not count,
        because the update is not its cause.
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
        """True if an update has moved the policy since the snapshot."""
        return self._before is not None and int(train.updates) > self._before.updates

    def restored(self) -> TrainState:
        """Returns the state before the last update, on its devices."""
        assert self._before is not None
        return jax.tree.map(
            lambda copy: copy.on_devices(),
            self._before.train,
            is_leaf=lambda node: isinstance(node, HostArray),
        )

    def keep(self, train: TrainState, shares: Shares) -> None:
        """Stores the state at the start of a step, and the shares of the step's traces."""
        # Deleted first, so that host memory never contains two copies.
        self._before = None
        copies = jax.tree.map(HostArray.of, train)
        self._before = Snapshot(copies, int(train.updates), shares)


def shares_of(first: Round) -> Shares:
    """Returns the watched shares of a step's first round of traces."""
    metrics = rollout_metrics(first)
    return {watched.metric: float(metrics[watched.metric]) for watched in WATCHED}


def make_guard(config: TrainConfig) -> UpdateGuard | None:
    """Returns the guard of a run; None if no bound is set."""
    bounds = {}
    for watched in WATCHED:
        bound = getattr(config, watched.key)
        if bound is not None:
            bounds[watched.key] = bound
    return UpdateGuard(bounds) if bounds else None
