"""Defines the inputs of a rollout: rows to sample, sampling settings and callbacks.

A row is one trace: a prompt, the thinking sampled after it, and an answer at each truncation point
of the thinking (cut). Callers of `rollouts.generate` build a request from these classes. A row that
can't be decoded raises an error that contains the id of the row. Invalid rows are detected before
any work on a device, and non-finite logits during decoding.
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
class SamplingSetup:
    """Sampling settings that stay the same in all rollouts.

    Attributes:
      spec: static settings of the rollout.
      rules: decoding rules, such as closing tags, forced suffixes and allowed tokens.
      sampling: temperature and top-p. If the rows are divided into streams (groups with different
        PRNG keys), it may contain one temperature per stream.
      phi_of: function that maps budgets [B] to the budget embedding phi. None for a model without
        budget embedding.
    """

    spec: RolloutSpec
    rules: DecodeRules
    sampling: SamplingParams
    phi_of: PhiOf | None = None


@dataclass(frozen=True)
class RolloutRequest:
    """A request to sample B rows (one trace each), on the host.

    Attributes:
      budgets: thinking budget that the policy receives as input for each row, in tokens, from 0 to
        spec.max_thinking. NO_BUDGET for rows without a budget.
      cuts: number of thinking tokens before each truncation point (cut), at which an answer is
        sampled. With M = 0 cuts, only thinking is sampled.
      ids: global row ids, which determine the random numbers of the rows. None for 0..B-1.
      limits: maximum number of thinking tokens of each row, not counting the grace window, in which
        a row may continue to the next line break. None uses the budgets, or spec.max_thinking for
        rows without a budget. If limits and budgets differ, the budgets must also be passed to
        `make_batch` in the argument `policy_budgets`.
      streams: index of each row's PRNG key and temperature, from 0 to C - 1. Required if there are
        C > 1 keys. None for a single key.
    """

    budgets: Int[np.ndarray, "B"]
    cuts: Int[np.ndarray, "B M"]
    ids: Int[np.ndarray, "B"] | None = None
    limits: Int[np.ndarray, "B"] | None = None
    streams: Int[np.ndarray, "B"] | None = None

    def complete(self, spec: RolloutSpec) -> "ResolvedRequest":
        """Returns the request with all defaults filled in.

        All arrays are converted to int32. Numbers outside the int32 range are clipped.
        """
        budgets = _to_int32(self.budgets)
        limits = self.limits
        if limits is None:
            limits = np.where(budgets == NO_BUDGET, spec.max_thinking, budgets)
        ids = self.ids
        if ids is None:
            ids = np.arange(len(budgets))
        streams = self.streams
        if streams is None:
            streams = np.zeros(len(budgets))
        return ResolvedRequest(
            budgets,
            _to_int32(self.cuts),
            _to_int32(ids),
            _to_int32(limits),
            _to_int32(streams),
        )


def _to_int32(numbers: Any) -> Any:
    """Clips numbers to the int32 range and converts them to int32."""
    bounds = np.iinfo(np.int32)
    return np.clip(numbers, bounds.min, bounds.max).astype(np.int32)


@dataclass(frozen=True)
class ResolvedRequest:
    """A `RolloutRequest` in which all defaults have been filled in. All arrays are int32."""

    budgets: Int[np.ndarray, "B"]
    cuts: Int[np.ndarray, "B M"]
    ids: Int[np.ndarray, "B"]
    limits: Int[np.ndarray, "B"]
    streams: Int[np.ndarray, "B"]

    @property
    def row_ids(self) -> RowIds:
        """Returns the ids and streams, which determine the random numbers of each trace (row)."""
        ids: Any = self.ids
        streams: Any = self.streams
        return RowIds(ids, streams)

    def take(self, index: Int[np.ndarray, "n"]) -> "ResolvedRequest":
        """Returns a request that contains only the rows (traces) with the given indices."""
        columns = vars(self).values()
        return ResolvedRequest(*(column[index] for column in columns))


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a rollout. None disables a callback.

    Attributes:
      poll: called without arguments after every few tokens. It may raise an exception to stop a
        long rollout.
      on_rows: called with the indices of finished rows, their prompts with thinking (`Trunks`) and
        their answers (`Branches`).
      on_tokens: called after every few thinking tokens with (row index, new thinking tokens of the
        row).
      on_answer: called after every few answer tokens with (row index, all forced and sampled tokens
        so far of the answer at the row's first truncation point).
    """

    poll: Poll = None
    on_rows: Callable[[np.ndarray, Trunks, Branches], None] | None = None
    on_tokens: Callable[[int, np.ndarray], None] | None = None
    on_answer: Callable[[int, np.ndarray], None] | None = None


