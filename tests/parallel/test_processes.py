"""How a process learns that it is one of several."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.parallel import processes

EXPLICIT = {
    "JAX_COORDINATOR_ADDRESS": "node1:1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
# What srun sets for one task of a step of two, on two nodes.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
}
TORCHRUN = {"WORLD_SIZE": "16", "RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "node1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}


def test_one_process_joins_nobody():
    assert processes.settings({}) is None
    # a batch script's own step, and a lone explicit process
    assert processes.settings({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    one = {**EXPLICIT, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}
    assert processes.settings(one) is None


def test_explicit_variables_win_over_slurm():
    found = processes.settings({**SLURM, **EXPLICIT})
    assert found["coordinator_address"] == "node1:1234"
    assert (found["num_processes"], found["process_id"]) == (2, 1)


def test_one_slurm_task_per_node_drives_all_its_gpus():
    assert processes.settings(SLURM)["local_device_ids"] == list(range(8))
    per_gpu = {**SLURM, "SLURM_STEP_NUM_TASKS": "16"}
    assert "local_device_ids" not in processes.settings(per_gpu)


@pytest.mark.parametrize(
    "change",
    [{"JAX_PROCESS_ID": "2"}, {"JAX_NUM_PROCESSES": "x"}, {"JAX_COORDINATOR_ADDRESS": "a"}],
)
def test_wrong_variables_are_named(change):
    with pytest.raises(UserError, match="JAX_COORDINATOR_ADDRESS=.*JAX_PROCESS_ID"):
        processes.settings({**EXPLICIT, **change})


def test_missing_variables_are_named():
    with pytest.raises(UserError, match="but not JAX_NUM_PROCESSES, JAX_PROCESS_ID"):
        processes.settings({"JAX_COORDINATOR_ADDRESS": "node1:1234"})


def test_one_process_tells_itself():
    assert processes.text_from_first("café") == "café"
    np.testing.assert_array_equal(processes.to_host({"x": np.arange(3)})["x"], [0, 1, 2])


def test_an_action_of_the_first_process_is_not_run_in_the_others(monkeypatch):
    actions = []
    assert processes.on_first(lambda: actions.append("first") or "lock") == "lock"
    monkeypatch.setattr(processes, "is_first", lambda: False)
    assert processes.on_first(lambda: actions.append("other")) is None
    assert actions == ["first"]


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", Path("a/\udcff")),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("no number"),
        shutil.Error([("a", "b", "no permission")]),
    ],
)
def test_an_error_of_the_first_process_arrives_as_it_was(monkeypatch, error):
    texts = []

    def fail():
        raise error

    monkeypatch.setattr(processes, "text_from_first", lambda text: texts.append(text) or text)
    with pytest.raises(OSError) as first:
        processes.on_first(fail)
    assert first.value is error
    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(processes, "text_from_first", lambda _: texts[0])
    with pytest.raises(OSError) as other:
        processes.on_first(fail)
    assert (other.value.errno, other.value.strerror) == (error.errno, error.strerror)
    assert str(other.value.filename) == str(error.filename)


@pytest.mark.parametrize(
    ("environment", "found", "instead"),
    [
        (
            TORCHRUN,
            r"torchrun started 16 processes \(WORLD_SIZE=16, RANK=3\)",
            r"JAX_COORDINATOR_ADDRESS=\$MASTER_ADDR:1234 .*JAX_PROCESS_ID=\$RANK",
        ),
        (
            OPEN_MPI,
            r"Open MPI started 4 processes \(OMPI_COMM_WORLD_SIZE=4",
            r"=\$OMPI_COMM_WORLD_RANK",
        ),
        (
            {"PMI_SIZE": "4", "PMI_RANK": "1"},
            r"MPI started 4 processes \(PMI_SIZE=4, PMI_RANK=1\)",
            r"=\$PMI_RANK",
        ),
        # A pod of an indexed Job: nothing says how many there are.
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX=0", "launch/kubernetes.yaml"),
        # mpirun inside of a step of one task a node: JAX would join the nodes' starters.
        ({**SLURM, **OPEN_MPI}, "OMPI_COMM_WORLD_SIZE=4", "HOST_OF_PROCESS_0:1234"),
        # A container that passed half of what srun set.
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID=1", "--export=ALL"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "lacks SLURM_JOB_ID, SLURM_STEP_NODELIST", "srun"),
        ({"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS=two", "whole number"),
    ],
)
def test_a_process_beside_others_does_not_train_alone(environment, found, instead):
    with pytest.raises(UserError, match=f"{found}.*{instead}") as refused:
        processes.settings(environment)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "3"},
        {"JAX_NUM_PROCESSES": "1", **TORCHRUN},
        # Launchers of one process, srun's other name for its tasks, a batch script's own step.
        {"WORLD_SIZE": "1", "RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
    ],
)
def test_a_process_that_is_alone_or_says_so_joins_nobody(environment):
    assert processes.settings(environment) is None


def test_a_step_of_slurm_with_its_own_pmi_is_joined():
    assert processes.settings({**SLURM, "PMI_SIZE": "2", "PMI_RANK": "1"})["num_processes"] == 2


def test_what_lies_elsewhere_is_gathered_by_one_program(monkeypatch):
    mesh = jax.make_mesh((1,), ("fsdp",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    tree = {
        "a": jax.device_put(np.arange(4), here),
        "b": [jax.device_put(np.ones((2, 3)), here), 7],
    }
    gathered = []

    def gather(mesh):
        gathered.append(mesh)
        return lambda arrays: [2 * x for x in arrays]

    monkeypatch.setattr(processes, "_is_spread", lambda leaf: isinstance(leaf, jax.Array))
    monkeypatch.setattr(processes, "_gather", gather)
    found = processes.to_host(tree)
    assert gathered == [mesh]
    np.testing.assert_array_equal(found["a"], [0, 2, 4, 6])
    np.testing.assert_array_equal(found["b"][0], np.full((2, 3), 2.0))
    assert found["b"][1] == 7 and all(isinstance(x, np.ndarray) for x in jax.tree.leaves(found))


def test_one_process_alone_hears_itself():
    assert processes.rank_among_all() == (0, 1)
    assert processes.texts_of_all("é") == ["é"]
    np.testing.assert_array_equal(processes.summed(np.array([1, 2])), [1, 2])


@pytest.mark.parametrize(
    ("seconds", "times"), [([1.0, 2.0, 8.0], 8 / 1.5), ([0.001, 0.002, 0.01], 0.02)]
)
def test_the_slowest_process_is_held_against_the_others(monkeypatch, seconds, times):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    gathered = lambda _: np.array(seconds, np.float32)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gathered)
    found = processes.slowest(8.0)
    assert found == {
        "process/slowest_host": 2,
        "process/slowest_host_times": pytest.approx(times),
    }
    monkeypatch.undo()
    assert processes.slowest(8.0) == {}


FORCED = "--xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, None),
        ({"XLA_FLAGS": f"{FORCED}=1"}, None),
        ({"XLA_FLAGS": f"--xla_x=1 {FORCED}=2"}, "32"),
        # Of two equal flags the last one counts.
        ({"XLA_FLAGS": f"{FORCED}=2 {FORCED}=1"}, None),
        ({"XLA_FLAGS": f"{FORCED}=16"}, "64"),
        ({"XLA_FLAGS": f"{FORCED}=2", "NPROC": "2"}, "32"),
        ({"XLA_FLAGS": f"{FORCED}=2", "NPROC": "many"}, "32"),
        ({"XLA_FLAGS": f"{FORCED}=2", "NPROC": "96"}, "96"),
    ],
)
def test_several_cpu_devices_get_threads_to_wait_for_each_other(environment, threads, monkeypatch):
    monkeypatch.setattr(processes, "cores", lambda: 2)
    processes.reserve_threads(environment)
    assert environment.get("NPROC") == threads


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_default_prng_impl", "rbg"),
        ("jax_default_prng_impl", "unsafe_rbg"),
        ("jax_threefry_partitionable", False),
        ("jax_random_seed_offset", 1),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_numpy_rank_promotion", "raise"),
    ],
)
def test_an_option_of_jax_that_changes_results_is_refused(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        with pytest.raises(UserError) as refused:
            processes.check_platform()
    finally:
        jax.config.update(name, before)
    processes.check_platform()
    line = str(refused.value)
    assert line.startswith(f"environment: JAX's option {name} is {value}")
    assert f"unset {name.upper()}" in line and f"jax.config.update('{name}', " in line


def test_the_variable_of_an_option_is_refused_too():
    done = subprocess.run(
        [sys.executable, "-c", "from bacr_jax.parallel.processes import check_platform as c; c()"],
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert "UserError: environment: JAX's option jax_enable_x64 is True" in done.stderr


# Programs with a sum over both devices are started behind a long one: with as many threads as two
# cores, a device's sum and the start of its next program hold both.
PILED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from bacr_jax.parallel import processes

processes.check_platform()
rows = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
x = jax.device_put(np.ones((16, 64), np.float32), rows)
turn = lambda i, y: jax.numpy.tanh(y @ jax.numpy.full((64, 64), 0.01))
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, turn, x))
summed = jax.jit(lambda x: x + x.sum() * 1e-9 + 1)
scaled = jax.jit(lambda x: x * 1.5e-1)
for _ in range(10):
    y = slow(x)
    for _ in range(60):
        y = scaled(summed(y))
    y.block_until_ready()
print(len(jax.devices()))
"""


