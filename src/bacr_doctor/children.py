"""Runs checks in child processes, so that a check that crashes or hangs ends only its process.

`__main__` calls `run_checks`; checks that need a second process (`paths`, `rates`) call
`child_process`. What a check does is not decided here.
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
from bacr_jax.errors import UserError, reason_of

# Seconds of all checks together, of one check, and of a process's first check, which imports JAX.
MOST_SECONDS = 600.0
CHECK_SECONDS = 120.0
FIRST_SECONDS = 210.0
# Load average per core above which a machine counts as busy.
_BUSY_LOAD = 1.5
# Characters of an error or of a process's last line that a record shows.
_SHOWN_CHARACTERS = 300
# Waits for the record of a check until a time of `time.monotonic`; None if it is not finished then.
NextRecord = Callable[["Check", float], Record | None]


@dataclass(frozen=True)
class Check:
    """One check, which makes one record.

    Attributes:
      name: the name in the doctor's output.
      function: a function of a module (it is pickled), called as `function(subject, *arguments)`.
      arguments: further arguments of the function.
      keys: config keys that may work around the problem if the check is broken on a GPU.
      advice: what the user can do if the check is broken and its record has no advice.
    """

    name: str
    function: Callable[..., Record]
    arguments: tuple[Any, ...] = ()
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    advice: str = ""

    def broken_record(self, reason: str) -> Record:
        """Returns the record of a check that did not finish."""
        return Record("broken", reason, name=self.name)

    def run(self, subject: Subject) -> Record:
        """Runs the check in this process; an exception becomes a broken record."""
        started = time.monotonic()
        try:
            record = self.function(subject, *self.arguments)
        except UserError as error:
            record = self.broken_record("; ".join(error.lines))
        # A defective machine can raise any exception.
        except Exception as error:
            reason = reason_of(error)[:_SHOWN_CHARACTERS]
            record = self.broken_record(f"{type(error).__name__}: {reason}")
        seconds = round(time.monotonic() - started, 2)
        return dataclasses.replace(record, name=self.name, seconds=seconds)


class _Clock:
    """Time limits of the checks: each one's share of a total that may be shortened."""

    def __init__(self, most_seconds: float):
        self._share = most_seconds / MOST_SECONDS
        self._end = time.monotonic() + most_seconds

    def has_time(self) -> bool:
        """True if the total time is not over."""
        return time.monotonic() < self._end

    def deadline(self, allowed: float) -> float:
        """Returns when a check that starts now must end, in seconds of `time.monotonic`.

        Args:
          allowed: seconds of the check if the total time were MOST_SECONDS.
        """
        return min(time.monotonic() + allowed * self._share, self._end)


def run_checks(
    checks: Sequence[Check], subject: Subject, most_seconds: float = MOST_SECONDS
) -> Iterator[Record]:
    """Runs checks in one child process, and in a fresh one after a check that breaks.

    A check that breaks on a GPU is run once more with its `keys`; its record names the keys if they
    help. A check that does not end is broken if it had its full time on a machine that is not busy,
    and a warning otherwise. Checks that cannot start in time are warnings too.

    Args:
      most_seconds: seconds of all checks together; the time of each check scales with it.

    Yields:
      The record of each check, as soon as it is available.
    """
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
    """Adds the check's advice to a broken record, and its keys if they help on this GPU."""
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
    """Makes the record of a check that has not ended after some seconds.

    Args:
      allowed: seconds after which a check on an idle machine counts as hanging.
    """
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    busy = load > _BUSY_LOAD * cores
    if seconds >= allowed and not busy:
        return check.broken_record(f"has not ended after {seconds:.0f} s")
    reason = f"not finished after {seconds:.0f} s"
    advice = "write a larger --seconds"
    if busy:
        reason += f", on a busy machine (load {load:.1f}, {cores} cores)"
        advice = f"stop other processes, or {advice}"
    return Record("warn", reason, advice, name=check.name)


@contextlib.contextmanager
def child_process(checks: Sequence[Check], subject: Subject) -> Iterator[NextRecord]:
    """Starts a process that runs checks one after the other, and kills it at the end.

    Yields:
      A function that waits for the record of the next check. If the process dies, the record is
      broken and contains the last line that the process printed.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    with NamedTemporaryFile(prefix="bacr-doctor-") as output:
        arguments = (list(checks), subject, sender, output.name)
        process = spawn.Process(target=_run_in_child, args=arguments)
        process.start()
        # Only the child's copy stays open, so that its death ends the pipe.
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
            # Kills what the child started too, because the child leads a session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            process.join()


def _dead_record(check: Check, exit_code: int, output: Path) -> Record:
    """Makes the record of a check whose process died; a negative code is a signal's number."""
    reason = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    lines = output.read_text(errors="replace").strip().splitlines()
    last_line = lines[-1][:_SHOWN_CHARACTERS] if lines else ""
    return check.broken_record(f"ended its process by {reason}: {last_line}")


def _run_in_child(
    checks: Sequence[Check], subject: Subject, sender: Connection, output_path: str
) -> None:
    """Runs checks and sends their records; stdout and stderr go to a file."""
    os.setsid()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with open(output_path, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # JAX must leave GPU memory for the processes that a check starts.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # A training run sets the same flag.
    allow_fast_additions()
    for check in checks:
        sender.send(check.run(subject))


def _exit_with_parent() -> None:
    """Ends this process when its parent ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
