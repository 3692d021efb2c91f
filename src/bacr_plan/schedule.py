"""Predicts the schedule of an iteration: the decoding calls and the learner's micro-batches.

This module runs the real rollout loop (`rollout.rollouts`), its scheduler and the code that forms
micro-batches, so that plans follow any change of this code. Only the lengths of the traces (rows)
exist, and a mock decoder counts decoding steps instead of computing tokens. `workload` explains the
terms row, trunk, branch and slot.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh
from jaxtyping import Int

from bacr_jax import parallel
from bacr_jax.learner.batch import Batch, empty_batch
from bacr_jax.learner.micro_batches import Shapes, planned_parts
from bacr_jax.learner.padding_free import Allowance, planned_rows
from bacr_jax.parallel import MeshShape
from bacr_jax.rollout import Callbacks, RolloutRequest, RolloutSpec, rollouts
from bacr_jax.rollout.engine import SlotDecoder, prompt_widths
from bacr_jax.rollout.scheduler import prefill_batches, smallest_at_least
from bacr_jax.types import Prompts
from bacr_plan.lengths import SUFFIX_TOKENS, Lengths
from bacr_plan.workload import Workload

# Number of keys that an attention kernel processes at a time if it skips invalid positions.
TILE = 128


@dataclass(frozen=True)
class DecodedChunk:
    """The decoding steps of one call, in which every slot decodes one trace (row).

    Attributes:
      slots: number of slots on all devices.
      length: length of the KV caches in positions.
      live: number of keys that unfinished traces attend to, for each step and device.
      tiles: the same as `live`, but the number of keys of each trace is rounded up to a multiple of
        `TILE`. Finished traces and free slots count as one tile each.
    """

    slots: int
    length: int
    live: Int[np.ndarray, "steps devices"]
    tiles: Int[np.ndarray, "steps devices"]

    @property
    def steps(self) -> int:
        """Returns the number of decoding steps."""
        return len(self.live)


@dataclass(frozen=True)
class Schedule:
    """The calls of a rollout, in order. A row is one trace.

    Attributes:
      prefills: (number of rows, prompt length in tokens) of each prefill, including padding.
      chunks: the chunks of decoding steps.
      answers: (number of rows, cache length, number of steps) of each round of answers.
    """

    prefills: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[DecodedChunk] = field(default_factory=list)
    answers: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Returns the number of decoding steps for thinking, without the steps for answers."""
        return sum(chunk.steps for chunk in self.chunks)


