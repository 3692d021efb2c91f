"""The keys that a rollout reads, counted by the scheduler alone: no model, no device.

A decoding step has to read the keys of its live rows. XLA's attention reads more: the caches' whole
length for every slot. Attention by rows (`cudnn_decoding`) reads the live keys alone, but devices
wait for the one that has most of them.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.rollout.scheduler import Scheduler, smallest_holding
from bacr_jax.rollout.spec import RolloutSpec


@dataclass(frozen=True)
class KeysRead:
    """Keys of a rollout's thinking, summed over its decoding steps; answers are left out.

    Attributes:
      steps: decoding steps.
      live: keys that the live rows see.
      by_window: keys that are read when every slot reads the whole cache.
      by_row: keys that are read while the devices wait for the one with most live keys, all devices
        together.
      device_tokens: tokens sampled on each device.
    """

    steps: int
    live: int
    by_window: int
    by_row: int
    device_tokens: Int[np.ndarray, " devices"]

    @property
    def wasted_by_window(self) -> float:
        """Share of the keys read for nothing, by windows."""
        return 1.0 - self.live / self.by_window if self.by_window else 0.0

    @property
    def wasted_by_row(self) -> float:
        """Share of the keys that could have been read while devices wait, by rows."""
        return 1.0 - self.live / self.by_row if self.by_row else 0.0


def positions_needed(
    prompts: Int[np.ndarray, "n"],
    sampled: Int[np.ndarray, "n"],
    limits: Int[np.ndarray, "n"],
    ended: Bool[np.ndarray, "n"],
    chunk: int,
) -> int:
    """Positions that caches must have for the next chunk.

    Args:
      limits: most tokens each may sample.
    """
    reach = np.minimum(sampled + np.where(ended, 0, chunk), limits)
    return int((prompts + reach).max())


def _live_keys(
    lengths: Int[np.ndarray, "n"], left: Int[np.ndarray, "n"], chunk: int
) -> Int[np.ndarray, "chunk n"]:
    """Keys that rows see at each step of a chunk: its token and those before it; 0 once ended."""
    step = np.arange(chunk)[:, None]
    return np.where(step < left, lengths + step + 1, 0)


def simulate(
    prompts: Int[np.ndarray, "B"],
    limits: Int[np.ndarray, "B"],
    thinking: Int[np.ndarray, "B"],
    *,
    spec: RolloutSpec,
    width: int,
) -> KeysRead:
    """Runs a rollout's schedule.

    Args:
      limits: most tokens each may sample; what the scheduler knows.
    """
    shards, lengths = spec.row_shards, spec.cache_lengths(width)
    scheduler = Scheduler(limits, spec.slots, spec.batch_sizes(), shards)
    sampled, ended = np.zeros(len(limits), int), np.ones(spec.slots, bool)
    steps = live = by_window = by_row = 0
    device_tokens = np.zeros(shards, int)
    while not scheduler.done:
        rows, slots = scheduler.assign()
        ended[slots] = thinking[rows] <= 0
        inside, occupied = scheduler.slot_row[scheduler.occupied], scheduler.occupied
        positions = positions_needed(
            prompts[inside], sampled[inside], limits[inside], ended[occupied], spec.chunk
        )
        if (occupied & ~ended).any():
            at = np.flatnonzero(occupied)
            left = np.minimum(thinking[inside] - sampled[inside], spec.chunk)
            keys = np.zeros((spec.chunk, spec.slots), int)
            keys[:, at] = _live_keys(prompts[inside] + sampled[inside], left, spec.chunk)
            by_device = keys.reshape(spec.chunk, shards, -1).sum(-1)
            window = smallest_holding(lengths, min(positions, lengths[-1]))
            steps += spec.chunk
            live += int(keys.sum())
            by_window += spec.chunk * spec.slots * window
            by_row += shards * int(by_device.max(-1).sum())
            device_tokens += (keys > 0).reshape(spec.chunk, shards, -1).sum((0, 2))
            sampled[inside] += left
            ended[at] = sampled[inside] >= thinking[inside]
        scheduler.release(scheduler.ready(ended))
    return KeysRead(steps, live, by_window, by_row, device_tokens)
