"""One call from prompts and budgets to trunks and branches, with slots refilled as rows end."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from bacr_jax.data.decode_rules import DecodeRules
from bacr_jax.errors import UserError
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.oom import phase_memory
from bacr_jax.parallel.processes import to_host
from bacr_jax.rollout import branches as branching
from bacr_jax.rollout.engine import Engine, PhiOf, RolloutSpec, answers_of
from bacr_jax.rollout.sampling import SamplingParams
from bacr_jax.rollout.scheduler import Scheduler, smallest_holding
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
        thinking_mean, thinking_max: tokens.
    """

    trunks: Trunks
    branches: Branches
    counters: dict[str, int | float]


def precompile(
    params: DecodeParams,
    prompts: Prompts,
    num_cuts: int,
    *,
    spec: RolloutSpec,
    rules: DecodeRules,
    sampling: SamplingParams,
    phi_of: PhiOf | None = None,
    truncated: bool = False,
    rows: int | None = None,
) -> None:
    """Runs every compiled form that `generate` can need once, whatever lengths come up later.

    Prompts are prefilled at multiples of 128 tokens: of wide prompts, other multiples than that of
    the first one are compiled when they come up.

    Args:
      params: decoding parameters.
      prompts: any prompts of the width that will be used.
      num_cuts: M of the calls to come.
      spec: shapes.
      rules: vocabulary facts.
      sampling: temperature and truncation; only its types matter.
      phi_of: budget embedding; None for the plain model.
      truncated: apply top-k/top-p.
      rows: rows of the calls to come; with no more than there are slots nothing is refilled.
    """
    engine = Engine(
        params,
        prompts,
        jax.random.key(0),
        spec=spec,
        rules=rules,
        sampling=sampling,
        phi_of=phi_of,
        truncated=truncated,
    )
    refilled = rows is None or rows > spec.slots
    counts = engine.sizes if refilled else [smallest_holding(engine.sizes, rows or 1)]
    total, steps = engine.answer_steps
    for length in engine.lengths:
        with phase_memory("prefill", **_sizes(engine)):
            engine.fit(length)
            for count in counts:
                slots = np.arange(count)
                zeros = np.zeros(count, np.int64)
                if length == engine.lengths[0] or refilled:
                    engine.enter(zeros, slots, zeros.astype(np.int32), zeros.astype(np.int32))
        with phase_memory("decode", **_sizes(engine)):
            engine.step()
        for count in engine.sizes if refilled else [spec.slots]:
            if num_cuts == 0:
                continue
            cuts = np.zeros((count, num_cuts), np.int32)
            with phase_memory("answers", **_sizes(engine), answered_rows=count, cuts=num_cuts):
                cache, _, opened, _ = engine.open(np.arange(count), cuts)
                engine.answer_chunk(cache, opened, 0, steps)
    # Back at the shortest: growing is compiled by now, and so is this.
    engine.fit(engine.lengths[0])


