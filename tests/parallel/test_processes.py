"""How a process learns that it is one of several."""

import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.parallel import processes

EXPLICIT = {
    "JAX_COORDINATOR_ADDRESS": "node1:1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}


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
    with pytest.raises(UserError, match="without JAX_NUM_PROCESSES, JAX_PROCESS_ID"):
        processes.settings({"JAX_COORDINATOR_ADDRESS": "node1:1234"})


def test_one_process_tells_itself():
    assert processes.text_from_first("café") == "café"
    np.testing.assert_array_equal(processes.to_host({"x": np.arange(3)})["x"], [0, 1, 2])
