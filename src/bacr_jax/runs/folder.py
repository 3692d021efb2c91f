"""The folder of a run: who may write into it, what lies where, what survives a resume."""

import contextlib
import fcntl
import hashlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.documents import (
    is_left_over,
    keep_until,
    read_lines,
    write_atomically,
    write_lines,
)
from bacr_jax.errors import UserError, first_of

LOCK = ".lock"
# What to do with a run that the folder holds: go on with it, refuse it, refuse to do without it.
Resume = Literal["auto", "never", "required"]
_CONFIG = "config.yaml"
# Its first line; a digest of the others stands behind it.
_SEAL = "# The run's own; sha256 of what follows: "
# A moved or renamed folder still holds the same run, a checkpoint fits any devices and servers, and
# how often it is saved, whether it is drawn or what was to be done about sets that were not there
# (data.eval holds those that were) changes nothing that it learns.
_MAY_DIFFER = (
    *("output.dir", "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.decode_tensor"),
    *("checkpoint.every", "checkpoint.keep", "export.every", "data.eval_missing"),
    *("output.report", "output.format_report", "output.tensorboard", "output.wandb"),
    *("output.compile_cache", "rollout.windows", "rollout.refill"),
    *("rollout.urls", "rollout.weights_dir"),
)
# Keys named in the refusal of another config's run.
_MOST_NAMED = 6


def write_config(path: Path, config: Config) -> None:
    """Writes a run's config in one step, under a digest of it; UserError: no space, or no right."""
    text = config_io.to_yaml(config)
    write_atomically(path, f"{_SEAL}{_digest(text)}\n{text}")


def read_config_file(path: Path) -> Config:
    """The config that a run wrote, or that somebody wrote in its place without a digest."""
    config = config_io.load([path])
    text = path.read_text(encoding="utf-8")
    seal, _, rest = text.partition("\n")
    changed = seal.startswith(_SEAL) and seal.removeprefix(_SEAL) != _digest(rest)
    if changed or not text.strip():
        what = "is not as the run wrote it" if changed else "is empty"
        raise UserError(f"{path}: {what}; put it back as it was")
    return config


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RunPaths:
    """What lies where in a run folder; nothing is opened, made or read.

    docs/runs.md says what each file is.

    Attributes:
      later_evaluations: a folder per checkpoint that was evaluated afterwards.
      warmup: unless `warmup.dir` names another (`WarmupPaths`).
      wandb: files of Weights & Biases, with the id of the run there.
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
        self.restarts = path / "restarts.json"

    def traces_of(self, step: int) -> Path:
        """Sampled traces of a step, a JSON line each."""
        return self.rollouts / f"{step:06d}.jsonl"

    def evaluation_of(self, step: int) -> Path:
        """Folder of the evaluation made of a checkpoint afterwards."""
        return self.later_evaluations / f"step-{step:06d}"

    def picture(self, name: str) -> Path:
        """A picture drawn from the run's files."""
        return self.path / f"{name}.png"