def _check(
    prompts: Prompts,
    budgets: np.ndarray,
    cuts: np.ndarray,
    spec: RolloutSpec,
    rules: DecodeRules,
    ids: np.ndarray,
) -> None:
    """Everything that would otherwise go wrong on the device, without a word.

    Raises:
      UserError: names the row.
    """
    tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    if rules.allowed_tokens.shape[0] != spec.config.vocab_size:
        raise UserError(
            f"rollout: rules know {rules.allowed_tokens.shape[0]} token ids, the model has "
            f"{spec.config.vocab_size} rows of the embedding; build the rules with the model's "
            "vocab_size and a tokenizer that is no larger"
        )
    count = len(tokens)
    if not len(lengths) == len(budgets) == len(cuts) == len(ids) == count:
        raise UserError(
            f"rollout: {count} prompts, {len(lengths)} lengths, {len(budgets)} budgets, "
            f"{len(cuts)} rows of cuts, {len(ids)} row ids; write one of each per row"
        )

    def refuse(bad: Any, say: Callable[[int], str]) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            raise UserError(f"rollout row {ids[row]}: {say(row)}")

    width, most = tokens.shape[1], spec.max_thinking
    refuse(lengths < 1, lambda i: "empty prompt; write at least one token")
    refuse(
        lengths > width,
        lambda i: f"prompt of {lengths[i]} tokens, but prompts are {width} wide; shorten it",
    )
    real = np.arange(width) < lengths[:, None]
    wrong = real & ((tokens < 0) | (tokens >= spec.config.vocab_size))
    refuse(
        wrong.any(1),
        lambda i: (
            f"prompt token {tokens[i][wrong[i]][0]}, but the model has "
            f"{spec.config.vocab_size} ids; write its own tokenizer's ids"
        ),
    )
    refuse(
        ((budgets < 0) & (budgets != NO_BUDGET)) | (budgets > most),
        lambda i: f"budget {budgets[i]}; write 0..{most} tokens (or NO_BUDGET)",
    )
    refuse((cuts < 0).any(1), lambda i: f"cut {cuts[i].min()}; write 0 or more tokens")


