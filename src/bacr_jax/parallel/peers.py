"""Whether the other processes of a run are alive, and one line when they are not.

JAX ends a process whose peers are gone by SIGABRT, or leaves it waiting. So each says once a second
what it does, in the key-value store by which JAX had them find each other. Whoever misses one says
which, and leaves as a stopped run does.
"""

import contextlib
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

# Seconds between two words of a process; of silence until it is lost, also where a collective has
# failed meanwhile; between looks, beyond which this process was stopped itself.
BEAT, SILENCE, SILENCE_AFTER_FAILURE, OWN_GAP = 1.0, 30.0, 5.0, 10.0
# A phase that lasts so many times its longest, and so many seconds, will not end.
STUCK_TIMES, STUCK_SECONDS = 10.0, 900.0
_ENDED, _DONE = "ended", "done"
_PLACE = "bacr/peers/"
_BARRIERS = itertools.count()

OnPhase = Callable[[str, int], None]
# Set once the host of process 0 has closed its connection.
_first_gone = threading.Event()


def relay(address: str) -> str:
    """An address on this machine that leads to another one, and stays open when that one closes.

    JAX's client would end this process within a millisecond of the other end's closing.
    """
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection((host.strip("[]"), int(port)))
            except OSError:
                near.close()  # Not there yet: the client tries again.
                continue
            _first_gone.clear()
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=copy, args=(one, other, near), daemon=True).start()

    def copy(source: socket.socket, sink: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with contextlib.suppress(OSError):  # What is sent to one who is gone is lost.
                    sink.sendall(data)
        if source is near:
            near.close()
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
        elif near.fileno() != -1:
            _first_gone.set()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


class Peers:
    """What the processes of a run said last in the store of JAX's coordination service."""

    def __init__(
        self, store: Any, index: int, count: int, clock: Callable[[], float] = time.monotonic
    ):
        self._store, self._index, self._clock = store, index, clock
        self._said: dict[str, Any] = {"host": socket.gethostname(), "phase": "start"}
        self._said |= {"step": 0, "beat": 0}
        self._since, self._longest = clock(), dict[str, float]()
        # The newest words of each, and when they were heard.
        self._rows: dict[int, dict[str, Any]] = {i: {} for i in range(count)}
        self._heard = dict.fromkeys(range(count), clock())
        self._looked, self._exchanged, self._told = clock(), clock(), ""

    def enter(self, phase: str, step: int | None = None) -> None:
        """This process begins a phase of a step; None: of the same."""
        step = self._said["step"] if step is None else step
        before, now = self._said["phase"], self._clock()
        self._longest[before] = max(self._longest.get(before, 0.0), now - self._since)
        self._said, self._since = self._said | {"phase": phase, "step": step}, now

    def exchange(self) -> None:
        """Says what this process does and hears the others."""
        self._said["beat"] += 1
        self._store.key_value_set(
            f"{_PLACE}{self._index}", json.dumps(self._said), allow_overwrite=True
        )
        found = {
            key.rpartition("/")[2]: text for key, text in self._store.key_value_dir_get(_PLACE)
        }
        self._told = found.pop("lost", "")
        for index, row in ((int(name), json.loads(text)) for name, text in found.items()):
            if self._rows[index] != row:
                self._rows[index], self._heard[index] = row, self._clock()
        self._exchanged = self._clock()

    def tell(self, line: str) -> None:
        """Has the others say the same of what was lost."""
        with contextlib.suppress(Exception):
            self._store.key_value_set(f"{_PLACE}lost", line, allow_overwrite=True)

    def lost(self, silence: float = SILENCE) -> str | None:
        """What has gone wrong with the processes of this run; None: nothing."""
        now, looked = self._clock(), self._looked
        self._looked = now
        if now - looked > OWN_GAP:
            # It was stopped itself, perhaps with the others.
            self._heard, self._exchanged = dict.fromkeys(self._heard, now), now
        if self._told:
            return self._told
        if _first_gone.is_set() and self._rows[0].get("phase") != _DONE:
            return self._line(0, "has closed its connection")
        # The store is process 0's: without it nobody is heard.
        ages = {i: self._exchanged - heard for i, heard in self._heard.items()}
        ages[0] = max(ages[0], now - self._exchanged)
        for other, age in ages.items():
            done = other == self._index or self._rows[other].get("phase") == _DONE
            if age > silence and not done:
                return self._line(other, f"was not heard of for {age:.0f} s")
        phase, spent = self._said["phase"], now - self._since
        longest = self._longest.get(phase)
        if longest is not None and spent > max(STUCK_SECONDS, STUCK_TIMES * longest):
            what = f"has been in it for {spent:.0f} s, where {longest:.0f} s were the longest"
            return self._line(self._index, what)
        return None

    def _line(self, process: int, what: str) -> str:
        row = self._said if process == self._index else self._rows[process]
        host, step, phase = (row.get(name, "?") for name in ("host", "step", "phase"))
        return (
            f"process {process} on {host} was lost at step {step} ({phase}): it {what}; once its "
            "host is well, the same command goes on from the last checkpoint"
        )


@contextlib.contextmanager
def watched(expected: tuple[type[BaseException], ...] = ()) -> Iterator[OnPhase]:
    """Watches the other processes while it is open, and leaves with 75 when one is lost.

    All processes close it together, or raise together what is `expected`. With one process it does
    nothing.
    """
    import jax
    from jax._src import distributed

    index, count, store = jax.process_index(), jax.process_count(), distributed.global_state.client
    if count == 1 or store is None:
        yield lambda phase, step: None
        return
    peers, closed, lock = Peers(store, index, count), threading.Event(), threading.Lock()

    def listen() -> None:
        while not closed.wait(BEAT):
            with contextlib.suppress(Exception):  # Silence is what counts.
                peers.exchange()

    def look(silence: float = SILENCE) -> None:
        with lock:
            if (line := peers.lost(silence)) is None:
                return
            sys.stdout.flush()
            os.write(2, f"{printable(line)}\n".encode())
            if index == 0:
                peers.tell(line)
                time.sleep(3 * BEAT)  # The others hear of it through this process.
            os._exit(STOPPED)

    def judge() -> None:
        while not closed.wait(BEAT):
            look()

    for work in (listen, judge):
        threading.Thread(target=work, name="peers", daemon=True).start()
    last = _DONE
    try:
        yield peers.enter
        # Process 0 writes its reports.
        store.wait_at_barrier(f"{_PLACE}end/{next(_BARRIERS)}", 10**12)
    except BaseException as error:
        last = last if isinstance(error, expected) else _ENDED
        # A collective that fails is what a lost process looks like at first.
        until = time.monotonic() + 2 * SILENCE_AFTER_FAILURE
        while not isinstance(error, (UserError, *expected)) and time.monotonic() < until:
            look(SILENCE_AFTER_FAILURE)
            time.sleep(BEAT / 2)
        raise
    finally:
        closed.set()
        peers.enter(last)
        with contextlib.suppress(Exception):
            peers.exchange()
