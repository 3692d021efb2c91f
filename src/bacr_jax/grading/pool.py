"""A pool of killable worker processes, driven by one thread of the parent."""

import collections
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from bacr_jax.errors import UserError
from bacr_jax.grading import worker as worker_module

# Importing math-verify takes one second on an idle core.
START_SECONDS = 120.0
START_ATTEMPTS = 3
_TICK = 0.005


class Request(NamedTuple):
    """One comparison for math-verify.

    Attributes:
        pred: the answer, or with `prose` the text to search for one.
        gold: the reference answer.
        prose: whether `pred` is running text.
        gold_is_prose: whether `gold` is running text.
    """

    pred: str
    gold: str
    prose: bool = False
    gold_is_prose: bool = False


class Outcome(NamedTuple):
    """What became of a request.

    Attributes:
        correct: math-verify's verdict; False when there is none.
        found: the answer that math-verify found in running text.
        timed_out: the deadline passed and the worker was killed.
        died: the worker ended by itself (out of memory, a crash).
    """

    correct: bool
    found: str = ""
    timed_out: bool = False
    died: bool = False


class Job:
    """A request on its way. `done` is called once, from the pool's thread, with the outcome."""

    __slots__ = ("attempts", "cancelled", "done", "request")

    def __init__(self, request: Request, done: Callable[[Outcome], None]):
        self.request = request
        self.done = done
        self.attempts = 0
        self.cancelled = False


@dataclass(eq=False)
class _Worker:
    """One process and what it is doing."""

    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    job: Job | None = None
    answered: int = 0
    buffer: bytes = field(default=b"")

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


