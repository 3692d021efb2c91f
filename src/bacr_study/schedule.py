"""Runs of a study side by side: one process each, pinned to its cores or its GPUs."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bacr_jax.config.cli import STOPPED
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.progress import Progress
from bacr_study.plan import PlannedRun

# Tells a run which process started it.
_PARENT = "BACR_JAX_STUDY"
# Seconds between looks at the processes.
POLL = 0.5
# What starting and evaluating a run are worth in the progress, as a share of the longest training.
_AROUND_TRAINING = 0.25
# Bytes at the end of a run's metrics that hold some of its lines.
_TAIL = 64 * 1024


@dataclass(frozen=True)
class Share:
    """What one run may use: GPUs, or cores of the machine; all where none are named."""

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None

    def environment(self, given: Mapping[str, str], compiled: Path) -> dict[str, str]:
        """The environment of a process that keeps to its share.

        Runs share the folder of compiled programs, unless what is given says another.
        """
        made = {**given, _PARENT: str(os.getpid())}
        made.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled))
        made.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        made.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        if self.gpus is not None:
            made["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            return made
        from bacr_jax.parallel.host_memory import HUGE_PAGES, TUNABLES  # loads JAX

        made["JAX_PLATFORMS"] = "cpu"
        made.setdefault(TUNABLES, HUGE_PAGES)
        if len(self.cores) == 1:
            # Products in one thread: a second one would wait for the same core.
            flag = "--xla_cpu_multi_thread_eigen=false"
            made["XLA_FLAGS"] = f"{given.get('XLA_FLAGS', '')} {flag}".strip()
            made.setdefault("OMP_NUM_THREADS", "1")
        return made

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Keeps this thread on the share's cores: a process that it starts here stays on them."""
        if not hasattr(os, "sched_setaffinity"):
            # macOS has no such call: runs are not pinned there.
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores or before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def visible_gpus() -> tuple[str, ...]:
    """GPUs that this process may use, by name; asks the driver, not JAX."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(name for name in named.split(",") if name.strip())
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.check_output(query, stderr=subprocess.DEVNULL, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(found.split())


def end_with_parent() -> None:
    """Has this process asked to save and leave when the one that started it is gone.

    Runs of a study that was killed would else hold their folders. On Linux only.
    """
    if sys.platform == "linux" and os.environ.get(_PARENT) == str(os.getppid()):
        # From <sys/prctl.h>; it holds for the thread that started this process, its main one.
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)


def shares(devices_per_run: int, jobs: int | None) -> list[Share]:
    """How the machine is divided.

    Args:
      devices_per_run: GPUs of a run; 0: runs are on CPU cores.
      jobs: runs at a time; None: as many as there are cores, or as GPUs suffice for.
    """
    if devices_per_run:
        gpus = visible_gpus()
        most = len(gpus) // devices_per_run
        if most == 0:
            raise UserError(
                f"devices_per_run={devices_per_run}: found {len(gpus)} GPUs; write --size cpu, or "
                "start it where they are"
            )
        each, count = devices_per_run, min(jobs or most, most)
        return [Share(gpus=gpus[i * each : (i + 1) * each]) for i in range(count)]
    everywhere = set(range(os.cpu_count() or 1))
    cores = sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everywhere)
    count = min(jobs or len(cores), len(cores))
    each = len(cores) // count
    return [Share(cores=tuple(cores[i * each : (i + 1) * each])) for i in range(count)]


@dataclass
class Running:
    """A run under way."""

    run: PlannedRun
    share: Share
    process: subprocess.Popen[bytes]


@dataclass
class Scheduler:
    """Starts runs as shares become free, and ends when all are done or a signal came.

    Attributes:
      command: starts a run, its id appended.
      failed: ids of runs that ended with an error, and their exit codes.
    """

    command: Sequence[str]
    shares: list[Share]
    waiting: list[PlannedRun]
    running: list[Running] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    stopping: bool = False

    def start_some(self) -> None:
        """Starts runs while a share is free, and a run's folder, and its warm-up is there or free.

        Cells of equal settings share a run: the second one finds it trained.
        """
        while self.shares and not self.stopping:
            busy = {other.run.folder for other in self.running}
            warming = {other.run.warmup for other in self.running if not other.run.warmed_up}
            free = (run for run in self.waiting if run.folder not in busy)
            run = next((run for run in free if run.warmed_up or run.warmup not in warming), None)
            if run is None:
                return
            self.waiting.remove(run)
            share = self.shares.pop(0)
            run.log.parent.mkdir(parents=True, exist_ok=True)
            with run.log.open("a", encoding="utf-8") as log, share.pinned():
                process = subprocess.Popen(
                    [*self.command, run.id],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=share.environment(os.environ, run.place.parent / "compiled"),
                    # A Ctrl-C at the terminal is passed on by `stop`, once.
                    start_new_session=True,
                )
            self.running.append(Running(run, share, process))

    def collect(self) -> list[PlannedRun]:
        """Runs that have ended since the last look; their shares are free again."""
        ended = [one for one in self.running if one.process.poll() is not None]
        for one in ended:
            self.running.remove(one)
            self.shares.append(one.share)
            code = one.process.returncode
            if code and not (self.stopping and code == STOPPED):
                self.failed[one.run.id] = code
        return [one.run for one in ended]

    def stop(self) -> None:
        """Asks every run to save and leave, and waits until they have."""
        self.stopping = True
        for one in self.running:
            one.process.send_signal(signal.SIGTERM)
        for one in self.running:
            one.process.wait()


def run_all(
    scheduler: Scheduler,
    everything: Sequence[PlannedRun],
    progress: Progress,
    poll: Callable[[], None],
) -> None:
    """Runs what waits, says which have ended, and shows all of it in a line with the time to go.

    `poll` is called all the time; it may raise, and runs go on until `Scheduler.stop`.
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
                code = scheduler.failed.get(run.id)
                why = f"exit code {code}"
                if code == -signal.SIGKILL:
                    why = "killed, as for want of memory (--jobs N runs fewer at a time)"
                failed = f"FAILED, {why}: {run.id}; see {run.log}"
                progress.say(f"done: {run.id}" if code is None else failed)
            scheduler.start_some()
            under_way = [one.run for one in scheduler.running]
            done = sum(work[id_] for id_ in finished) + sum(map(_trained_tokens, under_way))
            now = ", ".join(run.id for run in under_way)
            phase.update(done, runs=f"{len(finished)}/{len(work)}", now=now)


def _trained_tokens(run: PlannedRun) -> int:
    """Generated tokens of a run under way, as the last whole line of its metrics tells."""
    metrics = RunPaths(run.folder).metrics
    with contextlib.suppress(OSError, LookupError, ValueError), metrics.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
        record = json.loads(file.read().split(b"\n")[-2])
        return min(int(record["rollout/tokens_total"]), run.tokens or 0)
    return 0
