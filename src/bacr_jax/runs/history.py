"""What checkpoints keep of the files beside them, and how a resumed run gets these back."""

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bacr_jax import documents
from bacr_jax.documents import lines_until, read_lines, write_lines
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import RunPaths

Records = list[dict[str, Any]]

# Bytes of metrics.jsonl read at a time: a long run's are a hundred megabytes.
_PIECE = 1 << 20


class History:
    """What checkpoints keep of the files beside them; each line of metrics.jsonl is read once."""

    def __init__(self, paths: RunPaths):
        """Of a run whose files are those of its newest checkpoint."""
        self._paths, self._digest = paths, hashlib.sha256()
        self._records = self._read = 0

    def now(self, evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """For JSON, after a step.

        All records of eval.jsonl and changes of the config are few and kept whole. Metrics are kept
        as a digest; they are on the disk when this returns, as they must not come after the
        checkpoint.
        """
        if self._paths.metrics.exists():
            with self._paths.metrics.open("rb") as file:
                os.fsync(file.fileno())
                file.seek(self._read)
                for piece in iter(functools.partial(file.read, _PIECE), b""):
                    self._digest.update(piece)
                    self._read += len(piece)
                    self._records += piece.count(b"\n")
        return {
            "evaluations": list(evaluations),
            "changes": read_lines(self._paths.changes),
            "metrics": {"records": self._records, "sha256": self._digest.hexdigest()},
        }


def restore_files(paths: RunPaths, kept: dict[str, Any], step: int) -> list[str]:
    """Brings the files of a run to where they were when a checkpoint of `step` was saved.

    Later records are dropped, but for those of the same step that came after it. Nothing is written
    where metrics.jsonl has lost or changed records, which is refused.

    Args:
      kept: `History.now` of the checkpoint.

    Returns:
      A line for each file that was not as the run had left it, and is again.
    """
    found = _digest_of(paths.metrics, step)
    if found != kept["metrics"]:
        raise UserError(
            f"{paths.metrics}: is not what the run had written by step {step} "
            f"({kept['metrics']['records']} records there, {found['records']} now, "
            f"{'other ones' if found['records'] == kept['metrics']['records'] else 'some lost'})"
            "; restore the file, or write another output.dir"
        )
    said = []
    then: Records = kept["evaluations"]
    made = {(record["when"], record["step"]) for record in then}
    now = _readable(paths.evaluations)
    newer = [
        record
        for record in now
        if record.get("step") == step and (record.get("when"), record["step"]) not in made
    ]
    same = now[: len(then)] == then
    if not same or now != [*then, *newer]:
        write_lines(paths.evaluations, [*then, *newer])
    if not same:
        said.append(_mended(paths.evaluations, step))
    changes: Records = kept["changes"]
    if _readable(paths.changes)[: len(changes)] != changes:
        write_lines(paths.changes, changes)
        said.append(_mended(paths.changes, step))
    return said


def _mended(path: Path, step: int) -> str:
    return (
        f"note: {path} was not as the run had left it; it was written again from checkpoint {step}"
    )


def _readable(path: Path) -> Records:
    """Records of a file that can be written again; none if it can't be read as such."""
    try:
        return read_lines(path)
    except (OSError, ValueError):
        return []


def _digest_of(path: Path, step: int) -> dict[str, Any]:
    """Number and digest of a file's records up to a step."""
    digest, records = hashlib.sha256(), 0
    for line in lines_until(path, step):
        digest.update(f"{line}\n".encode())
        records += 1
    return {"records": records, "sha256": digest.hexdigest()}


def recorded_seconds(paths: RunPaths, step: int) -> float | None:
    """Wall time in the summary of a run that was finished at `step`; None: it has none."""
    try:
        summary = documents.read_object(paths.summary)
    except (OSError, ValueError):
        return None
    seconds = summary.get("wall_seconds")
    return seconds if summary.get("steps") == step and isinstance(seconds, float) else None
