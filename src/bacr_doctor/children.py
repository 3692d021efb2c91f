"""Checks in processes of their own: one that crashes or hangs ends its process and no other."""

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

# Seconds of all checks and of one; of the first in its process, which must import what it needs.
MOST_SECONDS, CHECK_SECONDS, FIRST_SECONDS = 600.0, 120.0, 210.0
# Processes that wait for a core, per core, from which on a machine counts as busy.
_BUSY_LOAD = 1.5
# Waits until then for the record of the check that is being done; None if it has not ended.
Next = Callable[["Check", float], Record | None]


@dataclass(frozen=True)
class Check:
    """One line of the page.

    Attributes:
      does: a function of a module, from a subject and `arguments` to a record.
      keys: of a config, that may go round it where it breaks on a GPU.
      advice: what else to do then.
    """

    name: str
    does: Callable[..., Record]
    arguments: tuple[Any, ...] = ()
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    advice: str = ""

    def broken(self, reason: str) -> Record:
        """The record of a check that did not come to its end."""
        return Record("broken", reason, name=self.name)

    def do(self, subject: Subject) -> Record:
        """Does it here; whatever it raises is a record."""
        started = time.monotonic()
        try:
            found = self.does(subject, *self.arguments)
        except UserError as error:
            found = self.broken("; ".join(error.lines))
        # A check may break in any way that a machine can.
        except Exception as error:
            found = self.broken(f"{type(error).__name__}: {reason_of(error)[:300]}")
        seconds = round(time.monotonic() - started, 2)
        return dataclasses.replace(found, name=self.name, seconds=seconds)


def examine(
    checks: Sequence[Check], subject: Subject, most_seconds: float = MOST_SECONDS
) -> Iterator[Record]:
    """Does checks, those after one that broke in a fresh process; each record as soon as it's here.

    What broke on a GPU is done once more under the check's keys, which the record names if they
    help. `most_seconds` are of all checks, and of each in proportion. A check that does not end is
    broken if it had its full time on a machine that is not busy, and not finished otherwise; those
    that don't begin within `most_seconds` are not done.
    """
    waiting, end = list(checks), time.monotonic() + most_seconds
    slower, on_gpu = most_seconds / MOST_SECONDS, False
    until = lambda allowed: min(time.monotonic() + allowed * slower, end)
    while waiting and time.monotonic() < end:
        allowed = FIRST_SECONDS
        stopped: Record | None = None
        with working(waiting, subject) as following:
            while waiting and stopped is None:
                check = waiting.pop(0)
                started = time.monotonic()
                record = following(check, until(allowed))
                if record is None:
                    stopped = overdue(check, time.monotonic() - started, allowed)
                elif record.status == "broken":
                    stopped = record
                else:
                    on_gpu |= record.values.get("platform") == "gpu"
                    allowed = CHECK_SECONDS
                    yield record
        if stopped is not None and stopped.status == "broken":
            stopped = dataclasses.replace(stopped, advice=stopped.advice or check.advice)
            if on_gpu and check.keys:
                with working([check], subject.under(check.keys)) as following:
                    again = following(check, until(FIRST_SECONDS))
                if again is not None and again.status != "broken":
                    stopped = dataclasses.replace(stopped, keys=check.keys)
        if stopped is not None:
            yield stopped
    for check in waiting:
        yield Record("warn", f"not done: the {most_seconds:g} s were over", name=check.name)


def overdue(check: Check, seconds: float, allowed: float) -> Record:
    """Makes the record of a check that has not ended after some seconds.

    Args:
      allowed: seconds after which a check on an idle machine hangs.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = load > _BUSY_LOAD * cores
    if seconds >= allowed and not busy:
        return check.broken(f"has not ended after {seconds:.0f} s")
    why = f"not finished after {seconds:.0f} s"
    advice = "write a larger --seconds"
    if busy:
        why += f", on a busy machine (load {load:.1f}, {cores} cores)"
        advice = f"stop other processes, or {advice}"
    return Record("warn", why, advice, name=check.name)


@contextlib.contextmanager
def working(checks: Sequence[Check], subject: Subject) -> Iterator[Next]:
    """A process that does checks one after the other; it is no more when this ends."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    with NamedTemporaryFile(prefix="bacr-doctor-") as said:
        process = spawn.Process(target=_work, args=(list(checks), subject, theirs, said.name))
        process.start()
        theirs.close()
        pid = process.pid
        assert pid is not None

        def following(check: Check, until: float) -> Record | None:
            if not ours.poll(max(until - time.monotonic(), 0.0)):
                return None
            with contextlib.suppress(EOFError, OSError):
                return ours.recv()
            process.join()
            code = process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            lines = Path(said.name).read_text(errors="replace").strip().splitlines()
            return check.broken(f"ended its process by {how}: {lines[-1][:300] if lines else ''}")

        try:
            yield following
        finally:
            process.kill()
            # With all that it has started: it leads a session of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            process.join()


def _work(checks: Sequence[Check], subject: Subject, records: Connection, said: str) -> None:
    """Does checks in this process and sends their records; what is printed goes into a file."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(said, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # Memory is left for the processes that a check starts itself.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # As a run does.
    allow_fast_additions()
    for check in checks:
        records.send(check.do(subject))


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
