"""Samples thinking and answers for prompts and thinking budgets.

A row is one trace: a prompt with its thinking (the trunk) and the answers (branches) at truncation
points of the thinking (cuts). A fixed number of decoding slots process one row each, and a slot is
refilled when its row has finished. Training, evaluation and scripts call `generate`. `precompile`
compiles all programs that `generate` can need, before it is first called.
"""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.out_of_memory import phase_memory
from bacr_jax.parallel.processes import to_host
from bacr_jax.rewards import cuts_of_trace
from bacr_jax.rollout import branches as branching
from bacr_jax.rollout.engine import SlotDecoder
from bacr_jax.rollout.rows import (
    Callbacks,
    ResolvedRequest,
    RolloutRequest,
    SamplingSetup,
    check_finite,
    check_request,
)
from bacr_jax.rollout.scheduler import Scheduler, positions_needed, smallest_at_least
from bacr_jax.types import CLOSED_BY_BUDGET, Branches, Prompts, Trunks


@dataclass
class Rollout:
    """The traces and answers sampled by `generate`, on the host, in the order of the prompts.

    Attributes:
      trunks: prompts and sampled thinking.
      branches: sampled answers. With A answers per truncation point, branch m * A + a is answer a
        at truncation point m.
      counters: statistics by name:

        * row_steps: number of decoding steps, summed over slots while thinking is decoded, and over
          parallel answers while answers are decoded. Each samples at most one token.
        * tokens: number of sampled tokens in thinking and distinct answers.
        * wasted_share: 1 - tokens / row_steps, the share of steps that sampled no token.
        * occupancy: share of the slots' thinking steps that sampled a token.
        * prefill_tokens: number of prompt tokens.
        * prefill_s, decode_s, answer_s: wall-clock seconds of each phase.
        * prefill_tokens_per_s, decode_tokens_per_s: throughput of these phases.
        * forced_share: share of traces whose thinking was truncated at the budget.
        * thinking_mean, thinking_max: mean and maximum number of thinking tokens per trace.
        * excess_mean: mean number of thinking tokens beyond the budget (in the grace window).
    """

    trunks: Trunks
    branches: Branches
    counters: dict[str, int | float]


def generate(
    params: DecodeParams,
    prompts: Prompts,
    rows: RolloutRequest,
    key: jax.Array,
    setup: SamplingSetup,
    callbacks: Callbacks = Callbacks(),
) -> Rollout:
    """Samples thinking under token budgets, then an answer at every truncation point (cut).

    A row is one trace with its answers. Finished rows free their decoding slots for waiting rows,
    longest budget first. The text of a row depends only on `key`, the row's id, its prompt and its
    budget.

    One rollout can serve several callers. Each caller's rows form a stream with its own key and
    optionally its own temperature. The text of a row is the same as in a rollout that only contains
    this stream.

    Args:
      params: parameters of the policy, as a copy in the layout for decoding.
      prompts: prompts of all rows.
      rows: budgets, cuts and ids of all rows.
      key: PRNG key of this rollout, or one key for each of C streams.
      setup: sampling settings.
      callbacks: functions to call during the rollout.

    Raises:
      UserError: a prompt, budget or cut is invalid, or logits are non-finite. The message contains
        the id of the row.
    """
    request = check_request(prompts, rows, key, setup)
    with phase_memory("prefill", slots=setup.spec.slots):
        engine = SlotDecoder(params, prompts, key, setup)
    loop = RolloutLoop(engine, request, callbacks)
    while not loop.scheduler.done:
        with loop.timed("prefill_s"):
            loop.fill_slots()
        with loop.timed("decode_s"):
            loop.decode_trunks()
        with loop.timed("answer_s"):
            answered = loop.answer_ended()
        if answered and callbacks.on_rows is not None:
            callbacks.on_rows(*loop.answered[-1])
    return loop.rollout()