class CountingDecoder(SlotDecoder):
    """A mock decoder that counts calls. A trace (row) ends when its thinking budget is used up.

    Attributes:
      schedule: the calls so far.
      length: current length of the KV caches in positions.
    """

    # Replaces a property of `SlotDecoder`, which reads the length from the KV caches.
    length = 0

    def __init__(self, spec: RolloutSpec, rows: Lengths, width: int):
        """Creates a decoder whose slots are all free. A slot decodes one trace (row) at a time.

        Args:
          spec: settings of the rollout.
          rows: lengths of the traces.
          width: prompt length in tokens, including padding.
        """
        no_tokens: Any = np.zeros((len(rows.prompts), width), np.int8)
        lengths: Any = rows.prompts
        self.spec = spec
        self.rows = rows
        self.width = width
        self.prompts = Prompts(no_tokens, lengths, lengths, lengths)
        self.lengths = spec.cache_lengths(width)
        self.sizes = spec.batch_sizes()
        self.schedule = Schedule()
        self.length = self.lengths[0]
        # The row in each slot (-1 if the slot is free), and the number of tokens it has sampled.
        self._row = np.full(spec.slots, -1)
        self._sampled = np.zeros(spec.slots, np.int32)

    def fit_caches(self, positions: int) -> None:
        """Selects the shortest cache length with at least `positions` positions."""
        wanted = min(positions, self.lengths[-1])
        self.length = smallest_at_least(self.lengths, wanted)

    def prefill(
        self, rows: Any, entering: np.ndarray, slots: np.ndarray, *, together: bool = False
    ) -> None:
        """Assigns traces (rows) to free slots and counts the prefill calls for their prompts.

        Traces with the same prompt are counted separately.

        Args:
          rows: unused.
          entering: indices of the traces.
          slots: index of the slot for each of these traces.
          together: unused.
        """
        widths = np.asarray(prompt_widths(self.width))
        indices = np.searchsorted(widths, self.rows.prompts[entering])
        padded_widths = widths[indices]
        for batch in prefill_batches(padded_widths, self.sizes):
            count = smallest_at_least(self.sizes, len(batch))
            width = int(padded_widths[batch].max())
            self.schedule.prefills.append((count, width))
        self._row[slots] = entering
        self._sampled[slots] = 0

    def decode(self) -> None:
        """Counts decoding steps until a trace ends, because nothing else can happen before.

        Every unfinished trace (row) grows by one token per step.
        """
        chunk_steps = self.spec.chunk
        sampled = self._sampled
        occupied = self._row >= 0
        prompts = np.where(occupied, self.rows.prompts[self._row], 0).astype(np.int32)
        left = np.where(occupied, self.rows.thinking[self._row] - sampled, 0).astype(np.int32)
        num_chunks = -(-int(left[left > 0].min()) // chunk_steps)
        steps = np.arange(num_chunks * chunk_steps, dtype=np.int32)[:, None]
        keys = np.where(steps < left, prompts + sampled + steps + 1, 0)
        tiles = np.maximum(-(-keys // TILE), 1) * TILE
        # Shape in which the last axis contains the rows of one device.
        by_device = (num_chunks, chunk_steps, self.spec.row_shards, -1)
        live_by_chunk = keys.reshape(by_device).sum(-1)
        tiles_by_chunk = tiles.reshape(by_device).sum(-1)
        for index in range(num_chunks):
            steps_done = (index + 1) * chunk_steps
            row_tokens = np.where(occupied, sampled + np.minimum(left, steps_done), 0)
            self.fit_caches(int((prompts + row_tokens).max()))
            chunk = DecodedChunk(
                slots=self.spec.slots,
                length=self.length,
                live=live_by_chunk[index],
                tiles=tiles_by_chunk[index],
            )
            self.schedule.chunks.append(chunk)
        self._sampled = sampled + np.clip(left, 0, num_chunks * chunk_steps)

    def status(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the state of each slot, which decodes one trace (row) at a time.

        Returns:
          Three arrays with one element per slot: True if its trace has ended or the slot is free,
          True if the logits are not finite (never), and the number of thinking tokens.
        """
        used_up = self._sampled >= self.rows.thinking[self._row]
        ended = (self._row < 0) | used_up
        return ended, np.zeros_like(ended), self._sampled.copy()

    def answer(self, slots: np.ndarray) -> None:
        """Frees slots and counts the decoding steps for their answers in complete chunks."""
        answers = self.rows.answers[self._row[slots]]
        self._row[slots] = -1
        if not answers.size:
            return
        forced = SUFFIX_TOKENS - 1
        chunk = min(self.spec.chunk, forced + self.spec.answer_tokens)
        longest = forced + int(answers.max())
        steps = -(-longest // chunk) * chunk
        count = smallest_at_least(self.sizes, len(slots))
        self.schedule.answers.append((count, self.length, steps))


class CountingRolloutLoop(rollouts.RolloutLoop):
    """The rollout loop of a run with a decoder that only counts. Its outputs are not used."""

    engine: CountingDecoder

    def answer(self, slots: np.ndarray) -> Any:
        """Counts one round of answers."""
        self.engine.answer(slots)
        return None, None


def rollout_spec(work: Workload, layout: MeshShape) -> RolloutSpec:
    """Returns the rollout settings that determine the schedule of a run."""
    rollout_config = work.config.rollout
    mesh_shape = (1, layout.slot_shards, layout.decode_tensor)
    return RolloutSpec(
        config=work.model,
        mesh=AbstractMesh(mesh_shape, parallel.AXES),
        max_thinking=work.thinking,
        answer_tokens=rollout_config.answer_tokens,
        slots=work.slots,
        chunk=rollout_config.chunk,
        windows=rollout_config.windows,
        refill=rollout_config.refill,
    )


def rollout(work: Workload, layout: MeshShape) -> Schedule:
    """Predicts the decoding calls of one rollout from the expected lengths of its traces."""
    spec = rollout_spec(work, layout)
    rows = work.lengths
    engine = CountingDecoder(spec, rows, work.prompt)
    limits: Any = rows.thinking.astype(np.int32)
    cuts = np.repeat(limits[:, None], rows.answers.shape[1], 1)
    request = RolloutRequest(limits, cuts).complete(spec)
    loop = CountingRolloutLoop(engine, request, Callbacks())
    while not loop.scheduler.done:
        loop.fill_slots()
        loop.decode_trunks()
        loop.answer_ended()
    return engine.schedule


@dataclass(frozen=True)
class PlannedMicroBatch:
    """The shape of a micro-batch of traces (rows).

    Attributes:
      rows: number of traces, including empty ones.
      trunk: number of positions per trace for the prompt and the thinking.
      branches: number of positions per trace for all answers.
      tokens: with `train.padding_free`, number of positions on which everything except attention is
        computed. None if everything is computed on all positions of all rows.
    """

    rows: int
    trunk: int
    branches: int
    tokens: int | None = None

    @property
    def positions(self) -> int:
        """Returns the number of positions on which everything except attention is computed."""
        if self.tokens is not None:
            return self.tokens
        return self.rows * (self.trunk + self.branches)


def updates(work: Workload, layout: MeshShape) -> list[list[PlannedMicroBatch]]:
    """Predicts the micro-batches of every update, using the same code as a run."""
    train = work.config.train
    size = work.update_rows
    if train.micro_batch_tokens is None:
        batch = PlannedMicroBatch(work.micro_rows, work.trunk, work.cuts * work.branch)
        count = max(size // work.micro_rows, 1)
        return [[batch] * count] * train.minibatches
    shapes = Shapes(train.micro_batch_tokens, train.length_buckets, layout.row_shards)
    result = []
    for start in range(0, work.rows, size):
        part = slice(start, start + size)
        batch_of_lengths = _batch_of_lengths(work, part)
        if train.padding_free:
            result.append(_without_padding(work, batch_of_lengths, part))
            continue
        micro_batches = [
            PlannedMicroBatch(planned.rows, planned.width, planned.branches)
            for planned in planned_parts(batch_of_lengths, shapes)
        ]
        result.append(micro_batches)
    return result


def _batch_of_lengths(work: Workload, part: slice) -> Batch:
    """Returns a batch that contains only the lengths of some traces (rows).

    The code that forms micro-batches reads only the lengths.
    """
    rows = work.lengths
    answered = rows.answers[part]
    widths = empty_batch(
        1,
        prompt=work.prompt,
        thinking=work.thinking,
        cuts=rows.answers.shape[1],
        suffix=SUFFIX_TOKENS,
        answer=work.config.rollout.answer_tokens,
    )
    lengths: dict[str, Any] = {
        "prompt_lengths": rows.prompts[part],
        "sampled": rows.thinking[part],
        "forced": np.full_like(answered, SUFFIX_TOKENS - 1),
        "answered": answered,
    }
    return dataclasses.replace(widths, **lengths)


def _without_padding(work: Workload, batch: Batch, part: slice) -> list[PlannedMicroBatch]:
    """Predicts the micro-batches of some traces (rows) with `train.padding_free`."""
    config = work.config
    tokens = config.train.micro_batch_tokens
    assert tokens is not None
    # Rows of the same question share their prompt, unless the budget changes the prompt's
    # activations.
    prompt_has_budget = work.conditioned and config.conditioning.positions != "response"
    # The learner finds equal prompts by comparing the tokens of their trunks. Here, a trunk
    # contains only the index of its question.
    question = np.arange(work.rows)[part] // config.rollout.group_size
    trunk: Any = np.broadcast_to(question[:, None], (len(question), work.trunk))
    batch = dataclasses.replace(batch, trunk=trunk)
    allowance = Allowance(tokens, shares_prompts=not prompt_has_budget)
    micro_batch = PlannedMicroBatch(
        rows=allowance.rows(batch),
        trunk=work.trunk,
        branches=work.cuts * work.branch,
        tokens=tokens,
    )
    return [micro_batch] * len(planned_rows(batch, allowance))


@dataclass(frozen=True)
class PlannedIteration:
    """The predicted schedule of an iteration.

    Attributes:
      rollout: the decoding calls of the rollout.
      updates: the micro-batches of each update.
    """

    rollout: Schedule
    updates: list[list[PlannedMicroBatch]]


def iteration(work: Workload, layout: MeshShape) -> PlannedIteration:
    """Predicts the schedule of an iteration."""
    return PlannedIteration(rollout(work, layout), updates(work, layout))


def real_share(work: Workload, all_updates: list[list[PlannedMicroBatch]]) -> float:
    """Returns the fraction of the learner's positions that contain a token.

    The fraction can exceed 1 if traces share prompts.
    """
    rows = work.lengths
    branches = rows.answers + SUFFIX_TOKENS - 1
    real_tokens = rows.prompts.sum() + rows.thinking.sum() + branches.sum()
    computed = 0
    for micro_batches in all_updates:
        computed += sum(batch.positions for batch in micro_batches)
    return int(real_tokens) / computed
