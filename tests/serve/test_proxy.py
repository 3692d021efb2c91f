"""A vLLM server's tokens in two streamed requests; no budget is exceeded, whatever it sends."""

import asyncio
import contextlib
import threading

import httpx
import pytest

from bacr_client import EngineError, Server, http_json, read_rules, server
from bacr_client.http_json import Timeouts
from bacr_jax.config import Config
from bacr_jax.config.settings import resolve
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.questions.ledger import ledger_tokenizer
from bacr_serve import proxy as proxy_module
from bacr_serve.app import Limits, Service
from bacr_serve.generation import ANSWER, FORCED, THINKING, BackendError, Generation
from bacr_serve.proxy import ProxyBackend
from serve_world import chat, letter_policy, listening, until
from served_world import CLOSE, END, FIVE, OPEN, WORD, Streaming

PROMPT = (1, 9, 2)


@pytest.fixture(scope="module")
def rules():
    tokenizer = ledger_tokenizer()
    section = describe(resolve(Config()).limits, tokenizer, FORMATS["ledger"], len(tokenizer))
    return read_rules({**section, "grace": 4, "answer_tokens": 8}, len(tokenizer))


def proxy(url, rules):
    return ProxyBackend(Server(url), rules, longest_prompt=20, largest_budget=16)


def generate(served, rules, budget, **settings):
    async def run():
        backend = proxy(served.url, rules)
        await backend.start()
        limit = 16 if budget is None else budget
        request = Generation(PROMPT, budget, limit, **settings)
        return [piece async for piece in backend.generate(request)]

    return asyncio.run(run())


def tokens(pieces, kind):
    return tuple(token for piece in pieces if piece.kind == kind for token in piece.tokens)


@pytest.mark.parametrize("budget", [0, 1, 4, 5, 6, 9, None])
def test_a_response_in_two_requests(rules, budget):
    with Streaming() as served:
        pieces = generate(served, rules, budget)
    # The server thinks five tokens and its tag, if it may.
    whole = (WORD,) * 5 + (CLOSE,)
    is_cut = budget is not None and budget < 6
    assert tokens(pieces, THINKING) == (whole[:budget] if is_cut else whole)
    (forced,) = [piece for piece in pieces if piece.kind == FORCED]
    assert (forced.tokens, forced.closed_by) == (
        ((CLOSE, OPEN), "budget") if is_cut else ((OPEN,), "tag")
    )
    assert tokens(pieces, ANSWER) == (FIVE, END) and pieces[-1].finished
    assert len(served.asked) == (1 if budget == 0 else 2)
    assert served.asked[0]["stream"] and served.asked[0]["vllm_xargs"]["budget"] == (
        "none" if budget is None else budget
    )


def test_thinking_arrives_as_it_is_sampled(rules):
    with Streaming() as served:
        pieces = generate(served, rules, 5)
    assert [len(p.tokens) for p in pieces if p.kind == THINKING] == [2, 2, 1]


def test_sampling_is_passed_on_and_is_reproducible(rules):
    with Streaming() as served:
        generate(served, rules, 4, temperature=0.7, top_p=0.9, seed=3)
        generate(served, rules, 4, temperature=0.7, top_p=0.9, seed=3)
        generate(served, rules, 4)
    first, answer, again, _, greedy, _ = served.asked
    assert (first["temperature"], first["top_p"]) == (0.7, 0.9)
    assert first["seed"] == again["seed"] != answer["seed"]
    assert (greedy["temperature"], greedy["seed"]) == (0.0, None)


@pytest.mark.parametrize(
    "fault, message",
    [
        ({"more": 1}, "engine returned 2 tokens, but at most 1 were requested"),
        ({"events": 1, "ends": b""}, "the connection was closed before the reply was complete"),
        ({"events": 1, "ends": b"data: {]\n\n"}, "an event that is not a JSON object"),
        ({"events": 1, "ends": b'data: {"error": {"message": "no memory"}}\n\n'}, "no memory"),
        ({"lie": {"token_ids": []}}, "ended a completion without any token"),
        ({"lie": {"token_ids": [99]}}, "returned 99, which is not a token id"),
        ({"dies_after": 0}, "the connection was closed before the reply was complete"),
    ],
)
def test_a_server_that_does_wrong_is_an_error(rules, fault, message):
    with Streaming(**fault) as served, pytest.raises(BackendError, match=message):
        generate(served, rules, 3)


