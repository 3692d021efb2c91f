"""The folder of a run: who may write into it, what lies where, what survives a resume."""

import fcntl
import json
import os
import types
from pathlib import Path
from typing import Any, TextIO

from bacr_jax import config_io
from bacr_jax.config import Config
from bacr_jax.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file in one step: a reader sees the old text or the new one, never half."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of indented JSON."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds one JSON line and flushes it."""
    with path.open("a") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file; a last line torn by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().split("\n")[:-1]:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class RunFolder:
    """An opened run folder; a context manager that holds its lock."""

    def __init__(self, path: Path, lock: TextIO):
        """Wraps a folder whose lock is held; use `open_run`."""
        self.path, self._lock = path, lock
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "eval.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"

    def __enter__(self) -> "RunFolder":
        """The folder itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """Releases the lock."""
        self._lock.close()

    def truncate_after(self, step: int) -> None:
        """Drops metrics, evaluations and rollouts of steps after `step`, and torn last lines.

        A resumed run then writes what an uninterrupted one would have.
        """
        for path in (self.metrics, self.evaluations):
            if path.exists():
                kept = [record for record in read_lines(path) if record["step"] <= step]
                text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept)
                write_atomically(path, text)
        for path in self.rollouts.glob("*.jsonl"):
            if int(path.stem) > step:
                path.unlink()


def _differing_keys(recorded: Path, config: Config) -> list[str]:
    one, two = config_io.flatten(config_io.load([recorded])), config_io.flatten(config)
    return sorted(key for key in two if one[key] != two[key])


def open_run(path: Path, config: Config) -> RunFolder:
    """Makes a run folder, or opens the one that this config made before.

    Args:
      path: the folder.
      config: settings of the run; written to config.yaml.

    Raises:
      UserError: the folder holds something else, another config's run, can't be written, or another
        process is using it. Nothing in it is touched then.
    """
    where = f"output.dir={path}"
    if path.exists() and not path.is_dir():
        raise UserError(f"{where}: is a file; write the name of a folder")
    entries = [p.name for p in path.iterdir() if p.name != ".lock"] if path.exists() else []
    recorded, text = path / "config.yaml", config_io.to_yaml(config)
    if entries and not recorded.exists():
        raise UserError(
            f"{where}: is not empty and holds no run (found {sorted(entries)[0]}); write another "
            "folder"
        )
    differing = ", ".join(_differing_keys(recorded, config)) if entries else ""
    if differing:
        raise UserError(
            f"{where}: holds a run with another config (differs in {differing}); write another "
            "folder, or the same config to resume"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("a")
    except OSError as error:
        raise UserError(f"{where}: can't write there ({error.strerror})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UserError(
            f"{where}: another process is using this run; write another folder"
        ) from None
    folder = RunFolder(path, lock)
    folder.rollouts.mkdir(exist_ok=True)
    if not recorded.exists():
        write_atomically(recorded, text)
    return folder
