"""Counts the restarts of a Slurm job between which nothing was saved.

The launch scripts put a job back into the queue whenever its training ends with exit code 75. A job
that never saves anything would be restarted forever. Training calls `give_up_reason` at its start.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from bacr_jax.documents import read_json, write_json
from bacr_jax.runs.folder import RunPaths

# Restarts without a new save after which a job is given up. It is more than one, because several
# preemptions in a row can come before the first checkpoint.
MOST_RESTARTS = 5


def give_up_reason(paths: RunPaths, warmup: Path, environment: Mapping[str, str]) -> str:
    """Counts this start if Slurm restarted the job. A new job (`sbatch`) starts a new count.

    Args:
      warmup: folder in which the warm-up saves its progress.
      environment: variables of the environment.

    Returns:
      The reason to give up the job, or "".
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job or environment.get("SLURM_RESTART_COUNT", "0") in ("", "0"):
        return ""
    start = {"job": job, "saved": _newest_save(paths.checkpoints, warmup)}
    previous = {}
    # A file that can't be read starts a new count.
    with contextlib.suppress(OSError, ValueError, TypeError):
        previous = dict(read_json(paths.restarts))
    restarts = previous.pop("restarts", None)
    count = 1
    if previous == start and type(restarts) is int:
        count = restarts + 1
    write_json(paths.restarts, {**start, "restarts": count})
    if count <= MOST_RESTARTS:
        return ""
    return (
        f"training: stopped, since Slurm restarted job {job} {count} times and nothing was saved "
        f"in between; look into the job's log, and submit it again. {paths.restarts} has the count"
    )


def _newest_save(*folders: Path) -> int:
    """Returns the newest time of all files and folders in some folders, in ns; 0 without files."""
    return max((time for folder in folders for time in _times(folder)), default=0)


def _times(folder: Path) -> Iterator[int]:
    """Yields the modification times of all files and folders in a folder, in nanoseconds."""
    for path in folder.rglob("*"):
        # Files that are being written may be renamed meanwhile.
        with contextlib.suppress(OSError):
            yield path.stat().st_mtime_ns
