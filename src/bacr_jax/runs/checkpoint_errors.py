"""Builds the errors for checkpoints that can't be written or read.

`runs.checkpoint` calls this module. The advice for a damaged checkpoint is to delete it, so an
error is only called damage if neither memory nor the operating system is its cause.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bacr_jax.errors import UserError
from bacr_jax.out_of_memory import is_out_of_memory, phase_memory
from bacr_jax.runs.digest import leaves_by_path
from bacr_jax.runs.folder import steps_in

# Error messages of a full or failing disk. Orbax's array store raises them without an errno.
_DISK_ERRORS = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "Permission denied",
    "Read-only file system",
    "Input/output error",
)
# The array store raises ValueErrors that contain the errno.
_SYSTEM_CODE = re.compile(r"os_error_code='(\d+)'")
# Values of errno if a file is missing, or replaced by something else. The checkpoint is damaged.
_DAMAGE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EINVAL,
    errno.EFBIG,
    errno.ENAMETOOLONG,
)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and the exceptions that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def disk_error(error: BaseException) -> str | None:
    """Returns the entry of `_DISK_ERRORS` that caused an exception, or None for other causes."""
    for cause in _causes(error):
        for message in _DISK_ERRORS:
            if message in str(cause):
                return message
    return None


def other_cause(error: BaseException, folder: Path) -> str | None:
    """Returns why a checkpoint that may be intact can't be read, or None if it is damaged.

    Args:
      error: exception that was raised by reading the checkpoint.
      folder: folder of the checkpoint. Its files are opened, because Orbax does not report every
        file that it can't open.
    """
    causes = list(_causes(error))
    if any(map(is_out_of_memory, causes)):
        return "the memory ran out"
    for cause in (*causes, *_open_errors(folder)):
        code = cause.errno if isinstance(cause, OSError) else None
        in_text = _SYSTEM_CODE.search(str(cause))
        if code is None and in_text is not None:
            code = int(in_text[1])
        if code is not None and code not in _DAMAGE:
            return os.strerror(code)
    return None


def _open_errors(folder: Path) -> Iterator[OSError]:
    """Yields the error for each file in a folder that can't be opened."""
    for path in folder.rglob("*"):
        try:
            if not path.is_dir():
                path.open("rb").close()
        except OSError as error:
            yield error


def raise_other_cause(error: Exception, folder: Path) -> None:
    """Raises an error if a checkpoint that may be intact can't be read.

    Returns without an error if the checkpoint is damaged.

    Args:
      error: exception that was raised by reading the checkpoint.
      folder: folder of the checkpoint.

    Raises:
      RuntimeError, MemoryError: the original error if a device or the host ran out of memory.
      UserError: if the operating system can't read a file.
    """
    for cause in _causes(error):
        if is_out_of_memory(cause):
            raise cause
    reason = other_cause(error, folder)
    if reason is not None:
        raise UserError(
            f"{folder} can't be read ({reason}), but no damage was found; remove this cause, and "
            "run the same command again"
        ) from None


def types_of(state: Any) -> dict[str, str]:
    """Returns the type of each leaf of a state by path, such as "float32[2, 3]"."""
    types = {}
    for name, leaf in leaves_by_path(state).items():
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        types[name] = f"{array.dtype}{list(array.shape)}"
    return types


def type_difference(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Describes the first array whose type differs from the type that a run needs.

    Args:
      saved: types of the arrays in a checkpoint, such as "float32[2, 3]", by path.
      wanted: types of the arrays that the run needs, by path.

    Returns:
      The description, or "" if all types are equal.
    """
    names = [name for name in {**wanted, **saved} if saved.get(name) != wanted.get(name)]
    if not names:
        return ""
    name = min(names)
    more = f", and {len(names) - 1:,} more arrays differ" if len(names) > 1 else ""
    return (
        f"{name} is {saved.get(name, 'missing')} in the checkpoint, but "
        f"{wanted.get(name, 'missing')} in this run{more}"
    )


def raise_policy_error(error: Exception, state: Path, reason: str) -> NoReturn:
    """Raises the error for a checkpoint that evaluate, generate or export can't read.

    Args:
      error: exception that was raised by reading the checkpoint.
      state: folder `state` of the checkpoint.
      reason: description of the damage.

    Raises:
      OutOfMemory: if the memory ran out.
      UserError: if the checkpoint can't be read, or is damaged or deleted.
    """
    with phase_memory("checkpoint reading"):
        raise_other_cause(error, state.parent)
    raise _damaged_policy(state, reason) from None


def _damaged_policy(state: Path, reason: str) -> UserError:
    """Builds the error for a damaged or deleted checkpoint. It suggests another one if possible."""
    steps = steps_in(state.parents[1])
    if steps and not state.parent.exists():
        return UserError(
            f"{state.parent}: this checkpoint was deleted, because its run is still training and "
            f"saved newer ones; run the same command again, or pass --step {steps[-1]}"
        )
    older = [step for step in steps if step < int(state.parent.name)]
    instead = f", or pass --step {older[-1]} to use the previous checkpoint" if older else ""
    return UserError(
        f"{state}: the policy can't be read, because the checkpoint is damaged ({reason}); copy "
        f"the checkpoint from the run again{instead}"
    )
