"""Detects that another process of a run was lost, and exits with a single clear error message.

If a process of a run ends, JAX aborts the other processes with SIGABRT or leaves them waiting.
Therefore each process writes a heartbeat with its phase and step once per second to the key-value
store of JAX's coordination service. A process that no longer receives the heartbeats of another
process prints which process was lost, and exits with the exit code of a stopped run. A process that
fails ends with its own exit code (`exit_if_failed`).
"""

import contextlib
import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bacr_jax.config.cli import STOPPED
from bacr_jax.errors import UserError, printable
from bacr_jax.out_of_memory import OutOfMemory

# Interval between two heartbeats of a process, in seconds.
BEAT = 1.0
# Time without a heartbeat after which a process counts as lost, in seconds.
SILENCE = 30.0
# As `SILENCE`, after a collective operation has failed in this process.
SILENCE_AFTER_FAILURE = 5.0
# Time between two checks above which this process itself was suspended, in seconds.
SUSPENDED_GAP = 10.0
# A phase counts as stuck after `STUCK_TIMES` times its longest duration, but not before
# `STUCK_SECONDS` seconds.
STUCK_TIMES = 10.0
STUCK_SECONDS = 900.0
# Final phases of a process: it failed, or it finished.
_ENDED = "ended"
_DONE = "done"
# Prefix of the keys in the store.
_KEYS = "bacr/peers/"
# Counter for the barriers at the end of `watched`, because a barrier name can be used only once.
_BARRIERS = itertools.count()

# Called with the name and the step of each phase that begins.
OnPhase = Callable[[str, int], None]
# Set when process 0 has closed its connection to this process.
_first_missing = threading.Event()


