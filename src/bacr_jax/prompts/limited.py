"""Loads tokenizers and renders chat templates of untrusted models in a resource-limited process.

A chat template is a program, and the Rust tokenizer library can abort the process. Both therefore
run first in a separate process with limited CPU time and memory (`limited_worker.py`). The main
process only loads the same files or uses the rendered text if this succeeds. The limited process is
started once and shared by all requests.
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

# Timeout for a reply in seconds of wall-clock time, including the start of the process. It is
# generous, because on a busy machine a request can take many times its CPU time limit.
CLOCK_SECONDS = 300.0
_WORKER = Path(__file__).with_name("limited_worker.py")
# Environment variables of the process. It is single-threaded, because every thread needs address
# space.
_ONE_THREAD = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
}


class Failed(Exception):
    """Raised if a request fails. The message is the reason, phrased as part of a sentence."""


class LimitedProcess:
    """A process that handles one request at a time and is restarted if it has exited."""

    def __init__(self) -> None:
        """Initializes the object. The process is started by `start` or the first request."""
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = os.getpid()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process if it is not running, without waiting until it is ready."""
        if self._parent != os.getpid():
            # After a fork, the pipes belong to the parent process.
            self._process = None
            self._parent = os.getpid()
        if self._process is not None and self._process.poll() is None:
            return
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            # -P prevents modules in the worker's folder from shadowing other modules of the same
            # name.
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | paths | _ONE_THREAD,
            start_new_session=True,
        )

    def ask(self, operation: str, *, seconds: float, memory: int, **values: Any) -> Any:
        """Runs an operation in the process and returns its result.

        Args:
          operation: key in `limited_worker.OPERATIONS`.
          seconds: CPU time limit, in seconds.
          memory: limit for additionally allocated memory, in bytes.
          values: arguments of the operation, which are sent as JSON.

        Raises:
          Failed: If the operation raised an error, exceeded a limit or terminated the process.
        """
        request = {"operation": operation, "seconds": seconds, "memory": memory, **values}
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            try:
                reply = self._exchange(line, seconds) or self._exchange(line, seconds)
            except BaseException:
                # An interrupted request, for example by Ctrl-C, leaves its reply in the pipe, where
                # the next request would take it for its own reply.
                self.close()
                raise
        if reply is None:
            raise Failed("its process exited before it replied")
        if "error" in reply:
            raise Failed(reply["error"])
        return reply["value"]

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any] | None:
        """Sends a request and returns the reply, or None if the process exited because it was idle.

        Raises:
          Failed: If the process exceeded a limit or exited for any other reason.
        """
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        content = b""
        # Writing fails if the process has exited. This case is handled when reading the reply.
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
                raise Failed(f"did not finish within {CLOCK_SECONDS:g} s")
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
            raise Failed(f"needs more than {seconds:g} s of CPU time")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise Failed(f"terminates its process ({how})")

    def close(self) -> None:
        """Terminates the process."""
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
    """Returns the resource-limited process shared by all requests of the current process."""
    process = LimitedProcess()
    atexit.register(process.close)
    return process
