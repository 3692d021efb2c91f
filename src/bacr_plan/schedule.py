"""An iteration's schedule without a device: who decodes when, and what the learner is given.

The run's own loop (`rollout.rollouts`, its scheduler) and its own micro-batch maker work on rows
that only have lengths; an engine that counts stands in for the one that computes. So a plan follows
whatever they do.
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
from bacr_jax.rollout import Listeners, RolloutSpec, Rows, rollouts
from bacr_jax.rollout.engine import Engine, prompt_widths
from bacr_jax.rollout.scheduler import prefill_batches, smallest_holding
from bacr_jax.types import Prompts
from bacr_plan.lengths import SUFFIX_TOKENS, Lengths
from bacr_plan.workload import Workload

# Keys that an attention kernel that is told the rows' lengths takes at a time.
TILE = 128


@dataclass(frozen=True)
class Chunk:
    """Decoding steps of one call.

    Attributes:
      slots: rows of the program, on all devices.
      live: keys that rows which still think see, at each step on each device.
      tiles: the same in whole tiles, one tile for every other row.
    """

    slots: int
    length: int
    live: Int[np.ndarray, "steps devices"]
    tiles: Int[np.ndarray, "steps devices"]

    @property
    def steps(self) -> int:
        """Decoding steps."""
        return len(self.live)


@dataclass(frozen=True)
class Schedule:
    """What a rollout runs, in order.

    Attributes:
      prefills: rows and width of each, padding included.
      answers: rows, positions of their caches and steps of each round of answers.
    """

    prefills: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    answers: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Decoding steps of trunks."""
        return sum(chunk.steps for chunk in self.chunks)


