"""One call from prompts and budgets to trunks and branches, with slots refilled as rows end."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.data.decode_rules import DecodeRules
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.oom import phase_memory
from bacr_jax.parallel.processes import to_host
from bacr_jax.rollout import cut_chunks
from bacr_jax.rollout.branches import no_branches
from bacr_jax.rollout.checks import check_calls, check_rows, refuse_broken
from bacr_jax.rollout.engine import Engine, PhiOf
from bacr_jax.rollout.sampling import SamplingParams
from bacr_jax.rollout.scheduler import Scheduler
from bacr_jax.rollout.simulation import positions_needed
from bacr_jax.rollout.spec import RolloutSpec
from bacr_jax.types import CLOSED_BY_BUDGET, NO_BUDGET, Branches, Prompts, Trunks


@dataclass
class Rollout:
    """Result of `generate`, on the host, in the order of the prompts.

    Attributes:
      trunks: sampled thinking.
      branches: sampled answers, one per cut; branch m A + a is the a-th of A answers at cut m.
      counters: what it took:
        row_steps, useful_steps: decoding steps of slots and answer lanes, and those of them that
        sampled a token; occupancy: steps of slots (answers aside) that sampled a token, as a
        share; wasted_share: 1 - useful_steps / row_steps; tokens: sampled tokens (thinking and
        distinct answers); prefill_tokens; prefill_s, decode_s, answer_s: wall seconds of each
        part; prefill_tokens_per_s, decode_tokens_per_s; forced_share: rows cut at their budget;
        thinking_mean, thinking_max: tokens; excess_mean: tokens above the budget (grace).
    """

    trunks: Trunks
    branches: Branches
    counters: dict[str, int | float]


def generate(
    params: DecodeParams,
    prompts: Prompts,
    budgets: Int[np.ndarray, "B"],
    cuts: Int[np.ndarray, "B M"],
    key: jax.Array,
    *,
    spec: RolloutSpec,
    rules: DecodeRules,
    sampling: SamplingParams,
    phi_of: PhiOf | None = None,
    rows: Int[np.ndarray, "B"] | None = None,
    limits: Int[np.ndarray, "B"] | None = None,
    calls: Int[np.ndarray, "B"] | None = None,
    poll: Callable[[], None] | None = None,
    on_rows: Callable[[np.ndarray, Trunks, Branches], None] | None = None,
    on_tokens: Callable[[int, np.ndarray], None] | None = None,
    on_answer: Callable[[int, np.ndarray], None] | None = None,
) -> Rollout:
    """Samples thinking under budgets, then an answer at every cut.

    Finished rows free their slots for waiting ones, longest budget first. What a row says depends
    only on `key`, its row id and its own text. Rows of several calls share slots if `key` holds a
    key of each, [C], and `calls` says whose each row is: they say what they would say in calls of
    their own. `sampling` may then hold C temperatures.

    Args:
      params: decoding parameters.
      prompts: B right-padded prompts.
      budgets: thinking tokens per row, 0..spec.max_thinking, or NO_BUDGET.
      cuts: [B, M] thinking tokens kept at each cut; M = 0 samples thinking only.
      key: key of this call, or of each of C calls.
      spec: shapes.
      rules: vocabulary facts.
      sampling: temperature and truncation.
      phi_of: maps budgets [B] to the budget embedding; None for the plain model.
      rows: global row ids; 0..B-1 by default.
      limits: most thinking tokens per row, spec.grace aside: what each row is told by default, and
        spec.max_thinking without a budget.
      calls: call of each row, in 0..C-1; needed where there are several.
      poll: called between chunks, so that a caller can stop a long rollout by raising.
      on_rows: called with the indices of rows that are done, their trunks and their branches.
      on_tokens: called after every chunk with (index of a row, its new thinking tokens).
      on_answer: called after every chunk of answers with (index of a row, forced and sampled tokens
        of the answer at its first cut so far).

    Raises:
      UserError: a prompt, budget or cut that can't be honoured, or logits that are not finite; the
        row is named.
    """
    budgets, cuts = np.asarray(budgets, np.int32), np.asarray(cuts, np.int32)
    ids = np.asarray(np.arange(len(budgets)) if rows is None else rows, np.int32)
    if limits is None:
        limits = np.where(budgets == NO_BUDGET, spec.max_thinking, budgets)
    check_rows(prompts, budgets, cuts, ids, spec=spec, rules=rules)
    check_calls(key, sampling, calls)
    # The last cut is the end of the trace, which a grace window moves.
    cuts = np.where(cuts >= limits[:, None], cuts + spec.grace, cuts)
    with phase_memory("prefill", slots=spec.slots):
        engine = Engine(
            params,
            prompts,
            key,
            spec=spec,
            rules=rules,
            sampling=sampling,
            phi_of=phi_of,
        )
    listeners = on_tokens, on_answer
    loop = Loop(engine, budgets, limits, cuts, ids, calls=calls, poll=poll, listeners=listeners)
    while not loop.scheduler.done:
        with loop.timed("prefill_s"):
            loop.fill_slots()
        with loop.timed("decode_s"):
            loop.decode_trunks()
        with loop.timed("answer_s"):
            done = loop.answer_ended()
        if on_rows is not None and len(done):
            on_rows(*loop.answered[-1])
    return loop.rollout()


class Loop:
    """The host's side of one call of `generate`.

    Attributes:
      scheduler: rows waiting, and the row in each slot.
      limits: most thinking tokens of each row.
      sampled: thinking tokens of each row so far.
      ended: slots whose row has ended its thinking.
      work: steps of slots and of answer lanes, and seconds of each part.
      answered: (rows, their trunks, their branches), in the order in which they were answered.
    """

    def __init__(
        self,
        engine: Engine,
        budgets: Int[np.ndarray, "B"],
        limits: Int[np.ndarray, "B"],
        cuts: Int[np.ndarray, "B M"],
        ids: Int[np.ndarray, "B"],
        *,
        calls: Int[np.ndarray, "B"] | None = None,
        poll: Callable[[], None] | None,
        listeners: tuple[Callable[[int, np.ndarray], None] | None, ...] = (None, None),
    ):
        """All rows wait; arguments as for `generate`, `ids` being its `rows`."""
        spec = engine.spec
        self.engine, self.budgets, self.cuts, self.ids = engine, budgets, cuts, ids
        self.poll, (self.on_tokens, self.on_answer) = poll or (lambda: None), listeners
        self.limits, self.calls = limits, calls
        self.scheduler = Scheduler(self.limits, spec.slots, engine.sizes, spec.row_shards)
        self.sampled = np.zeros(len(budgets), np.int64)
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
        rows, slots = scheduler.assign()
        self.ended[slots] = self.limits[rows] <= 0
        decoded = scheduler.occupied & engine.decoded
        inside = scheduler.slot_row[decoded]
        positions = positions_needed(
            engine.prompts.lengths[inside],
            self.sampled[inside],
            self.limits[inside] + engine.spec.grace,
            self.ended[decoded],
            engine.spec.chunk,
        )
        with phase_memory("prefill", **slot_sizes(engine), entering_rows=len(rows)):
            engine.fit_caches(positions)
            if len(rows):
                given = self.ids, self.budgets, self.limits
                together = len(rows) == len(self.limits)
                engine.prefill(rows, slots, *given, calls=self.calls, together=together)

    def decode_trunks(self) -> None:
        """One chunk of every slot, if any row is still thinking."""
        engine, scheduler = self.engine, self.scheduler
        occupied, slot_row = scheduler.occupied, scheduler.slot_row
        if not (occupied & ~self.ended).any():
            return
        with phase_memory("decode", **slot_sizes(engine)):
            if engine.spec.compact and not scheduler.waiting:
                engine.compact(self.ended)
            engine.decode()
            ended, broken, sampled = engine.progress()
        self.work["slot_steps"] += engine.spec.chunk * int(engine.decoded.sum())
        self.ended = ended.copy()
        refuse_broken(slot_row[occupied & broken], self.ids, "thinking")
        if self.on_tokens is not None:
            self._report_tokens(self.on_tokens, sampled)
        self.sampled[slot_row[occupied]] = sampled[occupied]
        self.poll()

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

    def answer_ended(self) -> Int[np.ndarray, "n"]:
        """Rows that are ready are answered at every cut, and free their slots; their indices."""
        slots = self.scheduler.ready(self.ended)
        if not len(slots):
            return slots
        rows = self.scheduler.slot_row[slots]
        sizes = {"answered_rows": len(slots), "cuts": self.cuts.shape[1]}
        with phase_memory("answers", **slot_sizes(self.engine), **sizes):
            trunks, branches = self._answer(slots, rows)
        self.answered.append((self.scheduler.release(slots), trunks, branches))
        return rows

    def _answer(
        self, slots: Int[np.ndarray, "n"], rows: Int[np.ndarray, "n"]
    ) -> tuple[Trunks, Branches]:
        """Trunks and branches of the `rows` in `slots`, on the host."""
        engine, cuts = self.engine, self.cuts[rows]
        if cuts.shape[1] == 0:
            return engine.trunks(slots), no_branches(len(slots))
        at_once = engine.spec.cuts_at_once
        if at_once is None or cuts.shape[1] <= at_once:
            return self._answer_cuts(slots, rows, cuts)
        trunks = engine.trunks(slots)
        return trunks, cut_chunks.answer(
            cuts,
            np.asarray(trunks.thinking),
            at_once,
            not engine.spec.tells_cuts,
            lambda part: self._answer_cuts(slots, rows, part.cuts, part.wanted, part.first)[1],
        )

    def _answer_cuts(
        self,
        slots: Int[np.ndarray, "n"],
        rows: Int[np.ndarray, "n"],
        cuts: Int[np.ndarray, "n M"],
        wanted: Bool[np.ndarray, "n M"] | None = None,
        first_cut: int = 0,
    ) -> tuple[Trunks, Branches]:
        """Trunks and the branches at these cuts, decoded together."""
        engine = self.engine
        opened = engine.open_branches(slots, cuts, self.budgets[rows], wanted, first_cut)
        total, steps = engine.answer_steps
        start = 0
        while start < total and not to_host(opened.state.ended).all():
            opened = engine.decode_branches(opened, start)
            start += steps
            self.work["lane_steps"] += steps * opened.state.sampled.size
            if self.on_answer is not None:
                for row, tokens in zip(rows, engine.first_answers(opened)):
                    self.on_answer(int(row), tokens)
            self.poll()
        on_host = to_host((opened.trunks, opened.state.broken))
        trunks, broken = jax.tree.map(lambda x: x[opened.places], on_host)
        refuse_broken(np.flatnonzero(broken.any(1)), self.ids[rows], "answer")
        return trunks, engine.answers(opened)

    def rollout(self) -> Rollout:
        """Everything that was sampled, in the order of the prompts."""
        order = np.argsort(np.concatenate([rows for rows, _, _ in self.answered]))
        parts = [(trunks, branches) for _, trunks, branches in self.answered]
        trunks, branches = jax.tree.map(lambda *x: np.concatenate(x)[order], *parts)
        trunks = dataclasses.replace(trunks, budgets=self.limits.astype(np.int32))
        return Rollout(trunks, branches, _counters(trunks, branches, self.work))


def slot_sizes(engine: Engine) -> dict[str, int]:
    """What the memory of a rollout goes with."""
    return {
        "slots": engine.spec.slots,
        "positions": engine.length,
        "prompt_tokens": engine.width,
        "answer_tokens": engine.spec.answer_tokens,
    }


def _counters(trunks: Trunks, branches: Branches, work: dict[str, Any]) -> dict[str, int | float]:
    """See `Rollout`."""
    thinking = int(trunks.sampled.sum())
    distinct = branches.source == np.arange(branches.source.shape[1])
    answers = int((branches.sampled * distinct).sum())
    prefill = int(trunks.prompt_lengths.sum())
    steps = work["slot_steps"] + work["lane_steps"]
    share = lambda part, whole: part / whole if whole else 1.0
    per_second = lambda amount, seconds: amount / seconds if seconds else 0.0
    return {
        "row_steps": steps,
        "useful_steps": thinking + answers,
        "occupancy": share(thinking, work["slot_steps"]),
        "wasted_share": 1.0 - share(thinking + answers, steps),
        "tokens": thinking + answers,
        "prefill_tokens": prefill,
        "prefill_s": work["prefill_s"],
        "decode_s": work["decode_s"],
        "answer_s": work["answer_s"],
        "prefill_tokens_per_s": per_second(prefill, work["prefill_s"]),
        "decode_tokens_per_s": per_second(thinking, work["decode_s"]),
        "forced_share": float((trunks.close == CLOSED_BY_BUDGET).mean()),
        "thinking_mean": float(trunks.thinking.mean()),
        "thinking_max": int(trunks.thinking.max()),
        "excess_mean": float(np.maximum(trunks.thinking - trunks.budgets, 0).mean()),
    }
