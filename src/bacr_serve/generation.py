"""Requests to a backend and the pieces of its responses, as token ids.

The application (`app`) sends a `Generation` to a backend and receives `Piece`s. Backends know no
HTTP and no text, and the application knows no engine.
"""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

THINKING = "thinking"
FORCED = "forced"
ANSWER = "answer"


@dataclass(frozen=True)
class Generation:
    """A prompt to continue.

    Attributes:
      prompt: token ids of the prompt.
      budget: thinking budget in tokens that the policy is conditioned on, or None for no budget.
      limit: maximum number of thinking tokens.
      temperature: sampling temperature. 0 selects the most likely tokens.
      top_p: cumulative probability for nucleus sampling.
      seed: random seed.
      max_tokens: maximum number of tokens after the prompt, including the forced tokens. None for
        no limit other than the policy's.
    """

    prompt: tuple[int, ...]
    budget: int | None
    limit: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class Piece:
    """Tokens of a response that belong together.

    A response has any number of thinking pieces, one forced piece, and any number of answer pieces.

    Attributes:
      kind: THINKING, FORCED or ANSWER.
      tokens: token ids, which may be empty. The token that ended the turn during the thinking is
        left out, because the answer follows it.
      closed_by: reason why the thinking ended ("tag", "budget" or "end of turn"). Only in the
        forced piece.
      finished: True in the last piece of an answer that was closed by its tag or by the end of the
        turn.
    """

    kind: str
    tokens: tuple[int, ...]
    closed_by: str | None = None
    finished: bool = False


class BackendError(Exception):
    """Raised if the engine fails while it answers a request. The message is one line."""


class Backend(Protocol):
    """An engine that answers several requests at the same time."""

    async def start(self) -> None:
        """Prepares the engine. Raises BackendError or UserError if it can't be used."""

    async def stop(self) -> None:
        """Releases the engine. No request is running."""

    async def problem(self) -> str:
        """Returns a line that describes why no request can be answered now, or ""."""

    def generate(self, request: Generation) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of a response. Closing the generator frees the request's slot."""


async def generate(backend: Backend, request: Generation) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of a response, truncated after `request.max_tokens` tokens.

    Raises:
      BackendError: if the engine fails.
    """
    remaining = request.max_tokens
    async with contextlib.aclosing(backend.generate(request)) as pieces:
        async for piece in pieces:
            if remaining is None:
                yield piece
                continue
            is_whole = len(piece.tokens) <= remaining
            tokens = piece.tokens[:remaining]
            remaining -= len(tokens)
            if is_whole:
                yield piece
                continue
            # The limit on tokens ended this part of the response, and not the budget or the policy.
            yield Piece(piece.kind, tokens)
            return
