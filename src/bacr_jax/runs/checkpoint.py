"""Saves and restores checkpoints of a run.

A checkpoint contains the parameters, the optimizer state, the value head, the curriculum and the
counters. The training loop saves and restores checkpoints with `Checkpoints`. Other commands read
only the policy, with `read_part`. Every array is verified against the digest that was computed when
the array was saved.
"""

import contextlib
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from bacr_jax import files
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError, reason_of
from bacr_jax.parallel import processes
from bacr_jax.runs.checkpoint_errors import (
    disk_error,
    other_cause,
    raise_other_cause,
    raise_policy_error,
    type_difference,
    types_of,
)
from bacr_jax.runs.digest import DigestMismatch, digests, leaves_by_path, verify


def _is_local(leaf: Any) -> bool:
    """True for a JAX array on local devices that is not committed to any device."""
    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return False
    return leaf.is_fully_addressable and not leaf.committed


def _local_on_host(leaf: Any) -> Any:
    """Copies an array to the host if it is not committed to any device (see `_is_local`)."""
    return np.asarray(leaf) if _is_local(leaf) else leaf


def _target_of(leaf: Any) -> Any:
    """Replaces an array that is committed to devices with its shape, dtype and sharding."""
    is_array = isinstance(leaf, jax.Array)
    if not is_array or not leaf.committed or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def restore_target(state: Any) -> Any:
    """Converts a state to a target for `Checkpoints.restore` that does not contain its arrays.

    Arrays that are committed to devices are replaced with their shapes, so that their memory can be
    freed before the checkpoint is restored.
    """
    return jax.tree.map(_target_of, state)


def arrays_of(state: Any, where: str) -> Any:
    """Converts the numbers in a state to JAX arrays, which a checkpoint restores unchanged.

    Args:
      state: tree of numbers and arrays.
      where: place of the state, for error messages.

    Raises:
      UserError: if a leaf is neither a number nor an array of numbers, or is an array without
        elements.
    """

    def array_of(path: Any, leaf: Any) -> jax.Array:
        # A restored array has no weak type, so a weak type would change the results of a resumed
        # run.
        if not isinstance(leaf, jax.Array) or jax.typeof(leaf).weak_type:
            try:
                array = jnp.asarray(leaf)
                leaf = jnp.asarray(array, array.dtype)
            except (TypeError, ValueError, OverflowError):
                raise UserError(
                    f"{where}: state{jax.tree_util.keystr(path)} is {shown(leaf)}, which can't be "
                    "converted to an array; use only numbers of at most 32 bits and arrays of them"
                ) from None
        if not leaf.size:
            raise UserError(
                f"{where}: state{jax.tree_util.keystr(path)} is an array of the shape "
                f"{leaf.shape}, which has no elements, so a checkpoint can't store it; leave it out"
            )
        return leaf

    return jax.tree_util.tree_map_with_path(array_of, state)


