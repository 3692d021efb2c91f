"""Micro-batches of nearly equal token counts, in a few padded shapes.

Rows of a rollout differ in length by an order of magnitude. Rows of similar length go together, as
many as the token allowance holds:

    bucket width    rows of a micro-batch
    S / 4           4 R         R = allowance / (S + branches)
    S / 2           2 R
    S               R

so that a compiled program exists once per bucket and little of it runs on padding. Host only.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from bacr_jax.learner.batch import Batch


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Padded shapes of the micro-batches of a run.

    Attributes:
      tokens: allowance of a micro-batch, padding included: trunk and branch positions.
      buckets: number of trunk widths.
      multiple: rows come in multiples of this (the row shards of a mesh).
    """

    tokens: int
    buckets: int = 4
    multiple: int = 1

    def widths(self, longest: int) -> list[int]:
        """Trunk widths, evenly spaced up to the longest."""
        return sorted({-(-longest * i // self.buckets) for i in range(1, self.buckets + 1)})

    def rows(self, width: int, branch_positions: int) -> int:
        """Rows of a micro-batch; at least one per row shard, whatever the allowance."""
        fit = self.tokens // (width + branch_positions)
        return max(fit // self.multiple, 1) * self.multiple


def has_advantage(batch: Batch) -> np.ndarray:
    """Rows with an advantage other than 0 on any sampled token; the others have no policy loss."""
    thinking = np.asarray(batch.thinking_advantages)
    sampled = np.arange(thinking.shape[1]) < np.asarray(batch.sampled)[:, None]
    answers = np.asarray(batch.answer_advantages) * (np.asarray(batch.answered) > 0)
    return ((thinking * sampled) != 0).any(1) | (answers != 0).any(1)


def _narrowed(batch: Batch, width: int) -> Batch:
    """The same rows with trunks cut to `width` positions, which hold all their tokens."""
    thinking = min(width, batch.thinking_advantages.shape[1])
    return dataclasses.replace(
        batch,
        trunk=batch.trunk[:, :width],
        thinking_advantages=batch.thinking_advantages[:, :thinking],
        thinking_logprobs=batch.thinking_logprobs[:, :thinking],
    )


def padded_rows(batch: Batch, index: np.ndarray, *, width: int, rows: int) -> Batch:
    """Rows `index` at trunk width `width`, filled up to `rows` with empty rows (no prompt)."""

    def pick(leaf: Any) -> np.ndarray:
        chosen = np.asarray(leaf)[index]
        return np.pad(chosen, [(0, rows - len(index))] + [(0, 0)] * (chosen.ndim - 1))

    return jax.tree.map(pick, _narrowed(batch, width))


def micro_batches(
    batch: Batch, shapes: Shapes, *, keep: np.ndarray | None = None
) -> Iterator[Batch]:
    """All rows of a batch, each in one micro-batch of the narrowest bucket that holds it.

    Args:
      batch: arrays of the host.
      shapes: padded shapes.
      keep: [B] rows to take; None for all.

    Yields:
      Micro-batches, the widest last.
    """
    longest = batch.trunk.shape[1]
    branch_positions = batch.branches.shape[1] * batch.branches.shape[2]
    lengths = np.asarray(batch.prompt_lengths) + np.asarray(batch.sampled)
    wanted = np.ones(len(lengths), bool) if keep is None else keep
    shortest = -1
    for width in shapes.widths(longest):
        index = np.flatnonzero(wanted & (lengths > shortest) & (lengths <= width))
        index = index[np.argsort(lengths[index], kind="stable")]
        rows = shapes.rows(width, branch_positions)
        for start in range(0, len(index), rows):
            yield padded_rows(batch, index[start : start + rows], width=width, rows=rows)
        shortest = width


def empty_micro_batches(batch: Batch, shapes: Shapes) -> Iterator[Batch]:
    """One micro-batch without rows of every shape, to compile them all."""
    branch_positions = batch.branches.shape[1] * batch.branches.shape[2]
    for width in shapes.widths(batch.trunk.shape[1]):
        rows = shapes.rows(width, branch_positions)
        yield padded_rows(batch, np.zeros(0, int), width=width, rows=rows)
