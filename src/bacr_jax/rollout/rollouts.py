"""One call from prompts and budgets to trunks and branches, with slots refilled as rows end.

`precompile` runs every compiled form that such a call can need, once before the first one.
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
from bacr_jax.oom import phase_memory
from bacr_jax.parallel.processes import to_host
from bacr_jax.rewards import cuts_of_trace
from bacr_jax.rollout import branches as branching
from bacr_jax.rollout.engine import Engine
from bacr_jax.rollout.rows import CompleteRows, Listeners, Rows, Sampler, checked, refuse_broken
from bacr_jax.rollout.scheduler import Scheduler, positions_needed, smallest_holding
from bacr_jax.types import CLOSED_BY_BUDGET, Branches, Prompts, Trunks


@dataclass
class Rollout:
    """Result of `generate`, on the host, in the order of the prompts.

    Attributes:
      branches: answers, one per cut; branch m A + a is the a-th of A answers at cut m.
      counters: what it took:
        row_steps: decoding steps of slots and answer lanes; tokens: sampled tokens (thinking and
        distinct answers), one a step; wasted_share: 1 - tokens / row_steps; occupancy: steps of
        slots (answers aside) that sampled a token, as a share; prefill_tokens; prefill_s,
        decode_s, answer_s: wall seconds of each part; prefill_tokens_per_s, decode_tokens_per_s;
        forced_share: rows cut at their budget; thinking_mean, thinking_max: tokens; excess_mean:
        tokens above the budget (grace).
    """

    trunks: Trunks
    branches: Branches
    counters: dict[str, int | float]


def generate(
    params: DecodeParams,
    prompts: Prompts,
    rows: Rows,
    key: jax.Array,
    sampler: Sampler,
    listeners: Listeners = Listeners(),
) -> Rollout:
    """Samples thinking under budgets, then an answer at every cut.

    Finished rows free their slots for waiting ones, longest budget first. What a row says depends
    only on `key`, its row id and its own text. One rollout can serve several callers: with C keys
    (and temperatures), each row says what it would say in a rollout under the key of its stream.

    Args:
      key: of this rollout, or of each of C streams.

    Raises:
      UserError: a prompt, budget or cut that can't be honoured, or logits that are not finite; the
        row is named.
    """
    whole = checked(prompts, rows, key, sampler)
    with phase_memory("prefill", slots=sampler.spec.slots):
        engine = Engine(params, prompts, key, sampler)
    loop = Loop(engine, whole, listeners)
    while not loop.scheduler.done:
        with loop.timed("prefill_s"):
            loop.fill_slots()
        with loop.timed("decode_s"):
            loop.decode_trunks()
        with loop.timed("answer_s"):
            answered = loop.answer_ended()
        if answered and listeners.on_rows is not None:
            listeners.on_rows(*loop.answered[-1])
    return loop.rollout()


class Loop:
    """The host's side of one call of `generate`.

    Attributes:
      sampled: thinking tokens of each row so far.
      ended: slots whose row has ended its thinking.
      work: steps of slots and of answer lanes, and seconds of each part.
      answered: (rows, their trunks, their branches), in the order in which they were answered.
    """

    def __init__(self, engine: Engine, rows: CompleteRows, listeners: Listeners):
        """All rows wait."""
        spec = engine.spec
        self.engine, self.rows, self.listeners = engine, rows, listeners
        self.scheduler = Scheduler(rows.limits, spec.slots, engine.sizes, spec.row_shards)
        self.sampled = np.zeros(len(rows.limits), np.int64)
        self.ended = np.ones(spec.slots, bool)
        self.work: dict[str, Any] = dict.fromkeys(("slot_steps", "lane_steps"), 0)
        self.answered: list[tuple[np.ndarray, Trunks, Branches]] = []

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of a part to `work`."""
        started = time.perf_counter()
        yield
        self.work[name] = self.work.get(name, 0.0) + time.perf_counter() - started

    def fill_slots(self) -> None:
        """Waiting rows go to free slots; the caches are made to hold every row's next chunk."""
        engine, scheduler = self.engine, self.scheduler
        entering, slots = scheduler.assign()
        self.ended[slots] = self.rows.limits[entering] <= 0
        inside = scheduler.slot_row[scheduler.occupied]
        positions = positions_needed(
            engine.prompts.lengths[inside],
            self.sampled[inside],
            self.rows.limits[inside] + engine.spec.grace,
            self.ended[scheduler.occupied],
            engine.spec.chunk,
        )
        with phase_memory("prefill", **slot_sizes(engine), entering_rows=len(entering)):
            engine.fit_caches(positions)
            if len(entering):
                together = len(entering) == len(self.rows.limits)
                engine.prefill(self.rows, entering, slots, together=together)

    def decode_trunks(self) -> None:
        """One chunk of every slot, if any row is still thinking."""
        engine, scheduler = self.engine, self.scheduler
        occupied, slot_row = scheduler.occupied, scheduler.slot_row
        if not (occupied & ~self.ended).any():
            return
        with phase_memory("decode", **slot_sizes(engine)):
            engine.decode()
            ended, broken, sampled = engine.status()
        self.work["slot_steps"] += engine.spec.chunk * engine.spec.slots
        self.ended = ended.copy()
        refuse_broken(slot_row[occupied & broken], self.rows.ids, "thinking")
        if self.listeners.on_tokens is not None:
            self._report_tokens(self.listeners.on_tokens, sampled)
        self.sampled[slot_row[occupied]] = sampled[occupied]
        self._poll()

    def _poll(self) -> None:
        if self.listeners.poll is not None:
            self.listeners.poll()

    def _report_tokens(
        self, on_tokens: Callable[[int, np.ndarray], None], sampled: Int[np.ndarray, "slots"]
    ) -> None:
        """Hands the new tokens of every row to the caller."""
        tokens, lengths = self.engine.tokens(), self.engine.prompts.lengths
        for slot in np.flatnonzero(self.scheduler.occupied):
            row = int(self.scheduler.slot_row[slot])
            start, stop = lengths[row] + self.sampled[row], lengths[row] + sampled[slot]
            if stop > start:
                on_tokens(row, tokens[slot, start:stop])

    def answer_ended(self) -> bool:
        """Rows that are ready are answered at every cut, and free their slots; are there any?"""
        slots = self.scheduler.ready(self.ended)
        if not len(slots):
            return False
        sizes = {"answered_rows": len(slots), "cuts": self.rows.cuts.shape[1]}
        with phase_memory("answers", **slot_sizes(self.engine), **sizes):
            trunks, branches = self.answer(slots)
        self.answered.append((self.scheduler.release(slots), trunks, branches))
        return True

    def answer(self, slots: Int[np.ndarray, "n"]) -> tuple[Trunks, Branches]:
        """Trunks and branches of the rows in `slots`, on the host."""
        engine, inside = self.engine, self.scheduler.slot_row[slots]
        cuts = self.rows.cuts[inside]
        if cuts.shape[1] == 0:
            return engine.trunks(slots), Branches.empty(len(slots), 0, width=1, sampled=1)
        if engine.spec.own_cuts:
            thinking = np.asarray(engine.trunks(slots).thinking)
            cuts = cuts_of_trace(cuts, thinking, self.rows.limits[inside])
        at_once = engine.spec.cuts_at_once
        if at_once is None or cuts.shape[1] <= at_once:
            return self._answer_cuts(slots, cuts)
        trunks = engine.trunks(slots)
        return trunks, branching.answer(
            cuts,
            np.asarray(trunks.thinking),
            at_once,
            lambda part: self._answer_cuts(slots, part.cuts, part.wanted, part.first)[1],
        )

    def _answer_cuts(
        self,
        slots: Int[np.ndarray, "n"],
        cuts: Int[np.ndarray, "n M"],
        wanted: Bool[np.ndarray, "n M"] | None = None,
        first_cut: int = 0,
    ) -> tuple[Trunks, Branches]:
        """Trunks and the branches at these cuts, decoded together."""
        engine, inside = self.engine, self.scheduler.slot_row[slots]
        rows, on_answer = self.rows.take(inside), self.listeners.on_answer
        opened = engine.open_branches(slots, cuts, wanted, first_cut)
        total, steps = engine.answer_steps
        start = 0
        while start < total and not to_host(opened.state.ended).all():
            opened = engine.decode_branches(opened, start)
            start += steps
            self.work["lane_steps"] += steps * opened.state.sampled.size
            if on_answer is not None and first_cut == 0:
                for row, tokens in zip(inside, engine.first_answers(opened)):
                    on_answer(int(row), tokens)
            self._poll()
        on_host = to_host((opened.trunks, opened.state.broken))
        trunks, broken = jax.tree.map(lambda x: x[opened.places], on_host)
        refuse_broken(np.flatnonzero(broken.any(1)), rows.ids, "answer")
        return trunks, engine.answers(opened)

    def rollout(self) -> Rollout:
        """Everything that was sampled, in the order of the prompts."""
        order = np.argsort(np.concatenate([rows for rows, _, _ in self.answered]))
        parts = [(trunks, branches) for _, trunks, branches in self.answered]
        trunks, branches = jax.tree.map(lambda *x: np.concatenate(x)[order], *parts)
        trunks = dataclasses.replace(trunks, budgets=self.rows.limits)
        return Rollout(trunks, branches, _counters(trunks, branches, self.work))


