"""The answers of a trace are requested at the same time, with the seeds of their numbers."""

import asyncio
import contextlib

import jax
import numpy as np
import pytest

from bacr_client import EngineError, Sampling
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.rollout import RolloutRequest, RolloutSpec, SamplingSetup, sampling_params
from bacr_jax.rollout.rows import Callbacks
from bacr_jax.rollout.served import AskedRow, RemoteSampling, ask, together
from bacr_jax.types import NO_BUDGET
from rollout_world import ANSWER_CLOSE, VOCAB, make_budget_rules, make_prompts, make_rules

THOUGHT = 15
CUTS = [2, 4, 4, 9]


class FakeServer:
    """Returns thinking that fills its budget, and answers that contain the number of their part.

    Attributes:
      delay: function from the part of a request to the seconds until its reply.
      barrier: if set, the number of answers that must be in flight before any of them continues.
      fails: part whose request fails.
      requests: for each request, the number of its prompt tokens and its part.
      running: number of requests in flight.
      most_running: largest number of requests in flight so far.
    """

    def __init__(self, delay=lambda part: 0.0, barrier=None, fails=None):
        self.delay, self.fails = delay, fails
        self.barrier = None if barrier is None else asyncio.Barrier(barrier)
        self.requests = []
        self.running = self.most_running = 0

    async def complete(self, call, sampling, part, xargs):
        self.requests.append((len(call.prompt), part))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if part and self.barrier:
                await asyncio.wait_for(self.barrier.wait(), 1)
            if part == self.fails:
                raise EngineError(f"part {part}")
            await asyncio.sleep(self.delay(part))
        finally:
            self.running -= 1
        if part:
            return [5 + part, ANSWER_CLOSE], [-1.0, -1.0]
        return [THOUGHT] * call.max_tokens, [-1.0] * call.max_tokens


def sampled(server, answers=1, most=100):
    """Samples a trace of two prompt tokens, nine thinking tokens and answers at `CUTS`."""
    remote = RemoteSampling(make_budget_rules(), lambda tokens: len(tokens) - 1, answers=answers)
    asked = AskedRow((6, 7), 9, 9, CUTS, Sampling(1.0, 1.0, 3))
    return remote.row(asked, server.complete, asyncio.Semaphore(most))


def test_answers_at_different_cuts_are_in_flight_together():
    # The last answer ends first.
    server = FakeServer(barrier=3, delay=lambda part: 0.02 * (3 - part))
    row = asyncio.run(sampled(server))
    assert [answer.tokens[0] for answer in row.answers] == [6, 7, 7, 8]
    assert row.source == [0, 1, 1, 3]
    # The prompt, the thinking before the cut, and the two tokens that are inserted. The seeds are
    # those of the parts 1, 2, ... in the order of the cuts, as for answers one after another.
    assert sorted(server.requests) == [(2, 0), (6, 1), (8, 2), (13, 3)]


def test_independent_answers_at_a_cut_are_in_flight_together():
    server = FakeServer(barrier=8, delay=lambda part: 0.01 * (8 - part))
    row = asyncio.run(sampled(server, answers=2))
    assert [answer.tokens[0] for answer in row.answers] == [6, 7, 8, 9, 10, 11, 12, 13]
    lengths = [6, 6, 8, 8, 8, 8, 13, 13]
    assert sorted(server.requests) == [(2, 0), *zip(lengths, range(1, 9))]


def test_an_answer_that_fails_ends_the_others():
    server = FakeServer(barrier=3, fails=2, delay=lambda part: 60.0 if part else 0.0)

    async def failing():
        before = asyncio.all_tasks()
        with pytest.raises(EngineError, match="part 2"):
            await asyncio.wait_for(sampled(server), 5)
        assert asyncio.all_tasks() == before

    asyncio.run(failing())
    assert (server.most_running, server.running) == (3, 0)


def test_a_trace_that_is_canceled_ends_its_answers():
    server = FakeServer(delay=lambda part: 60.0 if part else 0.0)

    async def canceled():
        before = asyncio.all_tasks()
        row = asyncio.ensure_future(sampled(server))
        while server.running < 3:
            await asyncio.sleep(0.001)
        row.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await row
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(canceled(), 5))
    assert server.running == 0


def test_the_requests_of_all_traces_share_the_slots():
    """A limit of traces alone would allow four requests per trace."""
    server = FakeServer(delay=lambda part: 0.001)
    remote = RemoteSampling(make_budget_rules(), lambda tokens: len(tokens) - 1)
    shape = Qwen2Config(VOCAB, 16, 32, 2, 2, 1, 8, rope_theta=1e4, tie_embeddings=True)
    sizes = {"max_thinking": 12, "answer_tokens": 3, "chunk": 5, "windows": 1, "refill": 0.5}
    spec = RolloutSpec(shape, slots=3, **sizes)
    setup = SamplingSetup(spec, make_rules(), sampling_params(1.0))
    cuts = np.tile([1, 2, 3, 4], (8, 1))
    rows = RolloutRequest(np.full(8, NO_BUDGET), cuts, limits=np.full(8, 9))
    ask(
        make_prompts([2] * 8, 2), rows, jax.random.key(0), setup, Callbacks(),
        lambda asked, limit: remote.row(asked, server.complete, limit),
    )  # fmt: skip
    assert len(server.requests) == 8 * 5 and server.most_running == 3


def test_a_trace_without_cuts_has_no_answers():
    remote = RemoteSampling(make_budget_rules(), lambda tokens: len(tokens) - 1)
    asked = AskedRow((6, 7), 9, 9, [], Sampling())
    row = asyncio.run(remote.row(asked, FakeServer().complete, asyncio.Semaphore(1)))
    assert row.answers == [] and row.num_thinking == 9


@pytest.mark.parametrize("on_rows", [None, lambda results: None])
def test_the_first_exception_ends_all_coroutines(on_rows):
    ended = []

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def fail():
        await asyncio.sleep(0)
        raise EngineError("lost")

    async def both():
        await asyncio.wait_for(together([wait(), fail()], 2, None, on_rows), 5)

    with pytest.raises(EngineError, match="lost"):
        asyncio.run(both())
    assert ended == [True]