def test_a_server_that_is_not_there_or_reads_no_budgets_is_refused_at_the_start(rules):
    with Streaming(plugin=False) as served:
        with pytest.raises(BackendError, match="does not read budgets"):
            generate(served, rules, 3)
        url = served.url
    backend = proxy(url, rules)
    with pytest.raises(BackendError, match="no server responds at this address"):
        asyncio.run(backend.start())
    assert "no server responds at this address" in asyncio.run(backend.problem())


def test_a_server_with_shorter_sequences_than_a_request_is_refused_at_the_start(rules):
    # 20 tokens of prompt, 16 of thinking, `</think><answer>`, and the answer.
    needed = 20 + 16 + 2 + rules.answer_tokens
    with Streaming(length=needed - 1) as served:
        message = (
            f"allows {needed - 1} tokens per sequence, but .* can have {needed} together; start"
        )
        with pytest.raises(BackendError, match=message):
            asyncio.run(proxy(served.url, rules).start())
    with Streaming(length=needed) as served:
        asyncio.run(proxy(served.url, rules).start())


class Slow(Streaming):
    """Server that waits before it sends the headers or the first token, as with a full batch.

    Attributes:
      waits: seconds to wait, by place. The place `probe` is a completion that is not streamed.
    """

    def __init__(self, place, seconds):
        super().__init__(hangs=seconds if place == "between tokens" else 0.0)
        self.waits = {place: seconds}

    def wait(self, place):
        threading.Event().wait(self.waits.get(place, 0.0))

    def completion(self, body):
        self.wait("headers" if body.get("stream") else "probe")
        return super().completion(body)

    def stream_of(self, choice):
        self.wait("first token")
        yield from super().stream_of(choice)


def slow_reply(monkeypatch, rules, place, seconds, limit, stream):
    """The reply of `bacr serve` to a chat in front of a slow server.

    Args:
      place: place at which the server waits.
      seconds: time that the server waits there in both of its replies.
      limit: --timeout in seconds.
      stream: True for a streamed reply.
    """
    # Shorter than the waits. These timeouts are those of training and must not be used here.
    soon = Timeouts(first=0.1, between=0.1, whole=0.1)
    monkeypatch.setattr(server, "timeouts_of", lambda call: soon)
    # The server's health is checked several times while it waits.
    monkeypatch.setattr(proxy_module, "SILENT_SECONDS", 0.05)
    with Slow(place, seconds) as served:
        return reply_of(served, rules, limit, stream)


def reply_of(served, rules, limit, stream):
    """The reply of `bacr serve` to a chat in front of a server."""
    backend = proxy(served.url, rules)
    asyncio.run(backend.start())
    service = Service(backend, letter_policy(), limits=Limits(seconds=limit))
    with listening(service) as url:
        body = chat(budget=4, stream=stream)
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


