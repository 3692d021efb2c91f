"""Rows that can't be decoded are refused by name, before they reach the device or after."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from bacr_jax.data.decode_rules import DecodeRules
from bacr_jax.errors import UserError
from bacr_jax.rollout.sampling import SamplingParams
from bacr_jax.rollout.spec import RolloutSpec
from bacr_jax.types import NO_BUDGET, Prompts


def check_rows(
    prompts: Prompts,
    budgets: Int[np.ndarray, "..."],
    cuts: Int[np.ndarray, "... M"],
    ids: Int[np.ndarray, "..."],
    *,
    spec: RolloutSpec,
    rules: DecodeRules,
) -> None:
    """Everything that would otherwise go wrong on the device, without a word.

    Args:
      prompts: right-padded prompts.
      budgets: thinking tokens of each row, or NO_BUDGET.
      cuts: thinking tokens kept at each cut.
      ids: global row ids, for the messages.
      spec: shapes.
      rules: vocabulary facts.

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
    if len({len(x) for x in (tokens, lengths, budgets, cuts, ids)}) > 1:
        raise UserError(
            f"rollout: {len(tokens)} prompts, {len(lengths)} lengths, {len(budgets)} budgets, "
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


def check_calls(
    key: jax.Array, sampling: SamplingParams, calls: Int[np.ndarray, "B"] | None
) -> None:
    """Refuses rows of several calls that are not told apart.

    Raises:
      UserError: keys, temperatures and the rows' calls do not fit together.
    """
    keys = key.shape[0] if key.ndim else 1
    if sampling.temperature.ndim and sampling.temperature.shape != (keys,):
        raise UserError(
            f"rollout: {sampling.temperature.shape[0]} temperatures for {keys} keys; write one "
            "for each, or a single one"
        )
    if key.ndim == 0:
        return
    if calls is None:
        raise UserError(f"rollout: {keys} keys and no calls; say whose each row is")
    if len(calls) and not 0 <= calls.min() <= calls.max() < keys:
        raise UserError(
            f"rollout: calls from {calls.min()} to {calls.max()}; write 0..{keys - 1}, one of the "
            f"{keys} keys"
        )


def refuse_broken(rows: Int[np.ndarray, "n"], ids: Int[np.ndarray, "B"], during: str) -> None:
    """Stops for rows whose logits are not finite.

    Args:
      rows: indices of such rows; none is fine.
      ids: global row ids.
      during: what was decoded.

    Raises:
      UserError: names the first of them.
    """
    if len(rows):
        raise UserError(
            f"rollout row {ids[rows[0]]}: logits are not finite while decoding its {during} "
            f"({len(rows)} such rows); the weights hold NaN or infinity, or bfloat16 overflows: "
            "go back to an earlier checkpoint or write model.compute_dtype=float32"
        )
