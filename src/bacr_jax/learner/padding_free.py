"""Builds micro-batches without padding, in which rows can share the computation of their prompt.

A row is one trace: a prompt with its thinking (trunk), and answers at truncation points (branches).
All micro-batches have the same shape. A micro-batch contains consecutive rows, as many as fit into
the maximum number of tokens. `updates` calls this module on the host if `train.padding_free` is
set.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bacr_jax.learner.batch import Batch, filled_rows, joined
from bacr_jax.model.real_tokens import RealTokens

# The number of rows per micro-batch is chosen as if each row used this fraction of the longest
# possible response. The number is limited, because attention is also computed for unused rows.
_SHORT = 0.5


@dataclasses.dataclass(frozen=True)
class Allowance:
    """The limits of a micro-batch.

    Attributes:
      tokens: maximum total number of tokens of all traces in a micro-batch.
      shares_prompts: True if the prompt is computed only once for traces with the same prompt. This
        requires that the prompt is not conditioned on the budget.
    """

    tokens: int
    shares_prompts: bool

    def rows(self, batch: Batch) -> int:
        """Returns the maximum number of rows (traces) per micro-batch.

        Args:
          batch: batch from which the micro-batches are built.
        """
        thinking = batch.thinking_advantages.shape[1]
        branch_positions = math.prod(batch.branches.shape[1:])
        longest = thinking + branch_positions
        rows = math.ceil(self.tokens / (_SHORT * longest))
        rows = min(rows, self.tokens, batch.trunk.shape[0])
        return max(rows, 1)


def _owners(batch: Batch, shares_prompts: bool) -> np.ndarray:
    """Returns, for each row (trace), the index of the row for which its prompt is computed.

    If `shares_prompts` is True, this is the first of consecutive rows with the same prompt.
    Otherwise, the prompt is computed for each row.
    """
    rows = np.arange(batch.trunk.shape[0])
    if not shares_prompts:
        return rows
    trunk = np.asarray(batch.trunk)
    lengths = np.asarray(batch.prompt_lengths)
    width = trunk.shape[1]
    is_prompt = np.arange(width) < lengths[:, None]
    prompts = np.where(is_prompt, trunk, -1)
    is_same = (prompts[1:] == prompts[:-1]).all(1)
    # Rows without a prompt are padding and are never shared.
    is_same = is_same & (lengths[1:] > 0)
    # The first row has no predecessor.
    is_same = np.append(False, is_same)
    return np.maximum.accumulate(np.where(is_same, 0, rows))


def _tokens(batch: Batch) -> np.ndarray:
    """Returns a mask [B, S + M A] that is True for all tokens that are not padding.

    In each row (trace), S positions of prompt and thinking precede M A positions of answers.
    """
    lengths = np.asarray(batch.prompt_lengths) + np.asarray(batch.sampled)
    branch_lengths = np.asarray(batch.branch_lengths)
    trunk_width = batch.trunk.shape[1]
    branch_width = batch.branches.shape[2]
    in_trunk = np.arange(trunk_width) < lengths[:, None]
    in_branch = np.arange(branch_width) < branch_lengths[..., None]
    in_branches = in_branch.reshape(len(lengths), -1)
    return np.concatenate([in_trunk, in_branches], axis=1)


def _flat_indices(flags: np.ndarray, entries: int) -> np.ndarray:
    """Returns the flat index of each True flag, padded with zeros to a length of `entries`."""
    indices = np.flatnonzero(flags)
    assert len(indices) <= entries, (len(indices), entries)
    missing = entries - len(indices)
    return np.pad(indices, (0, missing)).astype(np.int32)


def real_tokens(batch: Batch, allowance: Allowance) -> RealTokens:
    """Lists the tokens of a micro-batch that are not padding. Shared prompts are listed once.

    Args:
      batch: the micro-batch. Its tokens must fit into the allowance.
      allowance: limits of a micro-batch.
    """
    owner = _owners(batch, allowance.shares_prompts)
    is_token = _tokens(batch)
    rows, width = is_token.shape
    prompt_lengths = np.asarray(batch.prompt_lengths)
    is_prompt = np.arange(width) < prompt_lengths[:, None]
    shares = owner != np.arange(rows)
    is_copy = shares[:, None] & is_prompt
    is_source = is_token & ~is_copy
    rank = is_source.ravel().cumsum().reshape(rows, width) - 1
    slot = np.where(is_source, rank, 0)
    slot = np.where(is_prompt, slot[owner], slot)
    fields: dict[str, Any] = {
        "source": _flat_indices(is_source, allowance.tokens),
        "slot": slot.astype(np.int32),
        "is_source": is_source,
        "owner": owner.astype(np.int32),
        "shared": is_prompt & allowance.shares_prompts,
    }
    return RealTokens(**fields)


def planned_rows(batch: Batch, allowance: Allowance) -> list[np.ndarray]:
    """Splits a batch into micro-batches of consecutive rows (traces) that fit into the allowance.

    Returns:
      The row indices of each micro-batch.
    """
    owner = _owners(batch, allowance.shares_prompts)
    prompts = np.asarray(batch.prompt_lengths)
    tokens = _tokens(batch).sum(1)
    max_rows = allowance.rows(batch)
    parts = []
    first = 0
    used = 0
    for row in range(len(owner)):
        # The first row of a micro-batch always computes its prompt, even if an earlier micro-batch
        # computed the same prompt.
        is_shared = owner[row] < row and row > first
        needed = tokens[row] - (prompts[row] if is_shared else 0)
        if row > first and (used + needed > allowance.tokens or row - first == max_rows):
            parts.append(np.arange(first, row))
            first = row
            used = 0
            needed = tokens[row]
        used += needed
    return [*parts, np.arange(first, len(owner))]


def padding_free(batch: Batch, allowance: Allowance) -> Iterator[Batch]:
    """Yields micro-batches of the same shape that together contain all traces of a batch."""
    rows = allowance.rows(batch)
    for part in planned_rows(batch, allowance):
        yield filled(batch, part, rows, allowance)


def filled(batch: Batch, part: np.ndarray, rows: int, allowance: Allowance) -> Batch:
    """Builds a micro-batch from the given rows (traces) of a batch.

    Args:
      batch: the batch.
      part: indices of the rows.
      rows: number of rows of the micro-batch. Unused rows are empty.
    """
    chosen = filled_rows(batch, part, rows)
    sampled = np.asarray(joined(chosen.thinking_mask, chosen.answer_mask))
    scored: Any = _flat_indices(sampled, allowance.tokens)
    tokens = real_tokens(chosen, allowance)
    return dataclasses.replace(chosen, real_tokens=tokens, scored=scored)
