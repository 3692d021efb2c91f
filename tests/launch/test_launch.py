"""The launch scripts: syntax, and exactly what they would run."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jaxlib import xla_client

from bacr_jax.parallel.preemption import EXIT_CODE
from bacr_jax.runs.restarts import GIVEN_UP
from bacr_plan.devices import DEVICES, MEMORY_FRACTION

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = ("one_box.sh", "slurm.sh", "hosts.sh")
HOSTS = ("--coordinator", "node0:12355", "--processes", "4", "--process-id", "3")


def run(script, *arguments, cwd=None, **variables):
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", LAUNCH / script, *arguments],
        env=kept | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def dry_run(script, *arguments, **variables):
    """The exported settings and the command that a dry run prints."""
    done = run(script, "--dry-run", *arguments, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    *exports, command = done.stdout.splitlines()
    words = [shlex.split(line) for line in exports]
    assert all(word[0] == "export" for word in words)
    return dict(word[1].split("=", 1) for word in words), shlex.split(command)


@pytest.mark.parametrize(
    "path",
    [*sorted(LAUNCH.glob("*.sh")), *sorted(LAUNCH.glob("*.env"))],
    ids=lambda path: path.name,
)
def test_bash_can_parse_it(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_one_box_runs_one_process_with_the_rest_of_the_line():
    _, command = dry_run("one_box.sh", "--gpu", "a100", "--config", "c.yaml", "output.dir=a b")
    assert command == [
        *("python", "-m", "bacr_jax.train"),
        *("--config", "c.yaml", "output.dir=a b"),
    ]


def test_some_of_the_gpus():
    some = ("one_box.sh", "--gpu", "a100", "--gpus", "2", "--config", "c.yaml")
    assert dry_run(*some)[0]["CUDA_VISIBLE_DEVICES"] == "0,1"
    # Others' stay others'.
    allocated = dry_run(*some, CUDA_VISIBLE_DEVICES="4,5,7")[0]
    assert allocated["CUDA_VISIBLE_DEVICES"] == "4,5"
    done = run(*some, CUDA_VISIBLE_DEVICES="4")
    assert done.returncode == 2 and "found 4; use 2 GPUs" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_compiled_programs_go_to_the_folder_that_training_limits(script):
    """A folder that JAX_COMPILATION_CACHE_DIR names has no limit, so only a user names one."""
    words = (
        script,
        *(HOSTS if script == "hosts.sh" else ()),
        "--gpu",
        "a100",
        "--config",
        "c.yaml",
    )
    exports, _ = dry_run(*words)
    assert "JAX_COMPILATION_CACHE_DIR" not in exports
    # With such a folder, programs that compile fast are stored too.
    assert exports["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    mine, _ = dry_run(*words, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="2")
    assert mine["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "2"


def test_slurm_starts_one_process_per_node():
    _, command = dry_run("slurm.sh", "--gpu", "hopper", "--config", "c.yaml", PYTHON="python3.12")
    assert command == [
        *("srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=120"),
        *("python3.12", "-m", "bacr_jax.train", "--config", "c.yaml"),
    ]


def test_slurm_in_a_container_mounts_the_project_and_what_is_asked_for():
    own = ["--container-image", "bacr+jax:1", "--container-mounts", "/data:/data"]
    _, command = dry_run("slurm.sh", "--gpu", "a100", *own, "--config", "c.yaml")
    here = os.getcwd()
    assert command[4:7] == [
        "--container-image=bacr+jax:1",
        f"--container-mounts={here}:{here},/data:/data",
        f"--container-workdir={here}",
    ]
    done = run("slurm.sh", "--dry-run", "--gpu", "a100", *own[2:], "--config", "c.yaml")
    assert done.returncode == 2 and "no image; pass --container-image" in done.stderr


def slurm_job(tmp_path, code, state="RUNNING", scontrol='echo "$@" > {}/asked', training=":"):
    """A job of Slurm whose training ends with a code; what was asked of scontrol, or None."""
    stand_ins = {
        "srun": f"{training}\nexit {code}",
        "squeue": f"echo {state}",
        "scontrol": scontrol.format(tmp_path),
    }
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # Ten hours before its end.
    job["SLURM_JOB_END_TIME"] = str(int(time.time()) + 36000)
    done = run("slurm.sh", "--gpu", "a100", "--config", "c.yaml", cwd=tmp_path, **job)
    assert done.returncode == code, done.stderr
    asked = tmp_path / "asked"
    return done.stderr, asked.read_text() if asked.exists() else None


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [
        (75, "RUNNING", True),
        # Slurm does not answer.
        (75, "", True),
        (75, "COMPLETING", False),
        (75, "CANCELLED+", False),
        (0, "RUNNING", False),
        (1, "RUNNING", False),
        (2, "RUNNING", False),
        (GIVEN_UP, "RUNNING", False),
        # A signal killed a process: 134 SIGABRT, 137 SIGKILL, 139 SIGSEGV, 143 SIGTERM.
        (134, "RUNNING", True),
        (137, "RUNNING", True),
        (139, "", True),
        (137, "COMPLETING", False),
        (143, "CANCELLED", False),
        (127, "RUNNING", False),
    ],
)
def test_a_job_that_can_go_on_goes_back_into_the_queue_at_any_hour(tmp_path, code, state, requeued):
    _, asked = slurm_job(tmp_path, code, state)
    assert asked == ("requeue 17\n" if requeued else None)


@pytest.mark.parametrize("code", [EXIT_CODE, GIVEN_UP, 137, 139, 253])
def test_a_job_that_is_given_up_stays_out_of_the_queue_whatever_srun_returns(tmp_path, code):
    """srun returns the signal of a killed process, even if all others exit with higher codes."""
    program = """