def steps_in(checkpoints: Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, rising."""
    if not checkpoints.is_dir():
        return []
    # Unfinished ones have other names until they are whole.
    return sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())


class WarmupPaths:
    """What lies where in the folder of a warm-up, which several runs may share.

    Attributes:
      identity: which warm-up it is, and how well it went; there once it is finished.
      weights: checkpoint of the finished weights.
      unfinished: a folder of checkpoints for each fingerprint of settings.
    """

    def __init__(self, path: Path):
        self.path = path
        self.identity = path / "warmup.json"
        self.weights = path / "weights"
        self.unfinished = path / "progress"


class RunFolder(RunPaths, contextlib.AbstractContextManager["RunFolder"]):
    """An opened run folder; a context manager that holds its lock.

    Attributes:
      config_now: the config that `keep_config` makes the folder's; None: it stays as it is.
    """

    def __init__(self, path: Path, held: TextIO | None):
        """Wraps a folder whose lock is held; use `open_run`.

        `held`: the lock; None: another process of the same run has it, and that one alone writes.
        """
        super().__init__(path)
        self._held = held
        self.is_new = False
        self.config_now: Config | None = None

    def __exit__(self, *error: Any) -> None:
        """Releases the lock; the end of the process, however it comes, does so too."""
        if self._held is not None:
            self._held.close()

    def changed(self) -> list[str]:
        """Keys in which the present config differs from the folder's, until `keep_config`."""
        return [] if self.config_now is None else list(_differing(self.config, self.config_now))

    def keep_config(self) -> None:
        """Makes the present config the folder's, and keeps what it was before.

        To be called when nothing can refuse the config any more: a run whose change was refused
        afterwards could not go on with the config that it had.
        """
        if self.config_now is None:
            return
        if differing := _differing(self.config, self.config_now):
            before = {key: there for key, (there, _) in differing.items()}
            now = {key: here for key, (_, here) in differing.items()}
            change = {"before": before, "now": now}
            write_lines(self.changes, [*read_lines(self.changes), change])
            write_config(self.config, self.config_now)
        self.config_now = None

    def discard(self) -> None:
        """Takes away what `open_run` made, if it was new and nothing else has come to it since."""
        made = {self.config, self.rollouts, self.lock}
        if self.is_new and set(self.path.iterdir()) <= made and not any(self.rollouts.iterdir()):
            self.config.unlink()
            self.rollouts.rmdir()
            self.lock.unlink()
            self.path.rmdir()

    def truncate_after(self, step: int) -> None:
        """Drops metrics, evaluations and rollouts of steps after `step`, and torn last lines.

        A resumed run then writes what an uninterrupted one would have.
        """
        keep_until(self.metrics, step)
        keep_until(self.evaluations, step)
        for path in self.rollouts.glob("*.jsonl"):
            if path.stem.isdigit() and int(path.stem) > step:
                path.unlink()
            else:
                keep_until(path, step)

    def forget_last_evaluation(self) -> None:
        """Drops the evaluation made after training."""
        records = read_lines(self.evaluations)
        kept = [record for record in records if record.get("when") != "after"]
        if kept != records:
            write_lines(self.evaluations, kept)


def _differing(recorded: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose recorded value is another one: the value there, the value now."""
    there, now = config_io.flatten(read_config_file(recorded)), config_io.flatten(config)
    return {
        key: (there[key], now[key])
        for key in now
        if there[key] != now[key] and key not in _MAY_DIFFER
    }


def is_begun(path: Path, where: str, marker: str, what: str) -> bool:
    """Whether a folder holds `what` its file `marker` stands for; if not, it is new or empty.

    UserError: it is a file, or something else lies in it.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{where}: is a file; write the name of a folder")
    # What was killed while it made its folder leaves a lock and what it was writing.
    names = (entry.name for entry in (path.iterdir() if path.exists() else ()))
    entries = sorted(name for name in names if name != LOCK and not is_left_over(name))
    if entries and marker not in entries:
        raise UserError(
            f"{where}: is not empty and holds no {what} (found {entries[0]!r}); write another "
            "folder"
        )
    return bool(entries)


def _refuse_unless_ours(
    path: Path, config: Config, where: str, resume: Resume, allowed: Sequence[str]
) -> None:
    """Raises a UserError unless the folder is new, empty, or holds a run that may go on."""
    begun = is_begun(path, where, _CONFIG, "run")
    if resume == "required" and not begun:
        raise UserError(
            f"{where}: holds no run to go on with; write the folder of one, or leave out "
            "--resume required"
        )
    if not begun:
        return
    if resume == "never":
        raise UserError(
            f"{where}: holds a run already; write another folder, or leave out --resume never"
        )
    try:
        differing = _differing(path / _CONFIG, config)
    except UserError as error:
        raise UserError(
            f"{where}: holds a run whose config can't be read ({error}); write another folder"
        ) from None
    refused = [
        f"{key} ({there} there, {now} now)"
        for key, (there, now) in differing.items()
        if key not in allowed
    ]
    if refused:
        raise UserError(
            f"{where}: holds a run with another config, which differs in "
            f"{first_of(refused, _MOST_NAMED)}; write another folder, or the same config to "
            "resume, or --allow-change KEY for each key that may differ from here on"
        )


def lock_folder(path: Path, where: str) -> TextIO:
    """Takes the lock of a folder, without waiting."""
    if (lock := lock_if_free(path / LOCK)) is None:
        holder = (path / LOCK).read_text().strip() or "another process"
        raise UserError(f"{where}: is in use by {holder}; wait for it, or write another folder")
    return lock


def drop_left_over(path: Path) -> None:
    """Removes what a kill left of files that were being written to a folder; its lock is held."""
    for entry in path.iterdir():
        if is_left_over(entry.name):
            entry.unlink(missing_ok=True)


def lock_if_free(path: Path) -> TextIO | None:
    """Takes the lock of a file and writes there who has it; None: another process has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def lock_when_free(path: Path, poll: Callable[[], None] = lambda: None) -> TextIO:
    """Takes the lock of a file; `poll` is called every second while another process has it."""
    if (lock := lock_if_free(path)) is None:
        print(f"waiting for the process that holds {path}", file=sys.stderr, flush=True)
    while lock is None:
        poll()
        time.sleep(1)
        lock = lock_if_free(path)
    return lock


def open_run(
    path: Path, config: Config, *, resume: Resume = "auto", allowed: Sequence[str] = ()
) -> RunFolder:
    """Makes a run folder, or opens the one that this config made before, and locks it.

    `allowed`: keys in which that run's config may differ; `keep_config` notes what they were. If
    the folder is refused, nothing in it is touched.
    """
    where = _named(path)
    with usable(where):
        _refuse_unless_ours(path, config, where, resume, allowed)
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path, where)
        try:
            # Between the look and the lock, another process may have made its run here.
            _refuse_unless_ours(path, config, where, resume, allowed)
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
    path: Path, config: Config, *, resume: Resume = "auto", allowed: Sequence[str] = ()
) -> None:
    """The UserError that `open_run` would raise; leaves nothing behind."""
    where = _named(path)
    with usable(where):
        _refuse_unless_ours(path, config, where, resume, allowed)
        check_writable(path)


def check_writable(path: Path) -> None:
    """OSError: nothing can be written in a folder, or where it would be made."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    # Rights say less than writing does: of root's there are all, and a disk may be full.
    Path(tempfile.mkdtemp(dir=there)).rmdir()


def _named(path: Path) -> str:
    """The key and its value, for refusals."""
    name = str(path)
    return f"output.dir={name if name.isprintable() else ascii(name)}"


@contextlib.contextmanager
def usable(where: str) -> Iterator[None]:
    """Says in one line why the system does not let us use a folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{where}: can't be used ({error.strerror}); write a folder that can be written"
        ) from None
