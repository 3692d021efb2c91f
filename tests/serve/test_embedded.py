"""The worker thread: order, cancellation and failure by fake slots; the rest by a small folder."""

import asyncio
import json
import random
import threading
import time

import httpx
import pytest

from bacr_jax.generate import open_session
from bacr_jax.out_of_memory import OutOfMemory
from bacr_serve.app import Limits, Service
from bacr_serve.embedded import EmbeddedBackend
from bacr_serve.generation import ANSWER, THINKING, BackendError, Generation, Piece
from bacr_serve.setup import embedded_backend, serve_policy
from bacr_serve.slots import Event
from serve_world import OVERRIDES, events, listening, make_folder


class FakeSlots:
    """Two slots; a step gives every request a token, and the last one after its limit.

    Attributes:
      entered: limits of the requests in the order in which they got a slot.
      fails_at: number of the step that raises.
    """

    size = 2

    def __init__(self, fails_at=None):
        self.rows, self.entered, self.fails_at, self.steps = {}, [], fails_at, 0
        self.removed = 0
        self.threads = set()

    @property
    def free(self):
        return self.size - len(self.rows)

    def add(self, requests):
        assert len(requests) <= self.free
        for handle, request in requests:
            self.rows[handle] = request.limit
            self.entered.append(request.limit)

    def remove(self, handle):
        self.removed += self.rows.pop(handle, None) is not None

    def step(self):
        self.threads.add(threading.current_thread())
        time.sleep(0.002)
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("the device is gone\nand more")
        found = []
        for handle in list(self.rows):
            self.rows[handle] -= 1
            is_last = self.rows[handle] < 0
            if is_last:
                del self.rows[handle]
            piece = Piece(ANSWER if is_last else THINKING, (5,), finished=is_last)
            found.append(Event(handle, piece, is_last))
        return found


def request(limit):
    return Generation((1,), limit, limit)


def over(slots, work):
    """Runs `work(backend)` with a started backend over these slots."""

    async def run():
        backend = EmbeddedBackend(lambda: slots)
        await backend.start()
        try:
            return await work(backend)
        finally:
            await backend.stop()

    return asyncio.run(run())


async def collect(backend, limit):
    return [piece async for piece in backend.generate(request(limit))]


def test_requests_wait_in_order_for_two_slots_and_share_one_thread():
    slots = FakeSlots()

    async def ask(backend):
        return await asyncio.gather(*(collect(backend, limit) for limit in (5, 1, 3, 0)))

    found = over(slots, ask)
    assert [len(pieces) for pieces in found] == [6, 2, 4, 1]
    assert slots.entered == [5, 1, 3, 0] and len(slots.threads) == 1
    assert threading.current_thread() not in slots.threads


def test_a_cancelled_request_frees_its_slot_and_a_waiting_one_never_gets_one():
    slots = FakeSlots()

    async def ask(backend):
        tasks = [asyncio.ensure_future(collect(backend, 10**6 + n)) for n in range(3)]
        while slots.steps < 3:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await collect(backend, 2)

    assert len(over(slots, ask)) == 3
    assert slots.entered == [10**6, 10**6 + 1, 2] and slots.removed == 2


def test_a_failed_decoder_ends_all_requests_and_says_so_from_then_on():
    slots = FakeSlots(fails_at=3)

    async def ask(backend):
        found = await asyncio.gather(
            *(collect(backend, 9) for _ in range(4)), return_exceptions=True
        )
        with pytest.raises(BackendError) as later:
            await collect(backend, 1)
        return found, later.value, await backend.problem()

    found, later, problem = over(slots, ask)
    assert problem == ("the decoder failed (RuntimeError: the device is gone); restart the server")
    assert {str(error) for error in [*found, later]} == {problem}


def test_a_policy_that_cannot_be_loaded_is_an_error_of_the_start():
    def fail():
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        asyncio.run(EmbeddedBackend(fail).start())