def check_request(
    prompts: Prompts, rows: RolloutRequest, key: jax.Array, setup: SamplingSetup
) -> ResolvedRequest:
    """Checks a request for traces (rows) and fills in its defaults.

    Cuts (truncation points) at or beyond the thinking limit are moved to the end of the grace
    window.

    Args:
      prompts: prompts of all rows.
      rows: the request.
      key: PRNG key of the rollout, or one key per stream.
      setup: sampling settings.

    Raises:
      UserError: a row, a key or the sampling settings are invalid.
    """
    request = rows.complete(setup.spec)
    _check_shapes(prompts, request, setup)
    _check_rows(prompts, request, setup.spec)
    _check_streams(key, setup.sampling, rows.streams)
    cuts = with_grace(request.cuts, request.limits, setup.spec.grace)
    return dataclasses.replace(request, cuts=cuts)


def _check_shapes(prompts: Prompts, rows: ResolvedRequest, setup: SamplingSetup) -> None:
    """Raises UserError if the arrays of a request do not have an entry for each trace (row).

    Also raises UserError if an array has another number of axes, if the numbers of token ids of
    rules and model differ, or if `max_parallel_cuts` is combined with several answers per cut.
    """
    spec = setup.spec
    num_ids = setup.rules.allowed_tokens.shape[0]
    if num_ids != spec.config.vocab_size:
        raise UserError(
            f"rollout: the decoding rules have {num_ids} token ids, but the embedding of the "
            f"model has {spec.config.vocab_size} rows; build the rules with the vocab_size of the "
            "model and a tokenizer that is not larger"
        )
    _check_axes("prompts.tokens", prompts.tokens, "trace", "token")
    _check_axes("prompts.lengths", prompts.lengths, "trace")
    for name, column in vars(rows).items():
        axes = ("trace", "cut") if name == "cuts" else ("trace",)
        _check_axes(name, column, *axes)
    num_prompts = len(prompts.tokens)
    num_lengths = len(prompts.lengths)
    counts = {num_prompts, num_lengths}
    counts.update(len(column) for column in vars(rows).values())
    if len(counts) > 1:
        raise UserError(
            f"rollout: found {num_prompts} prompts, {num_lengths} lengths, {len(rows.budgets)} "
            f"budgets, {len(rows.cuts)} arrays of cuts, {len(rows.ids)} row ids, "
            f"{len(rows.limits)} limits and {len(rows.streams)} streams; pass one of each per "
            "trace"
        )
    if not num_prompts:
        raise UserError("rollout: the request contains no prompts; pass at least one")
    if spec.max_parallel_cuts is not None and spec.answers > 1:
        raise UserError(
            f"rollout: max_parallel_cuts={spec.max_parallel_cuts} can't be used with "
            f"{spec.answers} answers at each cut; set max_parallel_cuts=None, or answers=1"
        )


def _check_axes(name: str, array: Any, *axes: str) -> None:
    """Raises UserError if an array does not have the given axes."""
    if np.ndim(array) != len(axes):
        raise UserError(
            f"rollout: {name} has the shape {np.shape(array)}; pass an array with the axes "
            f"[{', '.join(axes)}]"
        )