PLACES = ["headers", "first token", "between tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_request_may_wait_for_the_server_up_to_the_timeout(monkeypatch, rules, place, stream):
    reply = slow_reply(monkeypatch, rules, place, seconds=0.3, limit=20.0, stream=stream)
    assert reply.status_code == 200 and "error" not in reply.text


@pytest.mark.parametrize("place", PLACES)
def test_a_request_that_waits_longer_than_the_timeout_ends_with_504(monkeypatch, rules, place):
    reply = slow_reply(monkeypatch, rules, place, seconds=2.0, limit=0.4, stream=False)
    assert reply.status_code == 504
    assert reply.json()["error"]["message"].startswith("timeout: the response was not complete")


def test_the_start_waits_for_a_server_with_a_full_batch(monkeypatch, rules):
    monkeypatch.setattr(server, "SHORT", Timeouts(first=0.1, between=0.1, whole=0.1))
    with Slow("probe", 0.2) as served:
        asyncio.run(proxy(served.url, rules).start())


class Busy(Streaming):
    """Server that refuses requests.

    Attributes:
      statuses: HTTP statuses of the next streamed completions. After them, `always` is used.
      always: HTTP status of all further streamed completions, or None to answer them.
      health: HTTP status of the list of models. None to keep the connection open for 10 s without
        a reply.
    """

    def __init__(self, statuses=(), always=None, **settings):
        super().__init__(**settings)
        self.statuses, self.always, self.health = list(statuses), always, 200
        outer, plain = self, self.server.RequestHandlerClass

        class Handler(plain):
            def do_GET(self):
                if outer.health == 200:
                    super().do_GET()
                elif outer.health is None:
                    outer.ends_health.wait(10)
                else:
                    self.send(outer.health, {})

        self.ends_health = threading.Event()
        self.server.RequestHandlerClass = Handler

    def completion(self, body):
        if body.get("stream"):
            status = self.statuses.pop(0) if self.statuses else self.always
            if status is not None:
                return status, {"error": {"message": "the queue is full"}}
        return super().completion(body)

    def __exit__(self, *arguments):
        self.ends_health.set()
        super().__exit__(*arguments)


@pytest.fixture
def soon(monkeypatch):
    """Short pauses between requests to a busy server, and before health checks."""
    monkeypatch.setattr(http_json, "BACK_OFF", (0.01, 0.02))
    monkeypatch.setattr(proxy_module, "SILENT_SECONDS", 0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_until_a_busy_server_accepts_it(soon, rules, stream):
    # Thinking and answer are refused more often than the number of pauses.
    with Busy([429, 503, 429, 503, None, 503, 503, 503, 429, None]) as served:
        reply = reply_of(served, rules, 20.0, stream)
    assert reply.status_code == 200 and "error" not in reply.text
    assert len(served.asked) == 2 and not served.statuses


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_stays_busy_ends_the_request_at_the_timeout(soon, rules, status):
    with Busy(always=status) as served:
        assert reply_of(served, rules, 0.4, stream=False).status_code == 504


def broken(served, rules, health):
    """The error of a request to a server whose health check has a problem after the start."""

    async def run():
        backend = proxy(served.url, rules)
        await backend.start()
        served.health = health
        async with asyncio.timeout(10):
            return [piece async for piece in backend.generate(Generation(PROMPT, 4, 4))]

    with pytest.raises(BackendError) as error:
        asyncio.run(run())
    return str(error.value)


def test_a_gateway_without_a_server_is_reported_before_the_timeout(soon, rules):
    with Busy(always=503) as served:
        assert "the server refuses requests" in broken(served, rules, health=503)


def test_a_silent_server_that_fails_the_health_check_is_reported_before_the_timeout(
    soon, monkeypatch, rules
):
    monkeypatch.setattr(server, "PING", Timeouts(first=0.2, between=0.2, whole=0.2))
    with Busy(hangs=5.0) as served:
        assert "/v1/models: the server did not" in broken(served, rules, health=None)


class Late(Server):
    """Client whose server sends nothing before its health check, which fails."""

    async def stream(self, call, sampling, part, xargs, timeouts):
        await self.checked.wait()
        yield [WORD] * call.max_tokens if part == 0 else [FIVE, END]

    async def check(self):
        self.checked.set()
        await asyncio.sleep(0.05)
        raise EngineError("the server does not respond")


def test_tokens_that_arrive_during_a_failing_health_check_are_kept(soon, rules):
    async def run():
        late = Late("http://127.0.0.1:1")
        late.checked = asyncio.Event()
        backend = ProxyBackend(late, rules, longest_prompt=20, largest_budget=16)
        async with asyncio.timeout(10):
            pieces = [piece async for piece in backend.generate(Generation(PROMPT, 4, 4))]
        return pieces, late.checked.is_set()

    pieces, was_checked = asyncio.run(run())
    assert was_checked and tokens(pieces, THINKING) == (WORD,) * 4 and pieces[-1].finished


def test_a_request_that_is_left_ends_the_servers(rules):
    with Streaming(hangs=0.02) as served:

        async def leave():
            backend = proxy(served.url, rules)
            await backend.start()
            async with contextlib.aclosing(backend.generate(Generation(PROMPT, 9, 9))) as pieces:
                await anext(pieces)

        asyncio.run(leave())
        until(lambda: served.left == 1)
