"""Rows that servers elsewhere sample: thinking, then an answer at every cut, call by call."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Int

from bacr_client import Answering, BudgetRules, Call, Sampling, Thinking
from bacr_client.calls import BY_BUDGET, BY_END_OF_TURN, BY_TAG
from bacr_client.server import extras
from bacr_jax.prompts.environment import Environment
from bacr_jax.prompts.stop_strings import compile_stop_string, match
from bacr_jax.rewards import cuts_of_trace
from bacr_jax.rollout.rollouts import Rollout, sampled_counters
from bacr_jax.rollout.rows import CompleteRows, Listeners, Rows, Sampler, checked
from bacr_jax.types import (
    CLOSED_BY_BUDGET,
    CLOSED_BY_EOS,
    CLOSED_BY_TAG,
    NO_BUDGET,
    Branches,
    Poll,
    Prompts,
    Trunks,
)

_T = TypeVar("_T")
# Asks a server: (call, sampling, part, extras) -> token ids and their log-probabilities.
Complete = Callable[
    [Call, Sampling, int, Mapping[str, Any]], Awaitable[tuple[list[Any], list[float]]]
]
_CLOSE = {BY_BUDGET: CLOSED_BY_BUDGET, BY_TAG: CLOSED_BY_TAG, BY_END_OF_TURN: CLOSED_BY_EOS}
# Seconds between two calls of `poll`.
_PATIENCE = 0.5


@dataclass(frozen=True)
class AskedRow:
    """What is asked for in a row.

    Attributes:
      budget: that the policy is told; None: none.
      limit: most thinking tokens.
      cuts: thinking tokens kept at each cut.
    """

    prompt: Sequence[int]
    budget: int | None
    limit: int
    cuts: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True)
class AnsweredRow:
    """A row that has ended.

    Attributes:
      kept: thinking tokens, without those of the tag that closed it.
      answers: at each cut, one after the other where there are several.
      source: place of the answer that serves each place.
    """

    thinking: Thinking
    kept: int
    answers: list[Answering]
    source: list[int]


@dataclass(frozen=True)
class Asking:
    """How rows are asked for; the fields of `RolloutSpec` by the same names.

    Attributes:
      without_tag: from the tokens of a thinking that its tag closed to how many are not the tag's.
    """

    rules: BudgetRules
    without_tag: Callable[[Sequence[int]], int]
    answers: int = 1
    own_cuts: bool = False

    async def row(self, asked: AskedRow, complete: Complete) -> AnsweredRow:
        """Thinks, and answers at each cut; cuts at the same place share their answer, if it is one.

        ValueError: a server answers with what can't be.
        """
        thinking = Thinking(self.rules, asked.prompt, asked.limit)
        told = extras(asked.budget, len(asked.prompt))
        await thinking.finish(lambda call: complete(call, asked.sampling, 0, told))
        kept = self.without_tag(thinking.tokens) if thinking.by_tag else len(thinking.kept)
        cuts = asked.cuts
        if self.own_cuts:
            given = (np.array([x]) for x in (asked.cuts, kept, asked.limit))
            cuts = cuts_of_trace(*given)[0].tolist()
        ends = [min(cut, kept) for cut in cuts for _ in range(self.answers)]
        source = [ends.index(end) if self.answers == 1 else at for at, end in enumerate(ends)]
        made = dict[int, Answering]()
        for at in sorted(set(source)):
            whole = ends[at] == kept
            made[at] = thinking.answering() if whole else thinking.answering_at(ends[at])
            await made[at].finish(lambda call: complete(call, asked.sampling, len(made), told))
        return AnsweredRow(thinking, kept, [made[at] for at in source], source)


def without_tag(environment: Environment) -> Callable[[Sequence[int]], int]:
    """How many tokens of a thinking that its tag closed are not the tag's, in a prompt format."""
    table = compile_stop_string(
        environment.tokenizer, environment.style.think_close, vocab_size=environment.vocab_size
    )
    return lambda tokens: match(table, tokens)[1]


def ask(
    prompts: Prompts,
    rows: Rows,
    key: jax.Array,
    sampler: Sampler,
    listeners: Listeners,
    answered: Callable[[AskedRow], Coroutine[Any, Any, AnsweredRow]],
) -> Rollout:
    """A rollout whose rows servers sample, `spec.slots` at once; arguments as of `generate`.

    Args:
      answered: has a row sampled; what it raises ends the rollout.
    """
    spec, whole = sampler.spec, checked(prompts, rows, key, sampler)
    width = sampler.rules.suffix_length + spec.answer_tokens
    shapes = {"sampled": spec.max_sampled, "width": prompts.tokens.shape[1] + spec.max_sampled}
    of_answers = {"sampled": spec.answer_tokens, "width": width}

    def ended(rows: dict[int, AnsweredRow]) -> None:
        if listeners.on_rows is not None:
            some = [*rows.values()]
            parts = as_trunks(some, **shapes), as_branches(some, **of_answers)
            listeners.on_rows(np.array([*rows]), *parts)

    work = [answered(asked) for asked in asked_rows(prompts, whole, key, sampler)]
    found = asyncio.run(together(work, spec.slots, listeners.poll, ended))
    trunks, branches = as_trunks(found, **shapes), as_branches(found, **of_answers)
    return Rollout(trunks, branches, sampled_counters(trunks, branches))


