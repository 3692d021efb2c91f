"""Undoes an update if a metric of the traces sampled after it violates a bound (train.undo_*).

`algorithm.guarded` calls an `UpdateGuard` after the traces of each step are sampled. The state
before the last update is kept in host memory. Checkpoints contain a copy of it, so that a resumed
run undoes the same updates as an uninterrupted run.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import TrainConfig
from bacr_jax.learner.train_step import TrainState
from bacr_jax.parallel import processes
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.training.dynamic_sampling import Round
from bacr_jax.training.logging import rollout_metrics
from bacr_jax.training.run import RunState
from bacr_jax.types import pytree

# Shares of a step's traces in [0, 1], by metric name.
Shares = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A metric of sampled traces that has a bound, such as the share of closed answers.

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

    @classmethod
    def of_restored(cls, array: Any, like: jax.Array | jax.ShapeDtypeStruct) -> "HostArray":
        """Creates a host copy from an array of a restored checkpoint.

        Args:
          array: NumPy array, or an array on devices if several processes train.
          like: array, or shape of an array, that has the sharding of the original array.
        """
        if isinstance(array, jax.Array):
            return cls.of(array)
        is_committed = not isinstance(like, jax.Array) or like.committed
        sharding = like.sharding if is_committed else None
        if sharding is None:
            return cls(array.shape, None, {"": array})
        indices = sharding.addressable_devices_indices_map(array.shape).values()
        # Indexing a scalar array yields a NumPy number, so convert it back to an array.
        shards = {str(index): np.asarray(array[index]) for index in indices}
        return cls(array.shape, sharding, shards)

    def to_save(self) -> np.ndarray | jax.Array:
        """Returns the array in the form that a checkpoint stores.

        With one process, this is a NumPy array, which needs no device memory. With several
        processes, it is an array on devices, because each process stores only its own shards.
        """
        if processes.several():
            return self.on_devices()
        if len(self.shards) == 1:
            (value,) = self.shards.values()
            return value
        return np.asarray(self.on_devices())

    def on_devices(self) -> jax.Array:
        """Copies the array back to its devices.

        The result shares no memory with the host copy, so its buffers may be donated.
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


@pytree
class GuardedRunState(RunState):
    """A `RunState` as a checkpoint stores it, with the snapshot of an `UpdateGuard`.

    Attributes:
      before_update: train state before the last update, as NumPy arrays (`HostArray.to_save`).
    """

    before_update: Any = None


class UpdateGuard:
    """Stores the state before the last update, and compares the traces before and after it."""

    def __init__(self, bounds: dict[str, float]) -> None:
        """Creates a guard without a snapshot, so nothing can be undone before `keep` is called.

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
                return (
                    f"{watched.metric} is {share:.3f}{change}, beyond the bound "
                    f"train.{watched.key}={bound:g}"
                )
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
            is_leaf=_is_host_array,
        )

    def keep(self, train: TrainState, shares: Shares) -> None:
        """Stores the state at the start of a step, and the watched metrics of the step's traces."""
        # Delete the old snapshot first, so that host memory never contains two of them.
        self._before = None
        copies = jax.tree.map(HostArray.of, train)
        self._before = Snapshot(copies, int(train.updates), shares)

    def to_save(self, state: RunState) -> tuple[RunState, dict[str, Any] | None]:
        """Adds the snapshot to a state that is saved in a checkpoint.

        Returns:
          The state, and the metadata of the snapshot, which is serializable as JSON. Without a
          snapshot, the same state and None.
        """
        before = self._before
        if before is None:
            return state, None
        train = jax.tree.map(HostArray.to_save, before.train, is_leaf=_is_host_array)
        guarded = GuardedRunState(**vars(state), before_update=train)
        return guarded, {"updates": before.updates, "shares": before.shares}

    def load(self, before_update: Any, like: TrainState, meta: dict[str, Any]) -> None:
        """Restores the snapshot of a checkpoint.

        Args:
          before_update: `GuardedRunState.before_update` of the checkpoint.
          like: train state with the shardings of the snapshot.
          meta: metadata that `to_save` returned.
        """
        copies = jax.tree.map(HostArray.of_restored, before_update, like)
        self._before = Snapshot(copies, meta["updates"], meta["shares"])


def _is_host_array(node: Any) -> bool:
    return isinstance(node, HostArray)


def with_empty_snapshot(state: RunState) -> GuardedRunState:
    """Returns a state into which a checkpoint that contains a snapshot can be restored."""
    train: Any = state.train
    if not processes.several():
        train = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), train)
    return GuardedRunState(**vars(state), before_update=train)


def without_snapshot(state: GuardedRunState) -> RunState:
    """Returns the state without the snapshot."""
    fields = {name: value for name, value in vars(state).items() if name != "before_update"}
    return RunState(**fields)


def restore_with_snapshot(
    checkpoints: Checkpoints,
    like: RunState,
    step: int,
    snapshot: dict[str, Any] | None,
    guard: UpdateGuard | None,
) -> RunState:
    """Restores the state of a checkpoint, and the snapshot of the update guard.

    Args:
      like: state with the shapes and shardings of the saved state.
      snapshot: metadata of the snapshot in the checkpoint. None if there is no snapshot.
      guard: update guard that receives the snapshot. None if the run has no bounds now.
    """
    saved_like = like if snapshot is None else with_empty_snapshot(like)
    _, state, _ = checkpoints.restore(saved_like, step)
    if snapshot is None:
        return state
    assert isinstance(state, GuardedRunState)
    if guard is not None:
        guard.load(state.before_update, like.train, snapshot)
    return without_snapshot(state)


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
