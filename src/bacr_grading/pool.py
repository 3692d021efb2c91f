"""Pool of worker processes that can be killed when a request exceeds its deadline.

Used by the graders (`pooled`). The pool has no background thread: workers are started, sent
requests and killed while the caller waits in `WorkerPool.run`.

Pebble's process pool is not used for two reasons. It terminates a late process with SIGTERM and
waits three seconds before SIGKILL. It also starts processes with multiprocessing, which imports the
main module of the program and with it JAX.
"""

import collections
import contextlib
import itertools
import json
import math
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
from bacr_grading.numbers import PLACES
from bacr_grading.verifier_worker import end_offspring
from bacr_io.errors import UserError

# Startup timeout of a worker in seconds. Importing math-verify takes one second on an idle core,
# but a user's verifier may import larger packages.
START_SECONDS = 120.0
# Maximum number of consecutive failed starts before the pool gives up.
START_ATTEMPTS = 3
# Maximum number of consecutive failed starts if workers are killed by a signal, or if a worker has
# started before. In these cases the cause may be temporary, such as too little memory or too many
# processes on the machine.
PATIENT_ATTEMPTS = 8
# Exponential backoff between failed starts, in seconds: the first pause, which doubles after each
# further failure, and its upper bound.
START_PAUSE = 0.25
LONGEST_PAUSE = 8.0
# Seconds between two calls of `poll`.
POLL_SECONDS = 0.1
# Seconds between two progress messages while no worker is ready.
PATIENCE_SECONDS = 5.0
# Number of replies after which a worker is replaced by a new process.
RECYCLE_AFTER = 2000
# Minimum and maximum of each setting: number of workers, deadline in seconds, memory in MiB. A
# worker needs tens of milliseconds to grade a simple answer, and an hour (3600 s) is enough to
# grade any answer. The largest machines have about 1024 cores.
LIMITS = {"workers": (1, 1024), "deadline": (0.05, 3600), "memory_mb": (128, 1 << 30)}


# Callback that is called regularly while the pool waits, so that the caller can handle signals. An
# exception raised by the callback ends the wait.
Poll = Callable[[], object] | None


class Request(NamedTuple):
    """A comparison to be made by math-verify.

    Attributes:
      answer: the answer. If `prose` is True, a text from which math-verify extracts the answer.
      reference: the reference answer.
      prose: True if `answer` is prose.
      reference_is_prose: True if `reference` is prose.
      search: if True, the answer is also correct if only a part of it matches the reference. If
        False, the whole answer must match.
      places: number of decimal places to which numbers must agree.
    """

    answer: str
    reference: str
    prose: bool = False
    reference_is_prose: bool = False
    search: bool = True
    places: int = PLACES


