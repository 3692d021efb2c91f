"""Splits the response to a prompt into calls to an inference engine.

A response has two segments: the thinking (`Thinking`) and the answer (`Answering`). A segment is
sampled by one or more calls:

    segment = Thinking(rules, prompt, limit)
    while (call := segment.call()) is not None:
        segment.take(tokens_of(call))

This module decides, token by token, where the thinking and the answer end. The stop strings of a
call are only an optimization. If an engine stops too early, another call is made. If it stops too
late, the tokens after the end are dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bacr_client.rules import BudgetRules, StopString

# Values of `Response.closed_by`, the reason why the thinking ended.
BY_BUDGET = "budget"
BY_TAG = "tag"
BY_END_OF_TURN = "end of turn"


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a response.

    Attributes:
      temperature: sampling temperature. 0 means greedy decoding.
      top_p: cumulative probability for nucleus sampling.
      seed: random seed of the response. The seeds of its calls are derived from it by
        `server.seed_of`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """A single completion request to an engine.

    Attributes:
      prompt: token ids to be continued.
      max_tokens: maximum number of new tokens.
      stop: strings at which the engine may stop.
      stop_ids: token ids at which the engine may stop.
      number: zero-based index of the call within its segment, which is the thinking or the answer.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Response:
    """The response to a prompt, which consists of the thinking and the answer.

    Attributes:
      thinking: token ids of the thinking, including its closing tag but excluding an end-of-turn
        token.
      closed_by: reason why the thinking ended: "tag", "budget" or "end of turn".
      forced: token ids that were inserted between the thinking and the answer.
      answer: token ids of the answer, including its closing tag or end-of-turn token.
      finished: True if the answer ended with its closing tag or an end-of-turn token. False if it
        was truncated.
      text: the decoded response, or "" if it was not decoded.
    """

    thinking: tuple[int, ...]
    closed_by: str
    forced: tuple[int, ...]
    answer: tuple[int, ...]
    finished: bool
    text: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids of the response."""
        return (*self.thinking, *self.forced, *self.answer)


def check_tokens(rules: BudgetRules, tokens: Sequence[Any], most: int) -> None:
    """Validates the tokens that an engine returned.

    Args:
      rules: budget rules of the exported policy.
      tokens: the values that the engine returned.
      most: maximum number of tokens that was requested.

    Raises:
      ValueError: if the engine returned no tokens or too many, or if a value is not a token id or
        is a token that is never sampled.
    """
    if not tokens:
        raise ValueError("the inference engine returned no tokens")
    if len(tokens) > most:
        raise ValueError(
            f"the inference engine returned {len(tokens)} tokens, but at most {most} were requested"
        )
    for token in tokens:
        # Compare the exact type, because bool is a subclass of int.
        is_id = type(token) is int and 0 <= token < rules.vocab_size
        if not is_id:
            raise ValueError(
                f"the inference engine returned {token!r:.40}, which is not a token id of this "
                "model"
            )
        if token in rules.never:
            raise ValueError(
                f"the inference engine returned the token id {token!r:.40}, which must not be "
                "sampled"
            )


class _Segment(ABC):
    """Base class for the sampled parts of a response: the thinking and the answer.

    A segment ends at a stop string, at an end-of-turn token, or when it reaches its maximum length.

    Attributes:
      rules: budget rules of the exported policy.
      prompt: token ids before the segment.
      stop: the stop string, usually the closing tag, as an automaton over token ids.
      tokens: token ids sampled so far.
      logprobs: log-probabilities of `tokens`, or an empty list if the engine does not return them.
      state: state of the automaton `stop` after `tokens`.
      calls: number of completed calls.
      by_tag: True if the stop string has ended the segment.
      by_turn: True if an end-of-turn token has ended the segment.
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
        """True if the segment has ended."""
        return self.by_tag or self.by_turn or self._room() == 0

    @abstractmethod
    def _room(self) -> int:
        """Returns the maximum number of tokens of the next call, or 0 at the maximum length."""

    def _stops(self) -> tuple[str, ...]:
        return (self.stop.text,) if self.stop.text else ()

    def call(self) -> Call | None:
        """Returns the next completion request for this segment, or None if it has ended.

        A segment is the thinking or the answer. The request continues the prompt and the tokens
        sampled so far.
        """
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
        """Appends the tokens of a call and drops tokens after the end of the segment.

        Args:
          tokens: the token ids that the engine returned.
          logprobs: log-probabilities of the tokens, or an empty sequence.

        Raises:
          ValueError: if `check_tokens` rejects the tokens, or if the numbers of tokens and
            log-probabilities differ.
        """
        check_tokens(self.rules, tokens, self._room())
        if logprobs and len(logprobs) != len(tokens):
            raise ValueError(
                f"the inference engine returned {len(tokens)} tokens, but {len(logprobs)} "
                "log-probabilities"
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
        """Calls the engine until the segment has ended.

        Args:
          ask: sends a call to the engine and returns the token ids and their log-probabilities. The
            second list may be empty.
        """
        while (call := self.call()) is not None:
            tokens, logprobs = await ask(call)
            self.take(tokens, logprobs)


class Thinking(_Segment):
    """The thinking of a response, which is truncated after at most `limit` tokens.

    With a limit of 0, the response has no thinking. The rules may define a grace window, which is a
    number of additional tokens. The thinking is then truncated at the first line break within this
    window, or at its end.

    Attributes:
      limit: maximum number of thinking tokens, excluding the grace window.
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
        # The budget is used up. Continue in the grace window until the next line break.
        return remaining + self.rules.grace

    def _stops(self) -> tuple[str, ...]:
        if len(self.tokens) < self.limit:
            return super()._stops()
        return (*super()._stops(), "\n")

    @property
    def closed_by(self) -> str:
        """The reason why the thinking ended: "tag", "budget" or "end of turn"."""
        if self.by_tag:
            return BY_TAG
        return BY_END_OF_TURN if self.by_turn else BY_BUDGET

    @property
    def kept(self) -> tuple[int, ...]:
        """The sampled tokens, excluding an end-of-turn token."""
        if self.by_turn:
            return tuple(self.tokens[:-1])
        return tuple(self.tokens)

    def answering(self) -> "Answering":
        """Returns the segment for the answer to the whole thinking.

        The token ids to insert between them depend on whether the thinking has a closing tag.
        """
        forced = self.rules.natural if self.by_tag else self.rules.closing
        context = (*self.prompt, *self.kept)
        return Answering(self.rules, context, forced)

    def answering_at(self, cut: int) -> "Answering":
        """Returns the segment for an answer to the first `cut` tokens of the thinking.

        The closing text is inserted between the thinking and the answer.

        Args:
          cut: truncation point: the number of thinking tokens that are kept.
        """
        context = (*self.prompt, *self.tokens[:cut])
        return Answering(self.rules, context, self.rules.closing)


class Answering(_Segment):
    """The answer of a response, which follows the prompt, the thinking and the inserted tokens.

    Attributes:
      forced: token ids inserted between the thinking and the answer.
    """

    def __init__(self, rules: BudgetRules, context: Sequence[int], forced: Sequence[int]):
        super().__init__(rules, (*context, *forced), rules.answer_close)
        self.forced = tuple(forced)

    def _room(self) -> int:
        return self.rules.answer_tokens - len(self.tokens)

    @property
    def finished(self) -> bool:
        """True if the answer ended with its closing tag or an end-of-turn token."""
        return self.by_tag or self.by_turn


def response_of(thinking: Thinking, answering: Answering) -> Response:
    """Combines two finished segments into a response. The field `text` is not set."""
    return Response(
        thinking=thinking.kept,
        closed_by=thinking.closed_by,
        forced=answering.forced,
        answer=tuple(answering.tokens),
        finished=answering.finished,
    )
