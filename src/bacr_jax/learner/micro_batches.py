"""Micro-batches of nearly equal token counts, in a few padded shapes.

Rows of a rollout differ in length by an order of magnitude. Rows of similar length go together, as
many as the token allowance holds; the widths of trunks are evenly spaced in their logarithm, from
an eighth of the longest to the longest. Rows whose branches have a quarter of the positions that
there are for them, or fewer, go together too, with branches packed one after the other
(`Batch.packing`). So a compiled program exists for each of a few shapes, and little of it runs on
padding. Host only.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bacr_jax.learner.batch import Batch, filled_rows, narrowed

# The narrowest trunks have this part of the longest one's positions, packed branches this one.
_NARROWEST, _PACKED = 1 / 8, 1 / 4
# Widths come in multiples that matrix units like, if the longest is that long.
_ALIGNMENT, _WIDE = 64, 1024
# Parts of a batch, sorted by length, in which rows with short branches are put together.
_WINDOWS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Padded shapes of the micro-batches of a run.

    Attributes:
      tokens: allowance of a micro-batch, padding included: trunk and branch positions.
      multiple: rows come in multiples of this (the row shards of a mesh).
    """

    tokens: int
    buckets: int = 4
    multiple: int = 1

    def widths(self, longest: int) -> list[int]:
        """Trunk widths, up to the longest."""
        align = _ALIGNMENT if longest >= _WIDE else 1
        ratio = _NARROWEST ** (1 / max(self.buckets - 1, 1))
        exact = [longest * ratio**i for i in range(self.buckets)]
        # Rounded first: powers are not exact.
        return sorted({min(math.ceil(round(x, 6) / align) * align, longest) for x in exact})

    def branch_widths(self, positions: int) -> list[int]:
        """Positions for the branches of a row: packed, and all that there are."""
        return sorted({math.ceil(positions * _PACKED), positions})

    def rows(self, width: int, branch_positions: int) -> int:
        """Rows of a micro-batch; at least one per row shard, whatever the allowance."""
        fit = self.tokens // (width + branch_positions)
        return max(fit // self.multiple, 1) * self.multiple


@dataclasses.dataclass(frozen=True)
class Part:
    """One micro-batch to be.

    Attributes:
      width: positions of its trunks.
      branches: positions of a row's branches.
      index: rows of the batch that it holds.
    """

    width: int
    branches: int
    rows: int
    index: np.ndarray

    @property
    def positions(self) -> int:
        """Positions that the learner computes, padding included."""
        return self.rows * (self.width + self.branches)


def _packing(lengths: np.ndarray, longest: int, positions: int) -> np.ndarray:
    """Indices m A + a of each row's branch tokens, one branch after the other, then -1."""
    real = (np.arange(longest) < lengths[:, :, None]).reshape(len(lengths), -1)
    real_first = np.argsort(~real, axis=1, kind="stable")[:, :positions]
    is_real = np.arange(positions) < real.sum(1)[:, None]
    return np.where(is_real, real_first, -1).astype(np.int32)


def padded_rows(batch: Batch, part: Part) -> Batch:
    """The rows of a micro-batch at its widths, filled up with empty rows."""
    rows = filled_rows(narrowed(batch, part.width, part.width), part.index, part.rows)
    _, cuts, longest = batch.branches.shape
    if part.branches == cuts * longest:
        return rows
    packing: Any = _packing(np.asarray(rows.branch_lengths), longest, part.branches)
    return dataclasses.replace(rows, packing=packing)


def _at_least(widths: list[int], needed: np.ndarray) -> np.ndarray:
    """The narrowest width that holds each."""
    return np.asarray(widths)[np.searchsorted(widths, needed)]


def _filled(
    order: np.ndarray, trunks: np.ndarray, branches: np.ndarray, shapes: Shapes
) -> list[Part]:
    """Micro-batches filled in this order; the first row left decides the widths of the next."""
    parts, left = [], order
    while len(left):
        width, positions = int(trunks[left[0]]), int(branches[left[0]])
        rows = shapes.rows(width, positions)
        fits = (trunks[left] <= width) & (branches[left] <= positions)
        taken = np.flatnonzero(fits)[:rows]
        parts.append(Part(width, positions, rows, left[taken]))
        left = np.delete(left, taken)
    return parts


def planned_parts(batch: Batch, shapes: Shapes) -> list[Part]:
    """The micro-batches of a batch: of several ways to sort its rows the one with least padding.

    Longest rows first, so that the last micro-batch, which may not be full, is the cheapest; rows
    with few branch positions are put together over all lengths, or over a part of them. Of what is
    returned the widest is the last.
    """
    _, cuts, longest = batch.branches.shape
    lengths = np.asarray(batch.prompt_lengths) + np.asarray(batch.sampled)
    trunks = _at_least(shapes.widths(batch.trunk.shape[1]), lengths)
    needed = np.asarray(batch.branch_lengths).sum(1)
    branches = _at_least(shapes.branch_widths(cuts * longest), needed)
    by_length = np.lexsort((np.arange(len(lengths)), -lengths))

    def order(windows: int) -> np.ndarray:
        parts = np.array_split(by_length, windows)
        return np.concatenate([part[np.argsort(-branches[part], kind="stable")] for part in parts])

    plans = [_filled(order(windows), trunks, branches, shapes) for windows in _WINDOWS]
    best = min(plans, key=lambda parts: sum(part.positions for part in parts))
    return sorted(best, key=lambda part: (part.width, part.branches))


def micro_batches(batch: Batch, shapes: Shapes) -> Iterator[Batch]:
    """All rows of a batch, each in one micro-batch that holds it (`planned_parts`)."""
    for part in planned_parts(batch, shapes):
        yield padded_rows(batch, part)


def empty_micro_batches(batch: Batch, shapes: Shapes) -> Iterator[Batch]:
    """One micro-batch without rows of every shape, to compile them all."""
    _, cuts, longest = batch.branches.shape
    for width in shapes.widths(batch.trunk.shape[1]):
        for positions in shapes.branch_widths(cuts * longest):
            rows = shapes.rows(width, positions)
            yield padded_rows(batch, Part(width, positions, rows, np.zeros(0, int)))
