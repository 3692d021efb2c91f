"""The command: bad input is one line and exit code 2, SIGTERM finishes what runs, exit code 0."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import httpx
import pytest

import bacr_serve.__main__
import bacr_serve.app
from bacr_serve.__main__ import bind, is_local, main, parse, read_key, serve
from serve_world import OVERRIDES, chat, make_folder

MODEL = ["--model", "hf"]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "exactly one policy is required; pass either --run DIR or --model HFDIR"),
        (
            [*MODEL, "--run", "runs/a"],
            "exactly one policy is required; pass either --run DIR or --model HFDIR",
        ),
        (
            [*MODEL, "--port", "http"],
            "--port: expected a whole number from 0 to 65535, but found http",
        ),
        ([*MODEL, "--port", "65536"], "but found 65536"),
        ([*MODEL, "--slots", "0"], "--slots: expected a whole number from 1"),
        ([*MODEL, "--max-budget", "-1"], "--max-budget"),
        ([*MODEL, "--concurrency", "many"], "but found many"),
        ([*MODEL, "--max-body", "10"], "--max-body: expected a whole number from 1024"),
        ([*MODEL, "--timeout", "0"], "--timeout 0.0: the timeout must be above 0"),
        ([*MODEL, "--timeout", "nan"], "--timeout nan: the timeout"),
        ([*MODEL, "--url", "localhost:8000"], "--url 'localhost:8000' is not an address"),
        (["--run", "runs/a", "--url", "http://a:1"], "a vLLM server serves a Hugging Face folder"),
        (
            [*MODEL, "--url", "http://a:1", "model.compute_dtype=float32"],
            "model.compute_dtype has no effect with --url",
        ),
        ([*MODEL, "--api-key-file", "none"], "--api-key-file none: the file can't be read"),
        ([*MODEL, "--host", "203.0.113.1"], "can't listen on this address"),
        # An empty label, and a label of more than 63 characters.
        ([*MODEL, "--host", "127.0.0..1"], "can't listen on this address (not a host name)"),
        ([*MODEL, "--host", "a" * 64], "can't listen on this address (not a host name)"),
        ([*MODEL, "--port", "0"], "hf"),
    ],
)
def test_bad_input_is_one_line_before_any_work(words, message, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    "words, message",
    [
        (["--budget", "99"], "--budget 99: the default budget must not be above"),
        (["--budget", "4,8"], "--budget 4,8: found 2 budgets; pass only one"),
        (["--budget", "medium"], "--budget medium: found 'medium'"),
        (["--max-budget", "60"], "the model's 64 positions leave room for only 58 thinking"),
        (["--url", "http://127.0.0.1:1"], "error: --url: "),
        (["train.steps=4"], "train.steps defines the policy, or does not affect its answers"),
        (["rollout.chunk=4"], "rollout.chunk defines the policy, or does not affect its answers"),
    ],
)
def test_what_the_policy_cannot_do_is_refused_before_its_weights_are_read(
    words, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    folder = make_folder(tmp_path / "tiny")
    assert main(["--model", str(folder), "--port", "0", *words, *OVERRIDES]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_defaults_are_this_machine_and_no_key():
    arguments = parse(MODEL)
    assert (arguments.host, arguments.port, arguments.key) == ("127.0.0.1", 8000, None)
    assert (arguments.slots, arguments.concurrency, arguments.timeout) == (8, 64, 600.0)


def test_a_key_is_the_only_word_of_its_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("secret\n")
    assert read_key(path) == "secret"


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"caf\xe9", b"\0", b"a" * 5000])
def test_a_file_without_one_key_is_refused(content, tmp_path):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="does not contain exactly one key") as refused:
        read_key(path)
    assert "secret" not in str(refused.value)


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"--port {port}: the server can't listen on this address"
        ):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    "host, expected",
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_which_addresses_are_of_this_machine_alone(host, expected):
    assert is_local(host) == expected


class IdleBackend:
    async def start(self):
        pass

    async def stop(self):
        pass


async def no_application(scope, receive, send):
    raise AssertionError("no request was sent")


def test_the_address_is_printed_when_clients_can_connect(monkeypatch):
    connected = []

    def connect_and_stop(service, listener, host):
        with socket.create_connection(listener.getsockname(), timeout=5):
            connected.append(host)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(bacr_serve.__main__, "_announce", connect_and_stop)
    monkeypatch.setattr(bacr_serve.app, "make_app", lambda service: no_application)
    service = SimpleNamespace(backend=IdleBackend(), limits=SimpleNamespace(seconds=1))
    with bind("127.0.0.1", 0) as listener:
        asyncio.run(serve(service, listener, "127.0.0.1"))
    assert connected == ["127.0.0.1"]


@pytest.fixture
def process(tmp_path):
    """A server in a process of its own, and its address."""
    folder = make_folder(tmp_path / "tiny")
    (tmp_path / "key").write_text("secret\n")
    command = [sys.executable, "-m", "bacr_jax", "serve", "--model", str(folder), "--port", "0"]
    command += ["--api-key-file", "key", "--chunk", "1", *OVERRIDES]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as one:
        line = one.stdout.readline()
        try:
            yield one, re.search(r"http://127\.0\.0\.1:\d+", line).group()
        finally:
            one.kill()


HEADERS = {"authorization": "Bearer secret"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_runs(process, number):
    server, url = process
    path = f"{url}/v1/chat/completions"
    assert httpx.post(path, json={}).status_code == 401
    replies = []

    def ask():
        body = {**chat("1a2", budget=16, stream=True), "model": None}
        with httpx.stream("POST", path, json=body, headers=HEADERS, timeout=60) as reply:
            lines = reply.iter_lines()
            replies.append(next(lines))
            server.send_signal(number)
            replies.extend(lines)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert server.wait(30) == 0
    assert replies.count("data: [DONE]") == 3
    assert server.stderr.read() == ""


@pytest.mark.slow
def test_curl_streams_an_answer(process):
    _, url = process
    body = json.dumps({"messages": [{"role": "user", "content": "1a2"}], "stream": True})
    command = ["curl", "-sN", f"{url}/v1/chat/completions", "-d", body]
    for header in ("Content-Type: application/json", "Authorization: Bearer secret"):
        command += ["-H", header]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("data: [DONE]\n\n") and done.returncode == 0
