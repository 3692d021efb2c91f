"""Converts SIGTERM, SIGINT and Slurm's SIGUSR1 to an exception when the work can be saved."""

import contextlib
import os
import signal
import time
import types
from typing import Any

from bacr_jax.config.cli import STOPPED
from bacr_jax.parallel import processes

# Exit code of a stopped command, which can be resumed by running it again.
EXIT_CODE = STOPPED
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Time in seconds within which a second signal counts as the same request. `timeout` and some
# schedulers send the signal twice, to the process and to its process group.
_SAME_REQUEST_SECONDS = 0.5


class Preempted(Exception):
    """Raised after a signal requested that the process stops. The message is the signal name."""


class PreemptionHandler:
    """Context manager that records the first signal, so that `poll` can raise an exception.

    Long work, such as a rollout, calls `poll` regularly and stops if it raises. The caller then
    saves its results and exits with `EXIT_CODE`. A second signal terminates the process
    immediately. Outside of the context, signals have their usual effect.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._received_at = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "PreemptionHandler":
        """Installs the signal handlers. Python allows this only in the main thread."""
        for number in SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous_handlers.items():
            # The handler is None if it was not installed by Python. Such a handler
            # can't be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _record(self, number: int, frame: types.FrameType | None) -> None:
        """Records the first signal, and terminates the process at the second signal."""
        now = time.monotonic()
        if self._signal is None:
            self._signal = number
            self._received_at = now
            name = signal.Signals(number).name
            message = (
                f"\n{name}: stopping after the current work is saved; send a second signal to "
                "stop immediately\n"
            )
            # Do not use print(), because the signal may have interrupted another
            # print().
            # The reader of stderr may have ended.
            with contextlib.suppress(OSError):
                os.write(2, message.encode())
        elif now - self._received_at > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            # A process with PID 1, such as the main process of a container, ignores signals with
            # the default action, so it must exit explicitly.
            os._exit(128 + number)

    def poll(self) -> None:
        """Raises `Preempted` if any process of the run has received a signal.

        With several processes, this is a collective operation that all processes must call.
        """
        number = processes.largest(self._signal or 0)
        if number:
            raise Preempted(signal.Signals(number).name)