def asked_rows(
    prompts: Prompts, rows: CompleteRows, key: jax.Array, sampler: Sampler
) -> list[AskedRow]:
    """Rows as servers are asked for them; a row's seed is that of its stream's key and its id."""
    words = np.asarray(jax.random.key_data(key)).reshape(-1, *jax.random.key_data(key).shape[-1:])
    # Of a number in float32 the digits that it was written with.
    warmth = np.asarray(sampler.sampling.temperature, float).reshape(-1).round(6)
    top_p = round(float(sampler.sampling.top_p), 6)
    found = []
    for place, stream in enumerate(rows.streams.tolist()):
        seeds = [*words[stream].tolist(), int(rows.ids[place])]
        seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
        temperature = float(warmth[stream if len(warmth) > 1 else 0])
        drawn = Sampling(temperature, top_p, seed) if temperature else Sampling()
        prompt = np.asarray(prompts.tokens[place])[: int(prompts.lengths[place])].tolist()
        budget, limit = int(rows.budgets[place]), int(rows.limits[place])
        told = None if budget == NO_BUDGET else budget
        found.append(AskedRow(prompt, told, limit, rows.cuts[place].tolist(), drawn))
    return found


async def together(
    rows: Sequence[Coroutine[Any, Any, _T]],
    at_once: int,
    poll: Poll,
    on_rows: Callable[[dict[int, _T]], None] | None = None,
) -> list[_T]:
    """Awaits coroutines, at most `at_once` in flight, and returns their results in their order.

    The first exception cancels all of them, also an exception that `poll` raises.

    Args:
      poll: called about twice a second.
      on_rows: called with the results that have arrived, by their places.
    """
    gate = asyncio.Semaphore(at_once)

    async def admitted(row: Coroutine[Any, Any, _T]) -> _T:
        async with gate:
            return await row

    tasks = [asyncio.ensure_future(admitted(row)) for row in rows]
    place = {task: number for number, task in enumerate(tasks)}
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_PATIENCE, return_when=asyncio.FIRST_EXCEPTION
            )
            if done and on_rows is not None:
                on_rows({place[task]: task.result() for task in done})
            if poll is not None:
                poll()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for row in rows:
            row.close()


def _padded(rows: Sequence[Sequence[Any]], width: int, kind: Any = np.int32) -> np.ndarray:
    """Rows of numbers with zeros after them."""
    found = np.zeros((len(rows), width), kind)
    for row, numbers in enumerate(rows):
        found[row, : len(numbers)] = numbers
    return found


def _numbers(values: Sequence[int]) -> Int[np.ndarray, "n"]:
    return np.array(values, np.int32)


def as_trunks(rows: Sequence[AnsweredRow], *, width: int, sampled: int) -> Trunks:
    """Thinking as rollouts give it.

    Args:
      width: of the tokens.
      sampled: of the log-probabilities.
    """
    thoughts = [row.thinking for row in rows]
    arrays: dict[str, Any] = {
        "tokens": _padded([(*thought.prompt, *thought.tokens) for thought in thoughts], width),
        "prompt_lengths": _numbers([len(thought.prompt) for thought in thoughts]),
        "sampled": _numbers([len(thought.tokens) for thought in thoughts]),
        "thinking": _numbers([row.kept for row in rows]),
        "close": _numbers([_CLOSE[thought.closed_by] for thought in thoughts]),
        "budgets": _numbers([thought.limit for thought in thoughts]),
        "logprobs": _padded([thought.logprobs for thought in thoughts], sampled, np.float32),
    }
    return Trunks(**arrays)


def as_branches(rows: Sequence[AnsweredRow], *, width: int, sampled: int) -> Branches:
    """Answers as rollouts give them: [rows, cuts]; arguments as in `as_trunks`."""
    flat = [answer for row in rows for answer in row.answers]
    shape = (len(rows), len(rows[0].answers))
    table = lambda values, kind: np.array(values, kind).reshape(shape)
    tokens = _padded([(*answer.forced, *answer.tokens) for answer in flat], width)
    logprobs = _padded([answer.logprobs for answer in flat], sampled, np.float32)
    arrays: dict[str, Any] = {
        "tokens": tokens.reshape(*shape, width),
        "context": table([len(answer.prompt) - len(answer.forced) for answer in flat], np.int32),
        "forced": table([len(answer.forced) for answer in flat], np.int32),
        "sampled": table([len(answer.tokens) for answer in flat], np.int32),
        "finished": table([answer.finished for answer in flat], bool),
        "source": _numbers([place for row in rows for place in row.source]).reshape(shape),
        "logprobs": logprobs.reshape(*shape, sampled),
    }
    return Branches(**arrays)