class RolloutLoop:
    """The host side of one `generate` call, which assigns traces (rows) to decoding slots.

    Attributes:
      engine: runs the phases on the device.
      rows: all rows of the rollout.
      scheduler: assigns rows to slots.
      sampled: number of thinking tokens sampled so far in each row.
      ended: True for slots whose row has finished its thinking, and for free slots.
      work: number of decoding steps for thinking and for answers, and wall-clock seconds of each
        phase.
      answered: (row indices, thinking, answers) of each batch of rows that were answered together,
        in the order in which the batches finished.
    """

    def __init__(self, engine: SlotDecoder, rows: ResolvedRequest, callbacks: Callbacks):
        """Puts all rows (one trace each) into the queue."""
        spec = engine.spec
        self.engine = engine
        self.rows = rows
        self.callbacks = callbacks
        self.scheduler = Scheduler(rows.limits, spec.slots, engine.sizes, spec.row_shards)
        self.sampled = np.zeros(len(rows.limits), np.int64)
        self.ended = np.ones(spec.slots, bool)
        self.work: dict[str, Any] = {"slot_steps": 0, "lane_steps": 0}
        self.answered: list[tuple[np.ndarray, Trunks, Branches]] = []

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the wall-clock seconds of a `with` block to the phase `name` in `work`."""
        started = time.perf_counter()
        yield
        seconds = self.work.get(name, 0.0)
        self.work[name] = seconds + time.perf_counter() - started

    def fill_slots(self) -> None:
        """Moves waiting rows (traces) to free slots, and resizes the caches for the next steps."""
        engine = self.engine
        scheduler = self.scheduler
        entering, slots = scheduler.assign()
        self.ended[slots] = self.rows.limits[entering] <= 0
        occupied = scheduler.occupied
        active_rows = scheduler.slot_row[occupied]
        positions = positions_needed(
            engine.prompts.lengths[active_rows],
            self.sampled[active_rows],
            self.rows.limits[active_rows] + engine.spec.grace,
            self.ended[occupied],
            engine.spec.chunk,
        )
        with phase_memory("prefill", **slot_sizes(engine), entering_rows=len(entering)):
            engine.fit_caches(positions)
            if len(entering):
                together = len(entering) == len(self.rows.limits)
                engine.prefill(self.rows, entering, slots, together=together)

    def decode_trunks(self) -> None:
        """Decodes a fixed number of thinking tokens of the unfinished traces in decoding slots."""
        engine = self.engine
        occupied = self.scheduler.occupied
        slot_row = self.scheduler.slot_row
        if not (occupied & ~self.ended).any():
            return
        with phase_memory("decode", **slot_sizes(engine)):
            engine.decode()
            ended, broken, sampled = engine.status()
        self.work["slot_steps"] += engine.spec.chunk * engine.spec.slots
        self.ended = ended.copy()
        check_finite(slot_row[occupied & broken], self.rows.ids, "thinking")
        if self.callbacks.on_tokens is not None:
            self._report_tokens(self.callbacks.on_tokens, sampled)
        self.sampled[slot_row[occupied]] = sampled[occupied]
        self._poll()

    def _poll(self) -> None:
        if self.callbacks.poll is not None:
            self.callbacks.poll()

    def _report_tokens(
        self, on_tokens: Callable[[int, np.ndarray], None], sampled: Int[np.ndarray, "slots"]
    ) -> None:
        """Passes the new thinking tokens of every trace (row) to the callback.

        Args:
          on_tokens: callback that receives the index of a row and its new tokens.
          sampled: number of tokens sampled so far in each slot.
        """
        tokens = self.engine.tokens()
        for slot in np.flatnonzero(self.scheduler.occupied):
            row = int(self.scheduler.slot_row[slot])
            prompt_length = self.engine.prompts.lengths[row]
            start = prompt_length + self.sampled[row]
            stop = prompt_length + sampled[slot]
            if stop > start:
                on_tokens(row, tokens[slot, start:stop])

    def answer_ended(self) -> bool:
        """Decodes the answers of traces whose thinking has ended, and frees their decoding slots.

        Nothing is decoded until enough traces have ended (`Scheduler.ready`).

        Returns:
          True if any answers were decoded.
        """
        slots = self.scheduler.ready(self.ended)
        if not len(slots):
            return False
        num_cuts = self.rows.cuts.shape[1]
        sizes = {"answered_rows": len(slots), "cuts": num_cuts}
        with phase_memory("answers", **slot_sizes(self.engine), **sizes):
            trunks, branches = self.answer(slots)
        self.answered.append((self.scheduler.release(slots), trunks, branches))
        return True

    def answer(self, slots: Int[np.ndarray, "n"]) -> tuple[Trunks, Branches]:
        """Decodes the answers of the traces (rows) in the given decoding slots.

        Returns:
          The rows' prompts with thinking (trunks) and answers (branches), on the host.
        """
        engine = self.engine
        indices = self.scheduler.slot_row[slots]
        cuts = self.rows.cuts[indices]
        if cuts.shape[1] == 0:
            no_branches = Branches.empty(len(slots), 0, width=1, sampled=1)
            return engine.trunks(slots), no_branches
        if engine.spec.cuts_relative_to_length:
            thinking = np.asarray(engine.trunks(slots).thinking)
            cuts = cuts_of_trace(cuts, thinking, self.rows.limits[indices])
        at_once = engine.spec.max_parallel_cuts
        if at_once is None or cuts.shape[1] <= at_once:
            return self._answer_cuts(slots, cuts)

        def answer_chunk(chunk: branching.Chunk) -> Branches:
            return self._answer_cuts(slots, chunk.cuts, chunk.wanted, chunk.first)[1]

        trunks = engine.trunks(slots)
        thinking = np.asarray(trunks.thinking)
        return trunks, branching.answer(cuts, thinking, at_once, answer_chunk)

    def _answer_cuts(
        self,
        slots: Int[np.ndarray, "n"],
        cuts: Int[np.ndarray, "n M"],
        wanted: Bool[np.ndarray, "n M"] | None = None,
        first_cut: int = 0,
    ) -> tuple[Trunks, Branches]:
        """Decodes the answers of some traces at the given truncation points (cuts) together.

        Args:
          slots: slots of the rows to answer.
          cuts, wanted, first_cut: as for `SlotDecoder.open_branches`.

        Returns:
          The rows' prompts with thinking (trunks) and answers (branches), on the host.
        """
        engine = self.engine
        on_answer = self.callbacks.on_answer
        indices = self.scheduler.slot_row[slots]
        opened = engine.open_branches(slots, cuts, wanted, first_cut)
        total, steps = engine.answer_steps
        start = 0
        while start < total and not to_host(opened.state.ended).all():
            opened = engine.decode_branches(opened, start)
            start += steps
            self.work["lane_steps"] += steps * opened.state.sampled.size
            if on_answer is not None and first_cut == 0:
                for row, tokens in zip(indices, engine.first_answers(opened)):
                    on_answer(int(row), tokens)
            self._poll()
        on_host = to_host((opened.trunks, opened.state.broken))
        trunks, broken = jax.tree.map(lambda x: x[opened.places], on_host)
        broken_rows = np.flatnonzero(broken.any(1))
        check_finite(broken_rows, self.rows.ids[indices], "answer")
        return trunks, engine.answers(opened)

    def rollout(self) -> Rollout:
        """Returns all traces and answers in the order of the prompts, and the counters."""
        rows = np.concatenate([rows for rows, _, _ in self.answered])
        order = np.argsort(rows)
        parts = [(trunks, branches) for _, trunks, branches in self.answered]
        trunks, branches = jax.tree.map(lambda *x: np.concatenate(x)[order], *parts)
        trunks = dataclasses.replace(trunks, budgets=self.rows.limits)
        return Rollout(trunks, branches, _counters(trunks, branches, self.work))


def slot_sizes(engine: SlotDecoder) -> dict[str, int]:
    """Returns the sizes on which a rollout's memory depends, by name, for out-of-memory messages.

    They are the number of slots (traces decoded at the same time), and the maximum number of
    positions of a trace, of tokens of a prompt and of tokens of an answer.
    """
    return {
        "slots": engine.spec.slots,
        "positions": engine.length,
        "prompt_tokens": engine.width,
        "answer_tokens": engine.spec.answer_tokens,
    }


def sampled_counters(trunks: Trunks, branches: Branches) -> dict[str, int | float]:
    """Returns the counters of a `Rollout` that can be computed from the samples."""
    is_distinct = branches.source == np.arange(branches.source.shape[1])
    answer_tokens = (branches.sampled * is_distinct).sum()
    is_forced = trunks.close == CLOSED_BY_BUDGET
    excess = np.maximum(trunks.thinking - trunks.budgets, 0)
    return {
        "tokens": int(trunks.sampled.sum()) + int(answer_tokens),
        "forced_share": float(is_forced.mean()),
        "thinking_mean": float(trunks.thinking.mean()),
        "thinking_max": int(trunks.thinking.max()),
        "excess_mean": float(excess.mean()),
    }


def _counters(trunks: Trunks, branches: Branches, work: dict[str, Any]) -> dict[str, int | float]:
    """Returns all counters of a `Rollout`."""
    from_samples = sampled_counters(trunks, branches)
    thinking = int(trunks.sampled.sum())
    prefill = int(trunks.prompt_lengths.sum())
    steps = work["slot_steps"] + work["lane_steps"]
    return {
        **from_samples,
        "row_steps": steps,
        "occupancy": _ratio(thinking, work["slot_steps"], otherwise=1.0),
        "wasted_share": 1.0 - _ratio(from_samples["tokens"], steps, otherwise=1.0),
        "prefill_tokens": prefill,
        "prefill_s": work["prefill_s"],
        "decode_s": work["decode_s"],
        "answer_s": work["answer_s"],
        "prefill_tokens_per_s": _ratio(prefill, work["prefill_s"], otherwise=0.0),
        "decode_tokens_per_s": _ratio(thinking, work["decode_s"], otherwise=0.0),
    }


def _ratio(amount: int | float, total: int | float, *, otherwise: float) -> float:
    """Returns amount / total, or `otherwise` if the total is 0."""
    return amount / total if total else otherwise


def precompile(
    params: DecodeParams,
    prompts: Prompts,
    num_cuts: int,
    setup: SamplingSetup,
    *,
    rows: int | None = None,
    on_program: Callable[[int, int], None] | None = None,
) -> None:
    """Compiles all programs that `generate` can need, by running each of them once.

    Prompts are prefilled at widths that are multiples of 128 tokens. If `prompts` are wider than
    128 tokens, only the width of the first prompt is compiled here. Other widths are compiled when
    they first occur.

    Args:
      params: parameters of the policy, as a copy in the layout for decoding.
      prompts: any prompts with the padded width of later calls.
      num_cuts: number of truncation points per trace in later calls.
      setup: settings of later calls. Of the sampling parameters, only `truncated` matters.
      rows: number of traces in later calls. Decoding slots are only refilled if there are more
        traces than slots. None compiles for any number of traces.
      on_program: callback that is called with (number of finished programs, total number of
        programs) before each program and after the last one. It may raise an exception to skip the
        remaining programs.
    """
    engine = SlotDecoder(params, prompts, jax.random.key(0), setup)
    refilled = rows is None or rows > setup.spec.slots
    programs = _programs(engine, num_cuts, refilled=refilled, rows=rows)
    report = on_program or (lambda finished, total: None)
    for finished, program in enumerate(programs):
        report(finished, len(programs))
        program()
    report(len(programs), len(programs))


def _programs(
    engine: SlotDecoder, num_cuts: int, *, refilled: bool, rows: int | None
) -> list[Callable[[], None]]:
    """Returns one function per compiled program, which runs it. Call them in the returned order.

    Args:
      engine: decoder whose programs are run.
      num_cuts: number of truncation points per trace.
      refilled: True if there are more traces than slots, so that slots are refilled.
      rows: number of traces in later rollouts. None for any number.
    """

    def prefill(length: int, count: int) -> None:
        engine.fit_caches(length)
        zeros = np.zeros(count, np.int64)
        request = RolloutRequest(zeros, zeros[:, None]).complete(engine.spec)
        with phase_memory("prefill", **slot_sizes(engine)):
            engine.prefill(request, zeros, np.arange(count), together=not refilled)

    def decode(length: int) -> None:
        with phase_memory("decode", **slot_sizes(engine)):
            engine.fit_caches(length)
            engine.decode()

    def answer(count: int) -> None:
        max_parallel_cuts = min(num_cuts, engine.spec.max_parallel_cuts or num_cuts)
        cuts = np.zeros((count, max_parallel_cuts), np.int32)
        with phase_memory("answers", **slot_sizes(engine), answered_rows=count, cuts=num_cuts):
            opened = engine.open_branches(np.arange(count), cuts)
            engine.answers(engine.decode_branches(opened, 0))

    counts = engine.sizes
    if not refilled:
        counts = [smallest_at_least(engine.sizes, rows or 1)]
    programs: list[Callable[[], None]] = []
    for length in engine.lengths:
        programs += [functools.partial(prefill, length, count) for count in counts]
        programs.append(functools.partial(decode, length))
        programs += [functools.partial(answer, count) for count in counts if num_cuts]
    # Compile every transition between two lengths, because prompts and budgets determine which
    # transitions occur.
    for lengths in itertools.permutations(engine.lengths, 2):
        programs += [functools.partial(engine.fit_caches, length) for length in lengths]
    return programs