def _check_rows(prompts: Prompts, rows: ResolvedRequest, spec: RolloutSpec) -> None:
    """Raises UserError for values that would silently lead to wrong results on the device."""
    budgets = rows.budgets
    cuts = rows.cuts
    limits = rows.limits
    tokens = np.asarray(prompts.tokens)
    lengths = np.asarray(prompts.lengths)
    width = tokens.shape[1]
    longest = spec.max_thinking

    def refuse(is_bad: Any, describe: Callable[[int], str]) -> None:
        if is_bad.any():
            row = int(np.argmax(is_bad))
            raise UserError(f"rollout: trace {rows.ids[row]}: {describe(row)}")

    refuse(lengths < 1, lambda i: "the prompt is empty; pass at least one token")
    refuse(
        lengths > width,
        lambda i: (
            f"the prompt has {lengths[i]} tokens, but the array of prompts has only {width} "
            "columns; pass a shorter length"
        ),
    )
    in_prompt = np.arange(width) < lengths[:, None]
    is_unknown = in_prompt & ((tokens < 0) | (tokens >= spec.config.vocab_size))
    refuse(
        is_unknown.any(1),
        lambda i: (
            f"the prompt contains the token id {tokens[i][is_unknown[i]][0]}, but the vocabulary "
            f"of the model has {spec.config.vocab_size} tokens; use the tokenizer of the model"
        ),
    )
    refuse(
        ((budgets < 0) & (budgets != NO_BUDGET)) | (budgets > longest),
        lambda i: (
            f"the budget {budgets[i]} is out of range; use 0 to {longest} tokens (or NO_BUDGET)"
        ),
    )
    refuse(
        (limits < 0) | (limits > longest),
        lambda i: f"the limit of thinking tokens, {limits[i]}, is out of range; use 0 to {longest}",
    )
    refuse(
        (cuts < 0).any(1),
        lambda i: f"a cut (truncation point) is at {cuts[i].min()} tokens; use 0 or more tokens",
    )


# Generator of random numbers whose keys are independent in a batch.
GENERATOR = "threefry2x32"


def _check_streams(
    key: jax.Array, sampling: SamplingParams, streams: Int[np.ndarray, "B"] | None
) -> None:
    """Raises UserError if keys and temperatures do not match the streams of the rows (traces).

    Args:
      key: PRNG key, or one key for each of C streams.
      streams: index of each row's key and temperature. None if it was not specified.
    """
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise UserError(
            "rollout: the random key is an old-style array of integers; use jax.random.key(seed)"
        )
    generator = jax.random.key_impl(key)
    if generator != GENERATOR:
        raise UserError(
            f"rollout: found a key of the generator {generator}, with which a trace would depend "
            f'on its slot; use jax.random.key(seed, impl="{GENERATOR}")'
        )
    num_keys = key.shape[0] if key.ndim else 1
    if sampling.temperature.ndim and sampling.temperature.shape != (num_keys,):
        raise UserError(
            f"rollout: found {sampling.temperature.shape[0]} temperatures for {num_keys} random "
            "keys; pass one temperature per key, or a single one"
        )
    if key.ndim == 0:
        return
    if streams is None:
        raise UserError(
            f"rollout: {num_keys} random keys were passed, but `streams`, which assigns a key to "
            "each trace, is missing; pass the index of each trace's key as `streams`"
        )
    if len(streams) and not 0 <= streams.min() <= streams.max() < num_keys:
        raise UserError(
            "rollout: `streams` must contain the index of a random key for each trace, but "
            f"contains indices from {streams.min()} to {streams.max()}; use 0 to {num_keys - 1}, "
            f"because {num_keys} keys were passed"
        )


def check_finite(broken_rows: Int[np.ndarray, "n"], ids: Int[np.ndarray, "B"], part: str) -> None:
    """Raises UserError if the logits of any trace (row) are non-finite.

    Args:
      broken_rows: indices into `ids` of rows with non-finite logits.
      ids: ids of all rows.
      part: the part that was being decoded, "thinking" or "answer", for the message.
    """
    if len(broken_rows):
        raise UserError(
            f"rollout: the logits of trace {ids[broken_rows[0]]} were not finite while its {part} "
            f"was decoded ({len(broken_rows)} such traces). The weights contain NaN or infinity, "
            "or bfloat16 overflows; go back to an earlier checkpoint, or set "
            "model.compute_dtype=float32"
        )