class WorkerPool:
    """Runs requests in worker processes that import neither JAX nor this library.

    The parent enforces the deadline: a worker that is late is killed (SIGKILL) and replaced. Its
    request gets no verdict, which grades as incorrect. Nothing starts before the first request.

    Args:
        workers: number of processes.
        deadline: seconds that one request may take.
        memory_mb: address space of a worker in MiB.
        recycle_after: requests after which a worker is replaced (its caches only grow).
    """

    def __init__(self, workers: int, *, deadline: int | float, memory_mb: int, recycle_after: int):
        self._size = workers
        self._deadline = deadline
        self._memory_bytes = memory_mb << 20
        self._recycle_after = recycle_after
        self._queue: collections.deque[Job] = collections.deque()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failed_starts = 0
        self._failure = ""
        # Why no worker can be started, when none can.
        self.broken: str | None = None
        self._selector: selectors.BaseSelector | None = None
        self._wake_read = self._wake_write = -1
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def submit(self, jobs: list[Job]) -> None:
        """Queues jobs and returns at once.

        Raises:
            UserError: workers cannot be started on this machine.
        """
        if self.broken:
            raise UserError(self.broken)
        with self._lock:
            if self._closing:
                raise RuntimeError("the grader is closed")
            self._queue.extend(jobs)
            if self._thread is None:
                self._wake_read, self._wake_write = os.pipe()
                os.set_blocking(self._wake_read, False)
                os.set_blocking(self._wake_write, False)
                self._selector = selectors.DefaultSelector()
                self._selector.register(self._wake_read, selectors.EVENT_READ, None)
                self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
                self._thread.start()
        self._wake()

    def close(self) -> None:
        """Kills the workers and waits until they are gone. Unfinished jobs get no verdict."""
        with self._lock:
            self._closing = True
            thread = self._thread
        if thread is None:
            return
        self._wake()
        if thread is not threading.current_thread():
            thread.join()
        self._thread = None

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        assert self._selector is not None
        try:
            while not self._closing:
                self._assign()
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    else:
                        self._read(key.data)
                self._kill_late()
        except Exception as error:  # noqa: BLE001  (a thread that dies silently would hang callers)
            self.broken = f"grading: the worker pool stopped: {error!r}"
        finally:
            self._shut_down()

    def _patience(self) -> float | None:
        """Seconds until the next deadline; None with nothing under way."""
        busy = [w.deadline for w in self._workers if w.job or not w.ready]
        if not busy:
            return None
        return max(min(busy) - time.monotonic(), 0.0) + _TICK

    def _assign(self) -> None:
        """Hands queued jobs to idle workers and starts workers while jobs are waiting."""
        while self._queue and not self._closing:
            idle = next((w for w in self._workers if w.ready and w.job is None), None)
            if idle is not None:
                job = self._queue.popleft()
                if not job.cancelled:
                    self._send(idle, job)
                continue
            starting = sum(not w.ready for w in self._workers)
            if len(self._workers) >= self._size or starting >= len(self._queue):
                return
            if self._failed_starts >= START_ATTEMPTS:
                if not self._workers:
                    self._give_up()
                return
            self._start()

    def _send(self, worker: _Worker, job: Job) -> None:
        line = json.dumps(job.request._asdict()).encode("ascii") + b"\n"
        worker.job = job
        worker.deadline = time.monotonic() + self._deadline
        job.attempts += 1
        try:
            worker.stdin.write(line)
            worker.stdin.flush()
        except OSError:
            # It died while idle, so the job is not to blame.
            worker.job = None
            self._remove(worker)
            self.counts["worker_deaths"] += 1
            if job.attempts < START_ATTEMPTS:
                self._queue.appendleft(job)
            else:
                job.done(Outcome(False, died=True))

    def _start(self) -> None:
        environment = dict(os.environ)
        # The worker must find math-verify wherever this process would.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        # -P keeps this room's modules (numbers, units, ...) from hiding others of the same name.
        command = [sys.executable, "-P", worker_module.__file__]
        command += [str(self._memory_bytes), str(int(2 * self._deadline) + 2)]
        self.counts["worker_starts"] += 1
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._start_failed(str(error))
            return
        worker = _Worker(process, time.monotonic() + START_SECONDS)
        self._workers.append(worker)
        assert self._selector is not None
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)

    def _start_failed(self, reason: str) -> None:
        self._failed_starts += 1
        self._failure = reason

    def _give_up(self) -> None:
        """No worker starts on this machine. Frees whoever waits; the next call says so."""
        self.broken = (
            f"grading: worker processes do not start ({self._failure}); check that math-verify is "
            f"installed for {sys.executable} and that memory_mb is large enough"
        )
        while self._queue:
            self._queue.popleft().done(Outcome(False, died=True))

    def _read(self, worker: _Worker) -> None:
        data = os.read(worker.stdout.fileno(), 1 << 16)
        if not data:
            self._died(worker)
            return
        worker.buffer += data
        while b"\n" in worker.buffer:
            line, worker.buffer = worker.buffer.split(b"\n", 1)
            reply = json.loads(line)
            if not worker.ready:
                worker.ready = True
                self._failed_starts = 0
                continue
            job, worker.job = worker.job, None
            worker.answered += 1
            if reply.get("memory") or worker.answered >= self._recycle_after:
                self._remove(worker)
                self.counts["worker_recycled"] += 1
            self.counts["worker_out_of_memory"] += bool(reply.get("memory"))
            self.counts["worker_errors"] += "error" in reply
            if job is not None:
                job.done(Outcome(bool(reply["correct"]), reply.get("found", "")))

    def _died(self, worker: _Worker) -> None:
        self._remove(worker)
        self.counts["worker_deaths"] += 1
        if worker.job is not None:
            worker.job.done(Outcome(False, died=True))
        elif not worker.ready:
            self._start_failed(f"it exited with status {worker.process.returncode}")

    def _kill_late(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if now < worker.deadline or (worker.ready and worker.job is None):
                continue
            self._remove(worker)
            if worker.job is None:
                self._start_failed(f"not ready after {START_SECONDS:.0f} s")
                continue
            self.counts["timeouts"] += 1
            worker.job.done(Outcome(False, timed_out=True))

    def _remove(self, worker: _Worker) -> None:
        assert self._selector is not None
        self._selector.unregister(worker.stdout)
        self._workers.remove(worker)
        _kill(worker)

    def _shut_down(self) -> None:
        assert self._selector is not None
        for worker in list(self._workers):
            self._remove(worker)
            if worker.job is not None:
                worker.job.done(Outcome(False, died=True))
        with self._lock:
            self._closing = True
            while self._queue:
                self._queue.popleft().done(Outcome(False, died=True))
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_write = -1


def _kill(worker: _Worker) -> None:
    worker.process.kill()
    with contextlib.suppress(OSError):
        worker.stdin.close()
    worker.stdout.close()
    worker.process.wait()
