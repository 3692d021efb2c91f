"""Counts the attention keys that a rollout reads, by simulating only its scheduler.

    python benchmarks/schedule.py [--record FILE]

A decoding step must read the keys of its live rows. XLA's attention reads more, because it reads
the full length of the KV cache for every slot. Attention with a length per row (`cudnn_decoding`)
only reads the live keys, but all devices wait for the device with the most live keys. The
simulation needs neither a model nor a device.
"""

import argparse
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import AbstractMesh
from jaxtyping import Int

import record
from bacr_jax.model.sizes import preset
from bacr_jax.parallel import AXES
from bacr_jax.rollout import RolloutSpec
from bacr_jax.rollout.scheduler import Scheduler, positions_needed, smallest_at_least


@dataclass(frozen=True)
class KeysRead:
    """Number of keys, summed over the decoding steps of a rollout's thinking, without answers.

    Attributes:
      steps: number of decoding steps.
      live: keys that the live rows attend to.
      by_window: keys that are read if every slot reads the full cache.
      by_row: keys that all devices together could read while they wait for the device with the most
        live keys.
      device_tokens: number of tokens sampled on each device.
    """

    steps: int
    live: int
    by_window: int
    by_row: int
    device_tokens: Int[np.ndarray, " devices"]

    @property
    def wasted_by_window(self) -> float:
        """Share of the reads that are wasted if every slot reads the full cache."""
        return 1.0 - self.live / self.by_window if self.by_window else 0.0

    @property
    def wasted_by_row(self) -> float:
        """Share of the possible reads that is lost to waiting, with a length per row."""
        return 1.0 - self.live / self.by_row if self.by_row else 0.0


def _live_keys(
    lengths: Int[np.ndarray, "n"], left: Int[np.ndarray, "n"], chunk: int
) -> Int[np.ndarray, "chunk n"]:
    """Returns the number of keys that each row attends to at each step of a chunk.

    These are the current token and all tokens before it. The number is 0 after the row has ended.
    """
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
    """Simulates the schedule of a rollout and counts the keys that are read.

    Args:
      prompts: number of prompt tokens of each row.
      limits: maximum number of thinking tokens of each row, which the scheduler receives.
      thinking: number of thinking tokens that each row actually samples.
      spec: settings of the rollout.
      width: width to which prompts are padded in the cache.
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
            window = smallest_at_least(lengths, min(positions, lengths[-1]))
            steps += spec.chunk
            live += int(keys.sum())
            by_window += spec.chunk * spec.slots * window
            by_row += shards * int(by_device.max(-1).sum())
            device_tokens += (keys > 0).reshape(spec.chunk, shards, -1).sum((0, 2))
            sampled[inside] += left
            ended[at] = sampled[inside] >= thinking[inside]
        scheduler.release(scheduler.ready(ended))
    return KeysRead(steps, live, by_window, by_row, device_tokens)


def math_like() -> tuple[Int[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Returns prompt lengths similar to MATH, with 8 rows per prompt, and N(1500, 512) budgets."""
    rng = np.random.default_rng(0)
    prompts = np.clip(np.exp(rng.normal(4.75, 0.55, 64)), 40, 1024).astype(int)
    budgets = rng.normal(1500, 512, 4096)
    budgets = budgets[(budgets >= 256) & (budgets <= 4096)][:512].astype(int)
    return np.repeat(prompts, 8), budgets


def on_devices(count: int, *, windows: int = 4) -> RolloutSpec:
    """Returns the rollout settings for budgets up to 4,096 tokens on a number of devices."""
    mesh = AbstractMesh((1, count, 1), AXES)
    return RolloutSpec(
        preset("qwen2.5-7b"),
        max_thinking=4096,
        answer_tokens=1,
        slots=512,
        chunk=16,
        windows=windows,
        refill=0.25,
        mesh=mesh,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    record.add_option(parser)
    options = parser.parse_args()
    shares: dict[str, float] = {}
    prompts, budgets = math_like()
    spec = on_devices(8)
    for windows in (4, 16):
        finer = replace(spec, windows=windows)
        read = simulate(prompts, budgets, budgets, spec=finer, width=1024)
        shares[f"keys read for nothing, {windows} windows"] = read.wasted_by_window
        print(f"{windows} windows: {read.wasted_by_window:.0%} of the keys read for nothing")
    shares["time waited, a length per row"] = read.wasted_by_row
    print(f"by rows: {read.wasted_by_row:.0%} of the time waited")
    # For comparison: consecutive rows of the sorted order on each device.
    order = np.argsort(-budgets, kind="stable").reshape(8, -1)
    lengths = np.arange(budgets.max())
    keys = [
        ((prompts[rows, None] + lengths + 1) * (lengths < budgets[rows, None])).sum(0)
        for rows in order
    ]
    waited = 1.0 - np.sum(keys) / (8 * np.max(keys, axis=0).sum())
    print(f"in the order itself: {waited:.0%}")
    shares["time waited, consecutive rows per device"] = float(waited)
    measurements = {
        name: record.measurement([share], "share", exact=True) for name, share in shares.items()
    }
    record.write(options, measurements)


if __name__ == "__main__":
    main()
