"""A pool of killable worker processes, driven by whoever waits for the answers.

Pebble's pool is not used: it ends a late process with SIGTERM and waits three seconds before
SIGKILL, and starts processes by multiprocessing, which imports the program's main module (JAX).
"""

import collections
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from bacr_grading import worker as worker_module
from bacr_grading.errors import UserError
from bacr_grading.numbers import PLACES
from bacr_grading.verifier_worker import end_offspring

# Importing math-verify takes one second on an idle core; a verifier may import more.
START_SECONDS = 120.0
# Starts in a row that may fail, and how many where workers are killed or one has started before:
# the machine can be short of memory or processes for a while.
START_ATTEMPTS = 3
PATIENT_ATTEMPTS = 8
# Seconds before the second try after a failure, doubled each time, and the longest of these pauses.
START_PAUSE, LONGEST_PAUSE = 0.25, 8.0
POLL_SECONDS = 0.1
# Until a wait for the first worker is worth a word, and between one word and the next.
PATIENCE_SECONDS = 5.0
# Answers after which a worker is replaced.
RECYCLE_AFTER = 2000
# Least and most of what a grader may be given. Seconds: a worker needs some hundredths for an
# answer that is no trouble at all; an hour for one. A process for each core of the largest machine.
LIMITS = {"workers": (1, 1024), "deadline": (0.05, 3600), "memory_mb": (128, 1 << 30)}


# Called regularly while somebody waits, to react to signals; what it raises ends the wait.
Poll = Callable[[], object] | None


class Request(NamedTuple):
    """One comparison for math-verify.

    Attributes:
      answer: the answer, or with `prose` the text to search for one.
      search: whether a value that was found somewhere in the answer counts, and not only one of
        the whole answer.
      places: decimal places to which numbers have to agree.
    """

    answer: str
    reference: str
    prose: bool = False
    reference_is_prose: bool = False
    search: bool = True
    places: int = PLACES


class Outcome(NamedTuple):
    """What became of a request.

    Attributes:
      timed_out: the deadline passed and the worker was killed.
      died: the worker ended by itself (out of memory, a crash).
    """

    correct: bool
    found: str = ""
    whole: bool = False
    timed_out: bool = False
    died: bool = False


def _outcome(reply: dict[str, Any]) -> list[Outcome]:
    found, whole = str(reply.get("found", "")), bool(reply.get("whole"))
    return [Outcome(bool(reply["correct"]), found, whole)]


@dataclass(frozen=True)
class Program:
    """What the workers of a pool run; by default math-verify.

    Attributes:
      script: a file that gets the two limits, and its mark, as its arguments.
      setup: the first line of its standard input; empty: none.
      batch: most requests that a worker is given at a time; each of them has the deadline.
      written: requests as a line of JSON.
      read: what a reply says of them; a LookupError, TypeError or ValueError: it is no reply.
      late, died: the outcome of a request whose worker was late, or ended by itself.
      advice: what to look at when no worker starts.
      foreign: it is a user's or a package's code, which may start processes; these end with it.
      environment: variables of the workers; None: those of this process.
      spare: seconds of a batch beyond the deadlines of its requests.
    """

    script: str = worker_module.__file__
    setup: bytes = b""
    batch: int = 1
    written: Callable[[Sequence[Any]], Any] = lambda requests: requests[0]._asdict()
    read: Callable[[dict[str, Any]], Sequence[Any]] = _outcome
    late: Any = Outcome(False, timed_out=True)
    died: Any = Outcome(False, died=True)
    advice: str = (
        f"check that math-verify is installed for {sys.executable} and that memory_mb is large "
        "enough"
    )
    foreign: bool = False
    environment: Mapping[str, str] | None = None
    spare: float = 0.0


@dataclass(eq=False)
class _Worker:
    """One process and what it is doing; `deadline` is for its requests, or for getting ready.

    Attributes:
      mark: a variable in the environment of what it starts, and of nothing else.
      unsent: what its standard input has yet to get.
    """

    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]
    deadline: float
    mark: str
    unsent: bytearray
    ready: bool = False
    requests: Sequence[Any] = ()
    answered: int = 0
    buffer: bytes = b""

    @property
    def idle(self) -> bool:
        return self.ready and not self.requests


