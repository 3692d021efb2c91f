"""Runs requests in worker processes that can be killed.

Used by the graders (`pooled`). The pool has no thread: the caller's wait starts, feeds and kills
workers.

Pebble's pool is not used, because it ends a late process with SIGTERM and waits three seconds
before SIGKILL, and because it starts processes by multiprocessing, which imports the program's main
module (JAX).
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

# Seconds until a worker must be ready. The import of math-verify takes one second on an idle core;
# a verifier may import more.
START_SECONDS = 120.0
# Failed starts in a row after which the pool gives up.
START_ATTEMPTS = 3
# The same if workers are killed or one has started before, because the machine may lack memory or
# processes only for a while.
PATIENT_ATTEMPTS = 8
# Seconds before the second start after a failure; doubled after each further failure.
START_PAUSE = 0.25
LONGEST_PAUSE = 8.0
# Seconds between two calls of `poll`.
POLL_SECONDS = 0.1
# Seconds between two messages while the first worker is not ready.
PATIENCE_SECONDS = 5.0
# Answers after which a worker is replaced.
RECYCLE_AFTER = 2000
# Smallest and largest settings of a grader. A worker needs some hundredths of a second for an easy
# answer, and an hour (3600 s) is enough for any. The largest machines have about 1024 cores.
LIMITS = {"workers": (1, 1024), "deadline": (0.05, 3600), "memory_mb": (128, 1 << 30)}


# Called regularly during a wait, so that the caller can react to signals; an exception ends the
# wait.
Poll = Callable[[], object] | None


class Request(NamedTuple):
    """One comparison for math-verify.

    Attributes:
      answer: the answer, or with `prose` the text in which math-verify searches one.
      reference: the reference answer.
      prose: `answer` is running text.
      reference_is_prose: `reference` is running text.
      search: a value somewhere in the answer counts too, and not only the whole answer.
      places: decimal places to which numbers must agree.
    """

    answer: str
    reference: str
    prose: bool = False
    reference_is_prose: bool = False
    search: bool = True
    places: int = PLACES


class Outcome(NamedTuple):
    """The result of a request.

    Attributes:
      correct: math-verify finds the two sides equal.
      compared_text: the part of running text that was compared.
      whole_answer: the whole answer was understood and is right.
      timed_out: the deadline passed and the worker was killed.
      died: the worker ended by itself, for lack of memory or in a crash.
    """

    correct: bool
    compared_text: str = ""
    whole_answer: bool = False
    timed_out: bool = False
    died: bool = False


def _encode(requests: Sequence[Request]) -> dict[str, Any]:
    return requests[0]._asdict()


def _decode(reply: dict[str, Any]) -> list[Outcome]:
    compared_text = str(reply.get("found", ""))
    whole_answer = bool(reply.get("whole"))
    return [Outcome(bool(reply["correct"]), compared_text, whole_answer)]


@dataclass(frozen=True)
class Program:
    """The program that the workers of a pool run; by default math-verify.

    Attributes:
      script: path of the program. Its arguments are the memory limit in bytes, the time limit of an
        answer in seconds, and the name of a variable that marks its processes.
      setup: first line of its standard input; empty for none.
      batch: largest number of requests per line. Each of them has the deadline.
      encode: returns the JSON value of a line with requests.
      decode: returns the outcomes in a reply. Raises a LookupError, TypeError or ValueError if the
        value is not a reply.
      late: outcome of a request whose worker was late.
      died: outcome of a request whose worker ended by itself.
      advice: what the user should check if no worker starts.
      foreign: the code of a user or a package runs in the workers. Processes that such code starts
        end with the worker.
      environment: environment variables of the workers; None for the variables of this process.
      spare: seconds of a batch beyond the deadlines of its requests.
    """

    script: str = worker_module.__file__
    setup: bytes = b""
    batch: int = 1
    encode: Callable[[Sequence[Any]], Any] = _encode
    decode: Callable[[dict[str, Any]], Sequence[Any]] = _decode
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
    """A worker process and its work.

    Attributes:
      deadline: time at which the process is killed if it is not ready, or has not answered.
      mark: name of an environment variable that only the processes of this worker have.
      unsent: bytes that are not yet written to its standard input.
      ready: the process can take requests.
      requests: the requests that the process is working on.
      answered: number of replies so far.
      buffer: bytes of the current reply.
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