class Outcome(NamedTuple):
    """The result of a `Request`.

    Attributes:
      correct: True if math-verify considers the answer equal to the reference.
      compared_text: the part of the prose that was compared, or "".
      whole_answer: True if the whole answer could be parsed and is correct.
      timed_out: True if the deadline passed and the worker was killed.
      died: True if the worker exited unexpectedly, for example after a crash or out of memory.
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
    """The program that the workers of a pool run. The defaults run math-verify.

    Attributes:
      script: path of the Python script. Its command-line arguments are the memory limit in bytes,
        the time limit of a request in seconds, the additional time limit of a batch in seconds, and
        the name of an environment variable that identifies the processes of this worker.
      setup: first line sent to stdin. Empty if the program needs no setup.
      batch: maximum number of requests per line. The deadline of a batch is the deadline of one
        request times the number of requests.
      encode: converts a batch of requests into a JSON value, which is sent as one line.
      decode: converts a reply into one outcome per request. Raises LookupError, TypeError or
        ValueError if the reply is malformed.
      late: outcome of a request that exceeded its deadline.
      died: outcome of a request whose worker exited unexpectedly.
      advice: hint for the user, shown in the error message if no worker starts.
      foreign: True if the workers run code of a user or a third-party package. Processes started
        by such code are killed together with the worker.
      environment: environment variables of the workers. None to inherit the environment of this
        process.
      spare: additional seconds per batch on top of the deadlines of its requests.
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
    """A worker process and the requests assigned to it.

    Attributes:
      process: the process.
      stdin: pipe to the standard input of the process.
      stdout: pipe from the standard output of the process.
      deadline: value of `time.monotonic()` at which the process is killed: the deadline of its
        startup or of its current batch.
      mark: name of an environment variable that is set only in the processes of this worker.
      unsent: bytes that still have to be written to stdin.
      ready: True once the process accepts requests.
      requests: the batch of requests that the process is working on. Empty if it is idle.
      answered: number of batches answered so far.
      buffer: bytes of the current reply received so far.
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
    """A failed start of a worker.

    Attributes:
      reason: why the worker did not start, for the error message.
      killed: True if the worker was killed by a signal.
    """

    reason: str
    killed: bool


class WorkerPool:
    """Runs requests in worker processes that import neither JAX nor the training library.

    A worker that exceeds its deadline is killed with SIGKILL and replaced. Its requests are not
    retried, and their outcome is `Program.late`. If a worker exits unexpectedly, its requests are
    retried once, one request at a time. Workers are started lazily, by the first request. A pool is
    not thread-safe.

    Attributes:
      counts: counters of events, such as "timeouts" and "worker_deaths".
    """

    def __init__(self, program: Program, *, workers: int, deadline: int | float, memory_mb: int):
        """Checks the settings without starting a process.

        Args:
          program: the program that the workers run.
          workers: maximum number of worker processes.
          deadline: timeout of a request in seconds.
          memory_mb: maximum size of a worker's address space in MiB.

        Raises:
          UserError: if a setting is outside of `LIMITS`.
        """
        settings = {"workers": workers, "deadline": deadline, "memory_mb": memory_mb}
        for name, (least, most) in LIMITS.items():
            if not least <= settings[name] <= most:
                raise UserError(
                    f"grading: {name}={settings[name]!r} is out of range; set {name} to a number "
                    f"from {least} to {most}"
                )
        self._program = program
        self._size = workers
        self._deadline = deadline
        self._memory_bytes = memory_mb << 20
        self._workers: list[_Worker] = []
        self._closed = False
        # Failed starts since the last successful start.
        self._failures: list[_FailedStart] = []
        # True once any worker has become ready.
        self._started = False
        # Value of `time.monotonic()` before which no worker is started (backoff).
        self._start_after = 0.0
        # Requests whose worker exited before it answered them.
        self._unanswered: list[Any] = []
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.process.pid for worker in self._workers]

    def check(self, report: Callable[[str], object] | None = None) -> None:
        """Starts a worker and waits until it is ready.

        If the worker is killed by a signal while it starts, another worker is started.

        Args:
          report: called with a progress message every few seconds while no worker is ready.

        Raises:
          UserError: if no worker can be started.
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
                    f"grading: no worker process is ready after {now - start_time:.0f} s (the "
                    f"limit is {START_SECONDS:.0f} s); {self._program.advice}"
                )

    def run(self, requests: Sequence[Any], poll: Poll = None) -> dict[Any, Any]:
        """Runs requests and returns a dict from each request to its outcome.

        Args:
          requests: the requests, without duplicates.
          poll: called every tenth of a second. If it raises, the requests are abandoned and the
            exception is re-raised.

        Raises:
          UserError: if worker processes cannot be started on this machine.
        """
        if self._closed:
            raise RuntimeError("the grader is closed")
        size = self._program.batch
        starts = range(0, len(requests), size)
        queue = collections.deque(requests[start : start + size] for start in starts)
        outcomes: dict[Any, Any] = {}
        retried: set[Any] = set()
        if self._started:
            # Keep only the newest failures, and fewer than the maximum. This call may then start a
            # worker at least once, even if all starts during the last call failed.
            del self._failures[: 1 - PATIENT_ATTEMPTS]
        poll_time = time.monotonic()
        try:
            # Workers may have become ready or exited since the last call.
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
        """Kills all workers and waits until they have exited."""
        self._closed = True
        for worker in list(self._workers):
            self._remove(worker)

    # --- starting workers -------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """True if the maximum number of consecutive failed starts is not yet reached."""
        was_killed = bool(self._failures) and self._failures[-1].killed
        attempts = PATIENT_ATTEMPTS if self._started or was_killed else START_ATTEMPTS
        return len(self._failures) < attempts

    def _start(self) -> None:
        """Starts a worker, or records a failed start if the process cannot be created."""
        mark = f"GRADING_WORKER_{uuid.uuid4().hex}"
        # The worker needs the module search path of this process to import math-verify.
        environment = {
            **(os.environ if self._program.environment is None else self._program.environment),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            mark: "1",
        }
        # -P keeps the script's folder off sys.path. Otherwise modules such as `numbers` in this
        # folder would shadow modules of the standard library.
        command = [sys.executable, "-P", self._program.script]
        # The kernel's time limits must be longer than the deadline of `_send`.
        request_seconds = int(2 * self._deadline) + 2
        batch_seconds = math.ceil(self._program.spare)
        command += [str(self._memory_bytes), str(request_seconds), str(batch_seconds), mark]
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
        # Writes must not block, because this process could not enforce the deadlines of other
        # workers while it waits for one worker to read its input.
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
        """Records a failed start and sets the earliest time of the next start."""
        self._failures.append(_FailedStart(reason, killed))
        pause = min(START_PAUSE * 2.0 ** (len(self._failures) - 1), LONGEST_PAUSE)
        self._start_after = time.monotonic() + pause

    def _start_error(self) -> UserError:
        return UserError(
            f"grading: the worker processes do not start ({self._failures[-1].reason}); "
            f"{self._program.advice}"
        )

    # --- requests and replies ---------------------------------------------------------------------

    def _assign(self, queue: collections.deque[Any], outcomes: dict[Any, Any]) -> None:
        """Assigns queued batches to idle workers and starts more workers if batches are left."""
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
        """Assigns a batch to a worker. The bytes are written to the pipe by `_listen`."""
        worker.requests = requests
        seconds = self._deadline * len(requests) + self._program.spare
        worker.deadline = time.monotonic() + seconds
        worker.unsent += json.dumps(self._program.encode(requests)).encode("ascii") + b"\n"

    def _retry_unanswered(
        self, queue: collections.deque[Any], outcomes: dict[Any, Any], retried: set[Any]
    ) -> None:
        """Requeues the requests of workers that exited unexpectedly, one request per batch.

        A request whose worker exits a second time gets the outcome `Program.died`.
        """
        for request in self._unanswered:
            if request in retried:
                outcomes[request] = self._program.died
            else:
                retried.add(request)
                queue.append([request])
        self._unanswered.clear()

    def _listen(self, seconds: float, outcomes: dict[Any, Any]) -> None:
        """Waits for replies, writes pending requests and kills workers that exceed their deadline.

        Args:
          seconds: maximum time to wait, in seconds.
          outcomes: dict to which the outcomes of answered requests are added.
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
                # If the pipe is full, the rest is written by a later call. If the worker has
                # exited, `_read` detects it.
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
        """Reads a worker's stdout and handles a complete line.

        The first line reports that the worker is ready or could not start. Every further line is
        the reply to a batch of requests.

        Args:
          worker: the worker.
          outcomes: dict to which the outcomes of answered requests are added.
        """
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
            # The line is malformed, because other code in the worker wrote to the pipe.
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
        """Handles the first reply of a worker: either it is ready, or it could not start.

        Raises:
          ValueError: if the reply is any other message.
        """
        if worker.ready or reply.keys() - {"ready", "refused"}:
            raise ValueError(
                "the worker's first message reports neither that it is ready nor why it could "
                "not start"
            )
        worker.buffer = b""
        if "refused" in reply:
            self._remove(worker)
            self._note_failed_start(str(reply["refused"]))
        else:
            worker.ready = True
            self._started = True
            self._failures.clear()

    # --- stopping workers -------------------------------------------------------------------------

    def _end_late(self, worker: _Worker, outcomes: dict[Any, Any]) -> None:
        """Kills a worker whose deadline has passed and sets the outcomes of its requests."""
        self._remove(worker)
        if worker.ready:
            self.counts["timeouts"] += 1
            outcomes |= dict.fromkeys(worker.requests, self._program.late)
        else:
            self._note_failed_start(f"not ready after {START_SECONDS:.0f} s")

    def _end_dead(self, worker: _Worker) -> None:
        """Removes a worker that exited unexpectedly and keeps its requests for a retry."""
        self._remove(worker)
        self.counts["worker_deaths"] += 1
        self._unanswered += worker.requests
        if not worker.ready:
            status = worker.process.returncode
            self._note_failed_start(f"it exited with status {status}", killed=status < 0)

    def _remove(self, worker: _Worker) -> None:
        """Kills a worker and all processes that it started, and waits until the worker exits."""
        self._workers.remove(worker)
        # The worker is the leader of its process group, to which its child processes belong.
        with contextlib.suppress(OSError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        if self._program.foreign:
            end_offspring(worker.mark)
        with contextlib.suppress(OSError):
            worker.stdin.close()
        worker.stdout.close()
        worker.process.wait()
