"""Counts consecutive restarts of a Slurm job during which no checkpoint was saved.

The launch scripts requeue a job whenever training exits with code 75. Without a limit, a job that
never saves a checkpoint would be restarted forever. Training calls `give_up_reason` at its start.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from bacr_jax.files import read_json, write_json
from bacr_jax.runs.folder import LOCK, RunPaths

# Maximum number of restarts without a new checkpoint. It is larger than 1, because a job can be
# preempted several times before its first checkpoint.
MOST_RESTARTS = 5


def give_up_reason(paths: RunPaths, warmup: Path, environment: Mapping[str, str]) -> str:
    """Counts the restarts of a Slurm job. A new job (`sbatch`) resets the count.

    Args:
      paths: files of the run.
      warmup: folder in which the warm-up saves its checkpoints.
      environment: environment variables.

    Returns:
      The reason for giving up the job, or "" to continue.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job or environment.get("SLURM_RESTART_COUNT", "0") in ("", "0"):
        return ""
    start = {"job": job, "saved": _newest_save(paths.checkpoints, warmup)}
    previous = {}
    # If the file can't be read, the count starts again.
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
        f"training: stopped, because Slurm restarted job {job} {count} times, and no checkpoint "
        "was saved between the restarts; find the cause in the job's log, and submit the job "
        f"again. {paths.restarts} contains the count"
    )


def _newest_save(*folders: Path) -> int:
    """Returns the newest modification time of any file in the folders, in nanoseconds.

    The result is 0 if the folders are missing or empty.
    """
    return max((time for folder in folders for time in _times(folder)), default=0)


def _times(folder: Path) -> Iterator[int]:
    """Yields the modification times of all files and subfolders of a folder, in nanoseconds.

    Lock files are skipped, because every start of a run writes them.
    """
    for path in folder.rglob("*"):
        if path.name == LOCK:
            continue
        # A file that is being written can be renamed before its time is read.
        with contextlib.suppress(OSError):
            yield path.stat().st_mtime_ns