def _refuse_broken(rows: np.ndarray, ids: np.ndarray, during: str) -> None:
    if len(rows):
        raise UserError(
            f"rollout row {ids[rows[0]]}: logits are not finite while decoding its {during} "
            f"({len(rows)} such rows); the weights hold NaN or infinity, or bfloat16 overflows: "
            "go back to an earlier checkpoint or write model.compute_dtype=float32"
        )


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
    truncated: bool = False,
    poll: Callable[[], None] | None = None,
    on_tokens: Callable[[int, np.ndarray], None] | None = None,
) -> Rollout:
    """Samples thinking under budgets, then an answer at every cut.

    Finished rows leave their slots and waiting ones enter, longest budget first. What a row says
    depends only on `key`, its row id and its own text.

    Args:
      params: decoding parameters.
      prompts: B right-padded prompts.
      budgets: thinking tokens per row, 0..spec.max_thinking, or NO_BUDGET.
      cuts: [B, M] thinking tokens kept at each cut; M = 0 samples thinking only.
      key: key of this call.
      spec: shapes.
      rules: vocabulary facts.
      sampling: temperature and truncation.
      phi_of: maps budgets [B] to the budget embedding; None for the plain model.
      rows: global row ids; 0..B-1 by default.
      truncated: apply top-k/top-p.
      poll: called between chunks, so that a caller can stop a long rollout by raising.
      on_tokens: called after every chunk with (index of a row, its new thinking tokens).

    Raises:
      UserError: a prompt, budget or cut that can't be honoured, or logits that are not finite; the
        row is named.
    """
    budgets, cuts = np.asarray(budgets, np.int32), np.asarray(cuts, np.int32)
    count = len(budgets)
    ids = np.arange(count, dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
    _check(prompts, budgets, cuts, spec, rules, ids)
    with phase_memory("prefill", slots=spec.slots):
        engine = Engine(
            params,
            prompts,
            key,
            spec=spec,
            rules=rules,
            sampling=sampling,
            phi_of=phi_of,
            truncated=truncated,
        )
    limits = np.where(budgets == NO_BUDGET, spec.max_thinking, budgets)
    plan = Scheduler(limits, spec.slots, engine.sizes)
    prompt_lengths = engine.prompts.lengths
    work = {"slot_steps": 0, "lane_steps": 0, "prefill_s": 0.0, "decode_s": 0.0, "answer_s": 0.0}
    sampled = np.zeros(count, np.int64)
    harvest: list[tuple[np.ndarray, Trunks, Branches]] = []
    ended = np.ones(spec.slots, bool)
    while not plan.done:
        started = time.perf_counter()
        entering, slots = plan.enter()
        ended[slots] = limits[entering] <= 0
        inside = plan.occupant[plan.occupied]
        ahead = np.where(ended[plan.occupied], 0, spec.chunk)
        reach = prompt_lengths[inside] + np.minimum(sampled[inside] + ahead, limits[inside])
        with phase_memory("prefill", **_sizes(engine), entering_rows=len(entering)):
            engine.fit(int(reach.max()))
            if len(entering):
                engine.enter(entering, slots, ids, budgets)
                jax.block_until_ready(engine.state.ended)
        started = _lap(work, "prefill_s", started)
        if (plan.occupied & ~ended).any():
            with phase_memory("decode", **_sizes(engine)):
                engine.step()
                state = engine.state
                ended, broken, now = to_host((state.ended, state.broken, state.sampled))
            work["slot_steps"] += spec.chunk * spec.slots
            ended = ended.copy()
            _refuse_broken(plan.occupant[plan.occupied & broken], ids, "thinking")
            if on_tokens is not None:
                _tell(on_tokens, plan, to_host(state.tokens), prompt_lengths, sampled, now)
            sampled[plan.occupant[plan.occupied]] = now[plan.occupied]
            if poll is not None:
                poll()
        started = _lap(work, "decode_s", started)
        ripe = plan.ripe(ended)
        if len(ripe):
            which = plan.occupant[ripe]
            answered = {"answered_rows": len(ripe), "cuts": cuts.shape[1]}
            with phase_memory("answers", **_sizes(engine), **answered):
                trunks, branches = _answer(engine, ripe, cuts[which], ids[which], work, poll)
            harvest.append((plan.leave(ripe), trunks, branches))
        _lap(work, "answer_s", started)
    order = np.argsort(np.concatenate([rows for rows, _, _ in harvest]))
    joined = jax.tree.map(lambda *x: np.concatenate(x)[order], *[x[1:] for x in harvest])
    trunks, branches = joined
    trunks = dataclasses.replace(trunks, budgets=limits.astype(np.int32))
    return Rollout(trunks, branches, _counters(trunks, branches, work))


def _sizes(engine: Engine) -> dict[str, int]:
    """What the memory of a rollout goes with."""
    return {
        "slots": engine.spec.slots,
        "positions": engine.length,
        "prompt_tokens": engine.width,
        "answer_tokens": engine.spec.answer_tokens,
    }


def _lap(work: dict[str, Any], name: str, started: float) -> float:
    now = time.perf_counter()
    work[name] += now - started
    return now


def _tell(
    on_tokens: Callable[[int, np.ndarray], None],
    plan: Scheduler,
    tokens: np.ndarray,
    lengths: np.ndarray,
    before: np.ndarray,
    now: np.ndarray,
) -> None:
    """Hands the new tokens of every row to the caller."""
    for slot in np.flatnonzero(plan.occupied):
        row = int(plan.occupant[slot])
        start, stop = lengths[row] + before[row], lengths[row] + now[slot]
        if stop > start:
            on_tokens(row, tokens[slot, start:stop])


def _answer(
    engine: Engine,
    slots: np.ndarray,
    cuts: np.ndarray,
    ids: np.ndarray,
    work: dict[str, Any],
    poll: Callable[[], None] | None,
) -> tuple[Trunks, Branches]:
    """Answers at every cut of the rows in `slots`; the trunks and branches on the host."""
    if cuts.shape[1] == 0:
        return engine.trunks(slots), branching.no_branches(len(slots))
    cache, trunks, opened, places = engine.open(slots, cuts)
    total, steps = engine.answer_steps
    done = 0
    while done < total and not to_host(opened.ended).all():
        opened = engine.answer_chunk(cache, opened, done, steps)
        done += steps
        work["lane_steps"] += steps * opened.sampled.size
        if poll is not None:
            poll()
    trunks, broken = jax.tree.map(lambda x: x[places], to_host((trunks, opened.broken)))
    _refuse_broken(np.flatnonzero(broken.any(1)), ids, "answer")
    return trunks, answers_of(opened, places, engine.spec.answers)


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
    }
