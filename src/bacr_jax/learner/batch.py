"""The learner's batch: tokens, lengths, and an advantage for every sampled token of a rollout.

`training/stages.py` builds a batch with `make_batch`; `updates` splits it into micro-batches.
"""

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
    """Rows of trunks and branches; all masks are derived from lengths.

    Attributes:
      trunk: prompt and thinking, right-padded.
      sampled: number of sampled thinking tokens (closing tag included).
      budgets: budgets that the policy read; a negative number if it read none.
      cuts: b_j of each cut, in tokens.
      branches: suffix and answer of each cut.
      context: number of trunk tokens that each branch attends to.
      forced: number of forced tokens of each branch, which have no loss.
      answered: number of sampled answer tokens; 0 if the answer of another cut is shared.
      thinking_advantages: advantage of the t-th sampled thinking token.
      answer_advantages: advantage of each answer.
      returns: R at each cut, the target of the value head.
      thinking_logprobs, answer_logprobs: log-probabilities computed by the sampler, in nats.
      packing: index m A + a of each branch token that the learner runs, -1 for none
        (`qwen2.forward_tree`). None runs all M A positions of the branches.
      real_tokens: the tokens that the learner runs. None runs every position.
      scored: index of each sampled token if `real_tokens` is set: row times T + M A plus the index
        in the row, thinking before answers. Unused entries have any index.
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
        """Returns True for rows with a prompt; other rows are padding."""
        return jnp.asarray(self.prompt_lengths) > 0

    @property
    def thinking_mask(self) -> Bool[Array, "B T"]:
        """Returns True for sampled thinking tokens."""
        width = self.thinking_advantages.shape[1]
        return jnp.arange(width) < self.sampled[:, None]

    @property
    def branch_lengths(self) -> Int[Array, "B M"] | Int[np.ndarray, "B M"]:
        """Returns the length of each branch up to its last sampled token; 0 if it has none."""
        return (self.forced + self.answered) * (self.answered > 0)

    @property
    def answer_mask(self) -> Bool[Array, "B M T"]:
        """Returns True for sampled answer tokens."""
        width = self.answer_logprobs.shape[2]
        return jnp.arange(width) < self.answered[:, :, None]


def joined(thinking: Array, answers: Array) -> Array:
    """Concatenates thinking [B, T] and answers [B, M, A] to one row of tokens per trace."""
    rows = answers.shape[0]
    return jnp.concatenate([thinking, answers.reshape(rows, -1)], axis=1)


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
    """Builds a batch from a rollout and its advantages; arrays on the host or on a device.

    Args:
      cuts: [B, M] b_j in tokens.
      thinking_advantages: [B, T] per sampled thinking token.
      answer_advantages: [B, M] per answer, already summed over the cuts that share the answer.
      returns: [B, M] R at each cut.
      told: [B] budgets that the policy read (`Rows.budgets`), possibly NO_BUDGET. The default is
        the limits of the trunks; required if they differ.
    """
    num_cuts = cuts.shape[1]
    is_source = np.asarray(branches.source) == np.arange(num_cuts)
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
        "answered": np.where(is_source, branches.sampled, 0),
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
    """Returns rows without tokens, to compile for later batches.

    Args:
      rows: number of rows.
      prompt, thinking: tokens of a prompt and of its thinking.
      cuts: cuts per row.
      suffix, answer: forced and sampled tokens of an answer.
    """
    trunks = Trunks.empty(rows, width=prompt + thinking, sampled=thinking)
    branches = Branches.empty(rows, cuts, width=suffix + answer, sampled=answer)
    zeros_per_cut = np.zeros((rows, cuts), np.float32)
    return make_batch(
        Prompts(trunks.tokens, trunks.prompt_lengths, trunks.prompt_lengths, trunks.prompt_lengths),
        trunks,
        branches,
        cuts=branches.context,
        thinking_advantages=trunks.logprobs,
        answer_advantages=zeros_per_cut,
        returns=zeros_per_cut,
    )


def filled_rows(batch: Batch, index: Int[np.ndarray, "n"], rows: int) -> Batch:
    """Takes some rows of a batch, on the host, and adds empty rows up to `rows` rows."""

    def take(leaf: Any) -> np.ndarray:
        chosen = np.asarray(leaf)[index]
        padding = [(0, 0)] * chosen.ndim
        padding[0] = (0, rows - len(index))
        return np.pad(chosen, padding)

    return jax.tree.map(take, batch)


def narrowed(batch: Batch, trunk: int, thinking: int) -> Batch:
    """Narrows the buffers of a batch, which must be wide enough for its rows.

    Args:
      trunk: new width of the trunks, in tokens.
      thinking: new width of the thinking tokens' advantages and log-probabilities.
    """
    return dataclasses.replace(
        batch,
        trunk=batch.trunk[:, :trunk],
        thinking_advantages=batch.thinking_advantages[:, :thinking],
        thinking_logprobs=batch.thinking_logprobs[:, :thinking],
    )


def only_rows(batch: Batch, keep: Bool[np.ndarray, "B"]) -> Batch:
    """Removes the sampled tokens, and with them the loss, of rows where `keep` is False."""
    if keep.all():
        return batch
    sampled: Any = np.where(keep, batch.sampled, 0)
    answered: Any = np.where(keep[:, None], batch.answered, 0)
    return dataclasses.replace(batch, sampled=sampled, answered=answered)
