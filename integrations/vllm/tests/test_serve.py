"""`bacr serve` and the openai client, with the embedded decoder and in front of vLLM.

BACR_VLLM_FOLDER names another exported folder of the ledger to serve, such as a trained one.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from vllm_world import free_port, processes_at, server_of

ROOT = Path(__file__).resolve().parents[3]
ENGINES = ["embedded", "vllm"]
KEY = "secret"
QUESTION = "4a2b3c1"
TRANSCRIPT_BUDGETS = [4, 16, 64]
MOST_BYTES = 4096
# Longest request in the tests of a vLLM server that hangs, in seconds.
SHORT_TIMEOUT = 5
OPTIONS = ["--max-budget", "64", "--max-body", str(MOST_BYTES), "data.max_prompt_tokens=64"]


@dataclass(frozen=True)
class Endpoint:
    """A running `bacr serve`.

    Attributes:
      process: the server.
      url: its address without `/v1`.
      model: name of the model in requests.
    """

    process: subprocess.Popen
    url: str
    model: str

    def client(self, kind=openai.OpenAI, api_key=KEY):
        return kind(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=600)

    def health(self):
        """Returns the status code and the body of /health."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@contextlib.contextmanager
def bacr_serve(folder, log_folder, *options):
    """Runs `bacr serve` in a process until the end of the block."""
    key_path = log_folder / "key"
    key_path.write_text(KEY)
    command = [os.environ["BACR_PYTHON"], "-m", "bacr_jax", "serve", "--model", str(folder)]
    command += ["--port", "0", "--name", "policy", "--api-key-file", str(key_path)]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    log_path = log_folder / "log"
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            [*command, *OPTIONS, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert address, log_path.read_text()
            yield Endpoint(process, address.group(), "policy")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(world):
    return Path(os.environ.get("BACR_VLLM_FOLDER", world / "both" / "out"))


@pytest.fixture(scope="module")
def vllm_port():
    return free_port()


@pytest.fixture(scope="module")
def vllm_url(folder, vllm_port, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("vllm") / "log"
    with server_of(folder, log_path, port=vllm_port) as url:
        yield url


@pytest.fixture(scope="module")
def start(folder, vllm_url, tmp_path_factory):
    """Returns a function that starts `bacr serve` with an engine."""

    def start_endpoint(engine, *options):
        url = ["--url", vllm_url] if engine == "vllm" else []
        return bacr_serve(folder, tmp_path_factory.mktemp(engine), *url, *options)

    return start_endpoint


@pytest.fixture(scope="module")
def endpoints(start):
    """The two servers, by their engine."""
    with start("embedded") as embedded, start("vllm") as proxy:
        yield {"embedded": embedded, "vllm": proxy}


@pytest.fixture(params=ENGINES)
def endpoint(request, endpoints):
    return endpoints[request.param]


def chat(question=QUESTION, **fields):
    """Returns the arguments of a streamed request; fields that OpenAI does not have are extra."""
    return {
        "model": "policy",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "extra_body": fields,
    }


@dataclass
class Answer:
    """The joined events of a stream.

    Attributes:
      thinking: text of all `delta.reasoning_content`.
      content: text of all `delta.content`.
      details: field `bacr` of the last event with a choice.
      reasoning_tokens: thinking tokens of the usage, or None without usage.
      num_events: number of events with text.
    """

    thinking: str = ""
    content: str = ""
    details: dict | None = None
    reasoning_tokens: int | None = None
    num_events: int = 0

    def add(self, event):
        """Adds an event."""
        if event.usage is not None:
            self.reasoning_tokens = event.usage.completion_tokens_details.reasoning_tokens
        for choice in event.choices:
            thinking = getattr(choice.delta, "reasoning_content", None) or ""
            content = choice.delta.content or ""
            self.thinking += thinking
            self.content += content
            self.details = choice.bacr
            self.num_events += bool(thinking or content)


def ask(endpoint, budget):
    """Sends the question at a budget and returns its answer, which is streamed."""
    answer = Answer()
    request = chat(budget=budget)
    options = {"include_usage": True}
    for event in endpoint.client().chat.completions.create(**request, stream_options=options):
        answer.add(event)
    return answer


def test_a_transcript_at_three_budgets_is_equal_with_both_engines(endpoints):
    transcripts = {}
    for engine, endpoint in endpoints.items():
        print(f"\n{engine}:")
        transcripts[engine] = []
        for budget in TRANSCRIPT_BUDGETS:
            answer = ask(endpoint, budget)
            details = answer.details
            print(
                f"  budget {budget}: thinking {answer.thinking!r} ({answer.reasoning_tokens} "
                f"tokens, closed by {details['closed_by']}), forced {details['forced_text']!r}, "
                f"answer {answer.content!r} ({details['answer_tokens']} tokens), "
                f"{answer.num_events} events"
            )
            assert answer.reasoning_tokens == details["thinking_tokens"] <= budget
            assert details["budget"] == budget
            transcripts[engine].append((answer.thinking, answer.content, details))
        # The text arrived in pieces.
        assert answer.num_events > 2
    assert transcripts["embedded"] == transcripts["vllm"]


def test_no_thinking_of_two_hundred_requests_exceeds_its_budget(endpoint):
    draws = random.Random(0)
    budgets = [draws.randrange(65) for _ in range(200)]

    async def answer_all():
        # Requests in flight, as the server refuses more than 64.
        in_flight = asyncio.Semaphore(32)

        async def answer_one(client, seed, budget):
            answer = Answer()
            request = chat(f"{seed % 9}a2b{seed % 7}", budget=budget)
            async with in_flight:
                events = await client.chat.completions.create(**request, temperature=1, seed=seed)
                async for event in events:
                    answer.add(event)
            return answer

        async with endpoint.client(openai.AsyncOpenAI) as client:
            requests = [answer_one(client, seed, budget) for seed, budget in enumerate(budgets)]
            return await asyncio.gather(*requests)

    begin = time.monotonic()
    answers = asyncio.run(answer_all())
    seconds = time.monotonic() - begin
    counts = [answer.details["thinking_tokens"] for answer in answers]
    excess = max(count - budget for count, budget in zip(counts, budgets))
    closings = [answer.details["closed_by"] for answer in answers]
    cuts = closings.count("budget")
    print(
        f"\n200 requests: {sum(counts)} thinking tokens in {seconds:.0f} s, {cuts} of 200 cut at "
        f"their budgets, largest excess {excess}"
    )
    assert excess == 0 and 0 < cuts < 200
    for answer, budget in zip(answers, budgets):
        # A token of the ledger is a character or a tag, so the tokens of a text can be counted.
        assert len(re.sub("<[a-z/]+>", "T", answer.thinking)) <= budget
        if answer.details["closed_by"] == "budget":
            assert answer.details["thinking_tokens"] == budget


def test_fifty_clients_of_whom_ten_vanish(endpoint):
    async def answer_all():
        async def answer_one(client, index):
            answer = Answer()
            events = await client.chat.completions.create(**chat(budget=24))
            async with events:
                async for event in events:
                    answer.add(event)
                    if index % 5 == 0:
                        return None
            return answer

        async with endpoint.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*[answer_one(client, index) for index in range(50)])

    answers = [answer for answer in asyncio.run(answer_all()) if answer is not None]
    assert len(answers) == 40
    assert len({answer.thinking for answer in answers}) == 1
    assert all(answer.details["answer_tokens"] > 0 for answer in answers)
    # Every slot is free again.
    deadline = time.monotonic() + 30
    while endpoint.health()[1]["running"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert endpoint.health() == (200, {"status": "ok", "running": 0, "concurrency": 64})


@pytest.mark.parametrize("api_key", ["wrong", "x"])
def test_a_wrong_key_is_refused(endpoint, api_key):
    with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
        endpoint.client(api_key=api_key).chat.completions.create(**chat(budget=4))


def test_a_huge_body_is_refused_and_the_next_request_is_answered(endpoint):
    with pytest.raises(openai.APIStatusError, match=f"the limit of {MOST_BYTES} bytes") as refused:
        endpoint.client().chat.completions.create(**chat("1" * 10_000_000, budget=4))
    assert refused.value.status_code == 413
    assert ask(endpoint, 4).details["budget"] == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_sigterm_finishes_what_runs(start, engine):
    with start(engine) as endpoint:
        answer = Answer()
        for event in endpoint.client().chat.completions.create(**chat(budget=48)):
            if not answer.num_events:
                endpoint.process.send_signal(signal.SIGTERM)
            answer.add(event)
        assert answer.details["answer_tokens"] > 0
        assert endpoint.process.wait(60) == 0
        with pytest.raises(openai.APIConnectionError):
            ask(endpoint, 4)


def running_in_vllm(url):
    """Returns the number of requests that vLLM samples or that wait in it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def test_a_hanging_vllm_ends_requests_and_goes_on(start, vllm_url, vllm_port):
    with start("vllm", "--timeout", str(SHORT_TIMEOUT)) as endpoint:
        assert ask(endpoint, 4).details["budget"] == 4
        stopped = processes_at(vllm_port)
        for process in stopped:
            process.suspend()
        try:
            with pytest.raises(openai.APIStatusError, match="not complete after 5 s") as failure:
                ask(endpoint, 4)
            assert failure.value.status_code == 504
            status, body = endpoint.health()
            assert status == 503 and vllm_url in body["status"]
        finally:
            for process in stopped:
                process.resume()
        deadline = time.monotonic() + 60
        while running_in_vllm(vllm_url) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert running_in_vllm(vllm_url) == 0
        assert ask(endpoint, 4).details["budget"] == 4
        assert endpoint.health()[0] == 200


# The last test, because it ends the vLLM server of the module.
def test_a_vllm_that_ended_is_reported(endpoints, vllm_url, vllm_port):
    for process in processes_at(vllm_port):
        process.kill()
    deadline = time.monotonic() + 30
    with contextlib.suppress(urllib.error.URLError, OSError):
        while time.monotonic() < deadline:
            urllib.request.urlopen(f"{vllm_url}/health", timeout=5).close()
            time.sleep(0.2)
    with pytest.raises(
        openai.APIStatusError, match="no server responds at this address"
    ) as failure:
        ask(endpoints["vllm"], 4)
    assert failure.value.status_code == 502
    status, body = endpoints["vllm"].health()
    assert status == 503 and "no server responds at this address" in body["status"]
