"""A vLLM server's tokens in two streamed requests; no budget is exceeded, whatever it sends."""

import asyncio
import contextlib
import threading

import httpx
import pytest

from bacr_client import Server, read_rules, server
from bacr_client.http_json import Timeouts
from bacr_jax.config import Config
from bacr_jax.config.settings import resolve
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.questions.ledger import ledger_tokenizer
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
      waits: seconds to wait, by place.
    """

    def __init__(self, place, seconds):
        super().__init__(hangs=seconds if place == "between tokens" else 0.0)
        self.waits = {place: seconds}

    def wait(self, place):
        threading.Event().wait(self.waits.get(place, 0.0))

    def completion(self, body):
        if body.get("stream"):
            self.wait("headers")
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
    with Slow(place, seconds) as served:
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


def test_a_request_that_is_left_ends_the_servers(rules):
    with Streaming(hangs=0.02) as served:

        async def leave():
            backend = proxy(served.url, rules)
            await backend.start()
            async with contextlib.aclosing(backend.generate(Generation(PROMPT, 9, 9))) as pieces:
                await anext(pieces)

        asyncio.run(leave())
        until(lambda: served.left == 1)
