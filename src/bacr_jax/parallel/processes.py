"""Several processes as one run: joining, what process 0 tells the others, arrays for the host.

Every process runs the same program on the same questions with the same keys; devices are global.
Only what the outside world can make differ (files, a grader's deadline) is decided by process 0 and
told to the others. Only process 0 prints and writes, checkpoints aside.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bacr_jax.errors import UserError, reason_of
from bacr_jax.parallel.launcher_env import COORDINATOR, COUNT, INDEX, SLURM_TASKS, refuse_incomplete
from bacr_jax.parallel.peers import relay

# The variable by which XLA sizes its pools of threads. With 4 threads two devices on two cores ran
# through what stopped every run with 2; eight devices ran with 32.
_THREADS, _LEAST_THREADS, _THREADS_A_DEVICE = "NPROC", 32, 4


def settings(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` must be told; None for a run of one process.

    By three variables, or else in a Slurm step (srun) of several tasks; see docs/devices.md.
    JAX_LOCAL_DEVICE_IDS chooses other GPUs.
    """
    given = {name: environment[name] for name in (COORDINATOR, COUNT, INDEX) if name in environment}
    if given == {COUNT: "1"}:
        return None
    if given:
        missing = [name for name in (COORDINATOR, COUNT, INDEX) if name not in given]
        if missing:
            raise UserError(
                f"environment: {', '.join(given)} without {', '.join(missing)}; set all three "
                "(host:port of process 0, number of processes, number of this one), or none"
            )
        try:
            count, index = int(given[COUNT]), int(given[INDEX])
        except ValueError:
            count, index = 0, 0
        if not 0 <= index < count or ":" not in given[COORDINATOR]:
            raise UserError(
                f"environment: found {COORDINATOR}={given[COORDINATOR]} {COUNT}={given[COUNT]} "
                f"{INDEX}={given[INDEX]}; write host:port, and a number from 0 to {COUNT} - 1"
            )
        if count == 1:
            return None
        return {
            "coordinator_address": given[COORDINATOR],
            "num_processes": count,
            "process_id": index,
            "cluster_detection_method": "deactivate",
        }
    refuse_incomplete(environment)
    tasks = int(environment.get(SLURM_TASKS, "1"))
    if tasks == 1:
        return None
    step: dict[str, Any] = {"num_processes": tasks}
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    one_per_node = environment.get("SLURM_STEP_NUM_NODES") == str(tasks)
    if one_per_node and gpus.isdecimal() and "JAX_LOCAL_DEVICE_IDS" not in environment:
        # JAX would give each task one GPU.
        step["local_device_ids"] = list(range(int(gpus)))
    return step


def join() -> bool:
    """Joins the other processes of this run that the environment names; False: there are none.

    To be called before devices are used.
    """
    others = settings(os.environ)
    if others is not None and not jax.distributed.is_initialized():
        jax.config.update("jax_enable_preemption_service", False)  # Ours is `preemption`.
        try:
            jax.distributed.initialize(**_relayed(others))
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{COORDINATOR}: the processes of this run did not find each other "
                f"({reason_of(error)}); start all of them, where process 0 can be reached"
            ) from None
    return others is not None


def reserve_threads(environment: MutableMapping[str, str]) -> None:
    """Sets NPROC, the size of XLA's pools of threads, where one process has several CPU devices.

    XLA gives a pool as many threads as there are cores, starts and runs the programs of all devices
    in it, and has a thread wait inside each collective. With two cores a device's collective and
    the start of its next program can hold both threads, while the other device waits for one. Call
    it before devices are used. A larger number of the user's own stays.
    """
    count = _cpu_devices(environment.get("XLA_FLAGS", ""))
    needed = max(_LEAST_THREADS, _THREADS_A_DEVICE * count)
    if count > 1 and threads(environment) < needed:
        environment[_THREADS] = str(needed)


def threads(environment: Mapping[str, str]) -> int:
    """Returns the size of XLA's pools of threads for CPUs."""
    own = environment.get(_THREADS, "")
    return int(own) if own.isdecimal() and int(own) else cores()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _cpu_devices(flags: str) -> int:
    """Returns the number of CPU devices of this process, by JAX's setting or by XLA's flags."""
    by_jax = jax.config.values["jax_num_cpu_devices"]
    by_xla = re.findall(r"--?xla_force_host_platform_device_count=(\d+)", flags)
    if by_jax >= 0:
        return int(by_jax)
    return int(by_xla[-1]) if by_xla else 1


