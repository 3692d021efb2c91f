"""Count of the restarts of a Slurm job that saved nothing in between.

The launch scripts put a job back into the queue whenever its training ends with 75. A job that
never gets further would go round for ever; training calls this at its start and gives up instead.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from bacr_jax.documents import read_json, write_json
from bacr_jax.runs.folder import RunPaths

# Restarts without anything new on disk, after which a job is given up. A preemption may come before
# the first checkpoint a few times in a row.
MOST_RESTARTS = 5


def give_up_reason(paths: RunPaths, warmup: Path, environment: Mapping[str, str]) -> str:
    """Counts this start if Slurm restarted the job; returns why the job is given up, or "".

    A new job (`sbatch`) is counted from the beginning.

    Args:
      warmup: folder in which the warm-up saves its progress.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job or environment.get("SLURM_RESTART_COUNT", "0") in ("", "0"):
        return ""
    start = {"job": job, "saved": _newest_save(paths.checkpoints, warmup)}
    before = {}
    # A file that can't be read counts from the beginning.
    with contextlib.suppress(OSError, ValueError, TypeError):
        before = dict(read_json(paths.restarts))
    restarts = before.pop("restarts", None)
    count = 1 + restarts if before == start and type(restarts) is int else 1
    write_json(paths.restarts, {**start, "restarts": count})
    if count <= MOST_RESTARTS:
        return ""
    return (
        f"training: stopped, since Slurm restarted job {job} {count} times and nothing was saved "
        f"in between; look into the job's log, and submit it again. {paths.restarts} has the count"
    )


def _newest_save(*folders: Path) -> int:
    """Returns the time of the newest file or folder in some folders, in nanoseconds; 0: none."""
    return max((time for folder in folders for time in _times(folder)), default=0)


def _times(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        # What is being written may be renamed meanwhile.
        with contextlib.suppress(OSError):
            yield path.stat().st_mtime_ns
