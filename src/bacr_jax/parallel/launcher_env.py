"""Detects launchers that start one run as several processes without all variables that JAX needs.

A process that detects no others trains independently, so N of them would write N runs into one
folder. If any variable shows that other processes were started, all needed variables must be set.
`processes.settings` calls `refuse_incomplete`.
"""

from collections.abc import Mapping

from bacr_jax.errors import UserError

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"

# Set by srun only. The batch script itself has SLURM_NTASKS too, but runs as one process.
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
# Set in the pods of an indexed Job of Kubernetes.
_JOB_INDEX = "JOB_COMPLETION_INDEX"
_SEPARATE_RUNS = f"or {COUNT}=1 if each is a run of its own"
# For each launcher: its variables for the number of processes and for this process's index, and
# what to write as the host of process 0.
_LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK", "$MASTER_ADDR"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "HOST_OF_PROCESS_0"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "HOST_OF_PROCESS_0"),
    "MPI": ("PMI_SIZE", "PMI_RANK", "HOST_OF_PROCESS_0"),
}


def refuse_incomplete(environment: Mapping[str, str]) -> None:
    """Checks the environment of a process that does not have the three JAX_* variables.

    Raises:
      UserError: a launcher started several processes, and JAX can't detect the others.
    """
    tasks = _number(environment, SLURM_TASKS)
    _refuse_incomplete_slurm(environment, tasks)
    for launcher, (count_variable, index_variable, host) in _LAUNCHERS.items():
        count = _number(environment, count_variable)
        # In a Slurm step, srun sets some of these variables to the number of its tasks.
        if count > 1 and count != tasks:
            index = environment.get(index_variable, "?")
            raise UserError(
                f"environment: found {count_variable}={count} {index_variable}={index} "
                f"({launcher}) without {COUNT}, so that {count} processes would each train alone; "
                f"write {COORDINATOR}={host}:1234 {COUNT}=${count_variable} "
                f"{INDEX}=${index_variable}, {_SEPARATE_RUNS}"
            )
    if _JOB_INDEX in environment and tasks <= 1:
        raise UserError(
            f"environment: found {_JOB_INDEX}={environment[_JOB_INDEX]} (a pod of an indexed Job "
            f"of Kubernetes) without {COUNT}, so that every pod would train alone; write "
            f"{COORDINATOR}=POD_0:1234 {COUNT}=PODS {INDEX}=${_JOB_INDEX} as "
            f"launch/kubernetes.yaml does, {_SEPARATE_RUNS}"
        )


def _refuse_incomplete_slurm(environment: Mapping[str, str], tasks: int) -> None:
    """Raises a UserError in a Slurm step of several tasks with missing variables.

    A container may pass only some variables.
    """
    rank = _number(environment, "SLURM_PROCID", default=0)
    if tasks > 1:
        evidence = f"{SLURM_TASKS}={tasks}"
        missing = [name for name in _SLURM_STEP if name not in environment]
    elif rank > 0 and SLURM_TASKS not in environment:
        # Not a batch script, since a batch script has rank 0.
        evidence = f"SLURM_PROCID={rank}"
        missing = [SLURM_TASKS]
    else:
        return
    if missing:
        raise UserError(
            f"environment: found {evidence} (Slurm) without {', '.join(missing)}, so that this "
            "task can't find the others; start it by srun with its whole environment "
            f"(--export=ALL, in a container too), or write {COORDINATOR}, {COUNT} and {INDEX}"
        )


def _number(environment: Mapping[str, str], name: str, *, default: int = 1) -> int:
    """Returns a launcher's variable as a number, or `default` if it is not set.

    Raises:
      UserError: the variable is not a whole number.
    """
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"environment: found {name}={text}; write a whole number, or unset it")
    return int(text)
