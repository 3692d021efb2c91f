"""Assigns rows (one trace each) to decoding slots, on the host.

Waiting rows are sorted by budget, longest first. This is possible because budgets are known before
decoding starts. Long rows then run at the same time, and short rows fill the remaining slots. Rows
are distributed evenly over devices by length, because all devices wait for the device with the most
keys to read.

A row whose thinking has ended stays in its slot until its answers are decoded, because the answers
read its cache. The answers of several rows are decoded together, as soon as a given share of the
slots has ended.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

# Entry of `Scheduler.slot_row` for a slot without a row.
FREE = -1


def doubling_sizes(slots: int, share: float, multiple: int = 1) -> list[int]:
    """Returns the possible numbers of traces (rows) that are prefilled or answered at once.

    A program is compiled for each of these sizes.

    Args:
      slots: number of decoding slots.
      share: share of the slots whose thinking must have ended before they are answered and
        refilled.
      multiple: number of parts into which a mesh divides the slots. The smallest size and its
        doublings are multiples of this number.

    Returns:
      The smallest batch size, its doublings up to half of the slots, and the number of slots, in
      ascending order.
    """
    smallest = max(round(slots * share / multiple), 1)
    sizes = [smallest * multiple]
    while 2 * sizes[-1] <= slots // 2:
        sizes.append(2 * sizes[-1])
    return sorted({*sizes, slots})


def smallest_at_least(candidates: Sequence[int], count: int) -> int:
    """Returns the smallest candidate that is at least `count`. The candidates are ascending."""
    return next(size for size in candidates if size >= count)


def positions_needed(
    prompts: Int[np.ndarray, "n"],
    sampled: Int[np.ndarray, "n"],
    limits: Int[np.ndarray, "n"],
    ended: Bool[np.ndarray, "n"],
    chunk: int,
) -> int:
    """Returns the number of cache positions that the traces (rows) need in the next decoding steps.

    Args:
      prompts: number of prompt tokens of each row.
      sampled: number of tokens that each row has sampled.
      limits: maximum number of sampled tokens of each row.
      ended: True for rows that sample no more tokens.
      chunk: number of steps in the next chunk.
    """
    steps = np.where(ended, 0, chunk)
    reach = np.minimum(sampled + steps, limits)
    return int((prompts + reach).max())


def spread_over_devices(
    slots: Int[np.ndarray, "n"], num_slots: int, shards: int
) -> Int[np.ndarray, "n"]:
    """Orders free slots so that traces sorted by length are distributed evenly over devices.

    Each device gets one slot per round. The devices are in ascending order in the first round, in
    descending order in the second round, and so on.

    Args:
      slots: free slots, in ascending order.
      num_slots: number of slots of all devices. Each device has a block of adjacent slots.
      shards: number of devices.

    Returns:
      The free slots, in the order in which to assign the sorted traces to them.
    """
    device = slots // (num_slots // shards)
    first_of_device = np.searchsorted(device, device)
    turn = np.arange(len(slots)) - first_of_device
    order_in_turn = np.where(turn % 2, -device, device)
    return slots[np.lexsort((order_in_turn, turn))]


def prefill_batches(widths: Int[np.ndarray, "n"], sizes: Sequence[int]) -> list[np.ndarray]:
    """Splits rows (one prompt each) into prefill batches with the least possible padding.

    Rows are sorted by width in descending order, so a batch is as wide as its first row. If several
    splits are equally good, the one with the fewest batches is used.

    Args:
      widths: padded width of each row, in tokens.
      sizes: possible numbers of rows per batch, ascending. A batch may contain fewer rows than its
        size.

    Returns:
      Indices of the rows in each batch.
    """
    n = len(widths)
    if n <= sizes[-1] and (widths == widths[0]).all():
        return [np.arange(n)]
    order = np.argsort(-widths, kind="stable")
    # Best split of the rows i, i + 1, ...: (number of positions, number of batches, size of the
    # first batch).
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
    """A queue of waiting rows (traces), and the row in each decoding slot.

    Attributes:
      waiting: indices of waiting rows, longest budget first.
      slot_row: index of the row in each slot, or FREE.
    """

    def __init__(
        self, budgets: Int[np.ndarray, "B"], slots: int, batch_sizes: Sequence[int], shards: int = 1
    ):
        """Puts all rows (traces) into the queue.

        Args:
          budgets: maximum number of thinking tokens of each row.
          slots: number of slots.
          batch_sizes: possible numbers of rows that are answered at once, in ascending order.
          shards: number of devices. Each device has a block of adjacent slots.
        """
        self.waiting = list(np.argsort(-budgets, kind="stable"))
        self.slot_row = np.full(slots, FREE, np.int64)
        self.batch_sizes = batch_sizes
        self.shards = shards

    @property
    def occupied(self) -> Bool[np.ndarray, "slots"]:
        """Returns True for decoding slots that contain a row (trace)."""
        return self.slot_row != FREE

    @property
    def done(self) -> bool:
        """True if no rows (traces) are waiting and all decoding slots are free."""
        return not self.waiting and not self.occupied.any()

    def assign(self) -> tuple[np.ndarray, np.ndarray]:
        """Moves as many waiting rows (traces) as possible to free decoding slots.

        Returns:
          Indices of the rows, and the slot of each row.
        """
        free = np.flatnonzero(~self.occupied)
        free = spread_over_devices(free, self.slot_row.size, self.shards)
        free = free[: len(self.waiting)]
        entering = slice(len(free))
        rows = np.array(self.waiting[entering], np.int64)
        del self.waiting[entering]
        self.slot_row[free] = rows
        return rows, free

    def ready(self, ended: Bool[np.ndarray, "slots"]) -> np.ndarray:
        """Returns the decoding slots whose answers should be decoded now.

        A slot decodes one trace (row) at a time. The result contains all slots whose thinking has
        ended, if this is true for every trace, or if traces are waiting and these slots fill the
        smallest batch. Otherwise the result is empty.

        Args:
          ended: True for slots whose row has finished its thinking.
        """
        finished = np.flatnonzero(self.occupied & ended)
        all_ended = not (self.occupied & ~ended).any()
        smallest_batch = self.batch_sizes[0]
        fills_batch = bool(self.waiting) and len(finished) >= smallest_batch
        if all_ended or fills_batch:
            return finished
        return finished[:0]

    def release(self, slots: np.ndarray) -> np.ndarray:
        """Frees the given decoding slots and returns the indices of the rows (traces) in them."""
        rows = self.slot_row[slots]
        self.slot_row[slots] = FREE
        return rows
