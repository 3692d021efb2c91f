"""Samples traces with remote servers: first the thinking, then an answer at every cut.

A row is one trace with its answers, and a cut is a truncation point of the thinking. Evaluation and
`fleet` (training rollouts) call `ask`. This module does not open connections. The caller supplies
the function that sends a request to a server.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from bacr_client import Answering, BudgetRules, Call, Sampling, Thinking
from bacr_client.calls import BY_BUDGET, BY_END_OF_TURN, BY_TAG
from bacr_client.server import extras
from bacr_jax.prompts.stop_strings import compile_stop_string, match
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.rewards import cuts_of_trace
from bacr_jax.rollout.rollouts import Rollout, sampled_counters
from bacr_jax.rollout.rows import (
    Callbacks,
    ResolvedRequest,
    RolloutRequest,
    SamplingSetup,
    check_request,
)
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
# Function that sends a request to a server: (call, sampling, part, extra arguments) -> (token ids,
# log-probabilities). The part is 0 for the thinking, and 1, 2, ... for the answers.
Complete = Callable[
    [Call, Sampling, int, Mapping[str, Any]], Awaitable[tuple[list[Any], list[float]]]
]
_CLOSE = {BY_BUDGET: CLOSED_BY_BUDGET, BY_TAG: CLOSED_BY_TAG, BY_END_OF_TURN: CLOSED_BY_EOS}
# Maximum number of seconds between two calls of `poll`.
_POLL_INTERVAL = 0.5


@dataclass(frozen=True)
class AskedRow:
    """A trace to sample with a server.

    Attributes:
      prompt: token ids of the prompt.
      budget: thinking budget in tokens that the policy receives as input. None without a budget.
      limit: maximum number of thinking tokens.
      cuts: number of thinking tokens before each truncation point, at which an answer is sampled.
      sampling: temperature, top-p and seed of the trace.
    """

    prompt: Sequence[int]
    budget: int | None
    limit: int
    cuts: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True)
class AnsweredRow:
    """A trace that a server has sampled, with its answers.

    Attributes:
      thinking: the sampled thinking.
      num_thinking: number of thinking tokens, without the closing tag.
      answers: answers in the order of their truncation points. Several answers at the same
        truncation point are adjacent.
      source: for each answer, the index of the answer from which it was copied, or its own index if
        it was sampled.
    """

    thinking: Thinking
    num_thinking: int
    answers: list[Answering]
    source: list[int]


@dataclass(frozen=True)
class RemoteSampling:
    """Settings of remote sampling.

    Attributes:
      rules: rules for closing the thinking at its budget.
      without_tag: function that maps thinking tokens that end with the closing tag to the number of
        tokens before the tag.
      answers: number of independent answers at each truncation point.
      cuts_relative_to_length: if True, truncation points are scaled to the length of each trace's
        thinking (`rewards.cuts_of_trace`).
    """

    rules: BudgetRules
    without_tag: Callable[[Sequence[int]], int]
    answers: int = 1
    cuts_relative_to_length: bool = False

    async def row(
        self, asked: AskedRow, complete: Complete, requests: asyncio.Semaphore
    ) -> AnsweredRow:
        """Samples the thinking of a trace, then its answers at all truncation points (cuts).

        The answers are sampled concurrently. Cuts at the same position share an answer if `answers`
        is 1. The first exception cancels the requests for the other answers.

        Args:
          asked: the trace to sample.
          complete: function that sends a request to a server.
          requests: limits the number of requests in flight, of this and other traces.

        Raises:
          ValueError: a server returns tokens that the request does not allow.
        """
        thinking = Thinking(self.rules, asked.prompt, asked.limit)
        xargs = extras(asked.budget, len(asked.prompt))

        async def send(part: int, call: Call) -> tuple[list[Any], list[float]]:
            async with requests:
                return await complete(call, asked.sampling, part, xargs)

        await thinking.finish(functools.partial(send, 0))
        num_thinking = len(thinking.kept)
        if thinking.by_tag:
            num_thinking = self.without_tag(thinking.tokens)
        ends = self._ends(asked, num_thinking)
        source = list(range(len(ends)))
        if self.answers == 1:
            source = [ends.index(end) for end in ends]
        answers = dict[int, Answering]()
        for index in sorted(set(source)):
            if ends[index] == num_thinking:
                answer = thinking.answering()
            else:
                answer = thinking.answering_at(ends[index])
            answers[index] = answer
        # The seeds of an answer depend on its part, so number the answers in the order of the cuts.
        work = [
            answer.finish(functools.partial(send, part))
            for part, answer in enumerate(answers.values(), 1)
        ]
        await together(work, len(work), None)
        return AnsweredRow(thinking, num_thinking, [answers[index] for index in source], source)

    def _ends(self, asked: AskedRow, num_thinking: int) -> list[int]:
        """Returns the number of thinking tokens before each answer, at most `num_thinking`.

        Several answers at the same truncation point (cut) are adjacent.
        """
        cuts = asked.cuts
        if self.cuts_relative_to_length:
            thinking = np.array([num_thinking])
            limit = np.array([asked.limit])
            moved = cuts_of_trace(np.array([cuts]), thinking, limit)
            cuts = moved[0].tolist()
        ends = []
        for cut in cuts:
            end = min(cut, num_thinking)
            ends += [end] * self.answers
        return ends


def without_tag(task_data: TaskData) -> Callable[[Sequence[int]], int]:
    """Builds the function `RemoteSampling.without_tag` from the stop string of the thinking."""
    table = compile_stop_string(
        task_data.tokenizer, task_data.style.think_close, vocab_size=task_data.vocab_size
    )
    return lambda tokens: match(table, tokens)[1]


def ask(
    prompts: Prompts,
    rows: RolloutRequest,
    key: jax.Array,
    setup: SamplingSetup,
    callbacks: Callbacks,
    answered: Callable[[AskedRow, asyncio.Semaphore], Coroutine[Any, Any, AnsweredRow]],
) -> Rollout:
    """Runs a rollout whose rows (one trace each) are sampled by servers.

    At most `setup.spec.slots` rows are sampled at the same time, with at most as many requests in
    flight. A row can have several requests in flight, for its answers.

    Args:
      prompts, rows, key, setup, callbacks: as for `rollouts.generate`.
      answered: async function that samples a row. Its second argument limits the number of
        requests in flight. If it raises an exception, the rollout is canceled.
    """
    spec = setup.spec
    request = check_request(prompts, rows, key, setup)
    prompt_width = prompts.tokens.shape[1]
    suffix_length = setup.rules.suffix_length

    def to_trunks(rows: Sequence[AnsweredRow]) -> Trunks:
        return as_trunks(rows, width=prompt_width + spec.max_sampled, sampled=spec.max_sampled)

    def to_branches(rows: Sequence[AnsweredRow]) -> Branches:
        width = suffix_length + spec.answer_tokens
        return as_branches(rows, width=width, sampled=spec.answer_tokens)

    def report(rows: dict[int, AnsweredRow]) -> None:
        if callbacks.on_rows is not None:
            ended = list(rows.values())
            indices = np.array(list(rows))
            callbacks.on_rows(indices, to_trunks(ended), to_branches(ended))

    requests = asyncio.Semaphore(spec.slots)
    work = [answered(asked, requests) for asked in asked_rows(prompts, request, key, setup)]
    answered_rows = asyncio.run(together(work, spec.slots, callbacks.poll, report))
    trunks = to_trunks(answered_rows)
    branches = to_branches(answered_rows)
    return Rollout(trunks, branches, sampled_counters(trunks, branches))


def asked_rows(
    prompts: Prompts, rows: ResolvedRequest, key: jax.Array, setup: SamplingSetup
) -> list[AskedRow]:
    """Converts the rows (traces) of a rollout to requests for servers.

    The seed of a row depends only on its id and its PRNG key. Rows are divided into streams if
    `key` contains several keys, one per stream.
    """
    key_data = jax.random.key_data(key)
    words_per_key = key_data.shape[-1]
    keys = np.asarray(key_data).reshape(-1, words_per_key)
    # Round, because temperatures such as 0.6 have more digits when they are converted from float32.
    temperatures = np.asarray(setup.sampling.temperature, float).reshape(-1).round(6)
    top_p = round(float(setup.sampling.top_p), 6)
    asked = []
    for index, stream in enumerate(rows.streams.tolist()):
        entropy = [*keys[stream].tolist(), int(rows.ids[index])]
        state = np.random.SeedSequence(entropy).generate_state(1)
        seed = int(state[0])
        is_shared = len(temperatures) == 1
        temperature = float(temperatures[0 if is_shared else stream])
        sampling = Sampling(temperature, top_p, seed) if temperature else Sampling()
        length = int(prompts.lengths[index])
        budget = int(rows.budgets[index])
        row = AskedRow(
            prompt=np.asarray(prompts.tokens[index])[:length].tolist(),
            budget=None if budget == NO_BUDGET else budget,
            limit=int(rows.limits[index]),
            cuts=rows.cuts[index].tolist(),
            sampling=sampling,
        )
        asked.append(row)
    return asked


async def together(
    rows: Sequence[Coroutine[Any, Any, _T]],
    at_once: int,
    poll: Poll,
    on_rows: Callable[[dict[int, _T]], None] | None = None,
) -> list[_T]:
    """Awaits coroutines with limited concurrency and returns their results in order.

    The first exception cancels all coroutines. This includes exceptions raised by `poll`.

    Args:
      rows: the coroutines.
      at_once: maximum number of coroutines in flight.
      poll: callback that is called at least twice per second.
      on_rows: callback that receives a dictionary of new results, keyed by the coroutine's index.
    """
    semaphore = asyncio.Semaphore(at_once)

    async def run_one(row: Coroutine[Any, Any, _T]) -> _T:
        async with semaphore:
            return await row

    tasks = [asyncio.ensure_future(run_one(row)) for row in rows]
    index_of = {task: index for index, task in enumerate(tasks)}
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_POLL_INTERVAL, return_when=asyncio.FIRST_EXCEPTION
            )
            # Reading a result raises the exception of a failed coroutine.
            results = {index_of[task]: task.result() for task in done}
            if results and on_rows is not None:
                on_rows(results)
            if poll is not None:
                poll()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for row in rows:
            row.close()


def _pad_rows(rows: Sequence[Sequence[Any]], width: int, dtype: Any = np.int32) -> np.ndarray:
    """Converts rows of numbers to an array [rows, width]. Rows are padded with zeros at the end."""
    padded = np.zeros((len(rows), width), dtype)
    for row, numbers in enumerate(rows):
        padded[row, : len(numbers)] = numbers
    return padded


def as_trunks(rows: Sequence[AnsweredRow], *, width: int, sampled: int) -> Trunks:
    """Converts the prompts and the thinking of traces to `Trunks`.

    Args:
      rows: the sampled traces.
      width: number of token positions per trace (prompt and thinking).
      sampled: number of log-probabilities per trace.
    """
    thoughts = [row.thinking for row in rows]
    columns: dict[str, list[int]] = {
        "prompt_lengths": [len(thought.prompt) for thought in thoughts],
        "sampled": [len(thought.tokens) for thought in thoughts],
        "thinking": [row.num_thinking for row in rows],
        "close": [_CLOSE[thought.closed_by] for thought in thoughts],
        "budgets": [thought.limit for thought in thoughts],
    }
    arrays: dict[str, Any] = {
        "tokens": _pad_rows([(*thought.prompt, *thought.tokens) for thought in thoughts], width),
        "logprobs": _pad_rows([thought.logprobs for thought in thoughts], sampled, np.float32),
    }
    arrays |= {name: np.array(values, np.int32) for name, values in columns.items()}
    return Trunks(**arrays)


def as_branches(rows: Sequence[AnsweredRow], *, width: int, sampled: int) -> Branches:
    """Converts the answers of traces to `Branches` with axes [traces, answers].

    Args:
      rows: the sampled traces. All have the same number of answers.
      width: number of token positions per answer (forced suffix and sampled tokens).
      sampled: number of log-probabilities per answer.
    """
    flat = [answer for row in rows for answer in row.answers]
    shape = (len(rows), len(rows[0].answers))
    texts = [(*answer.forced, *answer.tokens) for answer in flat]
    tokens = _pad_rows(texts, width)
    logprobs = _pad_rows([answer.logprobs for answer in flat], sampled, np.float32)
    columns: dict[str, list[int]] = {
        "context": [len(answer.prompt) - len(answer.forced) for answer in flat],
        "forced": [len(answer.forced) for answer in flat],
        "sampled": [len(answer.tokens) for answer in flat],
        "source": [index for row in rows for index in row.source],
    }
    finished = np.array([answer.finished for answer in flat], bool)
    arrays: dict[str, Any] = {
        "tokens": tokens.reshape(*shape, width),
        "finished": finished.reshape(shape),
        "logprobs": logprobs.reshape(*shape, sampled),
    }
    for name, values in columns.items():
        arrays[name] = np.array(values, np.int32).reshape(shape)
    return Branches(**arrays)
