"""Starts vLLM engines and servers on a CPU that are small enough for a test."""

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil

# One process, a small KV cache, and no kernels except Triton's, which run in its interpreter.
ENGINE = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "distributed_executor_backend": "uni",
}
OPTIONS = [
    word
    for name, value in ENGINE.items()
    for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
]


@contextlib.contextmanager
def engine_of(folder, **how):
    """Starts an engine in this process, and shuts it down at the end of the block."""
    from vllm import LLM

    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    length = min(ENGINE["max_model_len"], positions)
    llm = LLM(str(folder), **{**ENGINE, "max_model_len": length, "max_logprobs": -1, **how})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def free_port():
    """Returns a port that is not in use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def processes_at(port):
    """Returns the processes of the vLLM server at a port, which this process started."""
    parents = []
    for process in psutil.Process().children():
        # A process that has ended has no command line.
        with contextlib.suppress(psutil.NoSuchProcess):
            if {"--port", str(port)} <= set(process.cmdline()):
                parents.append(process)
    return [*parents, *(child for one in parents for child in one.children(recursive=True))]


@contextlib.contextmanager
def forgetful(url, loads, port):
    """Runs a proxy in front of a server that stops loading weights after `loads` requests.

    The proxy forwards every other request. It replies to further requests to load weights with
    success, but does not forward them.
    """

    class Between(BaseHTTPRequestHandler):
        def do_GET(self):
            self.hand_on(None)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/collective_rpc":
                seen.append(body)
                if len(seen) > loads:
                    self.answer(200, b'{"results": [null]}')
                    return
            self.hand_on(body)

        def hand_on(self, body):
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url + self.path, body, headers)
            try:
                with urllib.request.urlopen(request, timeout=300) as found:
                    self.answer(found.status, found.read())
            except urllib.error.HTTPError as error:
                self.answer(error.code, error.read())

        def answer(self, status, raw):
            # Without Content-Length, the body ends when the connection is closed.
            self.send_response(status)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_):
            pass

    seen = []
    with ThreadingHTTPServer(("127.0.0.1", port), Between) as between:
        threading.Thread(target=between.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            between.shutdown()


@contextlib.contextmanager
def server_of(folder, log, *options, port=None):
    """Starts a server in a new process, to which weights can be sent, and yields its URL."""
    port = port or free_port()
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"]
    with log.open("wb") as file:
        settings = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        process = subprocess.Popen(
            [*words, *OPTIONS, *options], env=settings, stdout=file, stderr=file
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 240
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            time.sleep(0.5)
        else:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        yield url
    finally:
        process.terminate()
        process.wait(60)
