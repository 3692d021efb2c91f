"""Searches for portions and meshes that fit into a given amount of memory.

A portion is a number of rows that a run processes at the same time: the rows of a micro-batch, the
decoding slots, or the slots of an evaluation.
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

# Fields of `Workload` that limit how many rows (traces) are processed at a time. They are called
# portions.
PORTIONS = ("micro_rows", "slots", "eval_slots")
# Maximum number of decoding waves in a suggested layout: rows per iteration divided by slots.
_MOST_WAVES = 8


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that may be used per device, with methods for the memory that each phase needs.

    Attributes:
      limit: number of bytes that may be used per device.
      update: ratio of the compiled to the analytical temporaries of an update.
      rollout: ratio of the compiled to the analytical temporaries of a rollout.
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
        """Returns the peak bytes of an evaluation, during training or the warm-up."""
        peak = self.of_rollout(work.evaluation, layout)
        phase = memory.warmup_phases(work, layout).get("warmup_accuracy")
        if phase is None:
            return peak
        return max(peak, phase.peak_with(self.rollout))

    def of_warmup_step(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes of a training step in the warm-up; 0 without a warm-up."""
        phase = memory.warmup_phases(work, layout).get("warmup")
        if phase is None:
            return 0.0
        return phase.peak_with(self.update)


@dataclass(frozen=True)
class Choice:
    """A run that fits into memory, with its mesh and the sizes of its micro-batches and slots.

    Attributes:
      work: the sizes of the run, including the portions.
      layout: the mesh.
      peak: peak bytes per device.
    """

    work: Workload
    layout: MeshShape
    peak: float

    def overrides(self) -> str:
        """Returns the choice as config overrides, such as `mesh.data=1 rollout.slots=64`."""
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
    """Returns the possible numbers of traces in a micro-batch, up to `most`, in increasing order.

    They are divisible by the number of devices that share the traces. Unless micro-batches are
    formed by tokens, they also divide the number of traces in an update.
    """
    multiples = range(layout.row_shards, most + 1, layout.row_shards)
    if work.by_tokens:
        return list(multiples)
    return [rows for rows in multiples if work.update_rows % rows == 0]


