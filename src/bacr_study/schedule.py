"""Executes the runs of a study in parallel, each in a process pinned to CPU cores or GPUs."""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bacr_jax.config.cli import STOPPED, print_message
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.progress import Progress
from bacr_study.plan import PlannedRun

# Environment variable with the process id of the study process that started a run.
_PARENT = "BACR_JAX_STUDY"
# Polling interval of the processes in seconds.
POLL = 0.5
# Progress assigned to starting and evaluating a run, as a fraction of the longest training run.
_AROUND_TRAINING = 0.25
# Number of bytes read from the end of a run's metrics file, enough for several lines.
_TAIL = 64 * 1024


@dataclass(frozen=True)
class Share:
    """The part of the machine that one run may use.

    Attributes:
      cores: indices of CPU cores; empty for all cores.
      gpus: names of GPUs, as in CUDA_VISIBLE_DEVICES; None if the run uses CPUs.
    """

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None

    def environment(self, base: Mapping[str, str], compiled: Path) -> dict[str, str]:
        """Returns environment variables that restrict a process to this share.

        Args:
          base: the environment to extend. Settings of the compilation cache that are already in it
            take precedence.
          compiled: folder of the compilation cache, which all runs share.
        """
        environment = {**base, _PARENT: str(os.getpid())}
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled))
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        if self.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            return environment
        from bacr_jax.parallel.host_memory import HUGE_PAGES, TUNABLES  # imports JAX

        environment["JAX_PLATFORMS"] = "cpu"
        environment.setdefault(TUNABLES, HUGE_PAGES)
        if len(self.cores) == 1:
            # Use one thread for matrix products, because a second one would compete for the same
            # core.
            flags = base.get("XLA_FLAGS", "")
            one_thread = "--xla_cpu_multi_thread_eigen=false"
            environment["XLA_FLAGS"] = f"{flags} {one_thread}".strip()
            environment.setdefault("OMP_NUM_THREADS", "1")
        return environment

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Context manager that restricts this thread and processes it starts to the run's cores."""
        if not hasattr(os, "sched_setaffinity"):
            # macOS does not provide this call, so runs are not pinned on macOS.
            yield
            return
        cores_before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores or cores_before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores_before)


def visible_gpus() -> tuple[str, ...]:
    """Returns the names of the GPUs that this process may use, without initializing JAX."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA hides all GPUs from the first invalid name on, and -1 is the usual invalid name.
        names = itertools.takewhile(lambda name: name.strip() != "-1", visible.split(","))
        return tuple(name for name in names if name.strip())
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        output = subprocess.check_output(query, stderr=subprocess.DEVNULL, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(output.split())


def end_with_parent() -> None:
    """Makes the kernel send SIGTERM to this process when the study that started it ends.

    Otherwise the runs of a killed study would continue and keep their folders locked. Only works on
    Linux. Nothing happens if a user started this process.

    Raises:
      SystemExit: if the study has already ended. The exit code is `STOPPED`.
    """
    study = os.environ.get(_PARENT)
    if sys.platform != "linux" or study is None:
        return
    # PR_SET_PDEATHSIG in <sys/prctl.h>. The signal is sent when the parent's main thread ends.
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
    # Compare afterwards, because no signal is sent for a parent that ended before the call.
    if study != str(os.getppid()):
        print_message(
            "the study that started this run has ended; run its command again to continue"
        )
        raise SystemExit(STOPPED)


def shares(devices_per_run: int, jobs: int | None) -> list[Share]:
    """Divides the machine into equal shares, one per parallel run.

    Args:
      devices_per_run: number of GPUs per run; 0 if runs use CPU cores.
      jobs: maximum number of parallel runs; None for as many as the cores or GPUs allow.

    Raises:
      UserError: if there are fewer GPUs than one run needs.
    """
    if devices_per_run:
        return _gpu_shares(devices_per_run, jobs)
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    count = min(jobs or len(cores), len(cores))
    size = len(cores) // count
    result = []
    for index in range(count):
        start = index * size
        result.append(Share(cores=tuple(cores[start : start + size])))
    return result


def _gpu_shares(devices_per_run: int, jobs: int | None) -> list[Share]:
    """Divides the GPUs into equal shares, one per parallel run (see `shares`)."""
    gpus = visible_gpus()
    most = len(gpus) // devices_per_run
    if most == 0:
        raise UserError(
            f"devices_per_run={devices_per_run}: a run needs {_count_gpus(devices_per_run)}, but "
            f"this machine has {len(gpus)}; pass a --size that needs fewer, or run the command on "
            "a machine with more GPUs"
        )
    result = []
    for index in range(min(jobs or most, most)):
        start = index * devices_per_run
        result.append(Share(gpus=gpus[start : start + devices_per_run]))
    return result


def _count_gpus(count: int) -> str:
    """Returns the count with its noun, such as `1 GPU`."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def planned_jobs(devices_per_run: int, jobs: int | None) -> int:
    """Returns the number of parallel runs for a forecast, which needs no GPU.

    If this machine has too few GPUs for one run, the forecast is for a machine with enough GPUs for
    `jobs` runs, by default one.
    """
    if devices_per_run and len(visible_gpus()) < devices_per_run:
        return jobs or 1
    return len(shares(devices_per_run, jobs))


def unused_gpus_warning(devices_per_run: int) -> str | None:
    """Returns a warning if the runs use CPU cores although this machine has GPUs.

    Returns None if JAX_PLATFORMS=cpu shows that the user chose the CPU.
    """
    if devices_per_run or os.environ.get("JAX_PLATFORMS") == "cpu":
        return None
    gpus = visible_gpus()
    if not gpus:
        return None
    return (
        f"WARNING, devices_per_run=0: the runs use CPU cores, but this machine has "
        f"{_count_gpus(len(gpus))}; to train on GPUs, pass a --size that sets devices_per_run, or "
        "set devices_per_run=1 in the size"
    )