def _text_digest(record: dict[str, Any]) -> str:
    """Returns the SHA-256 hash of a record, serialized as JSON."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _record(state: Path) -> dict[str, Any]:
    """Reads the record of a saved state.

    Returns:
      A dict with the metadata (`meta`), and with the digests and types of the arrays by path
      (`digests`, `types`).

    Raises:
      DigestMismatch: if the metadata was changed after it was saved.
    """
    record = files.read_object(state.parent / "meta" / "metadata")
    content = {name: value for name, value in record.items() if name != "digest"}
    if record.get("digest") != _text_digest(content):
        raise DigestMismatch(
            "the metadata was changed after it was saved, or was saved without digests"
        )
    return content


# Maximum number of array elements to restore in one call, which limits the memory use. A small
# number would be slow, because every call to Orbax takes 0.2 s.
_READ_AT_ONCE = 1 << 27
# Minimum number of array elements of a large state (see `Checkpoints.release_large_state`).
_LARGE_STATE = 1 << 26
# Timeout of Orbax's saves, in seconds. It is practically infinite, because Orbax measures it with
# the system clock, which may be adjusted during a save.
_SAVE_TIMEOUT = 10**9

# Orbax interprets paths with these characters as glob patterns, and its array store replaces a
# backslash by a slash.
_SPECIAL = re.compile(r"[*?\[\]\\]")


@contextlib.contextmanager
def _without_special_characters(folder: Path) -> Iterator[Path]:
    """Yields an existing folder, or a symbolic link to it if Orbax would misinterpret its path."""
    if not _SPECIAL.search(str(folder.absolute())):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="bacr-") as temporary:
        link = Path(temporary) / "link"
        link.symlink_to(folder.absolute())
        yield link


def _read(state: Path, wanted: Callable[[str], bool], like: Any = None) -> Any:
    """Reads selected arrays of a saved state to the host, and verifies their digests.

    Each process reads independently, without communicating with other processes.

    Args:
      state: folder of the saved state. Its path must not contain any character of `_SPECIAL`.
      wanted: function that returns True for the path of an array to read, such as
        "train/policy/embed".
      like: a tree with the structure of the state. If None, the structure is read from the files.
        This leaks 6 KB of memory per array, because the array store never frees its JSON
        descriptions.

    Returns:
      The state, with a placeholder for every array that was not read.

    Raises:
      DigestMismatch: if an array is missing or was changed after it was saved.
      Exception: if a file is damaged. The exception can have any class.
    """
    expected = _record(state)["digests"]
    reader = ocp.PyTreeCheckpointHandler()
    if like is None:
        like = reader.metadata(epath.Path(state)).tree
    leaves = [
        leaf if wanted(name) else ocp.PLACEHOLDER for name, leaf in leaves_by_path(like).items()
    ]
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    item = jax.tree.unflatten(jax.tree.structure(like), leaves)
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
    restored = reader.restore(epath.Path(state), args=args)
    arrays = {name: leaf for name, leaf in leaves_by_path(restored).items() if wanted(name)}
    missing = [name for name in expected if wanted(name) and name not in arrays]
    if missing:
        raise DigestMismatch(f"{min(missing)}: is missing")
    verify(arrays, expected)
    return restored


def read_whole(state: Path, sizes: Any) -> None:
    """Reads and verifies every array of a saved state, a few arrays at a time.

    Args:
      state: folder of the saved state.
      sizes: tree with the structure of the state that contains the number of elements of each
        array.

    Raises:
      Exception: if the checkpoint is damaged. The exception can have any class.
    """
    parts: list[set[str]] = [set()]
    remaining = _READ_AT_ONCE
    for name, size in leaves_by_path(sizes).items():
        remaining -= size
        if remaining < 0 and parts[-1]:
            parts.append(set())
            remaining = _READ_AT_ONCE - size
        parts[-1].add(name)
    for part in parts:
        _read(state, part.__contains__, sizes)


def read_part(state: Path, *path: str) -> Any:
    """Reads and verifies the subtree of a saved state at a path such as ("train", "policy").

    Args:
      state: folder `state` of a finished checkpoint.
      *path: keys that lead from the root of the state to the subtree.

    Returns:
      The arrays of the subtree on the host.

    Raises:
      UserError: if the checkpoint is damaged.
    """
    prefix = "".join(f"{name}/" for name in path)
    try:
        with _without_special_characters(state.parent) as step:
            part = _read(step / state.name, lambda name: f"{name}/".startswith(prefix))
        for name in path:
            part = part[name]
    # A damaged checkpoint can raise almost any exception.
    except Exception as error:
        raise_policy_error(error, state, reason_of(error))
    return part


def check_policy(state: Path) -> None:
    """Checks that the metadata of a saved state describes a policy. Does not read any arrays.

    Raises:
      UserError: if the metadata is missing or damaged.
    """
    try:
        with _without_special_characters(state.parent) as step:
            metadata = ocp.PyTreeCheckpointer().metadata(step / state.name)
        metadata.item_metadata.tree["train"]["policy"]
    # A missing or damaged metadata file raises one of these exceptions.
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise_policy_error(error, state, "it contains no description of a policy")


def read_meta(state: Path) -> dict[str, Any]:
    """Reads the metadata of a saved state.

    Args:
      state: folder `state` of a checkpoint.

    Raises:
      UserError: if the metadata is damaged.
    """
    return _record_of_policy(state)["meta"]


def policy_digest(state: Path) -> str:
    """Returns a short hash of the recorded digests of the policy's weights. Reads no arrays.

    The base weights under adapters, which the checkpoint does not contain, are included by the
    fingerprint in the metadata.

    Args:
      state: folder `state` of a checkpoint.

    Raises:
      UserError: if the metadata is damaged.
    """
    record = _record_of_policy(state)
    policy = {}
    for path, digest in record["digests"].items():
        if path.startswith("train/policy/"):
            policy[path] = digest
    base = record["meta"].get("base_fingerprint")
    return _text_digest({"policy": policy, "base": base})[:12]


def _record_of_policy(state: Path) -> dict[str, Any]:
    """Calls `_record`, and converts its errors to a UserError that suggests another checkpoint."""
    try:
        return _record(state)
    # A damaged file can raise almost any exception.
    except Exception as error:
        raise_policy_error(error, state, reason_of(error))


class _Retention:
    """Orbax preservation policy that keeps the newest checkpoints and the best checkpoint.

    The previous best checkpoint is kept until the new best checkpoint has been verified.

    Attributes:
      newest: number of newest checkpoints to keep.
      best: steps that are kept regardless of their age.
    """

    def __init__(self, newest: int):
        self.newest = newest
        self.best: list[int] = []

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        # The newest checkpoint is still being saved. The previous checkpoint is kept until the
        # newest is verified.
        recent = len(checkpoints) - max(self.newest, 2)
        return [i >= recent or info.step in self.best for i, info in enumerate(checkpoints)]


class Checkpoints:
    """Saves, verifies and restores the newest checkpoints of a run and the best checkpoint.

    Checkpoints are saved in the background, and appear under their final names only when they are
    complete. Each checkpoint is then read back in the background and verified, a few arrays at a
    time.
    """

    def __init__(self, folder: Path, *, keep: int):
        """Opens the checkpoint folder, which contains a subfolder per step, or creates it.

        Args:
          folder: folder of the checkpoints.
          keep: number of newest checkpoints to keep.
        """
        self.folder = folder.absolute()
        self._retention = _Retention(keep)
        policy: Any = self._retention
        options = ocp.CheckpointManagerOptions(
            create=True,
            cleanup_tmp_directories=True,
            preservation_policy=policy,
            async_options=ocp.options.AsyncOptions(timeout_secs=_SAVE_TIMEOUT),
        )
        self._contexts = contextlib.ExitStack()
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            # Pass a path without special characters to Orbax, which would interpret them.
            self._path = self._contexts.enter_context(_without_special_characters(self.folder))
            self._manager = ocp.CheckpointManager(self._path, options=options)
        self._reader = self._contexts.enter_context(ThreadPoolExecutor(1, "reading back"))
        # Number of array elements of the last saved state.
        self._saved_elements = 0
        # The last saved step that has not been verified yet, and the future of its verification in
        # this process.
        self._unconfirmed: int | None = None
        self._reading_back: Future[None] | None = None

    @property
    def latest(self) -> int | None:
        """Returns the step of the newest finished checkpoint, or None without a checkpoint."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints in ascending order."""
        return sorted(self._manager.all_steps())

    def prefer(self, best: int) -> None:
        """Marks a step as the best, which is kept regardless of its age.

        The previous best checkpoint is kept until this one has been verified.
        """
        confirmed = best in self.steps and best != self._unconfirmed
        self._retention.best = [best] if confirmed else [*self._retention.best, best]

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Saves a state in the background.

        Args:
          step: training step of the checkpoint.
          state: tree of arrays.
          meta: metadata, which must be serializable as JSON.

        Raises:
          UserError: if disk space or a permission is missing, or if the previous checkpoint can't
            be read back. Older checkpoints are unchanged.
        """
        self.confirm(wait=True)
        if jax.process_count() > 1:
            # Only process 0 writes host arrays. All processes write sharded arrays.
            state = jax.tree.map(_local_on_host, state)
        record: dict[str, Any] = {"meta": meta, "digests": digests(state), "types": types_of(state)}
        record["digest"] = _text_digest(record)
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(record)
                ),
            )
        self._unconfirmed = step
        sizes = jax.tree.map(np.size, state)
        self._saved_elements = sum(jax.tree.leaves(sizes))
        if processes.is_first():
            self._reading_back = self._reader.submit(self._read_back, step, sizes)

    def _read_back(self, step: int, sizes: Any) -> None:
        """Waits until a checkpoint is complete, then reads and verifies it."""
        path = self._path / str(step)
        while not path.exists():
            if not (self._manager.is_saving_in_progress() or path.exists()):
                # Writing failed. `wait_until_finished` raises the error.
                return
            time.sleep(0.05)
        read_whole(path / "state", sizes)

    def confirm(self, *, wait: bool = False) -> None:
        """Checks that the last checkpoint was verified, and then deletes old checkpoints.

        This is a collective operation: all processes must call it together.

        Args:
          wait: True to wait until the verification is finished. False to return immediately if it
            is unfinished. The next call then checks it.

        Raises:
          UserError: if the last checkpoint can't be written or read.
        """
        if self._unconfirmed is None:
            return
        finished = wait or (self._reading_back is not None and self._reading_back.done())
        if not processes.from_first(np.bool_(finished)):
            return
        step = self._unconfirmed
        reading_back = self._reading_back
        self._unconfirmed = None
        self._reading_back = None
        with self._writing():
            self._manager.wait_until_finished()
        error = None if reading_back is None else reading_back.exception()
        message = "" if error is None else self._not_verified(step, error)
        message = processes.text_from_first(message)
        if message:
            raise UserError(message)
        retention = self._retention
        if retention.best[-1:] == [step]:
            retention.best = [step]
        for old_step in self.steps[: -retention.newest]:
            if old_step not in retention.best:
                self._manager.delete(old_step)

    def meta(self, step: int) -> dict[str, Any]:
        """Reads the metadata of a checkpoint. Raises UserError if it is damaged."""
        with self._reading(step):
            return dict(_record(self._path / str(step) / "state")["meta"])

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """Restores the state of a checkpoint, with the shapes and shardings of `like`.

        Args:
          like: tree of arrays with the structure of the state. Arrays with a sharding may be
            replaced with their shapes (see `restore_target`).
          step: step of the checkpoint, or None for the newest.

        Returns:
          A tuple of the step, the state and the metadata.

        Raises:
          UserError: if the checkpoint is missing or damaged, or belongs to a different model.
        """
        if step is None:
            step = self.latest
        if step is None:
            raise UserError(
                f"{self.folder} contains no finished checkpoint, from which the run could continue"
            )
        # Uncommitted arrays are restored to the host and stay uncommitted. If they were
        # committed to one of several devices, they could not be combined with arrays that
        # are sharded over all devices.
        on_host = jax.tree.map(_local_on_host, like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, on_host)
        with self._reading(step, like):
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            saved = self._manager.restore(step, args=args)
            record = _record(self._path / str(step) / "state")
            verify(saved["state"], record["digests"])

        def unassigned_like(leaf: Any, restored: Any) -> Any:
            return jnp.asarray(np.asarray(restored)) if _is_local(leaf) else restored

        return step, jax.tree.map(unassigned_like, like, saved["state"]), record["meta"]

    def release_large_state(self) -> None:
        """Waits until the last saved state is written, if it is large and in host memory.

        On a CPU, arrays are written without a copy. The next update can't reuse the memory of
        arrays that are being written, so it would need memory for a second state. Errors of writing
        are raised by `confirm`, not here.
        """
        if jax.default_backend() != "cpu" or self._saved_elements < _LARGE_STATE:
            return
        while self._manager.is_saving_in_progress():
            time.sleep(0.05)

    def wait(self) -> None:
        """Waits until the last checkpoint is saved and verified, and raises any error."""
        with self._writing():
            self._manager.wait_until_finished()
        self.confirm(wait=True)

    def close(self) -> None:
        """Waits until the last checkpoint is saved and verified, then closes the folder."""
        with self._contexts:
            self.wait()
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Converts disk errors to UserErrors."""
        try:
            yield
        except Exception as error:
            reason = disk_error(error)
            if reason is None:
                raise
            raise UserError(
                f"{self.folder}: checkpoints can't be written ({reason}); free disk space or "
                "change the permissions, and run the same command again to continue from the last "
                "checkpoint"
            ) from None

    @contextlib.contextmanager
    def _reading(self, step: int, like: Any = None) -> Iterator[None]:
        """Converts errors in reading a checkpoint to errors that name the cause.

        Args:
          step: step of the checkpoint.
          like: state that is being restored, or None if only the metadata is being read.
        """
        folder = self.folder / str(step)
        try:
            yield
        # A damaged checkpoint can raise almost any exception.
        except Exception as error:
            raise_other_cause(error, folder)
            difference = "" if like is None else self._difference(step, like)
            if difference:
                raise UserError(
                    f"{folder} belongs to a run with another model, method or dtype "
                    f"({difference}); use the config and the environment of that run, or another "
                    "output.dir"
                ) from None
            cause = f"is damaged ({reason_of(error)})"
            raise UserError(self._unreadable(step, cause)) from None

    def _difference(self, step: int, like: Any) -> str:
        """Returns `type_difference` of a checkpoint and a state; "" if its metadata is damaged."""
        try:
            types = _record(self._path / str(step) / "state")["types"]
        # A damaged file can raise almost any exception.
        except Exception:
            return ""
        return type_difference(types, types_of(like))

    def _not_verified(self, step: int, error: BaseException) -> str:
        """Returns the error message for a checkpoint that can't be read back after saving."""
        folder = self.folder / str(step)
        reason = other_cause(error, folder)
        if reason is None:
            return self._unreadable(step, f"was saved, but can't be read ({reason_of(error)})")
        return (
            f"{folder} was saved, but could not be verified ({reason}); remove this cause, and run "
            "the same command again to continue from this checkpoint"
        )

    def _unreadable(self, step: int, cause: str) -> str:
        """Returns the error message for a checkpoint that can't be read."""
        older = [other for other in self.steps if other < step]
        alternative = f"step {older[-1]}" if older else "the start"
        return (
            f"{self.folder / str(step)} {cause}; delete this checkpoint, and run the same command "
            f"again to continue from {alternative}"
        )
