"""Micro-batches of real tokens alone: padding, and prompts that rows share, are computed once.

One shape for all of them: as many rows, in their order, as the allowance of tokens holds. On the
host only.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bacr_jax.learner.batch import Batch, filled_rows, joined
from bacr_jax.model.real_tokens import RealTokens

# Rows of a micro-batch are at most those that have this part of the longest response's tokens:
# attention is computed for all of them, held or not.
_SHORT = 0.5


@dataclasses.dataclass(frozen=True)
class Allowance:
    """What a micro-batch holds.

    Attributes:
      tokens: of all its rows.
      shares_prompts: whether rows with the same prompt run it once, as nothing tells it a budget.
    """

    tokens: int
    shares_prompts: bool

    def rows(self, batch: Batch) -> int:
        """Rows of a micro-batch of such a batch."""
        longest = batch.thinking_advantages.shape[1] + math.prod(batch.branches.shape[1:])
        rows = math.ceil(self.tokens / (_SHORT * longest))
        return max(min(rows, self.tokens, batch.trunk.shape[0]), 1)


def _owners(batch: Batch, shares_prompts: bool) -> np.ndarray:
    """The first of the rows before it, and with it, that have the same prompt as each row."""
    rows = np.arange(batch.trunk.shape[0])
    if not shares_prompts:
        return rows
    trunk, lengths = np.asarray(batch.trunk), np.asarray(batch.prompt_lengths)
    is_prompt = np.arange(trunk.shape[1]) < lengths[:, None]
    prompts = np.where(is_prompt, trunk, -1)
    same = (prompts[1:] == prompts[:-1]).all(1) & (lengths[1:] > 0)
    return np.maximum.accumulate(np.where(np.append(False, same), 0, rows))


def _tokens(batch: Batch) -> np.ndarray:
    """Which positions [B, S + M A] of trunks and branches hold a token that matters."""
    trunk = np.asarray(batch.prompt_lengths) + np.asarray(batch.sampled)
    of_trunk = np.arange(batch.trunk.shape[1]) < trunk[:, None]
    of_branches = np.arange(batch.branches.shape[2]) < np.asarray(batch.branch_lengths)[..., None]
    return np.concatenate([of_trunk, of_branches.reshape(len(trunk), -1)], axis=1)


def _listed(flags: np.ndarray, entries: int) -> np.ndarray:
    """Places of the flags, as one number each, and zeros up to a number of entries."""
    places = np.flatnonzero(flags)
    assert len(places) <= entries, (len(places), entries)
    return np.pad(places, (0, entries - len(places))).astype(np.int32)


def real_tokens(batch: Batch, allowance: Allowance) -> RealTokens:
    """Indices of the tokens of a micro-batch, which has no more of them than the allowance."""
    owner, is_token = _owners(batch, allowance.shares_prompts), _tokens(batch)
    rows, width = is_token.shape
    is_prompt = np.arange(width) < np.asarray(batch.prompt_lengths)[:, None]
    shares = owner != np.arange(rows)
    is_source = is_token & ~(shares[:, None] & is_prompt)
    slot = np.where(is_source, is_source.ravel().cumsum().reshape(rows, width) - 1, 0)
    slot = np.where(is_prompt, slot[owner], slot)
    fields: dict[str, Any] = {
        "source": _listed(is_source, allowance.tokens),
        "slot": slot.astype(np.int32),
        "is_source": is_source,
        "owner": owner.astype(np.int32),
        "shared": is_prompt & allowance.shares_prompts,
    }
    return RealTokens(**fields)


def planned_rows(batch: Batch, allowance: Allowance) -> list[np.ndarray]:
    """Rows of each micro-batch: the next ones, as long as their tokens and their number fit."""
    owner = _owners(batch, allowance.shares_prompts)
    prompts, whole = np.asarray(batch.prompt_lengths), _tokens(batch).sum(1)
    parts, most, first, held = [], allowance.rows(batch), 0, 0
    for row in range(len(owner)):
        # The first row of a micro-batch runs its prompt, whatever rows before it did.
        new = whole[row] - (prompts[row] if owner[row] < row and row > first else 0)
        if row > first and (held + new > allowance.tokens or row - first == most):
            parts.append(np.arange(first, row))
            first, held, new = row, 0, whole[row]
        held += new
    return [*parts, np.arange(first, len(owner))]


def padding_free(batch: Batch, allowance: Allowance) -> Iterator[Batch]:
    """All rows of a batch in micro-batches of one shape."""
    rows = allowance.rows(batch)
    for part in planned_rows(batch, allowance):
        yield filled(batch, part, rows, allowance)


def filled(batch: Batch, part: np.ndarray, rows: int, allowance: Allowance) -> Batch:
    """Some rows of a batch, filled up with empty ones, and the tokens that they hold."""
    chosen = filled_rows(batch, part, rows)
    sampled = np.asarray(joined(chosen.thinking_mask, chosen.answer_mask))
    scored: Any = _listed(sampled, allowance.tokens)
    return dataclasses.replace(chosen, real_tokens=real_tokens(chosen, allowance), scored=scored)