@dataclass
class RunningProcess:
    """The process of a run, and the share of the machine that it uses."""

    run: PlannedRun
    share: Share
    process: subprocess.Popen[bytes]


@dataclass
class RunScheduler:
    """Starts runs as soon as shares of the machine become free.

    Attributes:
      command: command that starts a run, to which the run's id is appended.
      shares: free shares of the machine.
      waiting: runs that have not been started yet.
      running: runs in progress.
      failed: exit codes of runs that ended with an error, by run id.
      stopping: True once `stop` has been called; no run is started after that.
    """

    command: Sequence[str]
    shares: list[Share]
    waiting: list[PlannedRun]
    running: list[RunningProcess] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    stopping: bool = False

    def start_some(self) -> None:
        """Starts waiting runs while a share is free.

        A run has to wait while another process uses its run folder or creates its warm-up. Runs
        with identical settings share a run folder, so the second process finds the training
        finished.
        """
        while self.shares and not self.stopping:
            run = self._next_run()
            if run is None:
                return
            self.waiting.remove(run)
            self._start(run, self.shares.pop(0))

    def _next_run(self) -> PlannedRun | None:
        """Returns the first waiting run that can start now; None if all of them have to wait."""
        busy_folders = set()
        busy_warmups = set()
        for other in self.running:
            busy_folders.add(other.run.folder)
            if not other.run.warmed_up:
                busy_warmups.add(other.run.warmup)
        for run in self.waiting:
            if run.folder in busy_folders:
                continue
            if run.warmed_up or run.warmup not in busy_warmups:
                return run
        return None

    def _start(self, run: PlannedRun, share: Share) -> None:
        """Starts the process of a run on a share. Its stdout and stderr go to the run's log."""
        run.log.parent.mkdir(parents=True, exist_ok=True)
        compiled = run.study_folder.parent / "compiled"
        with run.log.open("a", encoding="utf-8") as log, share.pinned():
            process = subprocess.Popen(
                [*self.command, run.id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=share.environment(os.environ, compiled),
                # A separate session does not receive Ctrl-C from the terminal. `stop` sends the
                # signal instead, so each run receives it only once.
                start_new_session=True,
            )
        self.running.append(RunningProcess(run, share, process))

    def collect(self) -> list[PlannedRun]:
        """Returns the runs that have ended since the last call, and frees their shares."""
        ended = [entry for entry in self.running if entry.process.poll() is not None]
        for entry in ended:
            self.running.remove(entry)
            self.shares.append(entry.share)
            code = entry.process.returncode
            was_stopped = self.stopping and code == STOPPED
            if code and not was_stopped:
                self.failed[entry.run.id] = code
        return [entry.run for entry in ended]

    def stop(self) -> None:
        """Sends SIGTERM to every running process, and waits until they have exited.

        A run saves its state before it exits.
        """
        self.stopping = True
        for entry in self.running:
            entry.process.send_signal(signal.SIGTERM)
        for entry in self.running:
            entry.process.wait()


def run_all(
    scheduler: RunScheduler,
    everything: Sequence[PlannedRun],
    progress: Progress,
    poll: Callable[[], None],
) -> None:
    """Executes all waiting runs and displays the progress and the remaining time.

    Args:
      scheduler: the scheduler with the waiting runs.
      everything: all runs of the study including finished ones, for the progress.
      progress: the progress display.
      poll: called every `POLL` seconds. If it raises an exception, the processes keep running until
        `RunScheduler.stop` is called.
    """
    longest = max((run.tokens or 0 for run in everything), default=0)
    around = max(int(_AROUND_TRAINING * longest), 1)
    work = {run.id: around + (run.tokens or 0) for run in everything}
    finished = work.keys() - {run.id for run in scheduler.waiting}
    with progress.phase("study", sum(work.values())) as phase:
        scheduler.start_some()
        while scheduler.running:
            time.sleep(POLL)
            poll()
            for run in scheduler.collect():
                finished.add(run.id)
                progress.print_line(_end_line(run, scheduler.failed.get(run.id)))
            scheduler.start_some()
            current_runs = [entry.run for entry in scheduler.running]
            done = sum(work[id_] for id_ in finished)
            done += sum(map(_trained_tokens, current_runs))
            phase.update(
                done,
                runs=f"{len(finished)}/{len(work)}",
                now=", ".join(run.id for run in current_runs),
            )


def _end_line(run: PlannedRun, code: int | None) -> str:
    """Returns the message for a run that has ended.

    Args:
      run: the run.
      code: the exit code if the run failed, otherwise None.
    """
    if code is None:
        return f"done: {run.id}"
    reason = f"exit code {code}"
    if code == -signal.SIGKILL:
        reason = "killed, probably because memory ran out (--jobs N runs fewer at a time)"
    return f"FAILED, {reason}: {run.id}; see {run.log}"


def _trained_tokens(run: PlannedRun) -> int:
    """Returns the number of tokens that an unfinished run has generated so far.

    The number is read from the last complete line of the run's metrics. Returns 0 if the metrics
    have no complete line yet.
    """
    metrics = RunPaths(run.folder).metrics
    with contextlib.suppress(OSError, LookupError, ValueError), metrics.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        # The last element is either empty or an incomplete line that is still being written.
        last_line = file.read().split(b"\n")[-2]
        record = json.loads(last_line)
        return min(int(record["rollout/tokens_total"]), run.tokens or 0)
    return 0
