"""Runs checks in child processes, so that a check that crashes or hangs can't stop `bacr doctor`.

`__main__` calls `run_checks`. Checks in `paths` and `rates` that need a second process call
`child_process`. The checks themselves are implemented in other modules.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from bacr_doctor.records import Record, Subject
from bacr_jax.config.atomics import allow_fast_additions
from bacr_jax.config.gpus import set_memory_fraction
from bacr_jax.errors import UserError, reason_of

# Time limits in seconds: for all checks together, for one check, and for the first check of each
# process. The first check has more time because it imports JAX.
MOST_SECONDS = 600.0
CHECK_SECONDS = 120.0
FIRST_SECONDS = 210.0
# A machine counts as busy if its one-minute load average per core is above this value.
_BUSY_LOAD = 1.5
# Maximum length in characters of an error message, or of the last line of a process's output, in a
# record.
_SHOWN_CHARACTERS = 300
# A function that waits for the record of a check until a deadline, a value of `time.monotonic()`.
# It returns None if the check has not finished by then.
NextRecord = Callable[["Check", float], Record | None]


@dataclass(frozen=True)
class Check:
    """A check of the machine, which produces one `Record` when it runs.

    Attributes:
      name: name of the check in the output of `bacr doctor`.
      function: called as `function(subject, *arguments)`. It must be a module-level function,
        because it is pickled.
      arguments: additional positional arguments for the function.
      keys: config overrides, by dotted key, that may work around the problem if the check is broken
        on a GPU.
      advice: suggestion for the user if the check is broken and its record contains no advice.
    """

    name: str
    function: Callable[..., Record]
    arguments: tuple[Any, ...] = ()
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    advice: str = ""

    def broken_record(self, reason: str) -> Record:
        """Returns the record for a check that could not finish."""
        return Record("broken", reason, name=self.name)

    def run(self, subject: Subject) -> Record:
        """Runs the check in this process. An exception in the check gives a broken record."""
        started = time.monotonic()
        try:
            record = self.function(subject, *self.arguments)
        except UserError as error:
            record = self.broken_record("; ".join(error.lines))
        # Catch everything, because a faulty machine can raise any exception.
        except Exception as error:
            reason = reason_of(error)[:_SHOWN_CHARACTERS]
            record = self.broken_record(f"{type(error).__name__}: {reason}")
        seconds = round(time.monotonic() - started, 2)
        return dataclasses.replace(record, name=self.name, seconds=seconds)


class _Clock:
    """Computes the deadlines of checks.

    The time limit of each check is scaled in proportion to the limit for all checks together.
    """

    def __init__(self, most_seconds: float):
        self._share = most_seconds / MOST_SECONDS
        self._end = time.monotonic() + most_seconds

    def has_time(self) -> bool:
        """True if the total time limit has not been reached."""
        return time.monotonic() < self._end

    def deadline(self, allowed: float) -> float:
        """Returns the deadline of a check that starts now, as a value of `time.monotonic()`.

        Args:
          allowed: time limit of the check in seconds when the total limit is MOST_SECONDS. It is
            scaled in proportion to the actual total limit.
        """
        return min(time.monotonic() + allowed * self._share, self._end)


def run_checks(
    checks: Sequence[Check], subject: Subject, most_seconds: float = MOST_SECONDS
) -> Iterator[Record]:
    """Runs checks one after another in a child process.

    After a check that is broken or does not finish in time, the remaining checks continue in a new
    process. A check that is broken on a GPU is run a second time with its `keys`, and its record
    contains the keys if they fix the problem.

    A check that does not finish is reported as broken if it had its full time limit and the machine
    was not busy. Otherwise it is reported as a warning. Checks that could not start before the
    total time limit are also reported as warnings.

    Args:
      checks: checks to run, in this order.
      subject: the run for which the machine is checked.
      most_seconds: time limit in seconds for all checks together. The limit of each check is scaled
        in proportion to this limit.

    Yields:
      The record of each check, as soon as it is available.
    """
    with subject.with_temporary() as prepared:
        yield from _records_of(checks, prepared, most_seconds)


def _records_of(checks: Sequence[Check], subject: Subject, most_seconds: float) -> Iterator[Record]:
    """Yields the records of checks that all use the same temporary folder (see `run_checks`)."""
    waiting = list(checks)
    clock = _Clock(most_seconds)
    on_gpu = False
    while waiting and clock.has_time():
        allowed = FIRST_SECONDS
        stopped: Record | None = None
        with child_process(waiting, subject) as next_record:
            while waiting and stopped is None:
                check = waiting.pop(0)
                started = time.monotonic()
                record = next_record(check, clock.deadline(allowed))
                if record is None:
                    stopped = overdue_record(check, time.monotonic() - started, allowed)
                elif record.status == "broken":
                    stopped = record
                else:
                    on_gpu |= record.values.get("platform") == "gpu"
                    allowed = CHECK_SECONDS
                    yield record
        if stopped is not None:
            yield _complete_broken(stopped, check, subject, clock, on_gpu=on_gpu)
    for check in waiting:
        yield Record("warn", f"not done: the {most_seconds:g} s were over", name=check.name)


def _complete_broken(
    record: Record, check: Check, subject: Subject, clock: _Clock, *, on_gpu: bool
) -> Record:
    """Adds advice to the record of a broken check, and config keys that work around the problem.

    On a GPU, a check with `keys` is run again in a new process with these keys applied to the
    config. The keys are added to the record if the check then succeeds.
    """
    if record.status != "broken":
        return record
    record = dataclasses.replace(record, advice=record.advice or check.advice)
    if not on_gpu or not check.keys:
        return record
    with child_process([check], subject.with_keys(check.keys)) as next_record:
        second = next_record(check, clock.deadline(FIRST_SECONDS))
    if second is None or second.status == "broken":
        return record
    return dataclasses.replace(record, keys=check.keys)


def overdue_record(check: Check, seconds: float, allowed: float) -> Record:
    """Builds the record of a check that has not finished.

    The status is `broken` if the check counts as hanging, and `warn` otherwise.

    Args:
      check: the check.
      seconds: time in seconds for which the check has been running.
      allowed: time limit in seconds above which a check counts as hanging, unless the machine is
        busy.
    """
    # Imported here because it imports JAX, which --help does not need.
    from bacr_jax.parallel import processes

    load = os.getloadavg()[0]
    cores = processes.cores()
    busy = load > _BUSY_LOAD * cores
    if seconds >= allowed and not busy:
        return check.broken_record(f"has not ended after {seconds:.0f} s")
    reason = f"not finished after {seconds:.0f} s"
    advice = "pass a larger --seconds"
    if busy:
        reason += f", on a busy machine (load {load:.1f}, {cores} cores)"
        advice = f"stop other processes, or {advice}"
    return Record("warn", reason, advice, name=check.name)


@contextlib.contextmanager
def child_process(checks: Sequence[Check], subject: Subject) -> Iterator[NextRecord]:
    """Starts a process that runs checks one after another, and kills it when the context exits.

    Yields:
      A function that waits for the record of the next check until a deadline. If the process dies,
      the function returns a broken record with the last line of the process's output.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    with NamedTemporaryFile(prefix="bacr-doctor-") as output:
        arguments = (list(checks), subject, sender, output.name)
        process = spawn.Process(target=_run_in_child, args=arguments)
        process.start()
        # Close the parent's copy of the sending end, so that the pipe is closed when the child
        # dies.
        sender.close()
        pid = process.pid
        assert pid is not None

        def next_record(check: Check, deadline: float) -> Record | None:
            if not receiver.poll(max(deadline - time.monotonic(), 0.0)):
                return None
            with contextlib.suppress(EOFError, OSError):
                return receiver.recv()
            process.join()
            return _dead_record(check, process.exitcode or 0, Path(output.name))

        try:
            yield next_record
        finally:
            process.kill()
            # The child is the leader of its session, so this also kills the processes that it
            # started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            process.join()


def _dead_record(check: Check, exit_code: int, output: Path) -> Record:
    """Builds the record of a check whose process died.

    Args:
      check: the check that was running.
      exit_code: exit code of the process. A negative value is the number of the signal that killed
        it.
      output: file with the process's stdout and stderr.
    """
    reason = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    lines = output.read_text(errors="replace").strip().splitlines()
    last_line = lines[-1][:_SHOWN_CHARACTERS] if lines else ""
    return check.broken_record(f"ended its process by {reason}: {last_line}")


def _run_in_child(
    checks: Sequence[Check], subject: Subject, sender: Connection, output_path: str
) -> None:
    """Runs checks in the child process and sends their records through a pipe.

    Args:
      checks: checks to run, in this order.
      subject: the run for which the machine is checked.
      sender: the sending end of the pipe.
      output_path: file to which stdout and stderr are redirected.
    """
    os.setsid()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with open(output_path, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # Allow as much GPU memory as a training run, but do not preallocate it, because a check may
    # start other processes that need it.
    set_memory_fraction()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Set the same XLA flag as a training run.
    allow_fast_additions()
    for check in checks:
        sender.send(check.run(subject))


def _exit_with_parent() -> None:
    """Waits for the parent process to end, then terminates this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