def slot_sizes(engine: Engine) -> dict[str, int]:
    """What the memory of a rollout goes with."""
    return {
        "slots": engine.spec.slots,
        "positions": engine.length,
        "prompt_tokens": engine.width,
        "answer_tokens": engine.spec.answer_tokens,
    }


def sampled_counters(trunks: Trunks, branches: Branches) -> dict[str, int | float]:
    """The counters that say what was sampled."""
    distinct = branches.source == np.arange(branches.source.shape[1])
    return {
        "tokens": int(trunks.sampled.sum()) + int((branches.sampled * distinct).sum()),
        "forced_share": float((trunks.close == CLOSED_BY_BUDGET).mean()),
        "thinking_mean": float(trunks.thinking.mean()),
        "thinking_max": int(trunks.thinking.max()),
        "excess_mean": float(np.maximum(trunks.thinking - trunks.budgets, 0).mean()),
    }


def _counters(trunks: Trunks, branches: Branches, work: dict[str, Any]) -> dict[str, int | float]:
    """See `Rollout`."""
    found = sampled_counters(trunks, branches)
    thinking, tokens = int(trunks.sampled.sum()), found["tokens"]
    prefill = int(trunks.prompt_lengths.sum())
    steps = work["slot_steps"] + work["lane_steps"]
    share = lambda part, whole: part / whole if whole else 1.0
    per_second = lambda amount, seconds: amount / seconds if seconds else 0.0
    return {
        **found,
        "row_steps": steps,
        "occupancy": share(thinking, work["slot_steps"]),
        "wasted_share": 1.0 - share(tokens, steps),
        "prefill_tokens": prefill,
        "prefill_s": work["prefill_s"],
        "decode_s": work["decode_s"],
        "answer_s": work["answer_s"],
        "prefill_tokens_per_s": per_second(prefill, work["prefill_s"]),
        "decode_tokens_per_s": per_second(thinking, work["decode_s"]),
    }


