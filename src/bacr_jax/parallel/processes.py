"""Joins several processes to one run, and exchanges values between them.

Every process runs the same program on the same questions with the same keys; devices are global.
Process 0 decides everything that depends on files or time (such as a grader's deadline), and sends
it to the others. Only process 0 prints and writes, except for checkpoints.
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

# Environment variable with the size of XLA's thread pools.
_THREADS = "NPROC"
# Smallest sizes of a pool: in total, and per device. Measured: two devices on two cores always stop
# with 2 threads and finish with 4; eight devices finish with 32.
_MIN_THREADS = 32
_THREADS_PER_DEVICE = 4


def settings(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize`; None for a run of one process.

    They come from the three variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, or else from a Slurm step (srun) of several tasks; docs/devices.md describes
    both. JAX_LOCAL_DEVICE_IDS can select other GPUs.

    Raises:
      UserError: variables are missing or wrong.
    """
    variables = {}
    for name in (COORDINATOR, COUNT, INDEX):
        if name in environment:
            variables[name] = environment[name]
    if variables == {COUNT: "1"}:
        return None
    if variables:
        return _explicit_settings(variables)
    refuse_incomplete(environment)
    tasks = int(environment.get(SLURM_TASKS, "1"))
    if tasks == 1:
        return None
    step: dict[str, Any] = {"num_processes": tasks}
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    one_per_node = environment.get("SLURM_STEP_NUM_NODES") == str(tasks)
    if one_per_node and gpus.isdecimal() and "JAX_LOCAL_DEVICE_IDS" not in environment:
        # By default JAX would give each task one GPU.
        step["local_device_ids"] = list(range(int(gpus)))
    return step


