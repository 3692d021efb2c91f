"""Builds micro-batches of real tokens: no padding is computed, and shared prompts only once.

All micro-batches have one shape. Each has as many rows, in their order, as fit in its number of
tokens. `updates` calls this module if `train.padding_free` is set, on the host.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bacr_jax.learner.batch import Batch, filled_rows, joined
from bacr_jax.model.real_tokens import RealTokens

# A micro-batch has room for as many rows as would fit if each had this share of the longest
# response. The number is limited, because attention is computed for unused rows too.
_SHORT = 0.5


@dataclasses.dataclass(frozen=True)
class Allowance:
    """Limits of a micro-batch.

    Attributes:
      tokens: maximum tokens of all rows together.
      shares_prompts: True if rows with the same prompt run it once, which requires that the prompt
        is not conditioned on the budget.
    """

    tokens: int
    shares_prompts: bool

    def rows(self, batch: Batch) -> int:
        """Returns the number of rows of a micro-batch."""
        thinking = batch.thinking_advantages.shape[1]
        branch_positions = math.prod(batch.branches.shape[1:])
        longest = thinking + branch_positions
        rows = math.ceil(self.tokens / (_SHORT * longest))
        rows = min(rows, self.tokens, batch.trunk.shape[0])
        return max(rows, 1)


def _owners(batch: Batch, shares_prompts: bool) -> np.ndarray:
    """Returns, for each row, the index of the first of adjacent rows with the same prompt."""
    rows = np.arange(batch.trunk.shape[0])
    if not shares_prompts:
        return rows
    trunk = np.asarray(batch.trunk)
    lengths = np.asarray(batch.prompt_lengths)
    width = trunk.shape[1]
    is_prompt = np.arange(width) < lengths[:, None]
    prompts = np.where(is_prompt, trunk, -1)
    is_same = (prompts[1:] == prompts[:-1]).all(1)
    # Rows without a prompt are padding.
    is_same = is_same & (lengths[1:] > 0)
    # The first row has no row before it.
    is_same = np.append(False, is_same)
    return np.maximum.accumulate(np.where(is_same, 0, rows))


def _tokens(batch: Batch) -> np.ndarray:
    """Returns True for the positions [B, S + M A] of trunks and branches that have a real token."""
    lengths = np.asarray(batch.prompt_lengths) + np.asarray(batch.sampled)
    branch_lengths = np.asarray(batch.branch_lengths)
    trunk_width = batch.trunk.shape[1]
    branch_width = batch.branches.shape[2]
    in_trunk = np.arange(trunk_width) < lengths[:, None]
    in_branch = np.arange(branch_width) < branch_lengths[..., None]
    in_branches = in_branch.reshape(len(lengths), -1)
    return np.concatenate([in_trunk, in_branches], axis=1)


def _flat_indices(flags: np.ndarray, entries: int) -> np.ndarray:
    """Returns the flat index of each True flag, padded with zeros to `entries`."""
    indices = np.flatnonzero(flags)
    assert len(indices) <= entries, (len(indices), entries)
    missing = entries - len(indices)
    return np.pad(indices, (0, missing)).astype(np.int32)


def real_tokens(batch: Batch, allowance: Allowance) -> RealTokens:
    """Returns the indices of a micro-batch's tokens, which must fit in the allowance."""
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
    """Returns the rows of each micro-batch: consecutive rows, while tokens and rows fit."""
    owner = _owners(batch, allowance.shares_prompts)
    prompts = np.asarray(batch.prompt_lengths)
    tokens = _tokens(batch).sum(1)
    max_rows = allowance.rows(batch)
    parts = []
    first = 0
    used = 0
    for row in range(len(owner)):
        # The first row of a micro-batch always runs its prompt, which an earlier one may have run.
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
    """Yields all rows of a batch in micro-batches of one shape."""
    rows = allowance.rows(batch)
    for part in planned_rows(batch, allowance):
        yield filled(batch, part, rows, allowance)


def filled(batch: Batch, part: np.ndarray, rows: int, allowance: Allowance) -> Batch:
    """Builds a micro-batch from some rows of a batch.

    Args:
      part: indices of the rows.
      rows: rows of the micro-batch; unused rows are empty.
    """
    chosen = filled_rows(batch, part, rows)
    sampled = np.asarray(joined(chosen.thinking_mask, chosen.answer_mask))
    scored: Any = _flat_indices(sampled, allowance.tokens)
    tokens = real_tokens(chosen, allowance)
    return dataclasses.replace(chosen, real_tokens=tokens, scored=scored)
