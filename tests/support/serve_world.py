"""What the tests of `bacr serve` share: a small folder, a policy of letters, and a fake backend."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import hf_world
from bacr_jax.config import ConditioningConfig
from bacr_jax.export import policy_folder
from bacr_jax.model.hf import hf_config
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.questions.ledger import ledger_tokenizer
from bacr_serve.app import Service, make_app
from bacr_serve.generation import ANSWER, FORCED, THINKING, Piece
from bacr_serve.policy import ServedPolicy

SHAPE = Qwen2Config(27, 16, 24, 2, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=64)
# The folder's name, its format and the lengths that fit into its 64 positions.
OVERRIDES = ["rollout.answer_tokens=3", "data.train=ledger", "data.max_prompt_tokens=24"]
LEVELS = {"low": 4, "high": 16}


def make_folder(path, seed=0):
    """Writes a random policy with a budget embedding, which reads the ledger's characters."""
    conditioning = ConditioningConfig()
    params = hf_world.random_params(SHAPE, seed, conditioning=conditioning)
    module = hf_config.BudgetModule(conditioning, 16)
    budget = policy_folder.BudgetInput(module, levels=LEVELS)
    policy_folder.save_policy(
        path, params, config=SHAPE, budget=budget, tokenizer=ledger_tokenizer()
    )
    return path


# A vocabulary of one token per character; the first tokens are tags and the end of the turn.
TAGS = ["<eos>", "</think>", "<answer>", "</answer>"]
EOS, CLOSE, OPEN, END = range(4)
VOCABULARY = [tag.encode() for tag in TAGS] + [bytes([byte]) for byte in range(32, 127)]


def ids(text):
    """Returns the tokens of a text without tags."""
    return tuple(len(TAGS) + ord(char) - 32 for char in text)


class LetterEncoder:
    """Makes a token of every character."""

    def question(self, question, budget):
        return ids(question if budget is None else f"{question}~{budget}")

    def text(self, text):
        if "\n" in text:
            raise ValueError("the tokenizer can't encode this text; use another")
        return ids(text)


def letter_policy(**changes):
    fields = {
        "name": "policy",
        "levels": LEVELS,
        "largest_budget": 64,
        "cap": 32,
        "prompt_tokens": 100,
        "answer_tokens": 8,
        "vocabulary": VOCABULARY,
        "end_ids": frozenset({EOS}),
        "think_close": "</think>",
        "answer_open": "<answer>",
        "answer_close": "</answer>",
        "encoder": LetterEncoder(),
    }
    return ServedPolicy(**fields | changes)


class FakeBackend:
    """Thinks `hm` until its limit, or `thought` if it is shorter, and answers `42`.

    Attributes:
      running: requests in flight now; most: the largest number so far.
      asked: all requests so far.
      hangs_after: number of thinking pieces after which it never answers.
      failure: error that it raises after its thinking.
    """

    def __init__(self, thought=None, hangs_after=None, failure=None, sick=""):
        self.thought, self.hangs_after = thought, hangs_after
        self.failure, self.sick = failure, sick
        self.running, self.most, self.asked = 0, 0, []

    async def start(self):
        pass

    async def stop(self):
        pass

    async def problem(self):
        return self.sick

    async def generate(self, request):
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async for piece in self.pieces(request):
                yield piece
        finally:
            self.running -= 1

    async def pieces(self, request):
        whole = ids("hm" * request.limit)[: request.limit]
        closed_by = "budget"
        if self.thought is not None and len(self.thought) < request.limit:
            whole, closed_by = (*ids(self.thought), CLOSE), "tag"
        for index, start in enumerate(range(0, len(whole), 4)):
            if index == self.hangs_after:
                await asyncio.Event().wait()
            yield Piece(THINKING, whole[start : start + 4])
            await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        forced = (OPEN,) if closed_by == "tag" else (CLOSE, OPEN)
        yield Piece(FORCED, forced, closed_by)
        yield Piece(ANSWER, ids("4"))
        yield Piece(ANSWER, (*ids("2"), END), finished=True)


def make_service(backend=None, **settings):
    return Service(backend or FakeBackend(), letter_policy(), **settings)


def chat(question="1+1", **fields):
    """A request's body."""
    return {"model": "policy", "messages": [{"role": "user", "content": question}], **fields}


def events(text):
    """The events of a stream; the last one must be `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line) for line in lines[:-1]]


@contextlib.contextmanager
def listening(service):
    """Serves over a socket from a thread; gives the address."""
    import uvicorn

    config = uvicorn.Config(make_app(service), http="h11", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        port = listener.getsockname()[1]
        run = server.serve(sockets=[listener])
        thread = threading.Thread(target=asyncio.run, args=(run,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(20)


def until(condition, seconds=10.0):
    """Waits until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)
