"""Which rows sit in which slots, and when: the host's side of a rollout.

Rows wait with the longest budget first, since a budget is known before a token is decoded: the long
ones run beside each other and the short ones fill the gaps they leave. They are dealt out to the
devices in turn, since all wait for the device that has the most keys to read. A row that has ended
keeps its slot until its answers are decoded, because they read its cache; that happens for several
rows at a time, as soon as a given share of the slots has ended.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

FREE = -1


def doubling_sizes(slots: int, share: float, multiple: int = 1) -> list[int]:
    """Numbers of rows that are prefilled or answered at once; each is compiled once.

    Args:
      share: of the slots that must have ended before they are answered and refilled.
      multiple: every size is a multiple of it (row shards of a mesh).

    Returns:
      The smallest batch, doubled up to half of the slots, and all slots.
    """
    sizes = [max(round(slots * share / multiple), 1) * multiple]
    while 2 * sizes[-1] <= slots // 2:
        sizes.append(2 * sizes[-1])
    return sorted({*sizes, slots})


def smallest_holding(candidates: Sequence[int], count: int) -> int:
    """The smallest of the ascending candidates that is at least `count`."""
    return next(size for size in candidates if size >= count)


def positions_needed(
    prompts: Int[np.ndarray, "n"],
    sampled: Int[np.ndarray, "n"],
    limits: Int[np.ndarray, "n"],
    ended: Bool[np.ndarray, "n"],
    chunk: int,
) -> int:
    """Positions that caches must have for the next chunk."""
    reach = np.minimum(sampled + np.where(ended, 0, chunk), limits)
    return int((prompts + reach).max())


def deal(slots: Int[np.ndarray, "n"], num_slots: int, shards: int) -> Int[np.ndarray, "n"]:
    """Slots in the order in which the longest rows take them: to and fro over the devices.

    Args:
      slots: some slots, ascending.
      num_slots: of all devices; each has a block of them.
    """
    device = slots // (num_slots // shards)
    turn = np.arange(len(slots)) - np.searchsorted(device, device)
    return slots[np.lexsort((np.where(turn % 2, -device, device), turn))]


def prefill_batches(widths: Int[np.ndarray, "n"], sizes: Sequence[int]) -> list[np.ndarray]:
    """Rows that are prefilled together: as few padded positions as batches of these sizes allow.

    Rows are taken from the widest down, so that a batch is as wide as its first row; of equally
    good splits the one with the fewest batches is taken.

    Args:
      widths: that each row is prefilled at, padding included.
      sizes: numbers of rows of a batch, ascending; a batch may have free places.

    Returns:
      Indices of the rows of every batch.
    """
    n = len(widths)
    if n <= sizes[-1] and (widths == widths[0]).all():
        return [np.arange(n)]
    order = np.argsort(-widths, kind="stable")
    # From row i on: (positions, batches, size of the first batch).
    best = [(0, 0, 0)] * (n + 1)
    for i in reversed(range(n)):
        after = [best[min(i + size, n)] for size in sizes]
        best[i] = min(
            (size * int(widths[order[i]]) + rest[0], 1 + rest[1], size)
            for size, rest in zip(sizes, after)
        )
    batches, i = [], 0
    while i < n:
        batches.append(np.sort(order[i : i + best[i][2]]))
        i += best[i][2]
    return batches


class Scheduler:
    """Rows waiting, and the row in each slot."""

    def __init__(
        self, budgets: Int[np.ndarray, "B"], slots: int, batch_sizes: Sequence[int], shards: int = 1
    ):
        """All rows wait.

        Args:
          batch_sizes: numbers of rows answered at once, ascending.
          shards: devices over which slots are spread, in blocks.
        """
        self.waiting = list(np.argsort(-budgets, kind="stable"))
        self.slot_row = np.full(slots, FREE, np.int64)
        self.batch_sizes = batch_sizes
        self.shards = shards

    @property
    def occupied(self) -> Bool[np.ndarray, "slots"]:
        """Slots that hold a row."""
        return self.slot_row != FREE

    @property
    def done(self) -> bool:
        """No row waits and none is in a slot."""
        return not self.waiting and not self.occupied.any()

    def assign(self) -> tuple[np.ndarray, np.ndarray]:
        """Waiting rows and the free slots they go to, as many as there are of both."""
        free = deal(np.flatnonzero(~self.occupied), self.slot_row.size, self.shards)
        free = free[: len(self.waiting)]
        rows = np.array(self.waiting[: len(free)], np.int64)
        del self.waiting[: len(free)]
        self.slot_row[free] = rows
        return rows, free

    def ready(self, ended: Bool[np.ndarray, "slots"]) -> np.ndarray:
        """Slots to answer and free now: none, unless enough have ended or nothing else is left."""
        finished = np.flatnonzero(self.occupied & ended)
        everything = not (self.occupied & ~ended).any()
        enough = bool(self.waiting) and len(finished) >= self.batch_sizes[0]
        return finished if everything or enough else finished[:0]

    def release(self, slots: np.ndarray) -> np.ndarray:
        """Frees slots; returns the rows that sat there."""
        rows = self.slot_row[slots]
        self.slot_row[slots] = FREE
        return rows
