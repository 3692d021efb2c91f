"""Converts SIGTERM, SIGINT and Slurm's SIGUSR1 into an exception where work can be saved."""

import os
import signal
import time
import types
from typing import Any

from bacr_jax.config.cli import STOPPED
from bacr_jax.parallel import processes

# Exit code of a stopped command that can be resumed by calling it again.
EXIT_CODE = STOPPED
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Seconds in which a second signal is the same request. `timeout` and some schedulers send it twice,
# to the process and to its group.
_SAME_REQUEST_SECONDS = 0.5


class Preempted(Exception):
    """A signal requests that the process ends; the message is the signal's name."""


class PreemptionHandler:
    """Context manager that records the first signal, so that `poll` raises it.

    A second signal ends the process at once. A rollout or an evaluation stops where it polls; the
    caller then saves its results and exits with `EXIT_CODE`. Outside of the context, signals have
    their usual effect.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._received_at = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "PreemptionHandler":
        """Installs the handlers. Python allows this in the main thread only."""
        for number in SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous_handlers.items():
            # None for a handler that was not set by Python, and can't be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _record(self, number: int, frame: types.FrameType | None) -> None:
        """Handles a signal: records the first one, and ends the process at the second."""
        now = time.monotonic()
        if self._signal is None:
            self._signal = number
            self._received_at = now
            name = signal.Signals(number).name
            message = f"\n{name}: stopping in good order; a second signal leaves at once\n"
            # Not by print(), because the signal may have interrupted another print().
            os.write(2, message.encode())
        elif now - self._received_at > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            # The kernel does not end the first process of a container by its own signal.
            os._exit(128 + number)

    def poll(self) -> None:
        """Raises `Preempted` if any process of the run received a signal.

        With several processes this is a collective, so all processes must call it.
        """
        number = processes.largest(self._signal or 0)
        if number:
            raise Preempted(signal.Signals(number).name)
