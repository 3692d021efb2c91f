"""Assigns rows to slots, on the host.

Rows wait in order of their budgets, longest first, because a budget is known before a token is
decoded. Long rows then run at the same time and short rows fill the remaining slots. Rows are dealt
to the devices in turn, because all devices wait for the device that has the most keys to read.

A row that has ended keeps its slot until its answers are decoded, because the answers read its
cache. Several rows are answered together, as soon as a given share of the slots has ended.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

FREE = -1


def doubling_sizes(slots: int, share: float, multiple: int = 1) -> list[int]:
    """Returns the numbers of rows that are prefilled or answered at once; each is compiled once.

    Args:
      share: share of the slots that must have ended before they are answered and refilled.
      multiple: row shards of a mesh; every size is a multiple of it.

    Returns:
      The smallest batch, its doublings up to half of the slots, and all slots; ascending.
    """
    smallest = max(round(slots * share / multiple), 1)
    sizes = [smallest * multiple]
    while 2 * sizes[-1] <= slots // 2:
        sizes.append(2 * sizes[-1])
    return sorted({*sizes, slots})


def smallest_holding(candidates: Sequence[int], count: int) -> int:
    """Returns the smallest of the ascending candidates that is at least `count`."""
    return next(size for size in candidates if size >= count)


def positions_needed(
    prompts: Int[np.ndarray, "n"],
    sampled: Int[np.ndarray, "n"],
    limits: Int[np.ndarray, "n"],
    ended: Bool[np.ndarray, "n"],
    chunk: int,
) -> int:
    """Returns the number of positions that the caches need for the next chunk.

    Args:
      prompts: prompt tokens of each row.
      sampled: tokens that each row has sampled.
      limits: maximum sampled tokens of each row.
      ended: True for rows that sample no more tokens.
      chunk: steps of the next chunk.
    """
    steps = np.where(ended, 0, chunk)
    reach = np.minimum(sampled + steps, limits)
    return int((prompts + reach).max())


def deal(slots: Int[np.ndarray, "n"], num_slots: int, shards: int) -> Int[np.ndarray, "n"]:
    """Orders slots for rows that are sorted by length: forwards and backwards over the devices.

    Args:
      slots: some slots, ascending.
      num_slots: slots of all devices; each device has a block of them.
      shards: number of devices.
    """
    device = slots // (num_slots // shards)
    first_of_device = np.searchsorted(device, device)
    turn = np.arange(len(slots)) - first_of_device
    order_in_turn = np.where(turn % 2, -device, device)
    return slots[np.lexsort((order_in_turn, turn))]


def prefill_batches(widths: Int[np.ndarray, "n"], sizes: Sequence[int]) -> list[np.ndarray]:
    """Splits rows into batches so that the prefill has as few padded positions as possible.

    Rows are taken in order of their widths, widest first, so a batch is as wide as its first row.
    Of equally good splits, the split with the fewest batches is used.

    Args:
      widths: padded width of each row, in tokens.
      sizes: possible numbers of rows of a batch, ascending; a batch may have unused rows.

    Returns:
      Indices of the rows of every batch.
    """
    n = len(widths)
    if n <= sizes[-1] and (widths == widths[0]).all():
        return [np.arange(n)]
    order = np.argsort(-widths, kind="stable")
    # Best split of rows i, i + 1, ...: (positions, number of batches, size of the first batch).
    best = [(0, 0, 0)] * (n + 1)
    for i in reversed(range(n)):
        width = int(widths[order[i]])
        candidates = []
        for size in sizes:
            positions, num_batches, _ = best[min(i + size, n)]
            positions += size * width
            candidates.append((positions, 1 + num_batches, size))
        best[i] = min(candidates)
    batches = []
    i = 0
    while i < n:
        size = best[i][2]
        batches.append(np.sort(order[i : i + size]))
        i += size
    return batches


class Scheduler:
    """Tracks the waiting rows and the row in each slot.

    Attributes:
      waiting: indices of waiting rows, longest budget first.
      slot_row: index of the row in each slot, or FREE.
    """

    def __init__(
        self, budgets: Int[np.ndarray, "B"], slots: int, batch_sizes: Sequence[int], shards: int = 1
    ):
        """Puts all rows in the queue.

        Args:
          budgets: thinking limit of each row, in tokens.
          batch_sizes: possible numbers of rows that are answered at once, ascending.
          shards: number of devices; each device has a block of the slots.
        """
        self.waiting = list(np.argsort(-budgets, kind="stable"))
        self.slot_row = np.full(slots, FREE, np.int64)
        self.batch_sizes = batch_sizes
        self.shards = shards

    @property
    def occupied(self) -> Bool[np.ndarray, "slots"]:
        """Returns True for slots that hold a row."""
        return self.slot_row != FREE

    @property
    def done(self) -> bool:
        """True if no row waits and no row is in a slot."""
        return not self.waiting and not self.occupied.any()

    def assign(self) -> tuple[np.ndarray, np.ndarray]:
        """Moves waiting rows to free slots until rows or free slots run out.

        Returns:
          The rows, and the slot of each.
        """
        free = np.flatnonzero(~self.occupied)
        free = deal(free, self.slot_row.size, self.shards)
        free = free[: len(self.waiting)]
        entering = slice(len(free))
        rows = np.array(self.waiting[entering], np.int64)
        del self.waiting[entering]
        self.slot_row[free] = rows
        return rows, free

    def ready(self, ended: Bool[np.ndarray, "slots"]) -> np.ndarray:
        """Returns the slots to answer and free now.

        These are all ended slots, if every row has ended or if rows wait and the ended slots fill
        the smallest batch. Otherwise the result is empty.
        """
        finished = np.flatnonzero(self.occupied & ended)
        all_ended = not (self.occupied & ~ended).any()
        smallest_batch = self.batch_sizes[0]
        fills_batch = bool(self.waiting) and len(finished) >= smallest_batch
        if all_ended or fills_batch:
            return finished
        return finished[:0]

    def release(self, slots: np.ndarray) -> np.ndarray:
        """Frees slots; returns the rows that were in them."""
        rows = self.slot_row[slots]
        self.slot_row[slots] = FREE
        return rows
