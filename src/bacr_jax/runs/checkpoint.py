"""Checkpoints of a whole run: parameters, optimizer, value head, curriculum, counters."""

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

from bacr_jax import documents
from bacr_jax.errors import UserError, reason_of
from bacr_jax.parallel import processes
from bacr_jax.runs.digest import DigestMismatch, digests, leaves_by_path, verify
from bacr_jax.runs.folder import steps_in

# How a full or failing disk shows: the array store says it in words, without an errno.
_REFUSED = (
    *("No space left on device", "Disk quota exceeded", "File too large"),
    *("Permission denied", "Read-only file system", "Input/output error"),
)


def _is_local(leaf: Any) -> bool:
    """An array that was never put on particular devices."""
    is_array = isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return is_array and leaf.is_fully_addressable and not leaf.committed


def _disk_trouble(error: BaseException | None) -> str | None:
    """What the disk refused, if that is what went wrong."""
    while error is not None:
        for refusal in _REFUSED:
            if refusal in str(error):
                return refusal
        error = error.__cause__ or error.__context__
    return None


def _text_digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _record(state: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What was saved beside a state, and its digests; DigestMismatch: it is not what was saved."""
    record = documents.read_object(state.parent / "meta" / "metadata")
    content = {name: value for name, value in record.items() if name != "digest"}
    if record.get("digest") != _text_digest(content):
        raise DigestMismatch("meta: not what was saved, or saved before checkpoints had digests")
    return content["meta"], content["digests"]


# Numbers that are read back at once; every read costs Orbax 0.2 s.
_READ_AT_ONCE = 1 << 27
# Seconds; Orbax takes them by the wall's clock, which may be set while it saves.
_LONGEST_SAVE = 10**9

# Orbax reads a path with the first ones as a pattern, the array store the last one as a slash.
_SPECIAL = re.compile(r"[*?\[\]\\]")


@contextlib.contextmanager
def _plainly_named(folder: Path) -> Iterator[Path]:
    """The folder, which is there, or a link to it that Orbax takes for a path."""
    if not _SPECIAL.search(str(folder.absolute())):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="bacr-") as place:
        link = Path(place) / "link"
        link.symlink_to(folder.absolute())
        yield link


def _read(state: Path, wanted: Callable[[str], bool], like: Any = None) -> Any:
    """A saved state with the leaves that are wanted, on the host, held against their digests.

    No other process is asked. Whatever a damaged file raises passes.

    Args:
      state: plainly named.
      wanted: says it of a leaf's path, such as "train/policy/embed".
      like: a tree of the same structure; None: files say it, and 6 KB a leaf are lost, since the
        array store never frees what it describes as JSON.
    """
    _, expected = _record(state)
    reader = ocp.PyTreeCheckpointHandler()
    like = reader.metadata(epath.Path(state)).tree if like is None else like
    named = leaves_by_path(like)
    item = [leaf if wanted(name) else ocp.PLACEHOLDER for name, leaf in named.items()]
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    shaped = jax.tree.unflatten(jax.tree.structure(like), item)
    args = ocp.args.PyTreeRestore(item=shaped, restore_args=on_host)
    found = reader.restore(epath.Path(state), args=args)
    read = {name: leaf for name, leaf in leaves_by_path(found).items() if wanted(name)}
    if missing := {name for name in expected if wanted(name)} - read.keys():
        raise DigestMismatch(f"{min(missing)}: is not there")
    verify(read, expected)
    return found


def read_whole(state: Path, sizes: Any) -> None:
    """Reads every array of a saved state, a few at a time; a damaged one raises anything.

    `sizes`: how many numbers each has, in a tree of the same structure.
    """
    parts: list[set[str]] = [set()]
    left = _READ_AT_ONCE
    for name, size in leaves_by_path(sizes).items():
        left -= size
        if left < 0 and parts[-1]:
            parts.append(set())
            left = _READ_AT_ONCE - size
        parts[-1].add(name)
    for part in parts:
        _read(state, part.__contains__, sizes)


def read_part(state: Path, *path: str) -> Any:
    """The part of a saved state to which names lead ("train", "policy"), held against its digests.

    It is on the host. `state` is that folder of a finished checkpoint.
    """
    prefix = "".join(f"{name}/" for name in path)
    try:
        with _plainly_named(state.parent) as step:
            found = _read(step / state.name, lambda name: f"{name}/".startswith(prefix))
        for name in path:
            found = found[name]
    # A damaged file shows as almost any exception, by where the damage is.
    except Exception as error:
        raise damaged_policy(state, reason_of(error)) from None
    return found


def check_policy(state: Path) -> None:
    """UserError if a policy in a saved state would be refused at once, without reading a value."""
    try:
        with _plainly_named(state.parent) as step:
            found = ocp.PyTreeCheckpointer().metadata(step / state.name)
        found.item_metadata.tree["train"]["policy"]
    # A missing or damaged metadata file shows as a missing attribute or key.
    except (AttributeError, KeyError, TypeError, ValueError, OSError):
        raise damaged_policy(state, "no description of a policy in it") from None


def read_meta(state: Path) -> dict[str, Any]:
    """What was saved beside a state (folder `state` of a checkpoint); UserError: it is damaged."""
    try:
        return _record(state)[0]
    except Exception as error:
        raise damaged_policy(state, reason_of(error)) from None


def damaged_policy(state: Path, reason: str) -> UserError:
    """The refusal of a checkpoint that is opened to be used elsewhere."""
    steps = steps_in(state.parents[1])
    if steps and not state.parent.exists():
        return UserError(
            f"{state.parent}: was dropped by its run, which goes on; run the same command again, "
            f"or write --step {steps[-1]}"
        )
    older = [step for step in steps if step < int(state.parent.name)]
    instead = f", or use the one before: --step {older[-1]}" if older else ""
    return UserError(
        f"{state}: damaged, can't read the policy ({reason}); copy the run's checkpoint "
        f"again{instead}"
    )


class _Kept:
    """Orbax's preservation policy: the newest, and the best; the best before until that is read."""

    def __init__(self, newest: int):
        self.newest, self.best = newest, list[int]()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        # The last is being saved: the one before stays until that one has been read.
        recent = len(checkpoints) - max(self.newest, 2)
        return [i >= recent or info.step in self.best for i, info in enumerate(checkpoints)]


class Checkpoints:
    """The newest checkpoints of a run and its best, saved in the background, swapped in whole.

    Each is read back in the background too, once it is whole, a few arrays at a time.
    """

    def __init__(self, folder: Path, *, keep: int):
        """Opens (or makes) the folder of a subfolder per step, of which the newest `keep` are kept.

        A half-written checkpoint is never listed.
        """
        self.folder, self._kept = folder.absolute(), _Kept(keep)
        policy: Any = self._kept
        options = ocp.CheckpointManagerOptions(
            create=True,
            cleanup_tmp_directories=True,
            preservation_policy=policy,
            async_options=ocp.options.AsyncOptions(timeout_secs=_LONGEST_SAVE),
        )
        self._opened = contextlib.ExitStack()
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._place = self._opened.enter_context(_plainly_named(self.folder))
            self._manager = ocp.CheckpointManager(self._place, options=options)
        self._reader = self._opened.enter_context(ThreadPoolExecutor(1, "reading back"))
        self._read: Future[None] | None = None
        self._saved: int | None = None

    @property
    def latest(self) -> int | None:
        """Newest finished step, or None."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Finished steps, rising."""
        return sorted(self._manager.all_steps())

    def prefer(self, best: int) -> None:
        """Names the step that is kept however old it gets; the one before, until this is read."""
        read = best in self.steps and best != self._saved
        self._kept.best = [best] if read else [*self._kept.best, best]

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Saves `state` under `step`; returns while writing goes on in the background.

        UserError: no room or no right to write, or the one before can't be read back; older
        checkpoints are as they were.
        """
        self.confirm(wait=True)
        if jax.process_count() > 1:
            # Process 0 writes arrays of the host; sharded ones are written by all.
            state = jax.tree.map(lambda x: np.asarray(x) if _is_local(x) else x, state)
        record: dict[str, Any] = {"meta": meta, "digests": digests(state)}
        record["digest"] = _text_digest(record)
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(record)
                ),
            )
        self._saved = step
        if processes.is_first():
            self._read = self._reader.submit(self._read_back, step, jax.tree.map(np.size, state))

    def _read_back(self, step: int, sizes: Any) -> None:
        """Reads what was saved, once it has its name; beside whatever the run does."""
        place = self._place / str(step)
        while not place.exists():
            if not (self._manager.is_saving_in_progress() or place.exists()):
                return  # Could not be written, as the next to wait for it will hear.
            time.sleep(0.05)
        read_whole(place / "state", sizes)

    def confirm(self, *, wait: bool = False) -> None:
        """Raises if the last save can't be read; with several processes all must call it.

        Unless it is to `wait` for that, what is not known yet is left for the next call.
        """
        if self._saved is None:
            return
        known = wait or (self._read is not None and self._read.done())
        if not processes.from_first(np.bool_(known)):
            return
        step, read, self._saved, self._read = self._saved, self._read, None, None
        with self._writing():
            self._manager.wait_until_finished()
        error = None if read is None else read.exception()
        reason = processes.text_from_first("" if error is None else reason_of(error))
        if reason:
            raise UserError(self._unreadable(step, f"was saved, but can't be read ({reason})"))
        if self._kept.best[-1:] == [step]:
            self._kept.best = [step]
        for old in self.steps[: -self._kept.newest]:
            if old not in self._kept.best:
                self._manager.delete(old)

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the state; UserError: the checkpoint is damaged."""
        with self._reading(step):
            return _record(self._place / str(step) / "state")[0]

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """The state saved under `step` (the newest by default), shaped and placed like `like`."""
        at = self.latest if step is None else step
        if at is None:
            raise UserError(f"{self.folder}: holds no finished checkpoint")
        # An array on no device in particular stays so: on one of several it could not be mixed with
        # arrays that are spread over all.
        on_host = jax.tree.map(lambda x: np.asarray(x) if _is_local(x) else x, like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, on_host)
        with self._reading(at):
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            saved = self._manager.restore(at, args=args)
            meta, expected = _record(self._place / str(at) / "state")
            verify(saved["state"], expected)
        free = lambda x, y: jnp.asarray(np.asarray(y)) if _is_local(x) else y
        return at, jax.tree.map(free, like, saved["state"]), meta

    def wait(self) -> None:
        """Waits for background writing and reading, and raises what they met."""
        with self._writing():
            self._manager.wait_until_finished()
        self.confirm(wait=True)

    def close(self) -> None:
        """`wait`, and releases the folder."""
        with self._opened:
            self.wait()
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says in one line what the disk refused."""
        try:
            yield
        except Exception as error:
            trouble = _disk_trouble(error)
            if trouble is None:
                raise
            raise UserError(
                f"{self.folder}: can't be written ({trouble}); make room or rights, and the same "
                "command goes on from the last checkpoint"
            ) from None

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Says in one line which checkpoint can't be read, and which one could."""
        try:
            yield
        # A damaged file shows as almost any exception, by where the damage is.
        except Exception as error:
            what = "damaged"
            if not isinstance(error, DigestMismatch):
                what += ", or of another model than this config's"
            raise UserError(self._unreadable(step, f"{what} ({reason_of(error)})")) from None

    def _unreadable(self, step: int, what: str) -> str:
        """What is wrong with a checkpoint, and what to do."""
        older = [other for other in self.steps if other < step]
        instead = f"step {older[-1]}" if older else "the start"
        return (
            f"{self.folder / str(step)}: {what}; take it away, and the same command goes on from "
            f"{instead}"
        )
