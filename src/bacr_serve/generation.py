"""Defines requests to a backend and the pieces of its responses, both as token ids.

The HTTP application (`app`) sends a `Generation` to a backend and receives a stream of `Piece`
objects. Backends therefore depend neither on HTTP nor on text, and the application does not depend
on an engine.
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
    """A prompt to continue, with its sampling settings.

    Attributes:
      prompt: token ids of the prompt.
      budget: thinking budget in tokens that the policy is conditioned on, or None for no budget.
      limit: maximum number of thinking tokens.
      temperature: sampling temperature. 0 selects the most likely tokens.
      top_p: cumulative probability for nucleus sampling.
      seed: random seed.
      max_tokens: maximum number of tokens after the prompt, including the forced tokens. None if
        only the policy's limits apply.
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
    """Consecutive tokens of a response that are of the same kind.

    A response has any number of thinking pieces, one forced piece, which is inserted to start the
    answer, and any number of answer pieces.

    Attributes:
      kind: THINKING, FORCED or ANSWER.
      tokens: token ids, which may be empty. If an end-of-turn token ended the thinking, it is left
        out, because the answer follows.
      closed_by: reason why the thinking ended: "tag" (closing tag), "budget" or "end of turn". None
        except in the forced piece.
      finished: True in the last piece of an answer that ended with its closing tag or with the end
        of the turn.
    """

    kind: str
    tokens: tuple[int, ...]
    closed_by: str | None = None
    finished: bool = False


class BackendError(Exception):
    """Raised if the engine fails while it generates a response. The message is one line."""


class Backend(Protocol):
    """Interface of an engine that answers several requests at the same time."""

    async def start(self) -> None:
        """Starts the engine. Raises BackendError or UserError if it can't be used."""

    async def stop(self) -> None:
        """Stops the engine. No request is running when this method is called."""

    async def problem(self) -> str:
        """Returns one line with the reason why no request can be answered now, or ""."""

    def generate(self, request: Generation) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of a response. Closing the generator cancels the request."""


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
            # Omit the reason and the flag of the original piece, because `max_tokens` truncated it.
            yield Piece(piece.kind, tokens)
            return
