"""Counts consecutive restarts of a Slurm job during which no checkpoint was saved.

The launch scripts requeue a job if training exits with code 75 or is killed by a signal. Without a
limit, a job that never saves a checkpoint would be restarted forever. If a run has several
processes, each of them calls `give_up_reason` before it connects to the others, because some of
them may be missing. The first process counts the restart, and the others read the count.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bacr_jax.errors import UserError
from bacr_jax.files import read_json, write_json
from bacr_jax.runs.folder import RunPaths, WarmupPaths, steps_in

# Maximum number of restarts without a new checkpoint. It is larger than 1, because a job can be
# preempted several times before its first checkpoint.
MOST_RESTARTS = 5
# Exit code of `bacr train` if the job is given up. srun returns the highest code of all processes,
# so the code is above 75, with which the other processes may exit. It is below 108 (Open MPI's code
# for a port in use, after which srun starts the processes again) and below the codes of signals.
GIVEN_UP = 76
# Variable with the path of a file that is created if the job is given up. launch/slurm.sh sets it:
# if any process was killed by a signal, srun returns 128 plus the signal, whatever the other
# processes return.
_GIVE_UP_FILE = "BACR_GIVE_UP_FILE"
# On NFS, reading a file fails (ESTALE) if another host replaces the file at that time.
_READ_ATTEMPTS = 4
_RETRY_SECONDS = 0.2


def give_up_reason(paths: RunPaths, warmup: Path, environment: Mapping[str, str]) -> str:
    """Counts the restarts of a Slurm job. A new job (`sbatch`) resets the count.

    The processes of a start all get the same count. The run folder is created if it is missing, and
    is not removed if the run is refused later.

    Args:
      paths: files of the run.
      warmup: folder in which the warm-up saves its checkpoints.
      environment: environment variables.

    Returns:
      The reason for giving up the job, or "" to continue.

    Raises:
      UserError: if the count can't be read or written.
    """
    job = environment.get("SLURM_JOB_ID", "")
    restart = environment.get("SLURM_RESTART_COUNT", "")
    if not job or restart in ("", "0"):
        return ""
    start = {"job": job, "restart": restart, "saved": _newest_save(paths.checkpoints, warmup)}
    previous = _read_count(paths.restarts)
    count = previous.pop("restarts", 0)
    # They are equal if another process of this start has counted it already.
    if previous != start:
        is_consecutive = all(previous.get(key) == start[key] for key in ("job", "saved"))
        count = count + 1 if is_consecutive else 1
        paths.path.mkdir(parents=True, exist_ok=True)
        write_json(paths.restarts, {**start, "restarts": count})
    if count <= MOST_RESTARTS:
        return ""
    if environment.get(_GIVE_UP_FILE):
        # Without the file, the exit code still gives up the job unless a process is killed.
        with contextlib.suppress(OSError):
            Path(environment[_GIVE_UP_FILE]).touch()
    return (
        f"training: stopped, because Slurm restarted job {job} {count} times, and no checkpoint "
        "was saved between the restarts; find the cause in the job's log, and submit the job "
        f"again. {paths.restarts} contains the count"
    )


def _read_count(path: Path) -> dict[str, Any]:
    """Reads restarts.json. Returns {} if the file is missing or malformed.

    Any other error must not reset the count, so reading is repeated.

    Raises:
      UserError: if the file still can't be read.
    """
    for attempt in range(1, _READ_ATTEMPTS + 1):
        try:
            content = read_json(path)
        except (FileNotFoundError, ValueError):
            return {}
        except OSError as error:
            if attempt == _READ_ATTEMPTS:
                raise UserError(
                    f"{path}: the count of restarts can't be read ({error.strerror}); make the "
                    "file readable, or delete it"
                ) from None
            time.sleep(_RETRY_SECONDS)
        else:
            break
    if isinstance(content, dict) and type(content.get("restarts")) is int:
        return content
    return {}


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
