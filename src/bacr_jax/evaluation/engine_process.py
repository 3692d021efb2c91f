"""A server of vLLM in an environment of its own, for as long as an evaluation takes."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bacr_jax.config.engine import Engine
from bacr_jax.errors import UserError
from bacr_jax.model.hf.held.http_json import EngineError, request_json

# A large model is read from a slow disk and compiled first.
_START_SECONDS, _STOP_SECONDS = 3600.0, 30.0
_PATIENCE = 0.5


@contextlib.contextmanager
def started(engine: Engine, folder: Path, *, dtype: str, slots: int) -> Iterator[str]:
    """Starts a server of a folder on this machine; gives its address, and stops it at the end.

    Args:
      engine: interpreter and further arguments.
      folder: exported folder.
      dtype: type in which it computes.
      slots: rows that it decodes together.

    Raises:
      UserError: it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [engine.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder.absolute()), "--served-model-name", "policy"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-num-seqs", str(slots), *engine.arguments]
    handle, name = tempfile.mkstemp(prefix="bacr-engine-", suffix=".log")
    log = Path(name)
    with os.fdopen(handle, "wb") as file:
        # A group of its own: it is stopped with its workers, and Ctrl-C reaches this process first.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        _stop(process)
    log.unlink(missing_ok=True)


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Until the server answers.

    Raises:
      UserError: it ended, or never answers.
    """
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise UserError(f"--engine-python: vLLM did not start ({_last_error(log)}); see {log}")
        try:
            asyncio.run(request_json("GET", f"{url}/v1/models", timeout=_STOP_SECONDS))
        except EngineError:
            time.sleep(_PATIENCE)
        else:
            return
    raise UserError(f"--engine-python: vLLM did not answer in {_START_SECONDS:g} s; see {log}")


def _last_error(log: Path) -> str:
    """The last line that names an error, shortened; or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\w*(Error|error)\b.*: ", line)]
    return (errors or lines or ["it said nothing"])[-1][-300:]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends a server and its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
