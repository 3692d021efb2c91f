"""Defines the file layout of a run folder, locks the folder, and validates resumed configs.

Training opens the folder with `open_run`. All commands locate its files with `RunPaths`.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from bacr_jax.config import Config, OutputConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import print_message
from bacr_jax.errors import UserError, first_of
from bacr_jax.files import (
    expand_home,
    is_left_over,
    keep_until,
    read_lines,
    write_atomically,
    write_lines,
)

LOCK = ".lock"
_RESTARTS = "restarts.json"
# Values of `OSError.errno` of a file system that does not implement file locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# Prefix of the temporary folders of `bacr doctor` in `output.dir`.
DOCTOR_PREFIX = ".bacr-doctor-"
# Prefix of the temporary folders of `check_writable`.
_PROBE_PREFIX = ".bacr-probe-"
# Action for a folder that contains a run: "auto" resumes the run and "never" raises an error.
# "required" resumes the run, and raises an error for a folder without a run.
Resume = Literal["auto", "never", "required"]
_CONFIG = "config.yaml"
# Name of the folders with exports and evaluations of steps that a resumed run has not reached.
_SET_ASIDE = "before-resume"
# Prefix of the first line of config.yaml. It is followed by a digest of the remaining lines.
_SEAL = "# The run's own; sha256 of what follows: "
# Config keys that may differ when a run is resumed, because they do not affect training: the keys
# that only affect speed, paths, devices, servers, outputs, and `data.eval_missing`, since
# `data.eval` already lists the sets that exist.
_MAY_DIFFER = (
    *config_io.SPEED_KEYS,
    "output.dir",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.decode_tensor",
    "checkpoint.every",
    "checkpoint.keep",
    "export.every",
    "data.eval_missing",
    "output.report",
    "output.format_report",
    "output.tensorboard",
    "output.wandb",
    "rollout.urls",
    "rollout.weights_dir",
)
# Maximum number of differing keys listed in an error.
_MAX_LISTED = 6
# Option or config key in front of a path, as in `--out runs/x` and `output.dir=runs/x`.
_OPTION = re.compile(r"--[\w-]+ |[\w.]+=")


def write_config(path: Path, config: Config) -> None:
    """Writes the config of a run atomically, with a digest in its first line.

    Raises:
      UserError: if disk space or a permission is missing.
    """
    text = config_io.to_yaml(config)
    write_atomically(path, f"{_SEAL}{_digest(text)}\n{text}")


def read_config_file(path: Path) -> Config:
    """Reads the config file of a run and verifies its digest.

    A config file without a digest was written by a user and is not verified.

    Raises:
      UserError: if the file is empty or invalid, or does not match its digest.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    first_line, _, rest = text.partition("\n")
    is_sealed = first_line.startswith(_SEAL)
    config = config_io.load([path])
    if not text.strip():
        raise UserError(
            f"{path}, the config that the run wrote, is empty; restore its original content"
        )
    if is_sealed and first_line.removeprefix(_SEAL) != _digest(rest):
        raise UserError(
            f"{path} was changed after the run wrote it; restore its original content, and set "
            "other values with options or in your own config"
        )
    return config


def _digest(text: str) -> str:
    """Returns the first 16 hexadecimal digits of the text's SHA-256 hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_path(output: OutputConfig) -> Path:
    """Returns the path of the run folder, with ~ and environment variables expanded.

    Raises:
      UserError: if the home folder can't be determined, or a variable is not set.
    """
    try:
        return expand_home(output.dir)
    except ValueError as error:
        raise UserError(f"output.dir={output.dir}: {error}") from None


class RunPaths:
    """Paths of the files in a run folder. Creating the object does not access any file.

    docs/runs.md describes the files.

    Attributes:
      later_evaluations: folder with a subfolder for each checkpoint that `bacr evaluate` evaluated.
      warmup: folder of the warm-up (`WarmupPaths`), used if `warmup.dir` is not set.
      wandb: files of Weights & Biases, including the run's id.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = path / _CONFIG
        self.changes = path / "changes.jsonl"
        self.lock = path / LOCK
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "eval.jsonl"
        self.later_evaluations = path / "evaluation"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.exports = path / "exports"
        self.warmup = path / "warmup"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"
        self.summary = path / "summary.json"
        self.best = path / "best.json"
        self.report = path / "report.html"
        self.restarts = path / _RESTARTS

    def traces_of(self, step: int) -> Path:
        """Returns the path of the traces sampled at a step, in JSON Lines format."""
        return self.rollouts / f"{step:06d}.jsonl"

    def evaluation_of(self, step: int, settings_name: str = "") -> Path:
        """Returns the folder to which `bacr evaluate` writes its evaluation of a checkpoint.

        Args:
          step: step of the checkpoint.
          settings_name: name of the settings (see `evaluate.settings_name`), or "" for the settings
            of the run.
        """
        dash = "-" if settings_name else ""
        return self.later_evaluations / f"step-{step:06d}{dash}{settings_name}"

    def evaluations_of(self, step: int) -> list[Path]:
        """Returns the folders of all evaluations of a step, in the order of their names.

        The evaluation with the settings of the run is first, if it exists.
        """
        name = f"step-{step:06d}"
        others = sorted(self.later_evaluations.glob(f"{name}-*"))
        default = self.later_evaluations / name
        return [default, *others] if default.is_dir() else others

    def picture(self, name: str) -> Path:
        """Returns the path of a plot of the run."""
        return self.path / f"{name}.png"


