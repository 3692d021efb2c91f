"""Records a run's files in its checkpoints, and restores the files when the run is resumed.

A checkpoint contains the evaluations, the config changes, and a digest of the metrics. A resumed
run calls `restore_files` to make its files match the checkpoint.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bacr_jax import files
from bacr_jax.errors import UserError
from bacr_jax.files import lines_until, read_lines, write_lines
from bacr_jax.runs.folder import RunPaths

Records = list[dict[str, Any]]

# Number of bytes to read from metrics.jsonl at a time. The file of a long run has about 100 MB.
_CHUNK = 1 << 20


class History:
    """Summarizes a run's files. Each checkpoint stores the summary, to detect changes of the files.

    Each line of metrics.jsonl is read once.
    """

    def __init__(self, paths: RunPaths):
        """Creates a summary that has read no records yet.

        If a run is resumed, the files must first be restored to their content at the checkpoint.
        """
        self._paths = paths
        self._digest = hashlib.sha256()
        self._num_records = 0
        self._bytes_read = 0

    def now(self, evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the current summary of the files, serializable as JSON.

        A checkpoint stores this summary. It contains all records of eval.jsonl and changes.jsonl,
        because they are few. For the metrics, it contains the number of records and a digest.
        metrics.jsonl is flushed to disk before this method returns, because it must be on disk
        before the checkpoint with its digest.

        Args:
          evaluations: all records of eval.jsonl.
        """
        if self._paths.metrics.exists():
            with self._paths.metrics.open("rb") as file:
                os.fsync(file.fileno())
                file.seek(self._bytes_read)
                for chunk in iter(functools.partial(file.read, _CHUNK), b""):
                    self._digest.update(chunk)
                    self._bytes_read += len(chunk)
                    self._num_records += chunk.count(b"\n")
        return {
            "evaluations": list(evaluations),
            "changes": read_lines(self._paths.changes),
            "metrics": {"records": self._num_records, "sha256": self._digest.hexdigest()},
        }


def restore_files(paths: RunPaths, kept: dict[str, Any], step: int) -> list[str]:
    """Restores a run's files to their state when the checkpoint of `step` was saved.

    Later records are removed. Evaluations of the same step are kept, even if they were added after
    the checkpoint.

    Args:
      paths: files of the run.
      kept: return value of `History.now` that was stored in the checkpoint.
      step: step of the checkpoint.

    Returns:
      A note for each file whose content had been changed, for the user.

    Raises:
      UserError: if records of metrics.jsonl are missing or changed. No file was written.
    """
    recorded_metrics = kept["metrics"]
    present_metrics = _count_and_digest(paths.metrics, step)
    if present_metrics != recorded_metrics:
        before = recorded_metrics["records"]
        now = present_metrics["records"]
        change = "the contents of its records differ"
        if now != before:
            change = f"it had {before} records, and now has {now}"
        raise UserError(
            f"{paths.metrics} was changed after the checkpoint of step {step} was saved: "
            f"{change}; restore the original file, or use another output.dir"
        )
    notes = []
    evaluations: Records = kept["evaluations"]
    recorded_keys = {(record["when"], record["step"]) for record in evaluations}
    present = _read_or_empty(paths.evaluations)
    newer = [
        record
        for record in present
        if record.get("step") == step and (record.get("when"), step) not in recorded_keys
    ]
    unchanged = present[: len(evaluations)] == evaluations
    if not unchanged or present != [*evaluations, *newer]:
        write_lines(paths.evaluations, [*evaluations, *newer])
    if not unchanged:
        notes.append(_restored_note(paths.evaluations, step))
    changes: Records = kept["changes"]
    if _read_or_empty(paths.changes)[: len(changes)] != changes:
        write_lines(paths.changes, changes)
        notes.append(_restored_note(paths.changes, step))
    return notes


def _restored_note(path: Path, step: int) -> str:
    """Returns the note about a restored file."""
    return (
        f"note: {path} was changed since the run wrote it, so its content was restored from "
        f"checkpoint {step}"
    )


def _read_or_empty(path: Path) -> Records:
    """Reads a JSONL file. Returns [] if it is unreadable, because `restore_files` rewrites it."""
    try:
        return read_lines(path)
    except (OSError, ValueError):
        return []


def _count_and_digest(path: Path, step: int) -> dict[str, Any]:
    """Returns the number of records up to a step and their SHA-256 hash."""
    digest = hashlib.sha256()
    num_records = 0
    for line in lines_until(path, step):
        digest.update(f"{line}\n".encode())
        num_records += 1
    return {"records": num_records, "sha256": digest.hexdigest()}


def recorded_seconds(paths: RunPaths, step: int) -> float | None:
    """Returns the wall-clock time in seconds of a run that finished at `step`, or None."""
    try:
        summary = files.read_object(paths.summary)
    except (OSError, ValueError):
        return None
    seconds = summary.get("wall_seconds")
    return seconds if summary.get("steps") == step and isinstance(seconds, float) else None
