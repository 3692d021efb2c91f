"""Initializes runs with several processes, and exchanges values between the processes.

Every process runs the same program on the same questions with the same PRNG keys. Arrays are
sharded over the devices of all processes. Process 0 makes all decisions that depend on files or
time (such as a grader's timeout) and sends them to the other processes. Only process 0 prints and
writes files, except for checkpoints and the count of restarts (`runs.restarts`).
"""

import contextlib
import functools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from bacr_jax.config.cli import STOPPED, print_message
from bacr_jax.config.gpus import memory_fraction
from bacr_jax.errors import UserError, reason_of
from bacr_jax.parallel.launcher_env import COORDINATOR, COUNT, INDEX, SLURM_TASKS, refuse_incomplete
from bacr_jax.parallel.peers import relay

_Result = TypeVar("_Result")

# Options of JAX whose other values change the results of a run, or make operations fail. With other
# generators of random numbers, a sampled token depends on the slot of its row, because JAX uses
# only the first key of a batch.
_REQUIRED_OPTIONS = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
}
# Environment variable with the size of XLA's thread pools.
_THREADS = "NPROC"
# Minimum size of a thread pool, in total and per device. In measurements, two devices on two cores
# always deadlock with 2 threads and finish with 4 threads. Eight devices finish with 32 threads.
_MIN_THREADS = 32
_THREADS_PER_DEVICE = 4
# Time limit in seconds for all processes of a run to start, for example while the nodes of some
# still download an image. Half an hour is six times JAX's default.
JOIN_SECONDS = 1800
# Time in seconds after which a process prints that it waits for the others.
_NOTICE_SECONDS = 10
# Time in seconds by which JAX's time limit is later than `JOIN_SECONDS`.
_MARGIN_SECONDS = 60


