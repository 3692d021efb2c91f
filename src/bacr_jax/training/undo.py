"""Undoes an update if a share of the traces sampled after it violates a bound (train.undo_*).

`algorithm.guarded` calls an `UpdateGuard` after the traces of each step are sampled. The state
before the last update is kept in host memory. Checkpoints contain a copy of it, so that a resumed
run undoes the same updates as an uninterrupted run.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import TrainConfig
from bacr_jax.learner.train_step import TrainState
from bacr_jax.parallel import processes
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.training.dynamic_sampling import Round
from bacr_jax.training.run import RunState
from bacr_jax.types import CLOSED_BY_BUDGET

# A share violates its bound only if it is worse than before the update by this number of standard
# errors. If the policy has not changed, this happens by chance in about 2 % of the steps.
STANDARD_ERRORS = 2.0
# The guard stops after this number of consecutive undone updates. Three different batches have then
# broken the bound from the same state, so the updates are too large or the bound is too strict.
MOST_IN_A_ROW = 3


@dataclasses.dataclass(frozen=True)
class Share:
    """A share of the traces of a step.

    Attributes:
      value: the share, in [0, 1].
      traces: number of traces.
      budget: budget of these traces, in tokens. None if traces of all budgets are counted.
    """

    value: float
    traces: int
    budget: int | None = None


# Watched shares of a step's traces, keyed by the bound's name in `TrainConfig`.
Shares = dict[str, Share]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A share of the sampled traces that has a bound, such as the share of closed answers.

    Attributes:
      key: name of the bound in `TrainConfig`.
      name: name of the share in messages.
      sign: 1 if larger values are worse, -1 if smaller values are worse.
    """

    key: str
    name: str
    sign: int

    def is_beyond(self, share: Share, bound: float) -> bool:
        """True if a share is worse than its bound."""
        return self.sign * (share.value - bound) > 0

    def is_worse(self, share: Share, before: Share) -> bool:
        """True if a share is worse than before the update by more than the sampling noise.

        Shares of traces with different budgets are not compared.
        """
        if share.budget != before.budget:
            return False
        worse_by = self.sign * (share.value - before.value)
        return worse_by > STANDARD_ERRORS * standard_error(share, before)


WATCHED = (
    Watched("undo_closed_answers", "rollout/closed_answers", -1),
    Watched("undo_filled_budgets", "the share of traces that fill the largest budget", 1),
)


def standard_error(first: Share, second: Share) -> float:
    """Returns the standard error of the difference of two shares.

    It is computed for two samples of traces of the same policy, so both have the same mean.
    """
    traces = first.traces + second.traces
    mean = (first.value * first.traces + second.value * second.traces) / traces
    return math.sqrt(mean * (1 - mean) * (1 / first.traces + 1 / second.traces))


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
    """The train state at the start of a step, and the watched shares of the step's traces.

    Attributes:
      train: `TrainState` in which each array is replaced by a `HostArray`.
      updates: number of updates that `train` has received.
      shares: watched shares of the step's traces.
    """

    train: Any
    updates: int
    shares: Shares