class Counting(Engine):
    """An engine whose phases only count; a row ends when its thinking is used up."""

    # A property of what computes: positions of the caches now.
    length = 0

    def __init__(self, spec: RolloutSpec, rows: Lengths, width: int):
        """Free slots for rows whose prompts are `width` wide, padding included."""
        nothing: Any = np.zeros((len(rows.prompts), width), np.int8)
        lengths: Any = rows.prompts
        self.spec, self.rows, self.width = spec, rows, width
        self.prompts = Prompts(nothing, lengths, lengths, lengths)
        self.lengths, self.sizes = spec.cache_lengths(width), spec.batch_sizes()
        self.schedule = Schedule()
        self.length = self.lengths[0]
        self._row, self._sampled = np.full(spec.slots, -1), np.zeros(spec.slots, np.int32)

    def fit_caches(self, positions: int) -> None:
        """The shortest length that holds so many."""
        self.length = smallest_holding(self.lengths, min(positions, self.lengths[-1]))

    def prefill(
        self, rows: Any, entering: np.ndarray, slots: np.ndarray, *, together: bool = False
    ) -> None:
        """Rows sit in slots from here on; every prompt is prefilled, shared or not."""
        widths = prompt_widths(self.width)
        wide = np.asarray(widths)[np.searchsorted(widths, self.rows.prompts[entering])]
        for batch in prefill_batches(wide, self.sizes):
            count = smallest_holding(self.sizes, len(batch))
            self.schedule.prefills.append((count, int(wide[batch].max())))
        self._row[slots], self._sampled[slots] = entering, 0

    def decode(self) -> None:
        """Chunks until a row ends, since nothing else can happen before.

        Live rows are one token longer at every step.
        """
        spec, row, sampled = self.spec, self._row, self._sampled
        taken = row >= 0
        prompts = np.where(taken, self.rows.prompts[row], 0).astype(np.int32)
        left = np.where(taken, self.rows.thinking[row] - sampled, 0).astype(np.int32)
        chunks = -(-int(left[left > 0].min()) // spec.chunk)
        step = np.arange(chunks * spec.chunk, dtype=np.int32)[:, None]
        keys = np.where(step < left, prompts + sampled + step + 1, 0)
        tiles = np.maximum(-(-keys // TILE), 1) * TILE
        by_device = (chunks, spec.chunk, spec.row_shards, -1)
        pairs = zip(*(x.reshape(by_device).sum(-1) for x in (keys, tiles)))
        for done, (live, whole) in enumerate(pairs, 1):
            reach = prompts + np.where(taken, sampled + np.minimum(left, done * spec.chunk), 0)
            self.fit_caches(int(reach.max()))
            self.schedule.chunks.append(Chunk(spec.slots, self.length, live, whole))
        self._sampled = sampled + np.clip(left, 0, chunks * spec.chunk)

    def status(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots that have ended, broken ones (none), and tokens of each."""
        ended = (self._row < 0) | (self._sampled >= self.rows.thinking[self._row])
        return ended, np.zeros_like(ended), self._sampled.copy()

    def answer(self, slots: np.ndarray) -> None:
        """Rows leave their slots, answered in whole chunks of steps until the longest is done."""
        answers, forced = self.rows.answers[self._row[slots]], SUFFIX_TOKENS - 1
        self._row[slots] = -1
        if answers.size:
            chunk = min(self.spec.chunk, forced + self.spec.answer_tokens)
            steps = -(-(forced + int(answers.max())) // chunk) * chunk
            count = smallest_holding(self.sizes, len(slots))
            self.schedule.answers.append((count, self.length, steps))


class CountingLoop(rollouts.Loop):
    """The run's loop over an engine that counts; what rows said and its `work` nobody reads."""

    engine: Counting

    def answer(self, slots: np.ndarray) -> Any:
        """One round of answers."""
        self.engine.answer(slots)
        return None, None


def rollout_spec(work: Workload, layout: MeshShape) -> RolloutSpec:
    """What fixes the shapes of a run's rollouts, as far as they are scheduled."""
    shape, asked = (1, layout.slot_shards, layout.decode_tensor), work.config.rollout
    return RolloutSpec(
        config=work.model,
        mesh=AbstractMesh(shape, parallel.AXES),
        max_thinking=work.thinking,
        answer_tokens=asked.answer_tokens,
        slots=work.slots,
        chunk=asked.chunk,
        windows=asked.windows,
        refill=asked.refill,
    )


def rollout(work: Workload, layout: MeshShape) -> Schedule:
    """The schedule of one rollout of the rows to be expected."""
    spec, rows = rollout_spec(work, layout), work.lengths
    engine = Counting(spec, rows, work.prompt)
    limits: Any = rows.thinking.astype(np.int32)
    cuts = np.repeat(limits[:, None], rows.answers.shape[1], 1)
    loop = CountingLoop(engine, Rows(limits, cuts).complete(spec), Listeners())
    while not loop.scheduler.done:
        loop.fill_slots()
        loop.decode_trunks()
        loop.answer_ended()
    return engine.schedule


@dataclass(frozen=True)
class Padded:
    """A micro-batch: rows, empty ones included, positions of a trunk and of a row's branches.

    Attributes:
      tokens: real tokens, on which all but attention is computed; None: on every position.
    """

    rows: int
    trunk: int
    branches: int
    tokens: int | None = None

    @property
    def positions(self) -> int:
        """Positions that everything but attention is computed on."""
        return self.rows * (self.trunk + self.branches) if self.tokens is None else self.tokens


def updates(work: Workload, layout: MeshShape) -> list[list[Padded]]:
    """Micro-batches of every update, as the run's own maker makes them."""
    size, train, rows = work.update_rows, work.config.train, work.lengths
    if train.micro_batch_tokens is None:
        one = Padded(work.micro_rows, work.trunk, work.cuts * work.branch)
        return [[one] * max(size // work.micro_rows, 1)] * train.minibatches
    shapes = Shapes(train.micro_batch_tokens, train.length_buckets, layout.row_shards)
    # Of a batch the widths and its rows' lengths are read, and nothing else.
    widths = empty_batch(
        1,
        prompt=work.prompt,
        thinking=work.thinking,
        cuts=rows.answers.shape[1],
        suffix=SUFFIX_TOKENS,
        answer=work.config.rollout.answer_tokens,
    )

    def micro_batches(part: slice) -> list[Padded]:
        answered = rows.answers[part]
        lengths: dict[str, Any] = {
            "prompt_lengths": rows.prompts[part],
            "sampled": rows.thinking[part],
            "forced": np.full_like(answered, SUFFIX_TOKENS - 1),
            "answered": answered,
        }
        batch = dataclasses.replace(widths, **lengths)
        if train.padding_free:
            return _without_padding(work, batch, part)
        parts = planned_parts(batch, shapes)
        return [Padded(one.rows, one.width, one.branches) for one in parts]

    return [micro_batches(slice(start, start + size)) for start in range(0, work.rows, size)]


def _without_padding(work: Workload, batch: Batch, part: slice) -> list[Padded]:
    """Micro-batches of some rows under train.padding_free, as the run's own maker makes them."""
    config = work.config
    tokens = config.train.micro_batch_tokens
    assert tokens is not None
    told = work.conditioned and config.conditioning.positions != "response"
    # Rows of a question have one prompt; of its tokens only that they are the same is read.
    question = np.arange(work.rows)[part] // config.rollout.group_size
    trunk: Any = np.broadcast_to(question[:, None], (len(question), work.trunk))
    batch = dataclasses.replace(batch, trunk=trunk)
    allowance = Allowance(tokens, shares_prompts=not told)
    one = Padded(allowance.rows(batch), work.trunk, work.cuts * work.branch, tokens)
    return [one] * len(planned_rows(batch, allowance))


@dataclass(frozen=True)
class Iteration:
    """What an iteration runs: prefills, decoding and answers; micro-batches of each update."""

    rollout: Schedule
    updates: list[list[Padded]]


def iteration(work: Workload, layout: MeshShape) -> Iteration:
    """The schedule of a run's iteration."""
    return Iteration(rollout(work, layout), updates(work, layout))


def real_share(work: Workload, parts: list[list[Padded]]) -> float:
    """Share of the learner's positions that hold a token; above 1 where rows share prompts."""
    rows = work.lengths
    branches = rows.answers + SUFFIX_TOKENS - 1
    real = rows.prompts.sum() + rows.thinking.sum() + branches.sum()
    computed = sum(one.positions for update in parts for one in update)
    return int(real) / computed