def test_memory_that_runs_out_in_the_warm_up_is_the_same_error_as_in_loading():
    class SmallDevice(FakeSlots):
        def add(self, requests):
            raise OutOfMemory(("prefill",), {"slots": 2}, 1 << 30)

    with pytest.raises(OutOfMemory):
        asyncio.run(EmbeddedBackend(SmallDevice, request(1)).start())


def test_a_decoder_that_fails_in_the_warm_up_is_an_error_of_the_start():
    slots = FakeSlots(fails_at=1)
    with pytest.raises(BackendError, match="the decoder failed"):
        asyncio.run(EmbeddedBackend(lambda: slots, request(1)).start())


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A small folder that is served with four slots."""
    folder = make_folder(tmp_path_factory.mktemp("models") / "tiny")
    session = open_session(None, folder, None, OVERRIDES)
    policy = serve_policy(session, name="policy", largest=None)
    backend = embedded_backend(session, policy, slots=4, chunk=4)
    service = Service(backend, policy, limits=Limits(concurrency=300))
    # The queues of the backend belong to no event loop until a request arrives.
    asyncio.run(backend.start())
    with listening(service) as url:
        yield url
    asyncio.run(backend.stop())


@pytest.fixture(scope="module")
def client(url):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


QUESTION = [{"role": "user", "content": "3b4a5"}]


def test_the_openai_client_streams_what_it_gets_at_once(client):
    ask = client.chat.completions.create
    for budget in (0, 4, 16):
        settings = {"model": "policy", "messages": QUESTION, "extra_body": {"budget": budget}}
        whole = ask(**settings)
        chunks = list(ask(**settings, stream=True, stream_options={"include_usage": True}))
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        message = whole.choices[0].message
        assert "".join(delta.content or "" for delta in deltas) == message.content
        thought = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        assert thought == message.reasoning_content
        assert chunks[-1].usage == whole.usage
        assert whole.usage.completion_tokens_details.reasoning_tokens <= budget
        assert bool(thought) == (budget > 0)


def test_the_openai_client_passes_efforts_and_gets_errors(client):
    openai = pytest.importorskip("openai")
    ask = client.chat.completions.create
    low = ask(model="policy", messages=QUESTION, reasoning_effort="low")
    assert low.choices[0].bacr["budget"] == 4
    with pytest.raises(openai.BadRequestError) as refused:
        ask(model="policy", messages=QUESTION, extra_body={"budget": 4, "thinking_budget": 5})
    assert refused.value.code == "contradictory_budgets"
    with pytest.raises(openai.NotFoundError):
        ask(model="other", messages=QUESTION)
    assert [model.id for model in client.models.list()] == ["policy"]


def test_a_completion_continues_ids(client, url):
    reply = client.completions.create(
        model="policy", prompt=[1, 9, 19, 10, 2], extra_body={"budget": 4}
    )
    assert reply.usage.prompt_tokens == 5
    assert reply.usage.completion_tokens_details.reasoning_tokens <= 4


def test_no_budget_is_exceeded_in_200_requests_at_once(url):
    drawn = random.Random(7)
    fields = ["budget", "thinking_budget", "thinking_token_budget"]
    bodies = []
    for seed in range(200):
        budget = drawn.randint(0, 16)
        bodies.append(
            {
                "messages": [{"role": "user", "content": f"{seed % 10}a{drawn.randint(0, 9)}"}],
                drawn.choice(fields): budget,
                "temperature": drawn.choice([0.0, 0.7, 1.5]),
                "seed": seed,
                "stream": bool(seed % 2),
            }
        )

    async def ask_all():
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(limits=limits, timeout=120) as client:
            path = f"{url}/v1/chat/completions"
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    thought = []
    for body, reply in zip(bodies, asyncio.run(ask_all())):
        assert reply.status_code == 200, reply.text
        found = events(reply.text)[-1] if body["stream"] else json.loads(reply.text)
        (budget,) = (body[name] for name in fields if name in body)
        details = found["choices"][0]["bacr"]
        assert details["budget"] == budget and details["thinking_tokens"] <= budget
        thought.append(details["thinking_tokens"] == budget)
    # Some thinking reached its budget, and some ended before it.
    assert 20 < sum(thought) < 200
