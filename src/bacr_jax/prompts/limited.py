"""Reads tokenizers and renders chat templates of untrusted folders in a limited process.

A template is a program, and the Rust reader of tokenizers can abort. Both therefore run first in a
process with limited time and memory (`limited_worker.py`). Only then does this process read the
same files or use the text. The limited process is started once and shared.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Longest time for a reply in seconds of wall-clock time, including the start of the process. A busy
# machine takes many times the processor time to which a request is limited.
CLOCK_SECONDS = 300.0
_WORKER = Path(__file__).with_name("limited_worker.py")
# Environment of the process. It has one thread, because each thread needs address space.
_ONE_THREAD = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
}


class Failed(Exception):
    """A request failed; the text is the reason, as a part of a sentence."""


class LimitedProcess:
    """A process that handles one request at a time, and is restarted if it has ended."""

    def __init__(self) -> None:
        """Prepares the object; the process starts with the first request or `start`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = os.getpid()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process if it is not running, and returns before it is ready."""
        if self._parent != os.getpid():
            # After a fork the pipes belong to the parent process.
            self._process = None
            self._parent = os.getpid()
        if self._process is not None and self._process.poll() is None:
            return
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            # -P keeps the modules of the worker's folder from hiding others of the same name.
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | paths | _ONE_THREAD,
            start_new_session=True,
        )

    def ask(self, operation: str, *, seconds: float, memory: int, **values: Any) -> Any:
        """Returns the result of an operation of the worker.

        Args:
          operation: key of `limited_worker.OPERATIONS`.
          seconds: limit of processor time.
          memory: limit of new memory, in bytes.
          values: arguments of the operation, which are sent as JSON.

        Raises:
          Failed: the operation raised, was stopped at its limits, or ended its process.
        """
        request = {"operation": operation, "seconds": seconds, "memory": memory, **values}
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            reply = self._exchange(line, seconds) or self._exchange(line, seconds)
        if reply is None:
            raise Failed("its process ended before it answered")
        if "error" in reply:
            raise Failed(reply["error"])
        return reply["value"]

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any] | None:
        """Sends a request and returns its reply; None if the process had ended because it was idle.

        Raises:
          Failed: the process exceeded a limit, or ended in another way.
        """
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        content = b""
        # Writing fails if the process has ended, which the reply shows below.
        with contextlib.suppress(OSError):
            process.stdin.write(line)
            process.stdin.flush()
        deadline = time.monotonic() + CLOCK_SECONDS
        output = select.poll()
        output.register(process.stdout, select.POLLIN)
        while not content.endswith(b"\n"):
            remaining = max(deadline - time.monotonic(), 0.0)
            if not output.poll(remaining * 1000):
                self.close()
                raise Failed(f"has not ended after {CLOCK_SECONDS:g} s")
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                break
            content += piece
        if content.endswith(b"\n"):
            reply: dict[str, Any] = json.loads(content)
            return reply
        code = process.wait()
        self.close()
        if code == -signal.SIGALRM:
            return None
        if code == -signal.SIGPROF:
            raise Failed(f"takes more than {seconds:g} s")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise Failed(f"ends its process by {how}")

    def close(self) -> None:
        """Ends the process."""
        process = self._process
        self._process = None
        if process is None or self._parent != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@functools.cache
def shared_process() -> LimitedProcess:
    """Returns the limited process for all requests of this process."""
    process = LimitedProcess()
    atexit.register(process.close)
    return process