def precompile(
    params: DecodeParams,
    prompts: Prompts,
    num_cuts: int,
    sampler: Sampler,
    *,
    rows: int | None = None,
    on_program: Callable[[int, int], None] | None = None,
) -> None:
    """Runs every compiled form that `generate` can need once, whatever lengths come up later.

    Prompts are prefilled at multiples of 128 tokens: of wide prompts, other multiples than that of
    the first one are compiled when they come up.

    Args:
      prompts: any prompts of the width that will be used.
      sampler: of the calls to come; of its sampling only whether it truncates matters.
      rows: rows of the calls to come; with no more than there are slots nothing is refilled.
      on_program: called with (programs done, programs in all) before each and after the last;
        raises to leave the rest.
    """
    engine = Engine(params, prompts, jax.random.key(0), sampler)
    refilled = rows is None or rows > sampler.spec.slots
    programs = _programs(engine, num_cuts, refilled=refilled, rows=rows)
    say = on_program or (lambda done, total: None)
    for done, program in enumerate(programs):
        say(done, len(programs))
        program()
    say(len(programs), len(programs))


def _programs(
    engine: Engine, num_cuts: int, *, refilled: bool, rows: int | None
) -> list[Callable[[], None]]:
    """What runs each compiled form of an engine once, in their order."""

    def prefill(length: int, count: int) -> None:
        engine.fit_caches(length)
        zeros = np.zeros(count, np.int64)
        nothing = Rows(zeros, zeros[:, None]).complete(engine.spec)
        with phase_memory("prefill", **slot_sizes(engine)):
            engine.prefill(nothing, zeros, np.arange(count), together=not refilled)

    def decode(length: int) -> None:
        with phase_memory("decode", **slot_sizes(engine)):
            engine.fit_caches(length)
            engine.decode()

    def answer(count: int) -> None:
        together = min(num_cuts, engine.spec.cuts_at_once or num_cuts)
        cuts = np.zeros((count, together), np.int32)
        with phase_memory("answers", **slot_sizes(engine), answered_rows=count, cuts=num_cuts):
            opened = engine.open_branches(np.arange(count), cuts)
            engine.answers(engine.decode_branches(opened, 0))

    counts = engine.sizes if refilled else [smallest_holding(engine.sizes, rows or 1)]
    programs: list[Callable[[], None]] = []
    for length in engine.lengths:
        programs += [functools.partial(prefill, length, count) for count in counts]
        programs.append(functools.partial(decode, length))
        programs += [functools.partial(answer, count) for count in counts if num_cuts]
    # From any length to any other: which are left out goes with prompts and budgets.
    lengths = itertools.chain(*itertools.permutations(engine.lengths, 2))
    return [*programs, *(functools.partial(engine.fit_caches, length) for length in lengths)]
