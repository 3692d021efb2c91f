"""What a rollout is asked for: rows, with what they are sampled, and who listens.

Rows that can't be decoded are refused by name, before they reach the device or after.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from bacr_jax.errors import UserError
from bacr_jax.prompts.decode_rules import DecodeRules
from bacr_jax.rewards import with_grace
from bacr_jax.rollout.sampling import RowIds, SamplingParams
from bacr_jax.rollout.spec import RolloutSpec
from bacr_jax.types import NO_BUDGET, Branches, Poll, Prompts, Trunks

PhiOf = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Sampler:
    """What stays the same from rollout to rollout.

    Attributes:
      sampling: temperature and truncation; a temperature of each stream, where there are several.
      phi_of: maps budgets [B] to the budget embedding; None for the plain model.
    """

    spec: RolloutSpec
    rules: DecodeRules
    sampling: SamplingParams
    phi_of: PhiOf | None = None


@dataclass(frozen=True)
class Rows:
    """What is asked for in each row, on the host.

    Attributes:
      budgets: thinking tokens, 0..spec.max_thinking, or NO_BUDGET.
      cuts: thinking tokens kept at each cut; M = 0 samples thinking only.
      ids: global row ids; 0..B-1 by default.
      limits: most thinking tokens, spec.grace aside: by default the budget, and spec.max_thinking
        without one. Where they differ `make_batch` needs the budgets as `told`.
      streams: which of C keys and temperatures each row is drawn with, in 0..C-1; needed where
        there are several.
    """

    budgets: Int[np.ndarray, "B"]
    cuts: Int[np.ndarray, "B M"]
    ids: Int[np.ndarray, "B"] | None = None
    limits: Int[np.ndarray, "B"] | None = None
    streams: Int[np.ndarray, "B"] | None = None

    def complete(self, spec: RolloutSpec) -> "CompleteRows":
        """The same with all defaults filled in, and as decoding counts."""

        def whole(numbers: Any) -> Any:
            bounds = np.iinfo(np.int32)
            return np.clip(numbers, bounds.min, bounds.max).astype(np.int32)

        budgets, cuts = whole(self.budgets), whole(self.cuts)
        limits = self.limits
        if limits is None:
            limits = np.where(budgets == NO_BUDGET, spec.max_thinking, budgets)
        ids = np.arange(len(budgets)) if self.ids is None else self.ids
        streams = np.zeros(len(budgets)) if self.streams is None else self.streams
        return CompleteRows(budgets, cuts, whole(ids), whole(limits), whole(streams))


@dataclass(frozen=True)
class CompleteRows:
    """`Rows` without defaults."""

    budgets: Int[np.ndarray, "B"]
    cuts: Int[np.ndarray, "B M"]
    ids: Int[np.ndarray, "B"]
    limits: Int[np.ndarray, "B"]
    streams: Int[np.ndarray, "B"]

    @property
    def row_ids(self) -> RowIds:
        """What their random numbers depend on."""
        ids: Any = self.ids, self.streams
        return RowIds(*ids)

    def take(self, index: Int[np.ndarray, "n"]) -> "CompleteRows":
        """Some of the rows."""
        return CompleteRows(*(column[index] for column in vars(self).values()))


@dataclass(frozen=True)
class Listeners:
    """Callbacks of a rollout; None: no call.

    Attributes:
      poll: called between chunks, so that a caller can stop a long rollout by raising.
      on_rows: called with the indices of rows that are done, their trunks and their branches.
      on_tokens: called after every chunk with (index of a row, its new thinking tokens).
      on_answer: called after every chunk of answers with (index of a row, forced and sampled tokens
        of the answer at its first cut so far).
    """

    poll: Poll = None
    on_rows: Callable[[np.ndarray, Trunks, Branches], None] | None = None
    on_tokens: Callable[[int, np.ndarray], None] | None = None
    on_answer: Callable[[int, np.ndarray], None] | None = None


def checked(prompts: Prompts, rows: Rows, key: jax.Array, sampler: Sampler) -> CompleteRows:
    """Rows as they are decoded, grace window included; UserError: a row can't be."""
    whole = rows.complete(sampler.spec)
    _check_rows(prompts, whole, sampler)
    _check_streams(key, sampler.sampling, rows.streams)
    cuts = with_grace(whole.cuts, whole.limits, sampler.spec.grace)
    return dataclasses.replace(whole, cuts=cuts)


def _check_rows(prompts: Prompts, rows: CompleteRows, sampler: Sampler) -> None:
    """Everything that would otherwise go wrong on the device, without a word."""
    spec, budgets, cuts, ids = sampler.spec, rows.budgets, rows.cuts, rows.ids
    limits, streams = rows.limits, rows.streams
    tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    known = sampler.rules.allowed_tokens.shape[0]
    if known != spec.config.vocab_size:
        raise UserError(
            f"rollout: rules know {known} token ids, the model has "
            f"{spec.config.vocab_size} rows of the embedding; build the rules with the model's "
            "vocab_size and a tokenizer that is no larger"
        )
    if len({len(x) for x in (tokens, lengths, budgets, cuts, ids, limits, streams)}) > 1:
        raise UserError(
            f"rollout: {len(tokens)} prompts, {len(lengths)} lengths, {len(budgets)} budgets, "
            f"{len(cuts)} rows of cuts, {len(ids)} row ids, {len(limits)} limits, {len(streams)} "
            "streams; write one of each per row"
        )
    if not len(tokens):
        raise UserError("rollout: no rows; write at least one")
    if spec.cuts_at_once is not None and spec.answers > 1:
        raise UserError(
            f"rollout: cuts_at_once={spec.cuts_at_once} with {spec.answers} answers at each cut; "
            "write cuts_at_once=None, or answers=1"
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
    refuse((limits < 0) | (limits > most), lambda i: f"limit {limits[i]}; write 0..{most} tokens")
    refuse((cuts < 0).any(1), lambda i: f"cut {cuts[i].min()}; write 0 or more tokens")


def _check_streams(
    key: jax.Array, sampling: SamplingParams, streams: Int[np.ndarray, "B"] | None
) -> None:
    """Refuses keys and temperatures that do not fit the rows' streams."""
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise UserError("rollout: found an old-style key; write jax.random.key(seed)")
    keys = key.shape[0] if key.ndim else 1
    if sampling.temperature.ndim and sampling.temperature.shape != (keys,):
        raise UserError(
            f"rollout: {sampling.temperature.shape[0]} temperatures for {keys} keys; write one "
            "for each, or a single one"
        )
    if key.ndim == 0:
        return
    if streams is None:
        raise UserError(f"rollout: {keys} keys and no streams; say which key each row has")
    if len(streams) and not 0 <= streams.min() <= streams.max() < keys:
        raise UserError(
            f"rollout: streams from {streams.min()} to {streams.max()}; write 0..{keys - 1}, one "
            f"of the {keys} keys"
        )


def refuse_broken(rows: Int[np.ndarray, "n"], ids: Int[np.ndarray, "B"], during: str) -> None:
    """Stops for rows whose logits are not finite."""
    if len(rows):
        raise UserError(
            f"rollout row {ids[rows[0]]}: logits are not finite while decoding its {during} "
            f"({len(rows)} such rows); the weights hold NaN or infinity, or bfloat16 overflows: "
            "go back to an earlier checkpoint or write model.compute_dtype=float32"
        )
