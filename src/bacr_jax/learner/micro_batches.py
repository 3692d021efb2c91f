"""Splits a batch into micro-batches of nearly equal token counts, in a few padded shapes.

The lengths of rows differ by an order of magnitude. A micro-batch has rows of similar length, as
many as fit in its number of tokens. The widths of trunks are evenly spaced in their logarithm, from
an eighth of the longest trunk to the longest. Rows that use at most a quarter of the positions of
their branches are grouped too, with their branches packed one after the other (`Batch.packing`).
The result is few compiled programs and little padding. `updates` calls this module, on the host.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bacr_jax.learner.batch import Batch, filled_rows, narrowed

# Narrowest width of trunks, as a share of the longest trunk.
_NARROWEST = 1 / 8
# Width of packed branches, as a share of all positions of the branches.
_PACKED = 1 / 4
# Trunk widths are multiples of this number, which suits matrix units ...
_ALIGNMENT = 64
# ... if the longest trunk has at least this number of tokens.
_WIDE = 1024
# Numbers of parts into which the rows, sorted by length, are split before the rows of each part are
# sorted by the length of their branches. The best number is used.
_WINDOWS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Padded shapes of the micro-batches of a run.

    Attributes:
      tokens: maximum trunk and branch positions of a micro-batch, padding included.
      buckets: number of trunk widths.
      multiple: the number of rows is a multiple of this (the row shards of a mesh).
    """

    tokens: int
    buckets: int = 4
    multiple: int = 1

    def widths(self, longest: int) -> list[int]:
        """Returns the trunk widths, ascending up to `longest`."""
        align = _ALIGNMENT if longest >= _WIDE else 1
        num_intervals = max(self.buckets - 1, 1)
        ratio = _NARROWEST ** (1 / num_intervals)
        widths = set()
        for i in range(self.buckets):
            # Rounded before ceil, because powers are not exact.
            exact = round(longest * ratio**i, 6)
            aligned = math.ceil(exact / align) * align
            widths.add(min(aligned, longest))
        return sorted(widths)

    def branch_widths(self, positions: int) -> list[int]:
        """Returns the widths of a row's branches: packed, and all positions."""
        packed = math.ceil(positions * _PACKED)
        return sorted({packed, positions})

    def rows(self, width: int, branch_positions: int) -> int:
        """Returns the rows of a micro-batch; one row per row shard is always allowed."""
        fit = self.tokens // (width + branch_positions)
        return max(fit // self.multiple, 1) * self.multiple


@dataclasses.dataclass(frozen=True)
class Part:
    """Plan of one micro-batch.

    Attributes:
      width: positions of a trunk.
      branches: positions of a row's branches.
      rows: rows, padding included.
      index: indices of the rows in the batch.
    """

    width: int
    branches: int
    rows: int
    index: np.ndarray

    @property
    def positions(self) -> int:
        """Returns the positions that the learner computes, padding included."""
        return self.rows * (self.width + self.branches)


def _packing(lengths: np.ndarray, longest: int, positions: int) -> np.ndarray:
    """Returns the index m A + a of each row's branch tokens, branch after branch, padded with -1.

    Args:
      lengths: [rows, cuts] tokens of each branch.
      longest: A, positions of a branch.
      positions: entries per row of the result.
    """
    is_token = np.arange(longest) < lengths[:, :, None]
    is_token = is_token.reshape(len(lengths), -1)
    tokens_first = np.argsort(~is_token, axis=1, kind="stable")[:, :positions]
    num_tokens = is_token.sum(1)
    is_used = np.arange(positions) < num_tokens[:, None]
    return np.where(is_used, tokens_first, -1).astype(np.int32)


def padded_rows(batch: Batch, part: Part) -> Batch:
    """Builds a micro-batch from its plan, padded with empty rows."""
    narrow_batch = narrowed(batch, part.width, part.width)
    rows = filled_rows(narrow_batch, part.index, part.rows)
    _, cuts, longest = batch.branches.shape
    if part.branches == cuts * longest:
        return rows
    packing: Any = _packing(np.asarray(rows.branch_lengths), longest, part.branches)
    return dataclasses.replace(rows, packing=packing)


def _at_least(widths: list[int], needed: np.ndarray) -> np.ndarray:
    """Returns the smallest of the ascending widths that is at least each needed number."""
    index = np.searchsorted(widths, needed)
    return np.asarray(widths)[index]


def _plan_in_order(
    order: np.ndarray, trunks: np.ndarray, branches: np.ndarray, shapes: Shapes
) -> list[Part]:
    """Plans micro-batches greedily; the first remaining row decides the widths of the next one.

    Args:
      order: indices of the rows, in the order in which they are used.
      trunks: padded trunk width of each row of the batch.
      branches: padded positions of each row's branches.
    """
    parts = []
    remaining = order
    while len(remaining):
        width = int(trunks[remaining[0]])
        positions = int(branches[remaining[0]])
        rows = shapes.rows(width, positions)
        fits = (trunks[remaining] <= width) & (branches[remaining] <= positions)
        chosen = np.flatnonzero(fits)[:rows]
        parts.append(Part(width, positions, rows, remaining[chosen]))
        remaining = np.delete(remaining, chosen)
    return parts


def planned_parts(batch: Batch, shapes: Shapes) -> list[Part]:
    """Plans the micro-batches of a batch; tries several orders of its rows.

    Rows are sorted by length, longest first, so that the last micro-batch, which may not be full,
    is the cheapest. Within parts of this order, rows are sorted by the positions of their branches.
    The number of parts with the fewest positions in total is used.

    Returns:
      The plans, in ascending order of their widths.
    """
    _, cuts, longest = batch.branches.shape
    lengths = np.asarray(batch.prompt_lengths) + np.asarray(batch.sampled)
    trunk_widths = shapes.widths(batch.trunk.shape[1])
    trunks = _at_least(trunk_widths, lengths)
    branch_tokens = np.asarray(batch.branch_lengths).sum(1)
    branch_widths = shapes.branch_widths(cuts * longest)
    branches = _at_least(branch_widths, branch_tokens)
    by_length = np.lexsort((np.arange(len(lengths)), -lengths))

    plans = []
    for windows in _WINDOWS:
        sorted_rows = []
        for rows in np.array_split(by_length, windows):
            by_branches = np.argsort(-branches[rows], kind="stable")
            sorted_rows.append(rows[by_branches])
        order = np.concatenate(sorted_rows)
        plans.append(_plan_in_order(order, trunks, branches, shapes))
    best = min(plans, key=lambda parts: sum(part.positions for part in parts))
    return sorted(best, key=lambda part: (part.width, part.branches))


def micro_batches(batch: Batch, shapes: Shapes) -> Iterator[Batch]:
    """Yields the micro-batches of a batch (`planned_parts`)."""
    for part in planned_parts(batch, shapes):
        yield padded_rows(batch, part)


def empty_micro_batches(batch: Batch, shapes: Shapes) -> Iterator[Batch]:
    """Yields a micro-batch without rows of every shape, to compile for all shapes."""
    _, cuts, longest = batch.branches.shape
    for width in shapes.widths(batch.trunk.shape[1]):
        for positions in shapes.branch_widths(cuts * longest):
            rows = shapes.rows(width, positions)
            part = Part(width, positions, rows, index=np.zeros(0, int))
            yield padded_rows(batch, part)