def steps_in(checkpoints: Path) -> list[int]:
    """Returns the steps of the finished checkpoints in a folder, in ascending order."""
    if not checkpoints.is_dir():
        return []
    # The names of unfinished checkpoints are not numbers.
    return sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())


class WarmupPaths:
    """Paths of the files in a warm-up folder, which may be shared by several runs.

    Attributes:
      identity: JSON file with the fingerprint and the results of the finished warm-up. It is
        missing until the warm-up is finished.
      weights: checkpoint of the final weights.
      unfinished: folder with a subfolder of checkpoints for each fingerprint of settings.
    """

    def __init__(self, path: Path):
        self.path = path
        self.identity = path / "warmup.json"
        self.weights = path / "weights"
        self.unfinished = path / "progress"


class RunFolder(RunPaths, contextlib.AbstractContextManager["RunFolder"]):
    """An opened run folder. Leaving its context releases the lock.

    Attributes:
      is_new: True if `open_run` created the run.
      config_now: config that `keep_config` will write, or None if the config file stays unchanged.
    """

    def __init__(self, path: Path, held: TextIO | None):
        """Wraps a locked folder. Call `open_run` instead of this constructor.

        Args:
          path: run folder.
          held: the open lock file, or None if another process of the same run holds the lock. Only
            that process writes the files.
        """
        super().__init__(path)
        self._lock = held
        self.is_new = False
        self.config_now: Config | None = None

    def __exit__(self, *error: Any) -> None:
        """Releases the lock. The operating system also releases it when the process ends."""
        if self._lock is not None:
            self._lock.close()

    def changed(self) -> list[str]:
        """Returns the keys for which `config_now` differs from the config file."""
        if self.config_now is None:
            return []
        return list(_differing(self.config, config_io.flatten(self.config_now)))

    def keep_config(self) -> None:
        """Writes `config_now` to the config file, and records the previous values.

        Call this method after all checks of the config have passed. If a later check failed, the
        run could no longer be resumed with its previous config.
        """
        if self.config_now is None:
            return
        differing = _differing(self.config, config_io.flatten(self.config_now))
        if differing:
            change = {
                "before": {key: before for key, (before, _) in differing.items()},
                "now": {key: now for key, (_, now) in differing.items()},
            }
            write_lines(self.changes, [*read_lines(self.changes), change])
            write_config(self.config, self.config_now)
        self.config_now = None

    def discard(self) -> None:
        """Removes the run folder if `open_run` created it and no other file was written to it."""
        initial_files = {self.config, self.rollouts, self.lock}
        if not self.is_new or not set(self.path.iterdir()) <= initial_files:
            return
        if not any(self.rollouts.iterdir()):
            self.config.unlink()
            self.rollouts.rmdir()
            self.lock.unlink()
            self.path.rmdir()

    def truncate_after(self, step: int) -> None:
        """Removes all records of steps after `step`, and incomplete last lines of the files.

        The records are metrics, evaluations and rollouts. A resumed run then writes the same files
        as an uninterrupted run.
        """
        keep_until(self.metrics, step)
        keep_until(self.evaluations, step)
        for path in self.rollouts.glob("*.jsonl"):
            if path.stem.isdigit() and int(path.stem) > step:
                path.unlink()
            else:
                keep_until(path, step)

    def exports_after(self, step: int) -> list[Path]:
        """Returns the folders of the exports of steps after `step`, sorted by name."""
        folders = sorted(self.exports.glob("*"))
        return [path for path in folders if path.name.isdecimal() and int(path.name) > step]

    def set_aside(self, folders: Sequence[Path]) -> list[Path]:
        """Moves each folder into a new folder `before-resume` in the same place.

        If this name is taken, a number is appended.

        Returns:
          The new folders.

        Raises:
          UserError: if a folder can't be moved.
        """
        destinations: dict[Path, Path] = {}
        with usable(_key_and_value(self.path)):
            for folder in folders:
                if folder.parent not in destinations:
                    destinations[folder.parent] = _free_name(folder.parent / _SET_ASIDE)
                    destinations[folder.parent].mkdir()
                folder.rename(destinations[folder.parent] / folder.name)
        return list(destinations.values())

    def forget_last_evaluation(self) -> None:
        """Removes the record of the evaluation after training."""
        records = read_lines(self.evaluations)
        remaining = [record for record in records if record.get("when") != "after"]
        if remaining != records:
            write_lines(self.evaluations, remaining)