def _largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Returns the largest of some increasing sizes that fits; 0 if none does."""
    # The largest size is tried first, because it is the only size that may need less memory than a
    # smaller one: with a slot for every row, answers do not need copies of the prompts and the
    # thinking (trunks).
    if not sizes or fits(sizes[-1]):
        return max(sizes, default=0)
    count = bisect.bisect_left(
        sizes,
        True,
        hi=len(sizes) - 1,
        key=lambda size: not fits(size),
    )
    return sizes[count - 1] if count else 0


def largest(portion: str, work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> int:
    """Returns the maximum number of traces (rows) of a portion that fits into memory.

    A portion is a number of traces that are processed together, such as a micro-batch. The traces
    of a micro-batch divide the traces of an update, unless micro-batches are formed by tokens. The
    slots, which decode one trace each, are at most the traces of an iteration. The slots of an
    evaluation are at most the traces of its largest call, rounded up to a multiple of the slot
    shards.

    Args:
      portion: one of `PORTIONS`.
      work: the sizes of the run.
      layout: the mesh.
      memory_limit: the memory limit.

    Returns:
      The number of rows, or 0 if not even one row per device fits.
    """
    shards = layout.slot_shards
    if portion == "micro_rows":
        sizes: Sequence[int] = _micro_batches(work, layout, work.update_rows)
        peak_of_phase = memory_limit.of_update
    elif portion == "slots":
        sizes = range(shards, work.rows + 1, shards)
        peak_of_phase = memory_limit.of_rollout
    else:
        sizes = range(shards, work.evaluation.rows + shards, shards)
        peak_of_phase = memory_limit.of_evaluation

    def fits(rows: int) -> bool:
        """True if the run fits if `rows` traces are processed together in the portion."""
        changes: dict[str, Any] = {portion: rows}
        changed = dataclasses.replace(work, **changes)
        return peak_of_phase(changed, layout) <= memory_limit.limit

    return _largest(sizes, fits)


def decoding_peak(work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> float:
    """Returns the peak bytes of decoding on one device, during training and evaluations."""
    training = memory_limit.of_rollout(work, layout)
    if not work.evaluated:
        return training
    return max(training, memory_limit.of_evaluation(work, layout))


def peak_of(work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> float:
    """Returns the peak bytes of a run on one device."""
    return max(
        memory_limit.of_update(work, layout),
        memory.score_phase(work, layout).peak,
        decoding_peak(work, layout, memory_limit),
        memory_limit.of_warmup_step(work, layout),
    )


def layouts(work: Workload, num_devices: int) -> list[MeshShape]:
    """Returns all valid meshes, ordered by increasing communication."""
    legal = parallel.layouts(
        num_devices,
        hidden_size=work.model.hidden_size,
        intermediate_size=work.model.intermediate_size,
        num_kv_heads=work.model.num_kv_heads,
    )
    # Tensor parallelism communicates twice per layer, and during decoding for every token. FSDP
    # communicates once per layer.
    return sorted(
        legal,
        key=lambda layout: (layout.tensor, layout.decode_tensor, layout.fsdp),
    )


def suggest(work: Workload, num_devices: int, memory_limit: MemoryLimit) -> Choice | None:
    """Returns the first mesh that fits, with its portions; None if no mesh fits.

    A portion is a number of traces (rows) that are processed together, such as a micro-batch. The
    portions of the config are kept if they fit; otherwise the largest portions that fit are used. A
    mesh is accepted if it has enough slots to decode all traces in at most eight waves. If no mesh
    has enough slots, the one with the most slots is returned.
    """
    fitting: list[Choice] = []
    for layout in layouts(work, num_devices):
        choice = _choice_on(work, layout, memory_limit)
        if choice is None:
            continue
        if choice.work.slots * _MOST_WAVES >= work.rows:
            return choice
        fitting.append(choice)
    return max(fitting, key=lambda choice: choice.work.slots, default=None)


def _choice_on(work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> Choice | None:
    """Returns the largest micro-batch and number of slots with which a run fits on a mesh.

    The sizes of the config are kept if they fit. Returns None if no sizes fit.
    """
    most = largest("micro_rows", work, layout, memory_limit)
    if work.rows % layout.row_shards or not most:
        return None
    micro_rows = most
    if work.micro_rows in _micro_batches(work, layout, most):
        micro_rows = work.micro_rows
    slots = min(largest("slots", work, layout, memory_limit), work.slots)
    slots -= slots % layout.slot_shards
    if not slots:
        return None
    changed = dataclasses.replace(work, micro_rows=micro_rows, slots=slots)
    return fewer_eval_slots(changed, layout, memory_limit)


def fewer_warmup_tokens(work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> Workload:
    """Reduces the number of tokens per step in the warm-up until a step fits.

    The number is halved repeatedly. The search stops at one example per step, even if it does not
    fit.
    """
    warmup = work.warmup
    while warmup is not None and warmup.rows > 1:
        if memory_limit.of_warmup_step(work, layout) <= memory_limit.limit:
            break
        tokens = max(work.warmup_tokens // 2, warmup.thinking)
        work = dataclasses.replace(work, warmup_tokens=tokens)
        warmup = work.warmup
    return work


def fewer_eval_slots(work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> Choice | None:
    """Reduces the sizes of evaluations and of the warm-up if they do not fit.

    Evaluations decode fewer traces together (slots), and the warm-up gets fewer tokens per step.

    Returns:
      The reduced run, or None if it still does not fit.
    """
    shards = layout.slot_shards
    wanted_slots = work.evaluation.slots
    smaller = work
    if wanted_slots % shards or decoding_peak(work, layout, memory_limit) > memory_limit.limit:
        most = min(largest("eval_slots", work, layout, memory_limit), wanted_slots)
        eval_slots = max(most // shards, 1) * shards
        smaller = dataclasses.replace(work, eval_slots=eval_slots)
    smaller = fewer_warmup_tokens(smaller, layout, memory_limit)
    peak = peak_of(smaller, layout, memory_limit)
    if peak > memory_limit.limit:
        return None
    return Choice(smaller, layout, peak)


def fastest_decoding(
    work: Workload, layout: MeshShape, memory_limit: MemoryLimit, device: Device
) -> tuple[MeshShape, float]:
    """Finds the value of mesh.decode_tensor with the fastest rollout.

    With more tensor shards, each device reads a smaller part of the weights per decoding step, and
    fewer rows have to wait for the longest row. In return, each layer needs two all-reduces. The
    other mesh axes are not changed. The candidates are the current mesh and all meshes that fit.

    Returns:
      The mesh, and the duration of its prefill and decoding in seconds.
    """
    candidates = []
    for other in layouts(work, layout.num_devices):
        if other[:3] != layout[:3]:
            continue
        all_slots = (work.slots, work.evaluation.slots)
        if any(slots % other.slot_shards for slots in all_slots):
            continue
        if other != layout and decoding_peak(work, other, memory_limit) > memory_limit.limit:
            continue
        rollout = schedule.rollout(work, other)
        by_phase = seconds.rollout_seconds(work, other, device, rollout)
        candidates.append((sum(by_phase.values()), other))
    fastest_seconds, fastest = min(candidates)
    return fastest, fastest_seconds
