"""Splits the response to one prompt into calls to an engine.

    segment = Thinking(rules, prompt, limit)
    while (call := segment.call()) is not None:
        segment.take(tokens_of(call))

This module decides, token by token, where thinking and answer end. The stop strings of a call only
save work: if an engine stops too early, another call follows, and tokens beyond the end are
dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bacr_client.rules import BudgetRules, StopString

# Ways in which thinking ends.
BY_BUDGET = "budget"
BY_TAG = "tag"
BY_END_OF_TURN = "end of turn"


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling.

    Attributes:
      temperature: 0 takes the most likely token.
      top_p: share of the probability in the nucleus.
      seed: seed of the response; every call has its own seed (`server.seed_of`).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """A request for tokens.

    Attributes:
      prompt: ids before the new tokens.
      max_tokens: largest number of new tokens.
      stop: strings at which the engine may stop.
      stop_ids: ids at which the engine may stop.
      number: index of the call in its segment, from 0 on.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Response:
    """The response to a prompt.

    Attributes:
      thinking: ids of the thinking with its closing tag, without a token that ended the turn.
      closed_by: the way in which thinking ended: tag, budget or end of turn.
      forced: ids that were inserted between thinking and answer.
      answer: ids of the answer with its closing tag or end of turn.
      finished: the answer was closed.
      text: the response as text, if it was decoded.
    """

    thinking: tuple[int, ...]
    closed_by: str
    forced: tuple[int, ...]
    answer: tuple[int, ...]
    finished: bool
    text: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All ids of the response."""
        return (*self.thinking, *self.forced, *self.answer)


def check_tokens(rules: BudgetRules, tokens: Sequence[Any], most: int) -> None:
    """Checks that an engine can have sampled the tokens that it returned.

    Args:
      rules: the rules of the exported policy.
      tokens: the values that the engine returned.
      most: number of requested tokens.

    Raises:
      ValueError: the number of tokens is 0 or too large, or a value is not an id or can't be
        sampled.
    """
    if not tokens:
        raise ValueError("the engine answered without a token")
    if len(tokens) > most:
        raise ValueError(
            f"the engine answered with {len(tokens)} tokens where {most} were asked for"
        )
    for token in tokens:
        # An exact comparison, because True is an int.
        is_id = type(token) is int and 0 <= token < rules.vocab_size
        if not is_id:
            raise ValueError(f"the engine answered with {token!r:.40}, which is not a token id")
        if token in rules.never:
            raise ValueError(f"the engine answered with {token!r:.40}, which can't be sampled")


class _Segment(ABC):
    """A sequence of sampled tokens that ends at a stop string, the end of the turn, or a length.

    Attributes:
      rules: the rules of the exported policy.
      prompt: ids before the segment.
      stop: the stop string.
      tokens: the sampled ids.
      logprobs: their log-probabilities, if the engine returns them.
      state: state of the stop string after the tokens.
      calls: number of finished calls.
      by_tag: the stop string has ended the segment.
      by_turn: the end of the turn has ended the segment.
    """

    def __init__(self, rules: BudgetRules, prompt: Sequence[int], stop: StopString):
        self.rules = rules
        self.prompt = tuple(prompt)
        self.stop = stop
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.state = 0
        self.calls = 0
        self.by_tag = False
        self.by_turn = False

    @property
    def done(self) -> bool:
        """True if the segment needs no more tokens."""
        return self.by_tag or self.by_turn or self._room() == 0

    @abstractmethod
    def _room(self) -> int:
        """Returns the largest number of tokens of the next call; 0 at the full length."""

    def _stops(self) -> tuple[str, ...]:
        return (self.stop.text,) if self.stop.text else ()

    def call(self) -> Call | None:
        """Returns the next call; None if the segment has ended."""
        if self.done:
            return None
        return Call(
            prompt=(*self.prompt, *self.tokens),
            max_tokens=self._room(),
            stop=self._stops(),
            stop_ids=tuple(sorted(self.rules.ends)),
            number=self.calls,
        )

    def take(self, tokens: Sequence[Any], logprobs: Sequence[float] = ()) -> None:
        """Adds the tokens of a call up to the end of the segment.

        Args:
          tokens: the values that the engine returned.
          logprobs: their log-probabilities, or empty.

        Raises:
          ValueError: the tokens are refused by `check_tokens`, or their number differs from the
            number of log-probabilities.
        """
        check_tokens(self.rules, tokens, self._room())
        if logprobs and len(logprobs) != len(tokens):
            raise ValueError(
                f"the engine answered with {len(tokens)} tokens, {len(logprobs)} log-probabilities"
            )
        self.calls += 1
        for index, token in enumerate(tokens):
            if self.done:
                return
            self.tokens.append(token)
            if logprobs:
                self.logprobs.append(logprobs[index])
            self.state = self.stop.after(self.state, token)
            self.by_tag = self.state == self.stop.seen
            self.by_turn = not self.by_tag and token in self.rules.ends

    async def finish(self, ask: Callable[[Call], Awaitable[tuple[list[Any], list[float]]]]) -> None:
        """Makes calls until the segment has ended.

        Args:
          ask: sends a call to the engine and returns tokens and their log-probabilities, if any.
        """
        while (call := self.call()) is not None:
            tokens, logprobs = await ask(call)
            self.take(tokens, logprobs)


class Thinking(_Segment):
    """The thinking of a response.

    It has at most `limit` tokens (0 for none). If the rules have a grace window, it continues to
    the next line break in this window.
    """

    def __init__(self, rules: BudgetRules, prompt: Sequence[int], limit: int):
        super().__init__(rules, prompt, rules.think_close)
        self.limit = limit

    def _room(self) -> int:
        remaining = self.limit - len(self.tokens)
        if remaining > 0:
            return remaining
        if self.limit == 0 or self.tokens[-1] in self.rules.line_breaks:
            return 0
        # The budget is spent, and the cut waits for a line break.
        return remaining + self.rules.grace

    def _stops(self) -> tuple[str, ...]:
        if len(self.tokens) < self.limit:
            return super()._stops()
        return (*super()._stops(), "\n")

    @property
    def closed_by(self) -> str:
        """The way in which thinking ended: tag, budget or end of turn."""
        if self.by_tag:
            return BY_TAG
        return BY_END_OF_TURN if self.by_turn else BY_BUDGET

    @property
    def kept(self) -> tuple[int, ...]:
        """The tokens without one that ended the turn."""
        if self.by_turn:
            return tuple(self.tokens[:-1])
        return tuple(self.tokens)

    def answering(self) -> "Answering":
        """Returns the answer that follows the thinking."""
        forced = self.rules.natural if self.by_tag else self.rules.closing
        context = (*self.prompt, *self.kept)
        return Answering(self.rules, context, forced)

    def answering_at(self, cut: int) -> "Answering":
        """Returns the answer that follows the first `cut` thinking tokens and the closing text."""
        context = (*self.prompt, *self.tokens[:cut])
        return Answering(self.rules, context, self.rules.closing)


class Answering(_Segment):
    """The answer of a response, after some forced ids.

    Attributes:
      forced: ids between thinking and answer.
    """

    def __init__(self, rules: BudgetRules, context: Sequence[int], forced: Sequence[int]):
        super().__init__(rules, (*context, *forced), rules.answer_close)
        self.forced = tuple(forced)

    def _room(self) -> int:
        return self.rules.answer_tokens - len(self.tokens)

    @property
    def finished(self) -> bool:
        """True if the answer was closed by its tag or the end of the turn."""
        return self.by_tag or self.by_turn


def response_of(thinking: Thinking, answering: Answering) -> Response:
    """Returns the response of two segments that have ended, without its text."""
    return Response(
        thinking=thinking.kept,
        closed_by=thinking.closed_by,
        forced=answering.forced,
        answer=tuple(answering.tokens),
        finished=answering.finished,
    )
