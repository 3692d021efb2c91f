"""Preemption: leaving a run in good order on SIGTERM, SIGINT or Slurm's SIGUSR1."""

import os
import signal
import time
import types
from typing import Any

from bacr_jax.config.cli import STOPPED
from bacr_jax.parallel import processes

# Nothing is wrong, the same command goes on.
EXIT_CODE = STOPPED
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# `timeout` and some schedulers send one request twice, to the process and to its group.
_SAME_REQUEST_SECONDS = 0.5


class Preempted(Exception):
    """The process was asked to end before its work was done; the message is the signal's name."""


class PreemptionHandler:
    """Notes the first signal, for `poll` to raise at a good moment; a second one ends the process.

    A context manager: outside of it signals do what they always do. A rollout or an evaluation is
    preempted where it polls; the caller saves what is whole and ends with `EXIT_CODE`.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "PreemptionHandler":
        """Starts listening; in the main thread only, as Python has it."""
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            # None: set by other than Python, which can't set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        now = time.monotonic()
        if self._number is None:
            self._number, self._at = number, now
            # print() may be in the middle of a line of its own.
            name = signal.Signals(number).name
            os.write(
                2, f"\n{name}: stopping in good order; a second signal leaves at once\n".encode()
            )
        elif now - self._at > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            # The kernel spares the first process of a container.
            os._exit(128 + number)

    def poll(self) -> None:
        """Raises `Preempted` if a signal has come, to any process of the run.

        With several processes this is a collective: all must call it at the same places.
        """
        number = processes.largest(self._number or 0)
        if number:
            raise Preempted(signal.Signals(number).name)