class UpdateGuard:
    """Stores the state before the last update, and compares the traces before and after it.

    The guard stops after `MOST_IN_A_ROW` consecutive undone updates. It then undoes no further
    update of the run.
    """

    def __init__(self, bounds: dict[str, float]) -> None:
        """Creates a guard without a snapshot, so nothing can be undone before `keep` is called.

        Args:
          bounds: bounds that are set in `TrainConfig`, by their key.
        """
        self._bounds = bounds
        self._before: Snapshot | None = None
        self._undone_in_a_row = 0

    @property
    def has_stopped(self) -> bool:
        """True if no further update is undone, because too many in a row were undone."""
        return self._undone_in_a_row >= MOST_IN_A_ROW

    def breach(self, shares: Shares) -> str | None:
        """Describes the first bound that is violated, or returns None if all bounds hold.

        A share violates its bound if it is worse than the bound, and worse than before the update
        by more than the sampling noise. Otherwise the update is not the cause.

        Args:
          shares: watched shares of the traces that were sampled after the update.
        """
        if self._before is None:
            return None
        for watched in WATCHED:
            if watched.key not in self._bounds:
                continue
            bound = self._bounds[watched.key]
            share = shares[watched.key]
            before = self._before.shares[watched.key]
            if watched.is_beyond(share, bound) and watched.is_worse(share, before):
                return (
                    f"{watched.name} is {share.value:.3f} ({before.value:.3f} before the update), "
                    f"beyond the bound train.{watched.key}={bound:g}"
                )
        return None

    def can_undo(self, train: TrainState) -> bool:
        """True if the policy was updated since the snapshot, and the guard has not stopped."""
        if self._before is None or self.has_stopped:
            return False
        return int(train.updates) > self._before.updates

    def undo(self) -> TrainState:
        """Returns the train state before the last update, on its devices."""
        assert self._before is not None
        return jax.tree.map(
            lambda copy: copy.on_devices(),
            self._before.train,
            is_leaf=_is_host_array,
        )

    def count_undone(self) -> None:
        """Counts the last update as undone.

        Call this function when the step has been sampled again. If the sampling is interrupted, the
        run is saved with the update, and the resumed run undoes the update again.
        """
        self._undone_in_a_row += 1

    def accept(self) -> None:
        """Counts the last update as accepted. A guard that has stopped remains stopped."""
        if not self.has_stopped:
            self._undone_in_a_row = 0

    def keep(self, train: TrainState, shares: Shares) -> None:
        """Stores the state at the start of a step, and the watched shares of the step's traces."""
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
        shares = {key: dataclasses.asdict(share) for key, share in before.shares.items()}
        meta = {
            "updates": before.updates,
            "shares": shares,
            "undone_in_a_row": self._undone_in_a_row,
        }
        return dataclasses.replace(state, before_update=train), meta

    def load(self, before_update: Any, like: TrainState, meta: dict[str, Any]) -> None:
        """Restores the snapshot of a checkpoint, and the number of updates undone in a row.

        Args:
          before_update: `RunState.before_update` of the checkpoint.
          like: train state with the shardings of the snapshot.
          meta: metadata that `to_save` returned.
        """
        copies = jax.tree.map(HostArray.of_restored, before_update, like)
        shares = {key: Share(**share) for key, share in meta["shares"].items()}
        self._before = Snapshot(copies, meta["updates"], shares)
        self._undone_in_a_row = meta["undone_in_a_row"]


def _is_host_array(node: Any) -> bool:
    return isinstance(node, HostArray)


def with_empty_snapshot(state: RunState) -> RunState:
    """Returns a state into which a checkpoint that contains a snapshot can be restored."""
    train: Any = state.train
    if not processes.several():
        train = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), train)
    return dataclasses.replace(state, before_update=train)


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

    Returns:
      The state without the snapshot.
    """
    saved_like = like if snapshot is None else with_empty_snapshot(like)
    _, state, _ = checkpoints.restore(saved_like, step)
    if snapshot is not None and guard is not None:
        guard.load(state.before_update, like.train, snapshot)
    return dataclasses.replace(state, before_update=None)


def shares_of(first: Round) -> Shares:
    """Returns the watched shares of the traces of a step's first round.

    The share of filled budgets is computed from the traces with the largest budget of the round,
    because nearly all traces fill small budgets.
    """
    is_finished = np.asarray(first.rollout.branches.finished)
    fills_budget = np.asarray(first.rollout.trunks.close) == CLOSED_BY_BUDGET
    budgets = np.asarray(first.plan.budgets).reshape(-1)
    largest = int(budgets.max())
    fills_largest = fills_budget[budgets == largest]
    return {
        "undo_closed_answers": Share(float(is_finished.mean()), len(is_finished)),
        "undo_filled_budgets": Share(float(fills_largest.mean()), len(fills_largest), largest),
    }


def make_guard(config: TrainConfig) -> UpdateGuard | None:
    """Returns the update guard of a run, or None if no bound is set."""
    bounds = {}
    for watched in WATCHED:
        bound = getattr(config, watched.key)
        if bound is not None:
            bounds[watched.key] = bound
    return UpdateGuard(bounds) if bounds else None
