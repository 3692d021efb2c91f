"""Counts consecutive restarts of a Slurm job during which no checkpoint was saved.

The launch scripts requeue a job if training exits with code 75 or is killed by a signal. Without a
limit, a job that never saves a checkpoint would be restarted forever. Every process of a run calls
`give_up_reason` before it connects to the others, because some of them may be missing.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from bacr_jax.files import read_json, write_json
from bacr_jax.runs.folder import RunPaths, WarmupPaths, steps_in

# Maximum number of restarts without a new checkpoint. It is larger than 1, because a job can be
# preempted several times before its first checkpoint.
MOST_RESTARTS = 5


def give_up_reason(paths: RunPaths, warmup: Path, environment: Mapping[str, str]) -> str:
    """Counts the restarts of a Slurm job. A new job (`sbatch`) resets the count.

    The processes of a start all get and write the same count. The run folder is created if it is
    missing.

    Args:
      paths: files of the run.
      warmup: folder in which the warm-up saves its checkpoints.
      environment: environment variables.

    Returns:
      The reason for giving up the job, or "" to continue.
    """
    job = environment.get("SLURM_JOB_ID", "")
    restart = environment.get("SLURM_RESTART_COUNT", "")
    if not job or restart in ("", "0"):
        return ""
    start = {"job": job, "saved": _newest_save(paths.checkpoints, warmup)}
    previous = {}
    # If the file can't be read, the count starts again.
    with contextlib.suppress(OSError, ValueError, TypeError):
        previous = dict(read_json(paths.restarts))
    restarts = previous.pop("restarts", None)
    # True if another process of this start has counted it already.
    is_counted = previous.pop("restart", None) == restart
    count = 1
    if previous == start and type(restarts) is int:
        count = restarts if is_counted else restarts + 1
    paths.path.mkdir(parents=True, exist_ok=True)
    write_json(paths.restarts, {**start, "restart": restart, "restarts": count})
    if count <= MOST_RESTARTS:
        return ""
    return (
        f"training: stopped, because Slurm restarted job {job} {count} times, and no checkpoint "
        "was saved between the restarts; find the cause in the job's log, and submit the job "
        f"again. {paths.restarts} contains the count"
    )


def _newest_save(checkpoints: Path, warmup: Path) -> int:
    """Returns the modification time of the newest finished checkpoint, in nanoseconds.

    A checkpoint that a killed process left unfinished does not count, because the job may be killed
    in every save. The result is 0 without a finished checkpoint.

    Args:
      checkpoints: folder of the run's checkpoints.
      warmup: folder of the warm-up, with the checkpoints of its weights and of its progress.
    """
    paths = WarmupPaths(warmup)
    times = [0]
    for folder in (checkpoints, paths.weights, *paths.unfinished.glob("*")):
        for step in steps_in(folder):
            # Another run that shares the warm-up may delete its older checkpoints.
            with contextlib.suppress(OSError):
                times.append((folder / str(step)).stat().st_mtime_ns)
    return max(times)