def test_two_devices_of_one_process_do_not_wait_for_ever():
    limit = "--xla_cpu_collective_call_terminate_timeout_seconds=20"
    kept = {name: value for name, value in os.environ.items() if name != "NPROC"}
    flags = f"{kept.get('XLA_FLAGS', '')} {FORCED}=2 {limit}"
    done = subprocess.run(
        [sys.executable, "-c", PILED],
        env={**kept, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr[-1000:]


# One of two processes, whose time limit for the start of the other is a few seconds.
LATE = """
import sys
from bacr_jax.parallel import processes
from bacr_jax.train import main

processes._NOTICE_SECONDS, processes.JOIN_SECONDS = 1, int(sys.argv[1])
sys.exit(main(["--config", "quickstart", f"output.dir={sys.argv[2]}"]))
"""


def late_process(folder, index, seconds, address):
    """One of two processes of a run, which waits that long for the other one."""
    joined = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", LATE, str(seconds), str(folder)],
        env=os.environ | joined | {"JAX_PROCESS_ID": str(index), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_whose_others_do_not_start_ends_with_two_lines_and_75(tmp_path, index):
    address = free_address()
    process = late_process(tmp_path / "run", index, 4, address)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    waits, fails = errors.splitlines()
    assert waits == f"waiting for the other processes at {address}, for at most 4 s"
    start = f"error: JAX_COORDINATOR_ADDRESS: not all processes of this run connected at {address} "
    assert fails.startswith(start) and "within 4 s; start all of them" in fails
    assert not (tmp_path / "run").exists()


def test_a_process_that_joins_in_time_leaves_no_clock(monkeypatch, capsys):
    """JAX's time limit is above the limit at which this process ends itself."""
    calls = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(processes, "relay", lambda address: f"relay of {address}")
    monkeypatch.setattr(processes, "_NOTICE_SECONDS", 0.05)
    joins = ({**EXPLICIT, "JAX_PROCESS_ID": "0"}, EXPLICIT, {**SLURM, "SLURM_PROCID": "0"}, SLURM)
    for variables in joins:
        for name in {**EXPLICIT, **SLURM}:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert processes.join()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    assert {call["initialization_timeout"] for call in calls} == {1860}
    assert processes.JOIN_SECONDS == 1800
    addresses = [call.get("coordinator_address") for call in calls]
    of_slurm = "relay of node1:61447"
    assert addresses == ["node1:1234", "relay of node1:1234", None, of_slurm]
