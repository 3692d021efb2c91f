"""What the learner sees of a rollout: tokens, lengths, and an advantage for every sampled token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.model.real_tokens import RealTokens
from bacr_jax.types import Branches, Prompts, Trunks, pytree


@pytree
class Batch:
    """Rows of trunks and branches; every mask is derived from lengths.

    Attributes:
      trunk: prompt and thinking, right-padded.
      sampled: sampled thinking tokens (closing tag included).
      budgets: that the policy was told; a negative number: none.
      cuts: b_j of each cut.
      branches: suffix and answer of each cut.
      context: trunk tokens each branch sees.
      forced: forced tokens of each branch; outside the loss.
      answered: sampled answer tokens; 0 where another cut's answer serves.
      thinking_advantages: advantage of the t-th sampled thinking token.
      answer_advantages: advantage of each answer.
      returns: R at each cut, the value head's target.
      thinking_logprobs, answer_logprobs: the sampler's.
      packing: index m A + a of the branch tokens that the learner runs, -1 for none
        (`qwen2.forward_tree`); None: all M A positions of the branches.
      real_tokens: the tokens of these rows, which are all that the learner runs; None: every
        position.
      scored: with them, the sampled ones: row times T + M A plus index, thinking then answers; any
        place for entries that hold none.
    """

    trunk: Int[Array, "B S"]
    prompt_lengths: Int[Array, "B"]
    question_start: Int[Array, "B"]
    question_end: Int[Array, "B"]
    sampled: Int[Array, "B"]
    budgets: Int[Array, "B"]
    cuts: Int[Array, "B M"]
    branches: Int[Array, "B M A"]
    context: Int[Array, "B M"]
    forced: Int[Array, "B M"]
    answered: Int[Array, "B M"]
    thinking_advantages: Float[Array, "B T"]
    answer_advantages: Float[Array, "B M"]
    returns: Float[Array, "B M"]
    thinking_logprobs: Float[Array, "B T"]
    answer_logprobs: Float[Array, "B M T"]
    packing: Int[Array, "B F"] | None = None
    real_tokens: RealTokens | None = None
    scored: Int[Array, " W"] | None = None

    @property
    def real(self) -> Bool[Array, "B"]:
        """Rows that hold something; rows without a prompt only fill up a shape."""
        return jnp.asarray(self.prompt_lengths) > 0

    @property
    def thinking_mask(self) -> Bool[Array, "B T"]:
        """Sampled thinking tokens."""
        return jnp.arange(self.thinking_advantages.shape[1]) < self.sampled[:, None]

    @property
    def branch_lengths(self) -> Int[Array, "B M"] | Int[np.ndarray, "B M"]:
        """Tokens of each branch that matter: up to the last sampled one, none where none is."""
        return (self.forced + self.answered) * (self.answered > 0)

    @property
    def answer_mask(self) -> Bool[Array, "B M T"]:
        """Sampled answer tokens."""
        return jnp.arange(self.answer_logprobs.shape[2]) < self.answered[:, :, None]


def joined(thinking: Array, answers: Array) -> Array:
    """[B, T] and [B, M, A] as one row of tokens per rollout."""
    return jnp.concatenate([thinking, answers.reshape(answers.shape[0], -1)], axis=1)


def make_batch(
    prompts: Prompts,
    trunks: Trunks,
    branches: Branches,
    *,
    cuts: Array | np.ndarray,
    thinking_advantages: Array | np.ndarray,
    answer_advantages: Array | np.ndarray,
    returns: Array | np.ndarray,
    told: Array | np.ndarray | None = None,
) -> Batch:
    """Joins a rollout and its advantages; arrays of the host or of a device.

    Args:
      cuts: [B, M] b_j in tokens.
      thinking_advantages: [B, T] per sampled thinking token.
      answer_advantages: [B, M] per answer, already summed over the cuts it serves.
      told: [B] budgets that the policy was told (`Rows.budgets`), NO_BUDGET among them; needed
        where they are not the trunks' limits, which they are by default.
    """
    own = np.asarray(branches.source) == np.arange(cuts.shape[1])
    fields: dict[str, Any] = {
        "trunk": trunks.tokens,
        "prompt_lengths": trunks.prompt_lengths,
        "question_start": prompts.question_start,
        "question_end": prompts.question_end,
        "sampled": trunks.sampled,
        "budgets": trunks.budgets if told is None else np.asarray(told, np.int32),
        "cuts": cuts,
        "branches": branches.tokens,
        "context": branches.context,
        "forced": branches.forced,
        "answered": np.where(own, branches.sampled, 0),
        "thinking_advantages": thinking_advantages,
        "answer_advantages": answer_advantages,
        "returns": returns,
        "thinking_logprobs": trunks.logprobs,
        "answer_logprobs": branches.logprobs,
    }
    return Batch(**fields)


def empty_batch(
    rows: int, *, prompt: int, thinking: int, cuts: int, suffix: int, answer: int
) -> Batch:
    """Rows without a token, to compile for the batches to come."""
    trunks = Trunks.empty(rows, width=prompt + thinking, sampled=thinking)
    branches = Branches.empty(rows, cuts, width=suffix + answer, sampled=answer)
    of_cuts = np.zeros((rows, cuts), np.float32)
    return make_batch(
        Prompts(trunks.tokens, trunks.prompt_lengths, trunks.prompt_lengths, trunks.prompt_lengths),
        trunks,
        branches,
        cuts=branches.context,
        thinking_advantages=trunks.logprobs,
        answer_advantages=of_cuts,
        returns=of_cuts,
    )


def filled_rows(batch: Batch, index: Int[np.ndarray, "n"], rows: int) -> Batch:
    """Some rows of a batch, on the host, and empty ones (no prompt) up to a number of rows."""

    def pick(leaf: Any) -> np.ndarray:
        chosen = np.asarray(leaf)[index]
        return np.pad(chosen, [(0, rows - len(index))] + [(0, 0)] * (chosen.ndim - 1))

    return jax.tree.map(pick, batch)


def narrowed(batch: Batch, trunk: int, thinking: int) -> Batch:
    """The same rows in buffers of so many trunk and thinking tokens, which hold all of theirs."""
    return dataclasses.replace(
        batch,
        trunk=batch.trunk[:, :trunk],
        thinking_advantages=batch.thinking_advantages[:, :thinking],
        thinking_logprobs=batch.thinking_logprobs[:, :thinking],
    )


def only_rows(batch: Batch, keep: Bool[np.ndarray, "B"]) -> Batch:
    """The same rows, of which those not kept have no sampled tokens and so no part in the loss."""
    if keep.all():
        return batch
    counted: Any = np.where(keep, batch.sampled, 0)
    answered: Any = np.where(keep[:, None], batch.answered, 0)
    return dataclasses.replace(batch, sampled=counted, answered=answered)
