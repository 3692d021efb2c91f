"""Creates small policies and a fake backend for tests of `bacr serve`, and runs its server."""

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
# Config overrides for commands that serve the folder: the prompt format of the ledger task, and
# lengths that fit into the model's 64 positions.
OVERRIDES = ["rollout.answer_tokens=3", "data.train=ledger", "data.max_prompt_tokens=24"]
LEVELS = {"low": 4, "high": 16}


def make_folder(path, seed=0):
    """Writes a folder with a random policy for the ledger task, and returns its path.

    The policy receives its budget as an embedding.
    """
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
    """Encodes every character of a prompt as one token.

    A text with a line break can't be encoded. A budget is appended to the question.
    """

    def question(self, question, budget):
        return ids(question if budget is None else f"{question}~{budget}")

    def text(self, text):
        if "\n" in text:
            raise ValueError("the tokenizer can't encode this text; use another")
        return ids(text)


def letter_policy(**changes):
    """Returns a `ServedPolicy` with one token per character.

    Args:
      changes: fields of `ServedPolicy` with other values.
    """
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
    """Backend without a model, whose answer to every question is `42`.

    The thinking is `thought`, or `hm` repeated up to the limit if `thought` is None or too long.

    Attributes:
      thought: text of the thinking, or None.
      hangs_after: number of pieces of thinking after which a request hangs forever, or None.
      failure: exception that is raised after the thinking, or None.
      sick: description of a problem for health checks. Empty if the backend is healthy.
      running: number of requests in progress.
      most: largest number of requests that were in progress at the same time.
      asked: all requests so far.
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
    """Returns a service with a backend, by default a `FakeBackend`, and the `letter_policy`."""
    return Service(backend or FakeBackend(), letter_policy(), **settings)


def chat(question="1+1", **fields):
    """Returns the body of a chat request with one message."""
    return {"model": "policy", "messages": [{"role": "user", "content": question}], **fields}


def events(text):
    """Parses the events of a stream, without the last event, which must be `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line) for line in lines[:-1]]


@contextlib.contextmanager
def listening(service):
    """Context manager that runs a server in a thread and yields its URL."""
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
    """Waits until a condition is true, and fails after a timeout in seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)