class WorkerPool:
    """Runs requests in worker processes that import neither JAX nor this library.

    A worker that is late is killed (SIGKILL) and replaced. Its requests get no verdict, which
    grades as incorrect. Requests of a worker that ended by itself are given once more, one by one.
    Nothing starts before the first request. For one thread at a time.
    """

    def __init__(self, program: Program, *, workers: int, deadline: int | float, memory_mb: int):
        """UserError: a number that no pool could work with."""
        given = {"workers": workers, "deadline": deadline, "memory_mb": memory_mb}
        for name, (least, most) in LIMITS.items():
            if not least <= given[name] <= most:
                raise UserError(
                    f"grading: found {name}={given[name]!r}; write a number from {least} to {most}"
                )
        self._program, self._size, self._deadline = program, workers, deadline
        self._memory_bytes = memory_mb << 20
        self._workers: list[_Worker] = []
        self._closed = False
        # Why workers did not start, since one did; True: it was killed.
        self._failures: list[tuple[str, bool]] = []
        self._started = False
        self._start_after = 0.0
        # Requests of workers that ended while they worked on them.
        self._unanswered: list[Any] = []
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.process.pid for worker in self._workers]

    def check(self, tell: Callable[[str], object] | None = None) -> None:
        """Waits until a worker is ready, of which one is started; UserError: it does not start.

        One that is killed is started again. `tell` gets a line when that takes long, and every so
        often from then on.
        """
        began = told = time.monotonic()
        while not any(worker.ready for worker in self._workers):
            if self._failures and not (self._failures[-1][1] and self._may_start()):
                raise self._refusal()
            if not self._workers and time.monotonic() >= self._start_after:
                self._start()
            self._listen(POLL_SECONDS, {})
            now = time.monotonic()
            if tell is not None and now - told >= PATIENCE_SECONDS:
                told = now
                tell(
                    f"grading: its worker is not ready after {now - began:.0f} s, of "
                    f"{START_SECONDS:.0f} that it has; {self._program.advice}"
                )

    def run(self, requests: Sequence[Any], poll: Poll = None) -> dict[Any, Any]:
        """Runs requests, all different, some in a batch; gives the outcome of each.

        `poll` is called every tenth of a second. When it raises, the work under way is dropped and
        the exception goes on. UserError: worker processes cannot be started on this machine.
        """
        if self._closed:
            raise RuntimeError("the grader is closed")
        size = self._program.batch
        starts = range(0, len(requests), size)
        queue = collections.deque(requests[start : start + size] for start in starts)
        outcomes: dict[Any, Any] = {}
        asked_again: set[Any] = set()
        if self._started:
            # After a call in which no worker started, the next one tries only once.
            del self._failures[PATIENT_ATTEMPTS - 1 :]
        polled = time.monotonic()
        try:
            # First whatever happened since the last call: workers got ready, or died.
            self._listen(0.0, outcomes)
            while len(outcomes) < len(requests):
                self._assign(queue, outcomes)
                self._listen(POLL_SECONDS, outcomes)
                for request in self._unanswered:
                    if request in asked_again:
                        outcomes[request] = self._program.died
                    else:
                        asked_again.add(request)
                        queue.append([request])
                self._unanswered.clear()
                if poll is not None and time.monotonic() - polled >= POLL_SECONDS:
                    poll()
                    polled = time.monotonic()
        except BaseException:
            for worker in [w for w in self._workers if w.requests]:
                self._remove(worker)
            self._unanswered.clear()
            raise
        return outcomes

    def close(self) -> None:
        """Kills the workers and waits until they are gone."""
        self._closed = True
        for worker in list(self._workers):
            self._remove(worker)

    def _may_start(self) -> bool:
        """True if the failures so far leave another try to start a worker."""
        patient = self._started or (bool(self._failures) and self._failures[-1][1])
        return len(self._failures) < (PATIENT_ATTEMPTS if patient else START_ATTEMPTS)

    def _not_started(self, reason: str, *, killed: bool = False) -> None:
        """Notes why a worker did not start, and how long the next one has to wait."""
        self._failures.append((reason, killed))
        pause = min(START_PAUSE * 2.0 ** (len(self._failures) - 1), LONGEST_PAUSE)
        self._start_after = time.monotonic() + pause

    def _assign(self, queue: collections.deque[Any], outcomes: dict[Any, Any]) -> None:
        """Hands requests to idle workers, and starts workers while requests are waiting."""
        while queue:
            idle = next((w for w in self._workers if w.idle), None)
            if idle is not None:
                self._send(idle, queue.popleft())
                continue
            starting = sum(not w.ready for w in self._workers)
            if len(self._workers) >= self._size or starting >= len(queue):
                return
            if self._may_start():
                if time.monotonic() < self._start_after:
                    return
                self._start()
            elif self._workers:
                return
            elif self._started:
                outcomes |= dict.fromkeys(itertools.chain(*queue), self._program.died)
                queue.clear()
            else:
                raise self._refusal()

    def _refusal(self) -> UserError:
        """Why no worker is there."""
        return UserError(
            f"grading: worker processes do not start ({self._failures[-1][0]}); "
            f"{self._program.advice}"
        )

    def _send(self, worker: _Worker, requests: Sequence[Any]) -> None:
        worker.requests = requests
        seconds = self._deadline * len(requests) + self._program.spare
        worker.deadline = time.monotonic() + seconds
        worker.unsent += json.dumps(self._program.written(requests)).encode("ascii") + b"\n"

    def _start(self) -> None:
        # The worker must find math-verify wherever this process would.
        given = self._program.environment
        environment = dict(os.environ if given is None else given)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        mark = f"GRADING_WORKER_{uuid.uuid4().hex}"
        environment[mark] = "1"
        # -P keeps this room's modules (numbers, pool, ...) from hiding others of the same name.
        command = [sys.executable, "-P", self._program.script]
        command += [str(self._memory_bytes), str(int(2 * self._deadline) + 2), mark]
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
            self._not_started(str(error))
            return
        assert process.stdin is not None
        assert process.stdout is not None
        # A write must not wait for one that doesn't read: deadlines would pass meanwhile.
        os.set_blocking(process.stdin.fileno(), False)
        ready_by = time.monotonic() + START_SECONDS
        line = bytearray(self._program.setup)
        self._workers.append(_Worker(process, process.stdin, process.stdout, ready_by, mark, line))

    def _listen(self, seconds: float, outcomes: dict[Any, Any]) -> None:
        """Waits for replies, at most that long, notes them and kills the workers that are late."""
        until = [worker.deadline - time.monotonic() for worker in self._workers if not worker.idle]
        pipes = select.poll()
        for worker in self._workers:
            pipes.register(worker.stdout, select.POLLIN)
            if worker.unsent:
                pipes.register(worker.stdin, select.POLLOUT)
        found = {pipe for pipe, _ in pipes.poll(1000 * max(min([seconds, *until]), 0.0))}
        for worker in [w for w in self._workers if w.unsent]:
            # One whose pipe is full gets the rest later; one that has died is found out by reading.
            with contextlib.suppress(OSError):
                del worker.unsent[: os.write(worker.stdin.fileno(), worker.unsent)]
        for worker in [w for w in self._workers if w.stdout.fileno() in found]:
            self._read(worker, outcomes)
        now = time.monotonic()
        for worker in [w for w in self._workers if not w.idle and w.deadline <= now]:
            self._remove(worker)
            if not worker.ready:
                self._not_started(f"not ready after {START_SECONDS:.0f} s")
            else:
                self.counts["timeouts"] += 1
                outcomes |= dict.fromkeys(worker.requests, self._program.late)

    def _read(self, worker: _Worker, outcomes: dict[Any, Any]) -> None:
        """Reads what a worker wrote: one line when it is ready, then one for each batch."""
        data = os.read(worker.stdout.fileno(), 1 << 16)
        worker.buffer += data
        if not data:
            self._died(worker, outcomes)
        elif worker.buffer.endswith(b"\n"):
            try:
                reply = json.loads(worker.buffer)
                if not worker.requests:
                    self._greeted(worker, reply)
                    return
                told = list(zip(worker.requests, self._program.read(reply), strict=True))
            except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
                # Something else than the worker has written into its pipe.
                self._died(worker, outcomes)
                return
            worker.buffer = b""
            outcomes |= told
            worker.requests = ()
            worker.answered += 1
            if reply.get("memory") or worker.answered >= RECYCLE_AFTER:
                self._remove(worker)
                self.counts["worker_recycled"] += 1
            self.counts["worker_out_of_memory"] += bool(reply.get("memory"))
            self.counts["worker_errors"] += "error" in reply

    def _greeted(self, worker: _Worker, reply: dict[str, Any]) -> None:
        """Notes that a worker is ready, or why it will not be."""
        if worker.ready or reply.keys() - {"ready", "refused"}:
            raise ValueError("no greeting")
        worker.buffer = b""
        if "refused" in reply:
            self._remove(worker)
            self._not_started(str(reply["refused"]))
        else:
            worker.ready = self._started = True
            self._failures.clear()

    def _died(self, worker: _Worker, outcomes: dict[Any, Any]) -> None:
        self._remove(worker)
        self.counts["worker_deaths"] += 1
        self._unanswered += worker.requests
        if not worker.ready:
            status = worker.process.returncode
            self._not_started(f"it exited with status {status}", killed=status < 0)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        # What it has started goes with it: a worker leads a session of its own.
        with contextlib.suppress(OSError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        if self._program.foreign:
            end_offspring(worker.mark)
        with contextlib.suppress(OSError):
            worker.stdin.close()
        worker.stdout.close()
        worker.process.wait()
