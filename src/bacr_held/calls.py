"""One row between its prompt and its end, as calls to an engine.

    part = Thinking(rules, prompt, budget)
    while (call := part.call()) is not None:
        part.take(tokens_of(call))

What ends thinking and answer is decided here, token by token. The stop strings of a call only keep
an engine from writing on: where it stops too early another call goes on, and what it writes too
much is left out.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bacr_held.rules import Rules, StopString

# How thinking ended.
BY_BUDGET, BY_TAG, BY_END_OF_TURN = "budget", "tag", "end of turn"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature 0 takes the most likely one; top_p is the nucleus."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """What an engine is asked for; `number`: of the call in its part of the row."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Answer:
    """What came after a prompt.

    Attributes:
      thinking: ids that were thought, the closing tag included; a token that ended the turn is left
        out.
      closed_by: what ended the thinking: tag, budget or end of turn.
      forced: ids that were put between thinking and answer.
      answer: ids of the answer, what closes it included.
      finished: the answer was closed.
    """

    thinking: tuple[int, ...]
    closed_by: str
    forced: tuple[int, ...]
    answer: tuple[int, ...]
    finished: bool
    text: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything after the prompt."""
        return (*self.thinking, *self.forced, *self.answer)


def check_tokens(rules: Rules, tokens: Sequence[Any], most: int) -> None:
    """Refuses, by a ValueError, tokens that an engine can't have sampled.

    Args:
      most: tokens that were asked for.
    """
    if not tokens:
        raise ValueError("the engine answered without a token")
    if len(tokens) > most:
        raise ValueError(
            f"the engine answered with {len(tokens)} tokens where {most} were asked for"
        )
    for token in tokens:
        # True is a number for Python.
        is_id = type(token) is int and 0 <= token < rules.vocab_size
        if not is_id or token in rules.never:
            fault = "can't be sampled" if is_id else "is no token's id"
            raise ValueError(f"the engine answered with {token!r:.40}, which {fault}")


class _Part(ABC):
    """A stretch of sampled tokens that ends by a stop string, by the turn, or at a length."""

    def __init__(self, rules: Rules, prompt: Sequence[int], stop: StopString):
        self.rules, self.prompt, self.stop = rules, tuple(prompt), stop
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.state = self.calls = 0
        self.by_tag = self.by_turn = False

    @property
    def done(self) -> bool:
        """No token will be sampled any more."""
        return self.by_tag or self.by_turn or not self._room()

    @abstractmethod
    def _room(self) -> int:
        """Most tokens of the next call; 0: its length is reached."""

    def _stops(self) -> tuple[str, ...]:
        return (self.stop.text,) if self.stop.text else ()

    def call(self) -> Call | None:
        """What is to be asked next; None: nothing."""
        if self.done:
            return None
        whole = (*self.prompt, *self.tokens)
        ends = tuple(sorted(self.rules.ends))
        return Call(whole, self._room(), self._stops(), ends, self.calls)

    def take(self, tokens: Sequence[Any], logprobs: Sequence[float] = ()) -> None:
        """Adds what the engine wrote, up to the end of the part, and its log-probabilities if any.

        ValueError: nothing, more than was asked for, or what is no id or can't be sampled; other
        than one log-probability for each token.
        """
        check_tokens(self.rules, tokens, self._room())
        if logprobs and len(logprobs) != len(tokens):
            raise ValueError(
                f"the engine answered with {len(tokens)} tokens, {len(logprobs)} log-probabilities"
            )
        self.calls += 1
        for place, token in enumerate(tokens):
            if self.done:
                return
            self.tokens.append(token)
            self.logprobs += logprobs[place : place + 1]
            self.state = self.stop.after(self.state, token)
            self.by_tag = self.state == self.stop.seen
            self.by_turn = not self.by_tag and token in self.rules.ends

    async def finish(self, ask: Callable[[Call], Awaitable[tuple[list[Any], list[float]]]]) -> None:
        """Asks for tokens and their log-probabilities until the part has ended."""
        while (call := self.call()) is not None:
            self.take(*await ask(call))


class Thinking(_Part):
    """The thinking of a row: `limit` tokens at most (0: none), and a grace window if any."""

    def __init__(self, rules: Rules, prompt: Sequence[int], limit: int):
        super().__init__(rules, prompt, rules.think_close)
        self.limit = limit

    def _room(self) -> int:
        left = self.limit - len(self.tokens)
        if left > 0:
            return left
        # The budget is spent, and a cut waits for a line break.
        if not self.limit or self.tokens[-1] in self.rules.line_breaks:
            return 0
        return left + self.rules.grace

    def _stops(self) -> tuple[str, ...]:
        waits = len(self.tokens) >= self.limit
        return (*super()._stops(), "\n") if waits else super()._stops()

    @property
    def closed_by(self) -> str:
        """What ended it: tag, budget or end of turn."""
        return BY_TAG if self.by_tag else BY_END_OF_TURN if self.by_turn else BY_BUDGET

    @property
    def kept(self) -> tuple[int, ...]:
        """Its tokens, without one that ended the turn."""
        return tuple(self.tokens[:-1] if self.by_turn else self.tokens)

    def answering(self) -> "Answering":
        """The answer that follows."""
        forced = self.rules.natural if self.by_tag else self.rules.closing
        return Answering(self.rules, (*self.prompt, *self.kept), forced)

    def answering_at(self, cut: int) -> "Answering":
        """The answer that follows when fewer tokens are kept and the closing text is forced."""
        return Answering(self.rules, (*self.prompt, *self.tokens[:cut]), self.rules.closing)


class Answering(_Part):
    """The answer of a row, before which ids are forced."""

    def __init__(self, rules: Rules, context: Sequence[int], forced: Sequence[int]):
        super().__init__(rules, (*context, *forced), rules.answer_close)
        self.forced = tuple(forced)

    def _room(self) -> int:
        return self.rules.answer_tokens - len(self.tokens)

    @property
    def finished(self) -> bool:
        """Whether it was closed by its tag or the end of the turn."""
        return self.by_tag or self.by_turn


def answer_of(thinking: Thinking, answering: Answering) -> Answer:
    """A row that has ended, without its text."""
    return Answer(
        thinking=thinking.kept,
        closed_by=thinking.closed_by,
        forced=answering.forced,
        answer=tuple(answering.tokens),
        finished=answering.finished,
    )
