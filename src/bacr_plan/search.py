"""Searches portions and layouts that fit into a given memory.

A portion is a number of rows that a run processes together: rows of a micro-batch, decoding slots,
slots of an evaluation.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bacr_jax import parallel
from bacr_jax.parallel import MeshShape
from bacr_plan import memory, schedule, seconds
from bacr_plan.devices import Device
from bacr_plan.workload import Workload

# Names of the portions in a workload.
PORTIONS = ("micro_rows", "slots", "eval_slots")
# Most waves of decoding in a suggested layout: an iteration's rows over its slots.
_MOST_WAVES = 8


@dataclass(frozen=True)
class MemoryLimit:
    """The bytes of a device that may be used, and the bytes that each phase takes.

    Attributes:
      limit: bytes of a device that may be used.
      update: temporaries of an update by the compiler, divided by those by arithmetic.
      rollout: the same ratio for a rollout.
    """

    limit: float
    update: float = 1.0
    rollout: float = 1.0

    def of_update(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes of an update."""
        phase = memory.update_phase(work, layout)
        return phase.peak_with(self.update)

    def of_rollout(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes of a rollout."""
        phase = memory.rollout_phase(work, layout)
        return phase.peak_with(self.rollout)

    def of_evaluation(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes of an evaluation, in training or in the warm-up."""
        peak = self.of_rollout(work.evaluation, layout)
        phase = memory.warmup_phases(work, layout).get("warmup_accuracy")
        if phase is None:
            return peak
        return max(peak, phase.peak_with(self.rollout))

    def of_warmup_step(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes of a step of the warm-up; 0 without a warm-up."""
        phase = memory.warmup_phases(work, layout).get("warmup")
        if phase is None:
            return 0.0
        return phase.peak_with(self.update)


@dataclass(frozen=True)
class Choice:
    """A run with portions and a layout that fit.

    Attributes:
      peak: peak bytes on a device.
    """

    work: Workload
    layout: MeshShape
    peak: float

    def overrides(self) -> str:
        """Returns the choice as config keys, such as `mesh.data=1 rollout.slots=64`."""
        work = self.work
        keys: dict[str, Any] = {}
        for axis, size in self.layout._asdict().items():
            keys[f"mesh.{axis}"] = size
        keys |= work.micro_batch(work.micro_rows)
        keys["rollout.slots"] = work.slots
        if work.eval_slots:
            keys["eval.slots"] = work.eval_slots
        if work.warmup_tokens:
            keys["warmup.batch_tokens"] = work.warmup_tokens
        return " ".join(f"{key}={value}" for key, value in keys.items())


def _micro_batches(work: Workload, layout: MeshShape, most: int) -> list[int]:
    """Returns the numbers of rows, up to `most`, that a micro-batch can have, rising.

    They divide evenly over the devices, and divide an update's rows.
    """
    multiples = range(layout.row_shards, most + 1, layout.row_shards)
    if work.by_tokens:
        return list(multiples)
    return [rows for rows in multiples if work.update_rows % rows == 0]


def _largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Returns the largest of some rising sizes that fits; 0 if none does."""
    # Tried first, because only the largest size may need less memory than a smaller one: with a
    # slot for every row, answers need no copies of the trunks.
    if not sizes or fits(sizes[-1]):
        return max(sizes, default=0)
    count = bisect.bisect_left(
        sizes,
        True,
        hi=len(sizes) - 1,
        key=lambda size: not fits(size),
    )
    return sizes[count - 1] if count else 0


def largest(portion: str, work: Workload, layout: MeshShape, room: MemoryLimit) -> int:
    """Returns the most rows of a portion that fit; 0 if not even one per device fits.

    Rows of a micro-batch divide the rows of an update. Slots are at most the rows of an iteration;
    slots of an evaluation are at most the rows of its largest call.

    Args:
      portion: one of `PORTIONS`.
    """
    shards = layout.slot_shards
    if portion == "micro_rows":
        sizes: Sequence[int] = _micro_batches(work, layout, work.update_rows)
        peak_of_phase = room.of_update
    elif portion == "slots":
        sizes = range(shards, work.rows + 1, shards)
        peak_of_phase = room.of_rollout
    else:
        sizes = range(shards, work.evaluation.rows + shards, shards)
        peak_of_phase = room.of_evaluation

    def fits(rows: int) -> bool:
        """True if the run fits with this many rows in the portion."""
        changes: dict[str, Any] = {portion: rows}
        changed = dataclasses.replace(work, **changes)
        return peak_of_phase(changed, layout) <= room.limit

    return _largest(sizes, fits)


def decoding_peak(work: Workload, layout: MeshShape, room: MemoryLimit) -> float:
    """Returns the peak bytes of decoding on one device, in training and in evaluations."""
    training = room.of_rollout(work, layout)
    if not work.evaluated:
        return training
    return max(training, room.of_evaluation(work, layout))


def peak_of(work: Workload, layout: MeshShape, room: MemoryLimit) -> float:
    """Returns the peak bytes of a run on one device."""
    return max(
        room.of_update(work, layout),
        memory.score_phase(work, layout).peak,
        decoding_peak(work, layout, room),
        room.of_warmup_step(work, layout),
    )


def layouts(work: Workload, num_devices: int) -> list[MeshShape]:
    """Returns every legal layout, the ones with the least communication first."""
    legal = parallel.layouts(
        num_devices,
        hidden_size=work.model.hidden_size,
        intermediate_size=work.model.intermediate_size,
        num_kv_heads=work.model.num_kv_heads,
    )
    # Tensor parallelism communicates twice per layer, in decoding at every token; FSDP once.
    return sorted(
        legal,
        key=lambda layout: (layout.tensor, layout.decode_tensor, layout.fsdp),
    )


def suggest(work: Workload, num_devices: int, room: MemoryLimit) -> Choice | None:
    """Returns the first layout that fits, with its portions; None if no layout fits.

    Portions are the config's if they fit, else the largest that do. A layout needs enough slots
    that decoding takes at most eight waves. If no layout has as many, the result is the layout with
    the most slots.
    """
    fitting: list[Choice] = []
    for layout in layouts(work, num_devices):
        choice = _choice_on(work, layout, room)
        if choice is None:
            continue
        if choice.work.slots * _MOST_WAVES >= work.rows:
            return choice
        fitting.append(choice)
    return max(fitting, key=lambda choice: choice.work.slots, default=None)


def _choice_on(work: Workload, layout: MeshShape, room: MemoryLimit) -> Choice | None:
    """Returns the portions with which a run fits on a layout; None if there are none."""
    most = largest("micro_rows", work, layout, room)
    if work.rows % layout.row_shards or not most:
        return None
    micro_rows = most
    if work.micro_rows in _micro_batches(work, layout, most):
        micro_rows = work.micro_rows
    slots = min(largest("slots", work, layout, room), work.slots)
    slots -= slots % layout.slot_shards
    if not slots:
        return None
    changed = dataclasses.replace(work, micro_rows=micro_rows, slots=slots)
    return fewer_eval_slots(changed, layout, room)


def fewer_warmup_tokens(work: Workload, layout: MeshShape, room: MemoryLimit) -> Workload:
    """Returns the run with fewer tokens in a step of its warm-up.

    The tokens are halved until the step fits or has one row.
    """
    warmup = work.warmup
    while warmup is not None and warmup.rows > 1:
        if room.of_warmup_step(work, layout) <= room.limit:
            break
        tokens = max(work.warmup_tokens // 2, warmup.thinking)
        work = dataclasses.replace(work, warmup_tokens=tokens)
        warmup = work.warmup
    return work


def fewer_eval_slots(work: Workload, layout: MeshShape, room: MemoryLimit) -> Choice | None:
    """Returns the run with smaller evaluations and a smaller warm-up, if they do not fit.

    Evaluations get fewer slots, a warm-up gets fewer tokens.

    Returns:
      None if another phase does not fit.
    """
    shards = layout.slot_shards
    wanted_slots = work.evaluation.slots
    smaller = work
    if wanted_slots % shards or decoding_peak(work, layout, room) > room.limit:
        most = min(largest("eval_slots", work, layout, room), wanted_slots)
        eval_slots = max(most // shards, 1) * shards
        smaller = dataclasses.replace(work, eval_slots=eval_slots)
    smaller = fewer_warmup_tokens(smaller, layout, room)
    peak = peak_of(smaller, layout, room)
    if peak > room.limit:
        return None
    return Choice(smaller, layout, peak)


def fastest_decoding(
    work: Workload, layout: MeshShape, room: MemoryLimit, device: Device
) -> tuple[MeshShape, float]:
    """Returns the layout whose mesh.decode_tensor makes a rollout fastest, and its seconds.

    With more tensor shards a decoding step reads less of the weights, and fewer rows wait for the
    longest one; two sums a layer are added. Other axes of the layout stay. Only layouts that fit,
    and the given one, are tried.

    Returns:
      The layout, and its seconds of prefill and decoding.
    """
    candidates = []
    for other in layouts(work, layout.num_devices):
        if other[:3] != layout[:3]:
            continue
        all_slots = (work.slots, work.evaluation.slots)
        if any(slots % other.slot_shards for slots in all_slots):
            continue
        if other != layout and decoding_peak(work, other, room) > room.limit:
            continue
        rollout = schedule.rollout(work, other)
        by_phase = seconds.rollout_seconds(work, other, device, rollout)
        candidates.append((sum(by_phase.values()), other))
    fastest_seconds, fastest = min(candidates)
    return fastest, fastest_seconds
