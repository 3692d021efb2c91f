"""Backend that generates responses with a vLLM server.

Each response needs two requests to the server. The first request samples at most as many thinking
tokens as the budget allows. The second request samples the answer and contains the thinking and the
closing text in its prompt. `bacr_client` counts the tokens and raises an error if the server sends
too many, so that no budget is exceeded.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from bacr_client import Answering, BudgetRules, EngineError, Sampling, Server, Thinking, http_json
from bacr_client.calls import Call
from bacr_client.http_json import BUSY, Refused
from bacr_client.server import QUEUED, extras
from bacr_serve.generation import ANSWER, FORCED, THINKING, BackendError, Generation, Piece

# Seconds without tokens after which the server's health is checked. A request may wait for longer
# in the server's queue, but the server then passes the check.
SILENT_SECONDS = 30.0


class ProxyBackend:
    """Forwards requests to a vLLM server and streams the tokens that it samples."""

    def __init__(
        self, server: Server, rules: BudgetRules, *, longest_prompt: int, largest_budget: int
    ):
        """Creates the backend without connecting.

        Args:
          server: client of the server.
          rules: budget rules of the served folder. Their grace window, in which the thinking may
            exceed its budget, is not used.
          longest_prompt: maximum number of tokens of a request's prompt.
          largest_budget: maximum budget of a request in tokens.
        """
        self._server = server
        self._rules = dataclasses.replace(rules, grace=0)
        self._longest_sequence = longest_prompt + self._rules.longest(largest_budget)

    async def start(self) -> None:
        """Connects to the server and checks that it can be used.

        Raises:
          BackendError: if the server can't be reached, does not serve the folder, or does not
            accept sequences as long as the longest prompt with its response.
        """
        try:
            await self._server.connect()
        except EngineError as error:
            raise BackendError(str(error)) from None
        needed = self._longest_sequence
        length = self._server.length
        if needed > length:
            raise BackendError(
                f"{self._server.url}: the server allows {length} tokens per sequence, but prompt, "
                f"thinking and answer can have {needed} together; start the server with "
                f"--max-model-len {needed}, or use a smaller --max-budget or "
                "data.max_prompt_tokens"
            )

    async def stop(self) -> None:
        """Does nothing, because every request has its own connection."""

    async def problem(self) -> str:
        """Returns the reason why the server can't be used now, or "" if there is none."""
        try:
            await self._server.check()
        except EngineError as error:
            return str(error)
        return ""

    async def generate(self, request: Generation) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of a response. Closing the generator aborts the server's request.

        There is no timeout, because a request may wait until a busy server accepts it, and then in
        the server's queue. `app` limits the time of the whole response.

        Raises:
          BackendError: if the server fails, does not respond to health checks while it sends
            nothing, or sends tokens that were not requested.
        """
        sampling = Sampling()
        if request.temperature:
            sampling = Sampling(request.temperature, request.top_p, request.seed)
        thinking = Thinking(self._rules, request.prompt, request.limit)
        try:
            segment = self._segment(thinking, request, sampling, 0)
            async with contextlib.aclosing(segment):
                async for tokens in segment:
                    yield Piece(THINKING, tokens)
            answering = thinking.answering()
            yield Piece(FORCED, answering.forced, thinking.closed_by)
            segment = self._segment(answering, request, sampling, 1)
            async with contextlib.aclosing(segment):
                async for tokens in segment:
                    yield Piece(ANSWER, tokens)
        except (EngineError, ValueError) as error:
            raise BackendError(str(error)) from None
        yield Piece(ANSWER, (), finished=answering.finished)

    async def _segment(
        self, segment: Thinking | Answering, request: Generation, sampling: Sampling, part: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Yields the new tokens of one segment, the thinking or the answer, until it has ended."""
        xargs = extras(request.budget, len(request.prompt))
        num_sent = 0
        while (call := segment.call()) is not None:
            num_before = len(segment.tokens)
            sampled = self._sample(call, sampling, part, xargs)
            async with contextlib.aclosing(sampled):
                async for tokens in sampled:
                    segment.take(tokens)
                    kept = segment.kept if isinstance(segment, Thinking) else segment.tokens
                    new_tokens = tuple(kept[num_sent:])
                    num_sent = max(num_sent, len(kept))
                    if new_tokens:
                        yield new_tokens
                    if segment.done:
                        break
            if len(segment.tokens) == num_before:
                raise BackendError(
                    f"{self._server.url}: the server ended a completion without any token; see "
                    "the log of the server"
                )

    async def _sample(
        self, call: Call, sampling: Sampling, part: int, xargs: Mapping[str, Any]
    ) -> AsyncGenerator[list[Any], None]:
        """Yields the tokens of a call. The request is repeated until the server is not busy.

        The arguments are as for `Server.stream`.
        """
        for attempt in itertools.count():
            stream = self._server.stream(call, sampling, part, xargs, QUEUED)
            try:
                async with contextlib.aclosing(stream):
                    while (tokens := await self._next_tokens(stream)) is not None:
                        yield tokens
                return
            except Refused as refused:
                if refused.status not in BUSY:
                    raise
            waits = http_json.BACK_OFF
            await asyncio.sleep(waits[min(attempt, len(waits) - 1)])
            # A gateway in front of a server that has ended also replies that it is busy.
            await self._server.check()

    async def _next_tokens(self, stream: AsyncGenerator[list[Any], None]) -> list[Any] | None:
        """Returns the next tokens of a stream, or None at its end.

        Raises:
          EngineError: if the stream fails, or if the server sends nothing and does not respond to a
            health check.
        """
        pending = asyncio.ensure_future(anext(stream, None))
        try:
            while not pending.done():
                await asyncio.wait({pending}, timeout=SILENT_SECONDS)
                if not pending.done():
                    await self._check_unless_done(pending)
            return await pending
        finally:
            pending.cancel()
            # Wait until the connection is closed.
            await asyncio.gather(pending, return_exceptions=True)

    async def _check_unless_done(self, pending: asyncio.Future[Any]) -> None:
        """Checks the server's health, but ignores a failure if tokens have arrived meanwhile."""
        try:
            await self._server.check()
        except EngineError:
            if not pending.done():
                raise