class _FailedStart(NamedTuple):
    """Why a worker did not start, and True if it was killed."""

    reason: str
    killed: bool


class WorkerPool:
    """Runs requests in worker processes that import neither JAX nor this library.

    A late worker is killed (SIGKILL) and replaced. Its requests get no verdict and count as
    incorrect. Requests of a worker that ended by itself are tried once more, one by one. No process
    starts before the first request. Only one thread may use a pool at a time.

    Attributes:
      counts: numbers of events, such as "timeouts" and "worker_deaths".
    """

    def __init__(self, program: Program, *, workers: int, deadline: int | float, memory_mb: int):
        """Checks the settings and starts nothing.

        Args:
          program: the program of the workers.
          workers: largest number of processes.
          deadline: seconds for one request.
          memory_mb: limit of a worker's address space in MiB.

        Raises:
          UserError: a setting is outside of `LIMITS`.
        """
        settings = {"workers": workers, "deadline": deadline, "memory_mb": memory_mb}
        for name, (least, most) in LIMITS.items():
            if not least <= settings[name] <= most:
                raise UserError(
                    f"grading: found {name}={settings[name]!r}; write a number from {least} to "
                    f"{most}"
                )
        self._program = program
        self._size = workers
        self._deadline = deadline
        self._memory_bytes = memory_mb << 20
        self._workers: list[_Worker] = []
        self._closed = False
        # Failed starts since the last worker that started.
        self._failures: list[_FailedStart] = []
        # A worker has started before.
        self._started = False
        # Time before which no further worker is started.
        self._start_after = 0.0
        # Requests of workers that ended while they worked on them.
        self._unanswered: list[Any] = []
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.process.pid for worker in self._workers]

    def check(self, report: Callable[[str], object] | None = None) -> None:
        """Starts a worker and waits until it is ready; starts another one if it is killed.

        Args:
          report: called with a message every few seconds while no worker is ready.

        Raises:
          UserError: no worker starts.
        """
        start_time = time.monotonic()
        report_time = start_time
        while not any(worker.ready for worker in self._workers):
            if self._failures and not (self._failures[-1].killed and self._may_start()):
                raise self._start_error()
            if not self._workers and time.monotonic() >= self._start_after:
                self._start()
            self._listen(POLL_SECONDS, {})
            now = time.monotonic()
            if report is not None and now - report_time >= PATIENCE_SECONDS:
                report_time = now
                report(
                    f"grading: its worker is not ready after {now - start_time:.0f} s, of "
                    f"{START_SECONDS:.0f} that it has; {self._program.advice}"
                )

    def run(self, requests: Sequence[Any], poll: Poll = None) -> dict[Any, Any]:
        """Runs requests and returns the outcome of each.

        Args:
          requests: the requests, all different.
          poll: called every tenth of a second. If it raises, the work is dropped and the exception
            is passed on.

        Raises:
          UserError: worker processes cannot be started on this machine.
        """
        if self._closed:
            raise RuntimeError("the grader is closed")
        size = self._program.batch
        starts = range(0, len(requests), size)
        queue = collections.deque(requests[start : start + size] for start in starts)
        outcomes: dict[Any, Any] = {}
        retried: set[Any] = set()
        if self._started:
            # If no worker started during the last call, this call tries only once.
            del self._failures[PATIENT_ATTEMPTS - 1 :]
        poll_time = time.monotonic()
        try:
            # Workers may have become ready, or died, since the last call.
            self._listen(0.0, outcomes)
            while len(outcomes) < len(requests):
                self._assign(queue, outcomes)
                self._listen(POLL_SECONDS, outcomes)
                self._retry_unanswered(queue, outcomes, retried)
                if poll is not None and time.monotonic() - poll_time >= POLL_SECONDS:
                    poll()
                    poll_time = time.monotonic()
        except BaseException:
            for worker in [worker for worker in self._workers if worker.requests]:
                self._remove(worker)
            self._unanswered.clear()
            raise
        return outcomes

    def close(self) -> None:
        """Kills the workers and waits for their end."""
        self._closed = True
        for worker in list(self._workers):
            self._remove(worker)

    # --- start of workers -------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """True if the number of failed starts allows another one."""
        was_killed = bool(self._failures) and self._failures[-1].killed
        attempts = PATIENT_ATTEMPTS if self._started or was_killed else START_ATTEMPTS
        return len(self._failures) < attempts

    def _start(self) -> None:
        """Starts a worker, or notes the failure if the system cannot start a process."""
        mark = f"GRADING_WORKER_{uuid.uuid4().hex}"
        # The worker must find math-verify in the same folders as this process.
        environment = {
            **(os.environ if self._program.environment is None else self._program.environment),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            mark: "1",
        }
        # With -P, the modules of this folder (numbers, pool) do not hide others of the same name.
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
            self._note_failed_start(str(error))
            return
        assert process.stdin is not None
        assert process.stdout is not None
        # A write to a worker that does not read must not wait, because deadlines would pass.
        os.set_blocking(process.stdin.fileno(), False)
        self._workers.append(
            _Worker(
                process=process,
                stdin=process.stdin,
                stdout=process.stdout,
                deadline=time.monotonic() + START_SECONDS,
                mark=mark,
                unsent=bytearray(self._program.setup),
            )
        )

    def _note_failed_start(self, reason: str, *, killed: bool = False) -> None:
        """Stores why a worker did not start, and sets the time of the next start."""
        self._failures.append(_FailedStart(reason, killed))
        pause = min(START_PAUSE * 2.0 ** (len(self._failures) - 1), LONGEST_PAUSE)
        self._start_after = time.monotonic() + pause

    def _start_error(self) -> UserError:
        return UserError(
            f"grading: worker processes do not start ({self._failures[-1].reason}); "
            f"{self._program.advice}"
        )

    # --- requests and replies ---------------------------------------------------------------------

    def _assign(self, queue: collections.deque[Any], outcomes: dict[Any, Any]) -> None:
        """Sends batches to idle workers, and starts workers while batches are waiting."""
        while queue:
            idle_worker = next((worker for worker in self._workers if worker.idle), None)
            if idle_worker is not None:
                self._send(idle_worker, queue.popleft())
                continue
            starting = sum(not worker.ready for worker in self._workers)
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
                raise self._start_error()

    def _send(self, worker: _Worker, requests: Sequence[Any]) -> None:
        """Gives a batch to a worker; `_listen` writes it."""
        worker.requests = requests
        seconds = self._deadline * len(requests) + self._program.spare
        worker.deadline = time.monotonic() + seconds
        worker.unsent += json.dumps(self._program.encode(requests)).encode("ascii") + b"\n"

    def _retry_unanswered(
        self, queue: collections.deque[Any], outcomes: dict[Any, Any], retried: set[Any]
    ) -> None:
        """Queues requests of dead workers once more, alone; a second death is their outcome."""
        for request in self._unanswered:
            if request in retried:
                outcomes[request] = self._program.died
            else:
                retried.add(request)
                queue.append([request])
        self._unanswered.clear()

    def _listen(self, seconds: float, outcomes: dict[Any, Any]) -> None:
        """Waits for replies, writes requests, and kills the workers that are late.

        Args:
          seconds: longest wait.
          outcomes: receives the outcomes of answered requests.
        """
        pipes = select.poll()
        waits = [seconds]
        for worker in self._workers:
            pipes.register(worker.stdout, select.POLLIN)
            if worker.unsent:
                pipes.register(worker.stdin, select.POLLOUT)
            if not worker.idle:
                waits.append(worker.deadline - time.monotonic())
        ready_pipes = {pipe for pipe, _ in pipes.poll(1000 * max(min(waits), 0.0))}
        for worker in self._workers:
            if worker.unsent:
                # A full pipe takes the rest later, and a dead worker is noticed by reading.
                with contextlib.suppress(OSError):
                    del worker.unsent[: os.write(worker.stdin.fileno(), worker.unsent)]
        for worker in list(self._workers):
            if worker.stdout.fileno() in ready_pipes:
                self._read(worker, outcomes)
        now = time.monotonic()
        for worker in list(self._workers):
            if not worker.idle and worker.deadline <= now:
                self._end_late(worker, outcomes)

    def _read(self, worker: _Worker, outcomes: dict[Any, Any]) -> None:
        """Reads from a worker, which writes a line when it is ready and a line for each batch."""
        data = os.read(worker.stdout.fileno(), 1 << 16)
        worker.buffer += data
        if not data:
            self._end_dead(worker)
            return
        if not worker.buffer.endswith(b"\n"):
            return
        try:
            reply = json.loads(worker.buffer)
            if not worker.requests:
                self._read_greeting(worker, reply)
                return
            new_outcomes = list(zip(worker.requests, self._program.decode(reply), strict=True))
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            # Other code has written into the worker's pipe.
            self._end_dead(worker)
            return
        worker.buffer = b""
        outcomes |= new_outcomes
        worker.requests = ()
        worker.answered += 1
        is_out_of_memory = bool(reply.get("memory"))
        if is_out_of_memory or worker.answered >= RECYCLE_AFTER:
            self._remove(worker)
            self.counts["worker_recycled"] += 1
        self.counts["worker_out_of_memory"] += is_out_of_memory
        self.counts["worker_errors"] += "error" in reply

    def _read_greeting(self, worker: _Worker, reply: dict[str, Any]) -> None:
        """Notes that a worker is ready, or why it refuses to work.

        Raises:
          ValueError: the reply is not a greeting.
        """
        if worker.ready or reply.keys() - {"ready", "refused"}:
            raise ValueError("the reply is not a greeting")
        worker.buffer = b""
        if "refused" in reply:
            self._remove(worker)
            self._note_failed_start(str(reply["refused"]))
        else:
            worker.ready = True
            self._started = True
            self._failures.clear()

    # --- end of workers ---------------------------------------------------------------------------

    def _end_late(self, worker: _Worker, outcomes: dict[Any, Any]) -> None:
        """Kills a worker whose deadline has passed."""
        self._remove(worker)
        if worker.ready:
            self.counts["timeouts"] += 1
            outcomes |= dict.fromkeys(worker.requests, self._program.late)
        else:
            self._note_failed_start(f"not ready after {START_SECONDS:.0f} s")

    def _end_dead(self, worker: _Worker) -> None:
        """Removes a worker that ended by itself and keeps its requests for another try."""
        self._remove(worker)
        self.counts["worker_deaths"] += 1
        self._unanswered += worker.requests
        if not worker.ready:
            status = worker.process.returncode
            self._note_failed_start(f"it exited with status {status}", killed=status < 0)

    def _remove(self, worker: _Worker) -> None:
        """Kills a worker with all processes that it started, and waits for its end."""
        self._workers.remove(worker)
        # The worker is the leader of a session, to which processes that it started belong.
        with contextlib.suppress(OSError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        if self._program.foreign:
            end_offspring(worker.mark)
        with contextlib.suppress(OSError):
            worker.stdin.close()
        worker.stdout.close()
        worker.process.wait()