def check_platform() -> None:
    """Starts the devices; UserError: JAX_PLATFORMS names what JAX can't start here."""
    reserve_threads(os.environ)
    try:
        jax.default_backend()
    # Of a platform whose plugin is not installed it is an assertion without words.
    except (RuntimeError, AssertionError) as error:
        if not (named := jax.config.values["jax_platforms"]):
            raise
        said = reason_of(error).partition(". (set JAX_")[0]
        raise UserError(
            f"environment: JAX_PLATFORMS={named}: JAX can't start it "
            f"({said if str(error) else 'no such plugin is installed'}); unset it, or install "
            "that platform"
        ) from None


def _relayed(others: dict[str, Any]) -> dict[str, Any]:
    """The same, where the end of process 0 is not the end of this process (`peers.relay`)."""
    address, index = others.get("coordinator_address"), others.get("process_id")
    if address is None:
        from jax._src.clusters.slurm_cluster import SlurmCluster

        port = os.environ.get("JAX_COORDINATOR_PORT")
        address = SlurmCluster.get_coordinator_address(None, port)
        index = SlurmCluster.get_process_id()
    return others if index == 0 else others | {"coordinator_address": relay(address)}


def is_first() -> bool:
    """Whether this process prints and writes."""
    return jax.process_index() == 0


def several() -> bool:
    """Whether this run has more than one process."""
    return jax.process_count() > 1


def from_first(values: Any) -> Any:
    """Process 0's arrays, in every process; shapes and types must be equal in all."""
    if jax.process_count() == 1:
        return values
    return multihost_utils.broadcast_one_to_all(values)


def largest(number: int) -> int:
    """The largest of the numbers that the processes give; all must call it at the same places."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def slowest(seconds: float) -> dict[str, float]:
    """Which process took longest for its own work, and how many times the others' median.

    Nothing with one process; all must call it at the same places.
    """
    if jax.process_count() == 1:
        return {}
    every = np.asarray(multihost_utils.process_allgather(np.float32(seconds)))
    last = int(every.argmax())
    others = max(float(np.median(np.delete(every, last))), 0.5)  # Less is noise.
    return {"process/slowest_host": last, "process/slowest_host_times": every[last] / others}


def summed(values: np.ndarray) -> np.ndarray:
    """The sum of what the processes give, in every process; shapes and types must be equal."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.process_allgather(values)).sum(0)


def place_among_all() -> tuple[int, int]:
    """Number of this process, and how many there are."""
    return jax.process_index(), jax.process_count()


def texts_of_all(text: str) -> list[str]:
    """The texts of all processes, in their order, in every process."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).tolist()
    padded = np.zeros(max(*lengths, 1), np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths)]


def text_from_first(text: str) -> str:
    """Process 0's text, in every process."""
    return texts_of_all(text if is_first() else "")[0]


def to_host(tree: Any) -> Any:
    """Global arrays as NumPy arrays, whole in every process; one program gathers all of a mesh."""
    leaves, shape = jax.tree.flatten(tree)
    spread: dict[jax.sharding.Mesh, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if _is_spread(leaf):
            spread.setdefault(leaf.sharding.mesh, []).append(place)
    for mesh, places in spread.items():
        for place, whole in zip(places, _gather(mesh)([leaves[place] for place in places])):
            leaves[place] = whole
    # Copies start together, and are waited for one by one.
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return jax.tree.unflatten(shape, [np.asarray(leaf) for leaf in leaves])


def _is_spread(leaf: Any) -> bool:
    """Whether some of an array lies in other processes alone."""
    if not isinstance(leaf, jax.Array):
        return False
    return not (leaf.is_fully_addressable or leaf.is_fully_replicated)


@functools.cache
def _gather(mesh: jax.sharding.Mesh) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """A program that copies arrays of a mesh whole to each of its devices."""
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda arrays: arrays, out_shardings=whole)
