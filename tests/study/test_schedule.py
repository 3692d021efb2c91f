"""Runs side by side: which start when, on what, and what a failure or a signal leaves."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from bacr_jax.errors import UserError
from bacr_jax.parallel.host_memory import HUGE_PAGES
from bacr_jax.parallel.preemption import EXIT_CODE
from bacr_jax.runs.folder import RunPaths, WarmupPaths
from bacr_jax.runs.progress import Progress
from bacr_study import schedule
from bacr_study.schedule import (
    RunScheduler,
    Share,
    planned_jobs,
    run_all,
    shares,
    unused_gpus_warning,
)
from study_world import STUDY, planned

# Writes down what it was given, makes its warm-up, and waits for a file before it ends.
RUN = """
import os, pathlib, signal, sys, time
place, name = pathlib.Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(place / f"{name}.started").write_text(f"{sorted(os.sched_getaffinity(0))}")
while not (place / f"{name}.end").exists():
    time.sleep(0.01)
sys.exit(int((place / f"{name}.end").read_text() or 0))
"""


def scheduler_of(folder, runs, count=2):
    core = min(os.sched_getaffinity(0))
    return RunScheduler(
        command=[sys.executable, "-c", RUN, str(folder)],
        shares=[Share(cores=(core,)) for _ in range(count)],
        waiting=list(runs),
    )


def warmed(run):
    identity = WarmupPaths(run.warmup).identity
    identity.parent.mkdir(parents=True, exist_ok=True)
    identity.write_text("{}")


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_run_makes_the_warmup_and_the_others_wait_for_it(tmp_path):
    _, runs, _ = planned(tmp_path)
    scheduler = scheduler_of(tmp_path, runs)
    scheduler.start_some()
    # Both arms of seed 0 share a warm-up, so that the second share takes a run of seed 1.
    assert [one.run.id for one in scheduler.running] == ["plain.grpo.0", "plain.grpo.1"]
    (tmp_path / "plain.grpo.1.end").write_text("")
    until(lambda: scheduler.collect())
    scheduler.start_some()
    # It ended without one: its own warm-up is free to be made.
    assert [one.run.id for one in scheduler.running] == ["plain.grpo.0", "plain.bacr.1"]
    warmed(runs[0])
    (tmp_path / "plain.bacr.1.end").write_text("")
    until(lambda: scheduler.collect())
    scheduler.start_some()
    assert [one.run.id for one in scheduler.running] == ["plain.grpo.0", "plain.bacr.0"]
    for name in ("plain.grpo.0", "plain.bacr.0"):
        (tmp_path / f"{name}.end").write_text("")
    until(lambda: not scheduler.collect() and not scheduler.running)
    assert scheduler.failed == {} and len(scheduler.shares) == 2


def test_a_failure_is_kept_and_the_rest_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "POLL", 0.01)
    _, runs, _ = planned(tmp_path)
    for run in runs:
        warmed(run)
        (tmp_path / f"{run.id}.end").write_text("3" if run.id == "plain.bacr.0" else "")
    scheduler = scheduler_of(tmp_path, runs)
    run_all(scheduler, runs, Progress(enabled=False), lambda: None)
    assert {path.stem for path in tmp_path.glob("*.started")} == {run.id for run in runs}
    assert scheduler.failed == {"plain.bacr.0": 3}
    assert all(run.log.exists() for run in runs)


class Seen(Progress):
    """Keeps what a progress is told."""

    def __init__(self):
        super().__init__(enabled=False)
        self.updates = []

    @contextlib.contextmanager
    def phase(self, name, total, **unused):
        yield self

    def update(self, done, **shown):
        self.updates.append(done)


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [
        ('{"rollout/tokens_total": 7}\n', 7),
        # The last line is half of one; of the others only the last is looked at.
        ("no record\n" + 9 * f"{'x' * 10_000}\n" + '{"rollout/tokens_total": 8}\n{"rol', 8),
        ('{"rollout/tokens_total": 5000}\n', 1000),
        ('{"rollout/tok', 0),
        ("", 0),
        (None, 0),
    ],
    ids=["a line", "long and torn", "beyond the end", "no whole line", "empty", "not there"],
)
def test_progress_is_what_the_end_of_the_metrics_says(tmp_path, monkeypatch, lines, tokens):
    monkeypatch.setattr(schedule, "POLL", 0.01)
    _, runs, _ = planned(tmp_path, "seeds=[0]", "arms=[grpo]")
    metrics = RunPaths(runs[0].folder).metrics
    metrics.parent.mkdir(parents=True)
    if lines is not None:
        metrics.write_text(lines)
    progress, end = Seen(), tmp_path / "plain.grpo.0.end"
    poll = lambda: end.write_text("") if progress.updates else None
    run_all(scheduler_of(tmp_path, runs), runs, progress, poll)
    # Starting and evaluating a finished run are worth 250.
    assert (progress.updates[0], progress.updates[-1]) == (tokens, 1250)


def test_cells_of_equal_settings_come_one_after_the_other(tmp_path):
    twin = "  twin: {label: again, set: {loss.entropy_coef: 0.0}}\nsizes:"
    _, runs, _ = planned(tmp_path, "seeds=[0]", text=STUDY.replace("sizes:", twin, 1))
    grpo, bacr, twin = runs
    warmed(grpo)
    scheduler = scheduler_of(tmp_path, [bacr, twin, grpo])
    scheduler.start_some()
    # The second share does not take the run that the first one is making.
    assert [one.run for one in scheduler.running] == [bacr, grpo]
    for name in ("bacr", "grpo", "twin"):
        (tmp_path / f"plain.{name}.0.end").write_text("")
    until(lambda: scheduler.collect())
    until(lambda: bacr not in [one.run for one in scheduler.running] or scheduler.collect())
    scheduler.start_some()
    assert twin in [one.run for one in scheduler.running]
    until(lambda: not scheduler.collect() and not scheduler.running)


def test_a_signal_is_passed_on_and_is_no_failure(tmp_path):
    _, runs, _ = planned(tmp_path)
    scheduler = scheduler_of(tmp_path, runs)
    scheduler.start_some()
    until(lambda: len(list(tmp_path.glob("*.started"))) == 2)
    scheduler.stop()
    assert [one.process.poll() for one in scheduler.running] == [EXIT_CODE] * 2
    scheduler.collect()
    scheduler.start_some()
    assert scheduler.running == [] and scheduler.failed == {} and len(scheduler.waiting) == 2


# A study that starts a run and ends before the run has called `end_with_parent`.
KILLED_STUDY = """
import os, subprocess, sys
run = '''
import os, pathlib, sys, time
from bacr_study.schedule import end_with_parent
study, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
while os.getppid() == study:
    time.sleep(0.01)
try:
    end_with_parent()
except SystemExit as error:
    (folder / "code.part").write_text(str(error.code))
    (folder / "code.part").rename(folder / "code")
'''
environment = {**os.environ, "BACR_JAX_STUDY": str(os.getpid())}
subprocess.Popen([sys.executable, "-c", run, str(os.getpid()), sys.argv[1]], env=environment)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the end of a parent")
def test_a_run_whose_study_has_already_ended_ends_too(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED_STUDY, str(tmp_path)], check=True)
    until(lambda: (tmp_path / "code").exists())
    assert (tmp_path / "code").read_text() == str(EXIT_CODE)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the end of a parent")
