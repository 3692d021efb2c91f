"""Detects launchers that start several processes without setting all variables that JAX needs.

A process that does not detect the other processes trains independently, so N processes would write
N runs to the same folder. Therefore, if any variable indicates that other processes were started,
all required variables must be set. `processes.settings` calls `refuse_incomplete`.
"""

from collections.abc import Mapping

from bacr_jax.errors import UserError

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"

# Set only by srun. SLURM_NTASKS is also set in the batch script, which runs as a single process.
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
# Variables that JAX reads in a Slurm step.
_SLURM_STEP = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_NODES",
)
# Set in the pods of an indexed Kubernetes Job.
_JOB_INDEX = "JOB_COMPLETION_INDEX"
_SEPARATE_RUNS = f"or {COUNT}=1 if they are separate runs"
# For each launcher: the variables with the number of processes and the index of this process, and
# the value to write for the host of process 0.
_LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK", "$MASTER_ADDR"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "HOST_OF_PROCESS_0"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "HOST_OF_PROCESS_0"),
    "MPI": ("PMI_SIZE", "PMI_RANK", "HOST_OF_PROCESS_0"),
}


def refuse_incomplete(environment: Mapping[str, str]) -> None:
    """Raises an error if other processes were started but the three JAX_* variables are not set.

    Args:
      environment: environment variables of a process without the three JAX_* variables.

    Raises:
      UserError: a launcher started several processes, and JAX can't detect the others.
    """
    tasks = _number(environment, SLURM_TASKS)
    _refuse_incomplete_slurm(environment, tasks)
    for launcher, (count_variable, index_variable, host) in _LAUNCHERS.items():
        count = _number(environment, count_variable)
        # In a Slurm step, srun sets some of these variables to its number of tasks.
        if count > 1 and count != tasks:
            index = environment.get(index_variable, "?")
            raise UserError(
                f"environment: {launcher} started {count} processes ({count_variable}={count}, "
                f"{index_variable}={index}), but {COUNT} is not set, so each would train "
                f"separately; set {COORDINATOR}={host}:1234 {COUNT}=${count_variable} "
                f"{INDEX}=${index_variable}, {_SEPARATE_RUNS}"
            )
    if _JOB_INDEX in environment and tasks <= 1:
        raise UserError(
            "environment: this is a pod of an indexed Kubernetes Job "
            f"({_JOB_INDEX}={environment[_JOB_INDEX]}), but {COUNT} is not set, so each pod would "
            f"train separately; set {COORDINATOR}=POD_0:1234 {COUNT}=PODS {INDEX}=${_JOB_INDEX} "
            f"as in launch/kubernetes.yaml, {_SEPARATE_RUNS}"
        )


def _refuse_incomplete_slurm(environment: Mapping[str, str], tasks: int) -> None:
    """Raises UserError in a Slurm step with several tasks if variables are missing.

    Variables can be missing because a container passes only some of them.
    """
    rank = _number(environment, "SLURM_PROCID", default=0)
    if tasks > 1:
        evidence = f"{SLURM_TASKS}={tasks}"
        missing = [name for name in _SLURM_STEP if name not in environment]
    elif rank > 0 and SLURM_TASKS not in environment:
        # This is not a batch script, because batch scripts have rank 0.
        evidence = f"SLURM_PROCID={rank}"
        missing = [SLURM_TASKS]
    else:
        return
    if missing:
        raise UserError(
            f"environment: this is one of several Slurm tasks ({evidence}), but its environment "
            f"lacks {', '.join(missing)}, so the tasks can't find each other; start the tasks by "
            "srun with its whole environment (--export=ALL, also in a container), or set "
            f"{COORDINATOR}, {COUNT} and {INDEX}"
        )


def _number(environment: Mapping[str, str], name: str, *, default: int = 1) -> int:
    """Returns a variable of a launcher as an integer, or `default` if it is not set.

    Raises:
      UserError: the value is not a non-negative integer.
    """
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise UserError(
            f"environment: {name}={text} is not a whole number; correct or unset this variable"
        )
    return int(text)