def settings(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize`, or None for a single process.

    The arguments are read from the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. If they are not set, they are read from a Slurm step (srun) with several tasks.
    docs/devices.md describes both. JAX_LOCAL_DEVICE_IDS can select other GPUs.

    Args:
      environment: environment variables.

    Raises:
      UserError: variables are missing or invalid.
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
        # By default, JAX would assign only one GPU to each task.
        step["local_device_ids"] = list(range(int(gpus)))
    return step


def _explicit_settings(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the arguments from the three JAX_* variables, or None for a single process."""
    missing = [name for name in (COORDINATOR, COUNT, INDEX) if name not in variables]
    if missing:
        raise UserError(
            f"environment: found {', '.join(variables)}, but not {', '.join(missing)}; set all "
            "three variables (host:port of process 0, number of processes, index of this "
            "process), or none of them"
        )
    try:
        count = int(variables[COUNT])
        index = int(variables[INDEX])
    except ValueError:
        # This is an invalid number of processes, so the next check fails.
        count = 0
        index = 0
    if not 0 <= index < count or ":" not in variables[COORDINATOR]:
        raise UserError(
            f"environment: {COORDINATOR}={variables[COORDINATOR]} {COUNT}={variables[COUNT]} "
            f"{INDEX}={variables[INDEX]} is not valid; set these variables to host:port, the "
            f"number of processes, and a number from 0 to {COUNT} - 1"
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
    """Connects to the other processes of this run. Call it before any device is used.

    Prints a line if the other processes take longer than `_NOTICE_SECONDS` to start. If they take
    longer than `JOIN_SECONDS`, prints an error and ends this process with exit code 75.

    Returns:
      True if the run has several processes.

    Raises:
      UserError: the processes can't connect, or their variables are incomplete.
    """
    arguments = settings(os.environ)
    if arguments is not None and not jax.distributed.is_initialized():
        # The module `preemption` handles signals instead.
        jax.config.update("jax_enable_preemption_service", False)
        address, index = _coordinator(arguments)
        # Process 0 runs the coordinator. The other processes connect to it through a local relay,
        # so that they do not end when process 0 ends (see `peers.relay`).
        if index > 0:
            arguments = arguments | {"coordinator_address": relay(address)}
        try:
            with _time_limit(address):
                jax.distributed.initialize(
                    **arguments, initialization_timeout=JOIN_SECONDS + _MARGIN_SECONDS
                )
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{COORDINATOR}: the processes of this run could not connect to each other "
                f"({reason_of(error)}); start all of them, and make sure that they can reach "
                "process 0"
            ) from None
    return arguments is not None


def _coordinator(arguments: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the coordinator's address as host:port, and the index of this process.

    Args:
      arguments: the result of `settings`. In a Slurm step, it contains neither of the two.
    """
    if "coordinator_address" in arguments:
        return arguments["coordinator_address"], arguments["process_id"]
    from jax._src.clusters.slurm_cluster import SlurmCluster

    port = os.environ.get("JAX_COORDINATOR_PORT")
    address = SlurmCluster.get_coordinator_address(None, port)
    return address, SlurmCluster.get_process_id()


@contextlib.contextmanager
def _time_limit(address: str) -> Iterator[None]:
    """Ends this process if the body of the context takes longer than `JOIN_SECONDS`.

    At its own time limit, JAX aborts the process with a stack trace. Neither this abort nor the
    call before it can be interrupted from Python, because both are in C++. Therefore another thread
    prints the error before JAX's time limit, and ends the process with `os._exit`. `sys.exit` would
    only end the thread.

    Args:
      address: address of the coordinator, as host:port.
    """
    joined = threading.Event()
    # Ctrl-C would otherwise have no effect while JAX waits in C++. A handler of None is not from
    # Python, and can't be restored.
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    changes_handler = in_main_thread and handler not in (None, signal.SIG_IGN)
    if changes_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def watch() -> None:
        if joined.wait(_NOTICE_SECONDS):
            return
        print_message(
            f"waiting for the other processes at {address}, for at most {JOIN_SECONDS:,} s"
        )
        if joined.wait(JOIN_SECONDS - _NOTICE_SECONDS):
            return
        # The readers of both streams may have ended.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        print_message(
            f"error: {COORDINATOR}: not all processes of this run connected at {address} within "
            f"{JOIN_SECONDS:,} s; start all of them with the same settings, make sure that they "
            "can reach process 0, and run the same command again"
        )
        os._exit(STOPPED)

    threading.Thread(target=watch, name="join", daemon=True).start()
    try:
        yield
    finally:
        joined.set()
        if changes_handler:
            signal.signal(signal.SIGINT, handler)


def reserve_threads(environment: MutableMapping[str, str]) -> None:
    """Sets NPROC, the size of XLA's thread pools, if one process has several CPU devices.

    Call it before any device is used. A larger value in the environment is not changed.

    By default, a pool has one thread per core. The pool launches and runs the programs of all
    devices, and each collective operation blocks a thread. With two cores, a collective operation
    of one device and the launch of its next program can block both threads while the other device
    waits for a thread, which is a deadlock.
    """
    num_devices = _cpu_devices(environment.get("XLA_FLAGS", ""))
    needed = max(_MIN_THREADS, _THREADS_PER_DEVICE * num_devices)
    if num_devices > 1 and threads(environment) < needed:
        environment[_THREADS] = str(needed)


def threads(environment: Mapping[str, str]) -> int:
    """Returns the number of threads in each of XLA's thread pools for CPUs.

    It is the environment variable NPROC, or the number of cores if NPROC is not a positive number.
    """
    text = environment.get(_THREADS, "")
    return int(text) if text.isdecimal() and int(text) else cores()


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    get_affinity = getattr(os, "sched_getaffinity", None)
    if get_affinity is not None:
        return len(get_affinity(0))
    return os.cpu_count() or 1


def _cpu_devices(flags: str) -> int:
    """Returns the number of CPU devices of this process, from JAX's config or from XLA's flags."""
    jax_setting = jax.config.values["jax_num_cpu_devices"]
    if jax_setting >= 0:
        return int(jax_setting)
    xla_counts = re.findall(r"--?xla_force_host_platform_device_count=(\d+)", flags)
    return int(xla_counts[-1]) if xla_counts else 1


def _check_options() -> None:
    """Raises UserError if an option of JAX has another value than `_REQUIRED_OPTIONS`."""
    for name, required in _REQUIRED_OPTIONS.items():
        # A later version of JAX may not have the option.
        value = getattr(jax.config, name, required)
        if value != required:
            raise UserError(
                f"environment: JAX's option {name} is {value}, which changes results or is not "
                f"supported; unset {name.upper()}, or call "
                f"jax.config.update({name!r}, {required!r})"
            )


def check_platform() -> None:
    """Checks JAX's options, initializes its devices, and checks the platforms in JAX_PLATFORMS.

    The commands that train, evaluate, generate and serve call this function first, so it also
    prepares the environment of XLA: the size of the thread pools, and the fraction of a GPU's
    memory. The latter is removed from the environment afterwards, so that later child processes can
    choose it.

    Raises:
      UserError: JAX can't initialize the platform in JAX_PLATFORMS, or an option of JAX has a
        value that would change results.
    """
    _check_options()
    reserve_threads(os.environ)
    try:
        with memory_fraction():
            jax.default_backend()
    # JAX raises an AssertionError without a message if the platform's plugin is not installed.
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.values["jax_platforms"]
        if not platforms:
            raise
        reason = "no such plugin is installed"
        if str(error):
            # Remove JAX's advice about its environment variables.
            reason = reason_of(error).partition(". (set JAX_")[0]
        raise UserError(
            f"environment: JAX can't use JAX_PLATFORMS={platforms} ({reason}); unset this "
            "variable, or install the platform"
        ) from None


def is_first() -> bool:
    """True in process 0, which prints and writes files."""
    return jax.process_index() == 0


def several() -> bool:
    """True if this run has more than one process."""
    return jax.process_count() > 1


def from_first(values: Any) -> Any:
    """Broadcasts the arrays of process 0 to all processes.

    Args:
      values: arrays whose shapes and dtypes are equal in all processes.
    """
    if jax.process_count() == 1:
        return values
    return multihost_utils.broadcast_one_to_all(values)


def largest(number: int) -> int:
    """Returns the maximum of a number over all processes. This is a collective operation."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def slowest(seconds: float) -> dict[str, float]:
    """Returns metrics of the slowest process: its index, and its time relative to the others.

    The time is divided by the median time of the other processes. This is a collective operation.
    The result is empty for a single process.

    Args:
      seconds: time that this process spent on its work, without waiting for other processes.
    """
    if jax.process_count() == 1:
        return {}
    all_seconds = np.asarray(multihost_utils.process_allgather(np.float32(seconds)))
    index = int(all_seconds.argmax())
    # Times below half a second are noise.
    others = max(float(np.median(np.delete(all_seconds, index))), 0.5)
    return {
        "process/slowest_host": index,
        "process/slowest_host_times": all_seconds[index] / others,
    }


def summed(values: np.ndarray) -> np.ndarray:
    """Returns the sum of the arrays of all processes, which must have equal shapes and dtypes."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.process_allgather(values)).sum(0)


def rank_among_all() -> tuple[int, int]:
    """Returns the index of this process and the number of processes."""
    return jax.process_index(), jax.process_count()


def texts_of_all(text: str) -> list[str]:
    """Gathers a text from each process. Returns the texts in the order of the process indices."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).tolist()
    padded = np.zeros(max(*lengths, 1), np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths)]


def text_from_first(text: str) -> str:
    """Broadcasts the text of process 0 to all processes."""
    return texts_of_all(text if is_first() else "")[0]


def on_first(action: Callable[[], _Result]) -> _Result | None:
    """Runs an action in process 0 while the other processes wait. This is a collective operation.

    Args:
      action: function that reads or writes files. It must contain no collective operation.

    Returns:
      The result of the action in process 0, and None in the other processes.

    Raises:
      UserError or OSError: the action failed. The same error is raised in all processes.
    """
    result = None
    error: UserError | OSError | None = None
    if is_first():
        try:
            result = action()
        except (UserError, OSError) as raised:
            error = raised
    text = text_from_first("" if error is None else _error_to_text(error))
    if error is not None:
        raise error
    if text:
        raise _error_from_text(text)
    return result


def _error_to_text(error: UserError | OSError) -> str:
    """Returns the arguments of an error as JSON, from which `_error_from_text` creates it again."""
    if isinstance(error, UserError):
        return json.dumps({"lines": error.lines})
    arguments = [*error.args]
    if error.filename is not None:
        # `args` does not contain the file name.
        arguments.append(str(error.filename))
    return json.dumps({"arguments": arguments}, default=str)


def _error_from_text(text: str) -> UserError | OSError:
    """Returns an error equal to the one that was passed to `_error_to_text`."""
    content = json.loads(text)
    if "lines" in content:
        return UserError(*content["lines"])
    return OSError(*content["arguments"])


def to_host(tree: Any) -> Any:
    """Copies the arrays of a pytree to the host, as complete NumPy arrays in every process.

    Arrays with shards in other processes are gathered by one program per mesh.
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
    # Start all copies before waiting for the first one, so that they run concurrently.
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])


def _is_spread(leaf: Any) -> bool:
    """True if a shard of the array is available only in other processes."""
    if not isinstance(leaf, jax.Array):
        return False
    return not (leaf.is_fully_addressable or leaf.is_fully_replicated)


@functools.cache
def _gather(mesh: jax.sharding.Mesh) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns a compiled program that replicates arrays to all devices of a mesh."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda arrays: arrays, out_shardings=replicated)
