"""How the outside world starts one run as several processes, and when it has only half told so.

A process that believes to be alone trains on its own: N of them would write N runs into one folder.
So whatever shows that others were started beside this one has to be complete.
"""

from collections.abc import Mapping

from bacr_jax.errors import UserError

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

# Set by srun only: the batch script itself knows SLURM_NTASKS too, but runs alone.
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
# What JAX reads of a step.
_SLURM_STEP = (
    *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "SLURM_STEP_NUM_NODES",
)
_JOB_INDEX = "JOB_COMPLETION_INDEX"
_ALONE = f"or {COUNT}=1 if each is a run of its own"
# Launchers, with their variables of how many and which one, and what leads to the first host.
_LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK", "$MASTER_ADDR"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "HOST_OF_PROCESS_0"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "HOST_OF_PROCESS_0"),
    "MPI": ("PMI_SIZE", "PMI_RANK", "HOST_OF_PROCESS_0"),
}


def refuse_incomplete(environment: Mapping[str, str]) -> None:
    """Refuses a process without the three JAX_* variables that was started beside others."""
    tasks = _number(environment, SLURM_TASKS)
    _refuse_slurm(environment, tasks)
    for launcher, (how_many, which, host) in _LAUNCHERS.items():
        count = _number(environment, how_many)
        # Under srun its own variables count, and these are another name for them.
        if count > 1 and count != tasks:
            raise UserError(
                f"environment: found {how_many}={count} {which}={environment.get(which, '?')} "
                f"({launcher}) without {COUNT}, so that {count} processes would each train alone; "
                f"write {COORDINATOR}={host}:1234 {COUNT}=${how_many} {INDEX}=${which}, {_ALONE}"
            )
    if _JOB_INDEX in environment and tasks <= 1:
        found = f"{_JOB_INDEX}={environment[_JOB_INDEX]}"
        raise UserError(
            f"environment: found {found} (a pod of an indexed Job of Kubernetes) without "
            f"{COUNT}, so that every pod would train alone; write "
            f"{COORDINATOR}=POD_0:1234 {COUNT}=PODS {INDEX}=${_JOB_INDEX} as "
            f"launch/kubernetes.yaml does, {_ALONE}"
        )


def _refuse_slurm(environment: Mapping[str, str], tasks: int) -> None:
    """A step of several tasks of which only some variables arrived, in a container perhaps."""
    rank = _number(environment, "SLURM_PROCID", least=0)
    if tasks > 1:
        missing = [name for name in _SLURM_STEP if name not in environment]
        found = f"{SLURM_TASKS}={tasks}"
    elif rank > 0 and SLURM_TASKS not in environment:
        # A batch script runs as task 0.
        missing, found = [SLURM_TASKS], f"SLURM_PROCID={rank}"
    else:
        return
    if missing:
        raise UserError(
            f"environment: found {found} (Slurm) without {', '.join(missing)}, so that this task "
            "can't find the others; start it by srun with its whole environment "
            f"(--export=ALL, in a container too), or write {COORDINATOR}, {COUNT} and {INDEX}"
        )


def _number(environment: Mapping[str, str], name: str, *, least: int = 1) -> int:
    """A count or number of a launcher; `least` where it is not set; UserError: it is no number."""
    text = environment.get(name, str(least))
    if not text.isdecimal():
        raise UserError(f"environment: found {name}={text}; write a whole number, or unset it")
    return int(text)