def _explicit_settings(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the settings of the three JAX_* variables; None for one process."""
    missing = [name for name in (COORDINATOR, COUNT, INDEX) if name not in variables]
    if missing:
        raise UserError(
            f"environment: {', '.join(variables)} without {', '.join(missing)}; set all three "
            "(host:port of process 0, number of processes, number of this one), or none"
        )
    try:
        count = int(variables[COUNT])
        index = int(variables[INDEX])
    except ValueError:
        # Not a valid number of processes, so the next check fails.
        count = 0
        index = 0
    if not 0 <= index < count or ":" not in variables[COORDINATOR]:
        raise UserError(
            f"environment: found {COORDINATOR}={variables[COORDINATOR]} {COUNT}={variables[COUNT]} "
            f"{INDEX}={variables[INDEX]}; write host:port, and a number from 0 to {COUNT} - 1"
        )
    if count == 1:
        return None
    return {
        "coordinator_address": variables[COORDINATOR],
        "num_processes": count,
        "process_id": index,
        "cluster_detection_method": "deactivate",
    }


def join() -> bool:
    """Joins the other processes of this run. Call it before devices are used.

    Returns:
      True if the run has several processes.

    Raises:
      UserError: the processes do not find each other, or their variables are incomplete.
    """
    arguments = settings(os.environ)
    if arguments is not None and not jax.distributed.is_initialized():
        # The module `preemption` handles signals instead.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            jax.distributed.initialize(**_with_relay(arguments))
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{COORDINATOR}: the processes of this run did not find each other "
                f"({reason_of(error)}); start all of them, where process 0 can be reached"
            ) from None
    return arguments is not None


def reserve_threads(environment: MutableMapping[str, str]) -> None:
    """Sets NPROC, the size of XLA's thread pools, if one process has several CPU devices.

    Call it before devices are used. A larger size in the environment is not changed.

    By default a pool has one thread per core. The pool starts and runs the programs of all devices,
    and each collective blocks a thread. With two cores a device's collective and the start of its
    next program can block both threads, while the other device waits for a thread.
    """
    num_devices = _cpu_devices(environment.get("XLA_FLAGS", ""))
    needed = max(_MIN_THREADS, _THREADS_PER_DEVICE * num_devices)
    if num_devices > 1 and threads(environment) < needed:
        environment[_THREADS] = str(needed)


def threads(environment: Mapping[str, str]) -> int:
    """Returns the size of XLA's thread pools for CPUs."""
    text = environment.get(_THREADS, "")
    return int(text) if text.isdecimal() and int(text) else cores()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    get_affinity = getattr(os, "sched_getaffinity", None)
    if get_affinity is not None:
        return len(get_affinity(0))
    return os.cpu_count() or 1


def _cpu_devices(flags: str) -> int:
    """Returns the number of CPU devices of this process, by JAX's setting or by XLA's flags."""
    jax_setting = jax.config.values["jax_num_cpu_devices"]
    if jax_setting >= 0:
        return int(jax_setting)
    xla_counts = re.findall(r"--?xla_force_host_platform_device_count=(\d+)", flags)
    return int(xla_counts[-1]) if xla_counts else 1


def check_platform() -> None:
    """Starts the devices.

    Raises:
      UserError: JAX can't start the platform of JAX_PLATFORMS.
    """
    reserve_threads(os.environ)
    try:
        jax.default_backend()
    # An AssertionError without a message if the platform's plugin is not installed.
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.values["jax_platforms"]
        if not platforms:
            raise
        reason = "no such plugin is installed"
        if str(error):
            # Without JAX's advice about its environment variables.
            reason = reason_of(error).partition(". (set JAX_")[0]
        raise UserError(
            f"environment: JAX_PLATFORMS={platforms}: JAX can't start it ({reason}); unset it, or "
            "install that platform"
        ) from None


def _with_relay(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replaces the coordinator's address by a local relay, except in process 0 (`peers.relay`).

    This process then does not end when process 0 ends.
    """
    address = arguments.get("coordinator_address")
    index = arguments.get("process_id")
    if address is None:
        from jax._src.clusters.slurm_cluster import SlurmCluster

        port = os.environ.get("JAX_COORDINATOR_PORT")
        address = SlurmCluster.get_coordinator_address(None, port)
        index = SlurmCluster.get_process_id()
    if index == 0:
        return arguments
    return arguments | {"coordinator_address": relay(address)}


def is_first() -> bool:
    """True in process 0, which prints and writes."""
    return jax.process_index() == 0


def several() -> bool:
    """True if this run has more than one process."""
    return jax.process_count() > 1


def from_first(values: Any) -> Any:
    """Returns process 0's arrays in every process.

    Args:
      values: arrays, with equal shapes and dtypes in all processes.
    """
    if jax.process_count() == 1:
        return values
    return multihost_utils.broadcast_one_to_all(values)


def largest(number: int) -> int:
    """Returns the largest number of all processes. It is a collective: all processes call it."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def slowest(seconds: float) -> dict[str, float]:
    """Returns metrics of the slowest process: its index, and its time over the others' median.

    It is a collective: all processes call it. With one process the result is empty.

    Args:
      seconds: time of this process for its own work.
    """
    if jax.process_count() == 1:
        return {}
    all_seconds = np.asarray(multihost_utils.process_allgather(np.float32(seconds)))
    index = int(all_seconds.argmax())
    # Times under half a second are noise.
    others = max(float(np.median(np.delete(all_seconds, index))), 0.5)
    return {
        "process/slowest_host": index,
        "process/slowest_host_times": all_seconds[index] / others,
    }


def summed(values: np.ndarray) -> np.ndarray:
    """Returns the sum of all processes' arrays, which have equal shapes and dtypes."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.process_allgather(values)).sum(0)


def place_among_all() -> tuple[int, int]:
    """Returns the index of this process, and the number of processes."""
    return jax.process_index(), jax.process_count()


def texts_of_all(text: str) -> list[str]:
    """Returns the texts of all processes, in the order of their indices."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).tolist()
    padded = np.zeros(max(*lengths, 1), np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths)]


def text_from_first(text: str) -> str:
    """Returns process 0's text in every process."""
    return texts_of_all(text if is_first() else "")[0]


def to_host(tree: Any) -> Any:
    """Returns a pytree's arrays as complete NumPy arrays in every process.

    Arrays with parts in other processes are gathered by one program per mesh.
    """
    leaves, structure = jax.tree.flatten(tree)
    spread: dict[jax.sharding.Mesh, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if _is_spread(leaf):
            spread.setdefault(leaf.sharding.mesh, []).append(index)
    for mesh, indices in spread.items():
        gathered = _gather(mesh)([leaves[index] for index in indices])
        for index, array in zip(indices, gathered):
            leaves[index] = array
    # All copies are started first, so that they run at the same time.
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])


def _is_spread(leaf: Any) -> bool:
    """True if some part of an array is only in other processes."""
    if not isinstance(leaf, jax.Array):
        return False
    return not (leaf.is_fully_addressable or leaf.is_fully_replicated)


@functools.cache
def _gather(mesh: jax.sharding.Mesh) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns a program that copies complete arrays of a mesh to each of its devices."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda arrays: arrays, out_shardings=replicated)