@pytest.mark.parametrize("of_a_study", [True, False])
def test_a_run_of_a_study_that_works_or_of_a_user_goes_on(of_a_study):
    environment = dict(os.environ)
    environment.pop("BACR_JAX_STUDY", None)
    if of_a_study:
        environment["BACR_JAX_STUDY"] = str(os.getpid())
    program = "from bacr_study.schedule import end_with_parent; end_with_parent(); print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("goes on\n", "")


def test_a_run_keeps_to_its_cores(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    _, runs, _ = planned(tmp_path, "seeds=[0]", "arms=[grpo]")
    scheduler = scheduler_of(tmp_path, runs)
    scheduler.shares = [Share(cores=(cores[-1],))]
    scheduler.start_some()
    started = tmp_path / "plain.grpo.0.started"
    until(lambda: started.exists() and started.read_text())
    assert started.read_text() == f"[{cores[-1]}]"
    scheduler.running[0].process.send_signal(signal.SIGKILL)
    scheduler.running[0].process.wait()
    assert [run.id for run in scheduler.collect()] == ["plain.grpo.0"]
    assert scheduler.failed == {"plain.grpo.0": -signal.SIGKILL}


def test_one_core_means_one_thread_and_programs_are_shared(tmp_path):
    one = Share(cores=(3,)).environment({"XLA_FLAGS": "--mine"}, tmp_path)
    assert one["XLA_FLAGS"] == "--mine --xla_cpu_multi_thread_eigen=false"
    assert one["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path) and one["JAX_PLATFORMS"] == "cpu"
    assert one["GLIBC_TUNABLES"] == HUGE_PAGES
    given = {"JAX_COMPILATION_CACHE_DIR": "mine", "GLIBC_TUNABLES": "mine"}
    two = Share(cores=(0, 1)).environment(given, tmp_path)
    assert "XLA_FLAGS" not in two and given.items() <= two.items()
    gpus = Share(gpus=("2", "3")).environment({}, tmp_path)
    assert gpus["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "JAX_PLATFORMS" not in gpus and "GLIBC_TUNABLES" not in gpus


def test_cores_and_gpus_are_divided(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 8})
    assert [share.cores for share in shares(0, None)] == [(4,), (5,), (6,), (7,), (8,)]
    assert [share.cores for share in shares(0, 2)] == [(4, 5), (6, 7)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5,6")
    assert [share.gpus for share in shares(2, None)] == [("0", "1"), ("2", "5")]
    assert [share.gpus for share in shares(1, 2)] == [("0",), ("1",)]
    with pytest.raises(
        UserError, match="devices_per_run=8: a run needs 8 GPUs, but this machine has 5"
    ):
        shares(8, None)


@pytest.mark.parametrize("visible", ["", "-1", "-1,0"])
def test_a_forecast_needs_no_gpu_and_a_run_does(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [planned_jobs(1, jobs) for jobs in (None, 3)] == [1, 3]
    with pytest.raises(UserError, match="a run needs 1 GPU, but this machine has 0; pass a --size"):
        shares(1, None)
    # With enough GPUs the forecast is for this machine.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert [planned_jobs(2, jobs) for jobs in (None, 1, 9)] == [2, 1, 2]


@pytest.mark.parametrize(
    ("visible", "platforms", "devices", "found"),
    [
        ("0", None, 0, "1 GPU;"),
        ("0,1", "cuda", 0, "2 GPUs;"),
        ("0,1", None, 1, None),
        ("0", "cpu", 0, None),
        ("", None, 0, None),
    ],
)
def test_runs_on_cpu_cores_next_to_gpus_are_warned_of(
    monkeypatch, visible, platforms, devices, found
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    warning = unused_gpus_warning(devices)
    assert (warning is None) == (found is None)
    if found:
        assert warning.startswith("WARNING, devices_per_run=0: the runs use CPU cores, but this")
        assert found in warning and "set devices_per_run=1 in the size" in warning
