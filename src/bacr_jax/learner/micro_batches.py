"""Splits a batch into micro-batches with similar numbers of tokens and a few different shapes.

A row is one trace: a trunk (prompt and thinking) and its branches (answers at truncation points).
The lengths of rows differ by an order of magnitude. Each micro-batch therefore contains rows of
similar length, as many as fit into the maximum number of tokens. The possible widths of trunks are
spaced logarithmically, from an eighth of the longest trunk to the longest trunk. Rows that use at
most a quarter of their branch positions are grouped as well, so that their branches can be packed
without padding between them (`Batch.packing`). This limits both the number of compiled programs and
the amount of padding. `updates` calls this module on the host.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bacr_jax.learner.batch import Batch, filled_rows, narrowed

# Smallest width of trunks (prompt and thinking), as a fraction of the longest trunk.
_NARROWEST = 1 / 8
# Number of positions for packed branches (answers), as a fraction of all branch positions of a row.
_PACKED = 1 / 4
# Long trunks have widths that are multiples of this number, which suits matrix units.
_ALIGNMENT = 64
# Minimum number of tokens in the longest trunk for which widths are rounded up to a multiple of
# `_ALIGNMENT`.
_WIDE = 1024
# Numbers of windows to try. `planned_parts` sorts rows by length, splits them into windows, and
# sorts each window by the length of the branches. The plan with the fewest positions is used.
_WINDOWS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The possible shapes of the micro-batches of a run.

    Attributes:
      tokens: maximum number of token positions per micro-batch, including padding.
      buckets: number of different widths of trunks (prompt and thinking).
      multiple: number of shards into which the mesh divides rows (traces). The number of rows of a
        micro-batch is a multiple of it.
    """

    tokens: int
    buckets: int = 4
    multiple: int = 1

    def widths(self, longest: int) -> list[int]:
        """Returns the possible widths of prompt and thinking, ascending. The last is `longest`."""
        align = _ALIGNMENT if longest >= _WIDE else 1
        num_intervals = max(self.buckets - 1, 1)
        ratio = _NARROWEST ** (1 / num_intervals)
        widths = set()
        for i in range(self.buckets):
            # Round before calling ceil, because floating-point powers are inexact.
            exact = round(longest * ratio**i, 6)
            aligned = math.ceil(exact / align) * align
            widths.add(min(aligned, longest))
        return sorted(widths)

    def branch_widths(self, positions: int) -> list[int]:
        """Returns the possible numbers of answer positions per trace: packed and unpacked.

        Args:
          positions: number of answer (branch) positions without packing.
        """
        packed = math.ceil(positions * _PACKED)
        return sorted({packed, positions})

    def rows(self, width: int, branch_positions: int) -> int:
        """Returns the number of traces (rows) per micro-batch, at least one per row shard.

        Args:
          width: number of positions of prompt and thinking per trace.
          branch_positions: number of answer positions per trace.
        """
        fit = self.tokens // (width + branch_positions)
        return max(fit // self.multiple, 1) * self.multiple


@dataclasses.dataclass(frozen=True)
class MicroBatchPlan:
    """The shape of a micro-batch, and the traces that it contains.

    Attributes:
      width: number of positions of prompt and thinking per trace.
      branches: number of answer positions per trace.
      rows: number of traces, including empty padding.
      index: indices of the traces in the batch.
    """

    width: int
    branches: int
    rows: int
    index: np.ndarray

    @property
    def positions(self) -> int:
        """Returns the number of positions that the learner computes, including padding."""
        return self.rows * (self.width + self.branches)


def _packing(lengths: np.ndarray, longest: int, positions: int) -> np.ndarray:
    """Returns the indices of each trace's answer tokens that are not padding.

    The answers of a trace are padded to A positions each. Position a of answer m has index m A + a.

    Args:
      lengths: [traces, answers] number of tokens of each answer, including its forced suffix.
      longest: number of positions per answer (A).
      positions: number of entries per trace in the result.

    Returns:
      [traces, positions] indices in ascending order, followed by -1.
    """
    is_token = np.arange(longest) < lengths[:, :, None]
    is_token = is_token.reshape(len(lengths), -1)
    tokens_first = np.argsort(~is_token, axis=1, kind="stable")[:, :positions]
    num_tokens = is_token.sum(1)
    is_used = np.arange(positions) < num_tokens[:, None]
    return np.where(is_used, tokens_first, -1).astype(np.int32)


def padded_rows(batch: Batch, part: MicroBatchPlan) -> Batch:
    """Builds a micro-batch from its plan and pads it with empty traces."""
    narrow_batch = narrowed(batch, part.width, part.width)
    rows = filled_rows(narrow_batch, part.index, part.rows)
    _, cuts, longest = batch.branches.shape
    if part.branches == cuts * longest:
        return rows
    packing: Any = _packing(np.asarray(rows.branch_lengths), longest, part.branches)
    return dataclasses.replace(rows, packing=packing)


def _at_least(widths: list[int], needed: np.ndarray) -> np.ndarray:
    """Rounds each needed width up to the next of the possible `widths`, which are ascending."""
    index = np.searchsorted(widths, needed)
    return np.asarray(widths)[index]


def _plan_in_order(
    order: np.ndarray, trunks: np.ndarray, branches: np.ndarray, shapes: Shapes
) -> list[MicroBatchPlan]:
    """Plans micro-batches greedily in a given order of the rows (traces).

    The first row that is not assigned yet determines the shape of the next micro-batch.

    Args:
      order: indices of the rows, in the order in which they are assigned.
      trunks: padded width of prompt and thinking of each row of the batch.
      branches: padded number of answer positions of each row of the batch.
      shapes: possible shapes of the micro-batches.
    """
    parts = []
    remaining = order
    while len(remaining):
        width = int(trunks[remaining[0]])
        positions = int(branches[remaining[0]])
        rows = shapes.rows(width, positions)
        fits = (trunks[remaining] <= width) & (branches[remaining] <= positions)
        chosen = np.flatnonzero(fits)[:rows]
        parts.append(MicroBatchPlan(width, positions, rows, remaining[chosen]))
        remaining = np.delete(remaining, chosen)
    return parts


def planned_parts(batch: Batch, shapes: Shapes) -> list[MicroBatchPlan]:
    """Plans the micro-batches of a batch.

    Rows (traces) are sorted by length in descending order, so that the last micro-batch, which may
    be incomplete, is the cheapest. The sorted rows are split into windows, and each window is
    sorted by the number of answer positions. Several numbers of windows are tried, and the plan
    with the fewest token positions is used.

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
    """Yields the micro-batches that `planned_parts` plans for a batch."""
    for part in planned_parts(batch, shapes):
        yield padded_rows(batch, part)


def empty_micro_batches(batch: Batch, shapes: Shapes) -> Iterator[Batch]:
    """Yields an empty micro-batch of every possible shape, used to compile all programs."""
    _, cuts, longest = batch.branches.shape
    for width in shapes.widths(batch.trunk.shape[1]):
        for positions in shapes.branch_widths(cuts * longest):
            rows = shapes.rows(width, positions)
            part = MicroBatchPlan(width, positions, rows, index=np.zeros(0, int))
            yield padded_rows(batch, part)