import os
from pathlib import Path
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.restarts import MOST_RESTARTS, give_up_reason
for count in range(1, MOST_RESTARTS + LATER):
    environment = os.environ | {"SLURM_RESTART_COUNT": str(count)}
    give_up_reason(RunPaths(Path("run")), Path("warmup"), environment)
"""
    (tmp_path / "training.py").write_text(program.replace("LATER", "1"))
    training = f"{sys.executable} training.py"
    _, asked = slurm_job(tmp_path, code, training=training)
    assert asked == (None if code == GIVEN_UP else "requeue 17\n")
    (tmp_path / "asked").unlink(missing_ok=True)
    (tmp_path / "training.py").write_text(program.replace("LATER", "2"))
    _, asked = slurm_job(tmp_path, code, training=training)
    assert asked is None
    assert list(tmp_path.glob("*.given-up")) == []


def test_a_job_that_slurm_does_not_take_back_is_not_left_out_silently(tmp_path):
    said, _ = slurm_job(tmp_path, 75, scontrol="exit 1")
    assert "job 17 is not put back into the queue; submit it again" in said


def test_machines_without_slurm_are_told_who_they_are():
    settings, command = dry_run("hosts.sh", "--gpu", "a100", *HOSTS, "--config", "c.yaml")
    assert settings["JAX_COORDINATOR_ADDRESS"] == "node0:12355"
    assert (settings["JAX_NUM_PROCESSES"], settings["JAX_PROCESS_ID"]) == ("4", "3")
    assert command[-2:] == ["--config", "c.yaml"]


def test_the_processes_of_a_run_understand_what_they_are_told():
    from bacr_jax.parallel import processes

    settings, _ = dry_run("hosts.sh", "--gpu", "a100", *HOSTS, "--config", "c.yaml")
    joined = processes.settings(settings)
    assert (joined["coordinator_address"], joined["num_processes"]) == ("node0:12355", 4)
    assert joined["process_id"] == 3


@pytest.mark.parametrize("gpu", ["a100", "hopper"])
def test_plan_and_launch_agree_on_the_share_of_the_memory(gpu):
    settings, _ = dry_run("one_box.sh", "--gpu", gpu, "--config", "c.yaml")
    assert float(settings["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == MEMORY_FRACTION


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("chosen", "fractions"),
    [
        ({}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, {"XLA_CLIENT_MEM_FRACTION": ".5"}),
        ({"XLA_CLIENT_MEM_FRACTION": ""}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}),
    ],
)
def test_there_is_one_fraction_of_the_memory_that_jaxlib_takes(
    script, chosen, fractions, monkeypatch
):
    """It refuses two."""
    hosts = HOSTS if script == "hosts.sh" else ()
    settings, _ = dry_run(script, *hosts, "--gpu", "a100", "--config", "c.yaml", **chosen)
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    assert {name: settings[name] for name in names if name in settings} == fractions
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in (chosen | fractions).items():
        monkeypatch.setenv(name, value)
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert options["memory_fraction"] == float(*fractions.values())


def test_flags_of_the_user_stand_last_and_so_win():
    settings, _ = dry_run("one_box.sh", "--gpu", "a100", "--config", "c", XLA_FLAGS="--xla_x=1")
    assert settings["XLA_FLAGS"].startswith("--xla_gpu_")
    assert settings["XLA_FLAGS"].endswith(" --xla_x=1")


def test_runs_that_agree_bit_for_bit_are_asked_for():
    common = ("one_box.sh", "--gpu", "hopper", "--config", "c")
    deterministic = "--xla_gpu_deterministic_ops=true"
    assert deterministic not in dry_run(*common)[0]["XLA_FLAGS"]
    assert deterministic in dry_run(*common, BACR_DETERMINISTIC="1")[0]["XLA_FLAGS"]


@pytest.mark.parametrize("card", DEVICES)
def test_every_card_that_can_be_planned_has_settings_of_its_own_kind(card, tmp_path):
    """By the name that `plan` has for it, and by the name that its driver has."""
    named, _ = dry_run("one_box.sh", "--gpu", card, "--config", "c", HOME="/h")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{DEVICES[card].name}'\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found, _ = dry_run("one_box.sh", "--config", "c", HOME="/h", PATH=path)
    assert found == named
    assert named["XLA_PYTHON_CLIENT_MEM_FRACTION"] == str(MEMORY_FRACTION)
    # No direct access among GeForce cards; one queue is for Ampere's and Hopper's large cards.
    assert ("NCCL_P2P_DISABLE" in named) == card.startswith("rtx-")
    large = card.startswith(("a100", "h100", "h200"))
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in named) == large


def test_xla_knows_the_flags():
    flags = set()
    for gpu in ("a100", "hopper", "blackwell", "geforce"):
        settings, _ = dry_run("one_box.sh", "--gpu", gpu, "--config", "c", BACR_DETERMINISTIC="1")
        flags.update(settings["XLA_FLAGS"].split())
    # XLA ends the process at an unknown flag, on any backend.
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=os.environ | {"XLA_FLAGS": " ".join(sorted(flags)), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        ("one_box.sh", ["--gpu", "a100"], "nothing to run"),
        (
            "one_box.sh",
            ["--gpu", "v100", "--config", "c"],
            "found 'v100'; use a100, hopper",
        ),
        ("one_box.sh", ["--gpu", "a100", "--gpus", "0", "--config", "c"], "1 or more"),
        ("one_box.sh", ["--config", "c", "--gpu"], "a value is missing"),
        ("slurm.sh", ["--gpu", "a100", "--config", "c"], "not in a Slurm job"),
        ("hosts.sh", ["--gpu", "a100", "--config", "c"], "such as node0:12355"),
        ("hosts.sh", ["--gpu", "a100", *HOSTS[:5], "4", "--config", "c"], "use 0 to 3"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(script, arguments, line):
    done = run(script, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_option(script):
    done = run(script, "--help")
    assert done.returncode == 0
    assert "--dry-run" in done.stdout
    assert f"launch/{script}" in done.stdout