def _free_name(path: Path) -> Path:
    """Returns a path, or the path with the first number from 2 that makes it unused."""
    free = path
    count = 1
    while os.path.lexists(free):
        count += 1
        free = path.with_name(f"{path.name}-{count}")
    return free


def _differing(recorded_file: Path, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the recorded and new values of keys that must not change, by key."""
    recorded = config_io.flatten(read_config_file(recorded_file))
    return {
        key: (recorded[key], value)
        for key, value in values.items()
        if recorded[key] != value and key not in _MAY_DIFFER
    }


def is_begun(path: Path, where: str, marker: str, what: str) -> bool:
    """True if a folder contains the file `marker`, False if the folder is missing or empty.

    Args:
      path: folder to check.
      where: option or config key that contains the path, for error messages.
      marker: name of a file that every folder of this type contains.
      what: type of the folder, such as "run", for error messages.

    Raises:
      UserError: if the path is a file, or the folder contains other files but no `marker`.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{where} is a file; use the name of a folder")
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    # A process that is killed while it creates the folder leaves a lock file and temporary
    # files. A killed `bacr doctor` leaves a temporary folder. Restarts are counted before the run,
    # while other processes may call `check_writable`.
    entries = []
    for name in sorted(names):
        is_temporary = is_left_over(name) or name.startswith((DOCTOR_PREFIX, _PROBE_PREFIX))
        if name not in (LOCK, _RESTARTS) and not is_temporary:
            entries.append(name)
    if entries and marker not in entries:
        raise UserError(
            f"{where} contains no {what}, but other files such as {entries[0]!r}; use "
            f"{free_folder(where, path)}"
        )
    return bool(entries)


def _refuse_foreign_folder(
    path: Path, values: Mapping[str, Any], where: str, resume: Resume, allowed: Sequence[str]
) -> None:
    """Raises UserError unless the folder is new, empty, or contains a run that can be resumed."""
    begun = is_begun(path, where, _CONFIG, "run")
    if not begun:
        if resume != "required":
            return
        raise UserError(
            f"{where} contains no run to continue; use the folder of a run, or leave out "
            "`--resume required`"
        )
    if resume == "never":
        raise UserError(
            f"{where} already contains a run; use {free_folder(where, path)}, or leave out "
            "`--resume never`"
        )
    try:
        differing = _differing(path / _CONFIG, values)
    except UserError as error:
        raise UserError(
            f"{where} contains a run whose config can't be read ({error}); use "
            f"{free_folder(where, path)}"
        ) from None
    refused = {key: values for key, values in differing.items() if key not in allowed}
    if refused:
        changes = [
            f"{key} ({recorded} in the folder, {now} now)"
            for key, (recorded, now) in refused.items()
        ]
        raise UserError(
            f"{where} contains a run whose config differs in {first_of(changes, _MAX_LISTED)}; "
            f"use {free_folder(where, path)} for a new run, the same config to resume, or "
            f"{_allow_change(list(refused))}"
        )


def _allow_change(keys: Sequence[str]) -> str:
    """Returns the options that allow a run to be resumed with other values of these keys."""
    if len(keys) > _MAX_LISTED:
        return "--allow-change KEY for each key that may differ from now on"
    options = " ".join(f"--allow-change {key}" for key in keys)
    return f"{options} to continue with the new value{'s' if len(keys) > 1 else ''}"


def free_folder(where: str, path: Path) -> str:
    """Suggests a folder that does not exist, such as `output.dir=runs/quickstart-2`.

    Args:
      where: option or config key that contains `path`, followed by the path.
      path: folder that can't be used.
    """
    stem, dash, number = path.name.rpartition("-")
    if not (dash and stem and number.isdecimal() and len(number) < 4):
        stem = path.name
        number = "1"
    count = int(number) + 1
    while os.path.lexists(path.with_name(f"{stem}-{count}")):
        count += 1
    name = str(path.with_name(f"{stem}-{count}"))
    option = _OPTION.match(where)
    return f"{option[0] if option else ''}{name if name.isprintable() else ascii(name)}"


def lock_folder(path: Path, where: str) -> TextIO:
    """Locks a folder without waiting.

    Raises:
      UserError: if another process has locked the folder, or its file system has no file locks.
    """
    lock = lock_if_free(path / LOCK)
    if lock is None:
        holder = (path / LOCK).read_text().strip() or "another process"
        raise UserError(
            f"{where} is in use by {holder}; wait until it has finished, or use "
            f"{free_folder(where, path)}"
        )
    return lock


def drop_left_over(path: Path) -> None:
    """Removes the temporary files that a killed process left in a folder.

    The caller must have locked the folder.
    """
    for entry in path.iterdir():
        if is_left_over(entry.name):
            entry.unlink(missing_ok=True)


def lock_if_free(path: Path) -> TextIO | None:
    """Locks a file without waiting, and writes the id and host of this process into it.

    Returns:
      The open file, or None if another process has the lock. Closing the file releases the lock.

    Raises:
      UserError: if the file system has no file locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            return None
        if error.errno not in _NO_LOCKS:
            raise
        raise UserError(
            f"{path.parent}: this file system does not support file locks ({error.strerror}); use "
            "another folder, or mount it with flock"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def lock_when_free(path: Path, poll: Callable[[], None] = lambda: None) -> TextIO:
    """Waits until a file can be locked, and locks it.

    Args:
      path: lock file.
      poll: called every second while another process has the lock. It may raise an exception to
        stop waiting.

    Raises:
      UserError: if the file system has no file locks.
    """
    lock = lock_if_free(path)
    if lock is None:
        print_message(f"waiting for the process that holds {path}")
    while lock is None:
        poll()
        time.sleep(1)
        lock = lock_if_free(path)
    return lock


def open_run(
    path: Path, config: Config, *, resume: Resume = "auto", allowed: Sequence[str] = ()
) -> RunFolder:
    """Opens and locks a run folder, or creates the folder if it does not exist.

    Args:
      path: run folder.
      config: config of the run.
      resume: "auto" resumes a run in the folder, "never" raises an error for it, and "required"
        raises an error if the folder contains no run.
      allowed: keys whose values may differ from an existing run. `keep_config` records the previous
        values.

    Raises:
      UserError: if the folder can't be used. Nothing in it was changed.
    """
    where = _key_and_value(path)
    values = config_io.flatten(config)
    with usable(where):
        _refuse_foreign_folder(path, values, where, resume, allowed)
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path, where)
        try:
            # Check again, because another process may have created a run before the
            # folder was locked.
            _refuse_foreign_folder(path, values, where, resume, allowed)
            drop_left_over(path)
            folder = RunFolder(path, lock)
            folder.is_new = not folder.config.exists()
            if folder.is_new:
                write_config(folder.config, config)
            else:
                folder.config_now = config
            folder.rollouts.mkdir(exist_ok=True)
        except BaseException:
            lock.close()
            raise
    return folder


def check_run_folder(
    path: Path, values: Mapping[str, Any], *, resume: Resume = "auto", allowed: Sequence[str] = ()
) -> None:
    """Raises the UserError that `open_run` would raise, without changing the folder.

    Args:
      path: run folder.
      values: values of the run's config, keyed by dotted name.
      resume: what to do with an existing run (see `open_run`).
      allowed: keys whose values may differ from an existing run.
    """
    where = _key_and_value(path)
    with usable(where):
        _refuse_foreign_folder(path, values, where, resume, allowed)
        check_writable(path)


def check_writable(path: Path) -> None:
    """Raises OSError if a folder is not writable.

    If the folder does not exist, its nearest existing parent is checked.
    """
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    # Create a folder instead of checking permissions, because root passes every permission
    # check and because the disk may be full.
    Path(tempfile.mkdtemp(prefix=_PROBE_PREFIX, dir=existing)).rmdir()


def _key_and_value(path: Path) -> str:
    """Returns the config key `output.dir` with its value, for error messages."""
    name = str(path)
    return f"output.dir={name if name.isprintable() else ascii(name)}"


@contextlib.contextmanager
def usable(where: str) -> Iterator[None]:
    """Context manager that converts any OSError of its block to a UserError.

    Args:
      where: option or config key that contains the path of the folder.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{where} can't be used ({error.strerror}); use a folder in which files can be created"
        ) from None