def relay(address: str) -> str:
    """Opens a local address that forwards connections to another address.

    The local address stays open when the other address closes its connection. JAX's client connects
    through this relay, because it would otherwise terminate this process within a millisecond after
    the coordinator closes the connection.

    Args:
      address: address to forward to, as host:port.

    Returns:
      The local address, as host:port.
    """
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection((host.strip("[]"), int(port)))
            except OSError:
                near.close()  # The coordinator has not started yet. The client retries.
                continue
            _first_missing.clear()
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=copy, args=(source, sink, near), daemon=True).start()

    def copy(source: socket.socket, sink: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with contextlib.suppress(OSError):  # Data for a closed connection is discarded.
                    sink.sendall(data)
        if source is near:
            near.close()
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
        elif near.fileno() != -1:
            _first_missing.set()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


class Peers:
    """Heartbeats of all processes of a run, in the store of JAX's coordination service."""

    def __init__(
        self, store: Any, index: int, count: int, clock: Callable[[], float] = time.monotonic
    ):
        """Creates the heartbeat of this process, with the phase `start`.

        Args:
          store: client of JAX's coordination service.
          index: index of this process.
          count: number of processes.
          clock: returns the current time in seconds.
        """
        now = clock()
        self._store = store
        self._index = index
        self._clock = clock
        # The heartbeat of this process.
        self._status: dict[str, Any] = {
            "host": socket.gethostname(),
            "phase": "start",
            "step": 0,
            "beat": 0,
        }
        self._phase_start = now
        # Maximum duration of each finished phase, in seconds.
        self._longest: dict[str, float] = {}
        # The latest heartbeat of each process, and the time at which it arrived.
        self._heartbeats: dict[int, dict[str, Any]] = {i: {} for i in range(count)}
        self._arrived = dict.fromkeys(range(count), now)
        self._last_check = now
        self._last_exchange = now
        # Message of process 0 about a lost process.
        self._announced = ""

    @property
    def is_first(self) -> bool:
        """True in process 0, which provides the store."""
        return self._index == 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Starts a new phase of this process.

        Args:
          phase: name of the phase.
          step: step of the phase, or None to keep the previous step.
        """
        now = self._clock()
        finished_phase = self._status["phase"]
        seconds = now - self._phase_start
        self._longest[finished_phase] = max(self._longest.get(finished_phase, 0.0), seconds)
        if step is None:
            step = self._status["step"]
        # Another thread reads these attributes. Therefore the time is set first, and the
        # dict is replaced rather than modified.
        self._phase_start = now
        self._status = self._status | {"phase": phase, "step": step}

    def exchange(self) -> None:
        """Writes the heartbeat of this process and reads the heartbeats of all processes.

        Also reads the message of process 0 about a lost process, if there is one.
        """
        self._status["beat"] += 1
        self._store.key_value_set(
            f"{_KEYS}{self._index}", json.dumps(self._status), allow_overwrite=True
        )
        texts = {}
        for key, text in self._store.key_value_dir_get(_KEYS):
            texts[key.rpartition("/")[2]] = text
        self._announced = texts.pop("lost", "")
        for name, text in texts.items():
            index = int(name)
            heartbeat = json.loads(text)
            if self._heartbeats[index] != heartbeat:
                self._heartbeats[index] = heartbeat
                self._arrived[index] = self._clock()
        self._last_exchange = self._clock()

    def announce(self, line: str) -> None:
        """Publishes a message about a lost process, which all other processes print as well."""
        with contextlib.suppress(Exception):
            self._store.key_value_set(f"{_KEYS}lost", line, allow_overwrite=True)

    def lost(self, silence: float = SILENCE) -> str | None:
        """Returns a message about a process that is lost or stuck, or None if all are healthy.

        Args:
          silence: time without a heartbeat after which a process counts as lost, in seconds.
        """
        now = self._clock()
        seconds_since_check = now - self._last_check
        self._last_check = now
        if seconds_since_check > SUSPENDED_GAP:
            # This process was suspended, possibly together with the others.
            self._arrived = dict.fromkeys(self._arrived, now)
            self._last_exchange = now
        if self._announced:
            return self._announced
        if _first_missing.is_set() and self._heartbeats[0].get("phase") != _DONE:
            return self._line(0, "closed its connection")
        # Ages are measured at the last exchange. Process 0 hosts the store, so no exchange
        # succeeds without it.
        ages = {i: self._last_exchange - arrived for i, arrived in self._arrived.items()}
        ages[0] = max(ages[0], now - self._last_exchange)
        for other, age in ages.items():
            is_done = self._heartbeats[other].get("phase") == _DONE
            if age > silence and other != self._index and not is_done:
                return self._line(other, f"sent no heartbeat for {age:.0f} s")
        phase_seconds = now - self._phase_start
        longest = self._longest.get(self._status["phase"])
        if longest is not None and phase_seconds > max(STUCK_SECONDS, STUCK_TIMES * longest):
            durations = (
                f"{phase_seconds:.0f} s, more than its longest duration so far, {longest:.0f} s"
            )
            return self._line(self._index, f"has been in this phase for {durations}")
        return None

    def wait_until_ended(self, timeout: float) -> None:
        """Waits until all other processes have failed or finished, but not longer than `timeout`.

        The store of process 0 is available to the others while process 0 waits.

        Args:
          timeout: maximum waiting time in seconds.
        """
        deadline = self._clock() + timeout
        while self._clock() < deadline:
            # A failed exchange changes no heartbeat.
            with contextlib.suppress(Exception):
                self.exchange()
            phases = {heartbeat.get("phase") for heartbeat in self._heartbeats.values()}
            # Another process writes its last phase before it reads the store for the last time.
            # Without the store, it would wait until JAX aborts it.
            time.sleep(BEAT)
            if phases <= {_ENDED, _DONE}:
                return

    def _line(self, process: int, problem: str) -> str:
        """Returns the message about a lost process, with its host, step and phase."""
        status = self._status if process == self._index else self._heartbeats[process]
        host = status.get("host", "?")
        step = status.get("step", "?")
        phase = status.get("phase", "?")
        return (
            f"process {process} on {host} was lost at step {step} ({phase}): it {problem}; when "
            "its host works again, run the same command to continue from the last checkpoint"
        )


# The heartbeats of this process after it failed in `watched`, or None.
_failed: Peers | None = None


def exit_if_failed(code: int) -> None:
    """Ends this process with an exit code, if it is one of several and failed in `watched`.

    The error must have been printed. Otherwise JAX would wait five minutes at exit for the other
    processes, which may not have failed, and then abort this process with another exit code.

    Process 0 first gives the other processes time to raise the same error, for example about bad
    input, because they can't continue without process 0.

    Args:
      code: exit code of this process.
    """
    if _failed is None:
        return
    for stream in (sys.stdout, sys.stderr):
        # The reader of a pipe may have closed it.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if _failed.is_first:
        _failed.wait_until_ended(SILENCE)
    os._exit(code)


def _fail(peers: Peers) -> None:
    """Stores that this process failed, so that it exits without waiting for the other processes.

    An exception that no code handles is printed by `sys.excepthook`, which then ends the process.
    """
    global _failed
    if _failed is None:
        sys.excepthook = functools.partial(_print_and_exit, sys.excepthook)
    _failed = peers


def _print_and_exit(print_error: Callable[..., Any], *error: Any) -> None:
    """Prints an exception that was not handled, and ends this process as Python would."""
    print_error(*error)
    exit_if_failed(1)


@contextlib.contextmanager
def watched(expected: tuple[type[BaseException], ...] = ()) -> Iterator[OnPhase]:
    """Context manager that monitors the other processes, and exits with code 75 if one is lost.

    The context manager yields a function that must be called with the name and the step of each
    phase that begins. All processes must leave the context together. After an exception that is not
    expected, call `exit_if_failed`. With a single process, nothing is monitored.

    Args:
      expected: exceptions that all processes raise together. They do not mean that a process is
        lost.
    """
    import jax
    from jax._src import distributed

    index = jax.process_index()
    count = jax.process_count()
    store = distributed.global_state.client
    if count == 1 or store is None:
        yield lambda phase, step: None
        return
    peers = Peers(store, index, count)
    closed = threading.Event()
    lock = threading.Lock()

    def exchange_heartbeats() -> None:
        while not closed.wait(BEAT):
            # A failed exchange is detected by the missing heartbeat.
            with contextlib.suppress(Exception):
                peers.exchange()

    def exit_if_lost(silence: float = SILENCE) -> None:
        with lock:
            line = peers.lost(silence)
            if line is None:
                return
            # The readers of both streams may have ended.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            with contextlib.suppress(OSError):
                os.write(2, f"{printable(line)}\n".encode())
            if index == 0:
                peers.announce(line)
                # Keep the store of this process available until the other processes
                # have read the message.
                time.sleep(3 * BEAT)
            os._exit(STOPPED)

    def check() -> None:
        while not closed.wait(BEAT):
            exit_if_lost()

    for work in (exchange_heartbeats, check):
        threading.Thread(target=work, name="peers", daemon=True).start()
    last_phase = _DONE
    try:
        yield peers.enter
        # Wait for process 0, which writes the reports.
        store.wait_at_barrier(f"{_KEYS}end/{next(_BARRIERS)}", 10**12)
    except BaseException as error:
        if not isinstance(error, expected):
            last_phase = _ENDED
            _fail(peers)
        # A failed collective operation is often the first sign of a lost process.
        local_errors = (UserError, OSError, OutOfMemory)
        deadline = time.monotonic() + 2 * SILENCE_AFTER_FAILURE
        while not isinstance(error, (*local_errors, *expected)) and time.monotonic() < deadline:
            exit_if_lost(SILENCE_AFTER_FAILURE)
            time.sleep(BEAT / 2)
        raise
    finally:
        closed.set()
        peers.enter(last_phase)
        with contextlib.suppress(Exception):
            peers.exchange()
