"""Defines the learner's batch: the tokens of a rollout, with an advantage for each sampled token.

`training/stages.py` builds a batch with `make_batch`, and `updates` splits it into micro-batches.
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
    """A batch of B traces (rows), with their advantages.

    A row consists of a trunk, which is a prompt with its thinking, and of M branches, which are
    answers that continue the thinking from a truncation point (cut). All masks are computed from
    lengths.

    Attributes:
      trunk: prompt and thinking tokens, right-padded.
      prompt_lengths: number of prompt tokens. Rows with 0 prompt tokens are padding.
      question_start, question_end: range of the question's tokens within the prompt.
      sampled: number of sampled thinking tokens, including the closing tag.
      budgets: budget in tokens that the policy received as input. Negative if a row has no budget.
      cuts: number of thinking tokens before each cut (b_j).
      branches: forced suffix and answer tokens at each cut.
      context: number of prompt and thinking tokens that each branch attends to.
      forced: number of forced suffix tokens of each branch, which are excluded from the loss.
      answered: number of sampled answer tokens. 0 if the branch shares the answer of another cut.
      thinking_advantages: advantage of each sampled thinking token.
      answer_advantages: advantage of each answer.
      value_targets: reward R (Eq. 7) at each cut, the target of the value head.
      thinking_logprobs, answer_logprobs: log-probabilities in nats, computed by the sampler.
      packing: for each row, the branch tokens that the learner computes, followed by -1
        (`qwen2.forward_tree`). Token a of branch m has index m A + a. All other positions must be
        padding. None computes all M A positions.
      real_tokens: indices of all tokens that are not padding. The learner only computes these
        tokens. None computes every position.
      scored: flat index of each sampled token in an array [B, T + M A'], in which the T thinking
        tokens of a row precede the A' tokens of each answer. Unused entries at the end are 0. Only
        used with `real_tokens`.
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
    value_targets: Float[Array, "B M"]
    thinking_logprobs: Float[Array, "B T"]
    answer_logprobs: Float[Array, "B M T"]
    packing: Int[Array, "B F"] | None = None
    real_tokens: RealTokens | None = None
    scored: Int[Array, " W"] | None = None

    @property
    def real(self) -> Bool[Array, "B"]:
        """Returns a mask that is True for rows (traces) with a prompt. Other rows are padding."""
        return jnp.asarray(self.prompt_lengths) > 0

    @property
    def thinking_mask(self) -> Bool[Array, "B T"]:
        """Returns a mask that is True for sampled thinking tokens."""
        width = self.thinking_advantages.shape[1]
        return jnp.arange(width) < self.sampled[:, None]

    @property
    def branch_lengths(self) -> Int[Array, "B M"] | Int[np.ndarray, "B M"]:
        """Returns the number of tokens of each answer (branch), including its forced suffix.

        The number is 0 for answers without sampled tokens.
        """
        return (self.forced + self.answered) * (self.answered > 0)

    @property
    def answer_mask(self) -> Bool[Array, "B M T"]:
        """Returns a mask that is True for sampled answer tokens."""
        width = self.answer_logprobs.shape[2]
        return jnp.arange(width) < self.answered[:, :, None]


def joined(thinking: Array, answers: Array) -> Array:
    """Concatenates thinking [B, T] and answers [B, M, A] to one array [B, T + M A]."""
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
    value_targets: Array | np.ndarray,
    policy_budgets: Array | np.ndarray | None = None,
) -> Batch:
    """Builds a batch from a rollout and its advantages. Arrays may be on the host or on a device.

    Args:
      prompts: prompts of the B traces, with the position of the question.
      trunks: prompts with their sampled thinking.
      branches: answers sampled at M truncation points (cuts) of each trace.
      cuts: [B, M] number of thinking tokens before each cut (b_j).
      thinking_advantages: [B, T] advantage of each sampled thinking token.
      answer_advantages: [B, M] advantage of each answer, summed over the cuts that share the
        answer.
      value_targets: [B, M] reward R (Eq. 7) at each cut.
      policy_budgets: [B] budgets in tokens that the policy received as input, or NO_BUDGET
        (`RolloutRequest.budgets`). None for the thinking limits `trunks.budgets`. Required if the
        budgets differ from these limits.
    """
    num_cuts = cuts.shape[1]
    is_source = np.asarray(branches.source) == np.arange(num_cuts)
    fields: dict[str, Any] = {
        "trunk": trunks.tokens,
        "prompt_lengths": trunks.prompt_lengths,
        "question_start": prompts.question_start,
        "question_end": prompts.question_end,
        "sampled": trunks.sampled,
        "budgets": trunks.budgets
        if policy_budgets is None
        else np.asarray(policy_budgets, np.int32),
        "cuts": cuts,
        "branches": branches.tokens,
        "context": branches.context,
        "forced": branches.forced,
        "answered": np.where(is_source, branches.sampled, 0),
        "thinking_advantages": thinking_advantages,
        "answer_advantages": answer_advantages,
        "value_targets": value_targets,
        "thinking_logprobs": trunks.logprobs,
        "answer_logprobs": branches.logprobs,
    }
    return Batch(**fields)


def empty_batch(
    rows: int, *, prompt: int, thinking: int, cuts: int, suffix: int, answer: int
) -> Batch:
    """Returns a batch without tokens, used to compile programs for later batches.

    Args:
      rows: number of traces.
      prompt: maximum number of prompt tokens.
      thinking: maximum number of thinking tokens.
      cuts: number of truncation points per trace.
      suffix: maximum number of forced tokens before an answer.
      answer: maximum number of sampled tokens per answer.
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
        value_targets=zeros_per_cut,
    )


def filled_rows(batch: Batch, index: Int[np.ndarray, "n"], rows: int) -> Batch:
    """Selects rows (traces) of a batch on the host, and pads the result with empty rows.

    Args:
      index: indices of the selected rows.
      rows: number of rows of the result.
    """

    def take(leaf: Any) -> np.ndarray:
        chosen = np.asarray(leaf)[index]
        padding = [(0, 0)] * chosen.ndim
        padding[0] = (0, rows - len(index))
        return np.pad(chosen, padding)

    return jax.tree.map(take, batch)


def narrowed(batch: Batch, trunk: int, thinking: int) -> Batch:
    """Truncates the padding of a batch. The new widths must fit the longest trace.

    Args:
      trunk: new width of prompt and thinking together, in tokens.
      thinking: new width of the advantages and log-probabilities of thinking tokens.
    """
    return dataclasses.replace(
        batch,
        trunk=batch.trunk[:, :trunk],
        thinking_advantages=batch.thinking_advantages[:, :thinking],
        thinking_logprobs=batch.thinking_logprobs[:, :thinking],
    )


def only_rows(batch: Batch, keep: Bool[np.ndarray, "B"]) -> Batch:
    """Excludes traces from the loss, by setting their numbers of sampled tokens to 0.

    Args:
      keep: False for traces to exclude.
    """
    if keep.all():
        return batch
    sampled: Any = np.where(keep, batch.sampled, 0)
    answered: Any = np.where(keep[:, None], batch.answered, 0)
    return dataclasses.replace(batch, sampled=sampled, answered=answered)
