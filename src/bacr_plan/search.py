"""Searches for batch sizes and device meshes with which a run fits into a given memory.

A portion is the number of traces (rows) that a phase processes at the same time: the traces of a
micro-batch, the decoding slots of a rollout, or the decoding slots of an evaluation.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bacr_jax import parallel
from bacr_jax.config.values import shown
from bacr_jax.parallel import MeshShape
from bacr_plan import memory, schedule, seconds
from bacr_plan.devices import Device
from bacr_plan.workload import Workload

# Fields of `Workload` that contain a portion.
PORTIONS = ("micro_rows", "slots", "eval_slots")
# Maximum number of traces per slot in an iteration, for a suggested mesh.
_MOST_WAVES = 8


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit per device, with methods that predict the memory of each phase.

    Attributes:
      limit: number of bytes that may be used per device.
      update: factor for the predicted temporaries of an update, determined by compilation.
      rollout: factor for the predicted temporaries of a rollout, determined by compilation.
    """

    limit: float
    update: float = 1.0
    rollout: float = 1.0

    def of_update(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes per device of an update."""
        phase = memory.update_phase(work, layout)
        return phase.peak_with(self.update)

    def of_rollout(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes per device of a rollout."""
        phase = memory.rollout_phase(work, layout)
        return phase.peak_with(self.rollout)

    def of_evaluation(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes per device of an evaluation, during training or the warm-up."""
        peak = self.of_rollout(work.evaluation, layout)
        phase = memory.warmup_phases(work, layout).get("warmup_accuracy")
        if phase is None:
            return peak
        return max(peak, phase.peak_with(self.rollout))

    def of_warmup_step(self, work: Workload, layout: MeshShape) -> float:
        """Returns the peak bytes per device of a warm-up step, or 0 without a warm-up."""
        phase = memory.warmup_phases(work, layout).get("warmup")
        if phase is None:
            return 0.0
        return phase.peak_with(self.update)


@dataclass(frozen=True)
class Choice:
    """Settings with which a run fits into memory.

    Attributes:
      work: the sizes of the run, including its micro-batches and slots.
      layout: the device mesh.
      peak: predicted peak memory per device in bytes.
      needs_padding: True if `train.padding_free` must be turned off, because the mesh has several
        devices.
    """

    work: Workload
    layout: MeshShape
    peak: float
    needs_padding: bool = False

    def overrides(self) -> str:
        """Returns the settings as config overrides, such as `mesh.data=1 rollout.slots=64`."""
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
        if self.needs_padding:
            keys["train.padding_free"] = False
        return " ".join(f"{key}={shown(value)}" for key, value in keys.items())


def _micro_batches(work: Workload, layout: MeshShape, most: int) -> list[int]:
    """Returns the possible numbers of traces in a micro-batch, up to `most`, in increasing order.

    The numbers are divisible by the number of devices that share the traces. Unless micro-batches
    are formed by tokens, they also divide the number of traces in an update.
    """
    multiples = range(layout.row_shards, most + 1, layout.row_shards)
    if work.by_tokens:
        return list(multiples)
    return [rows for rows in multiples if work.update_rows % rows == 0]


def _largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Returns the largest of several increasing sizes that fits, or 0 if none fits."""
    # Try the largest size first, because it is the only size that may need less memory than a
    # smaller one: if every trace has a slot, the KV caches of prompt and thinking are not copied
    # for the answers.
    if not sizes or fits(sizes[-1]):
        return max(sizes, default=0)
    count = bisect.bisect_left(
        sizes,
        True,
        hi=len(sizes) - 1,
        key=lambda size: not fits(size),
    )
    return sizes[count - 1] if count else 0


def with_portion(work: Workload, portion: str, rows: int) -> Workload:
    """Returns the run with `rows` traces in a portion, which is one of `PORTIONS`."""
    if portion == "micro_rows":
        return work.with_micro_rows(rows)
    changes: dict[str, Any] = {portion: rows}
    return dataclasses.replace(work, **changes)


def largest(portion: str, work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> int:
    """Returns the maximum number of traces (rows) in a portion that fits into memory.

    A portion is the number of traces that a phase processes at the same time. Micro-batches divide
    the traces of an update evenly, unless they are formed by tokens. The slots of a rollout are
    limited to the traces of an iteration, and the slots of an evaluation to the traces of its
    largest call, rounded up to a multiple of the slot shards.

    Args:
      portion: one of `PORTIONS`.
      work: the sizes of the run.
      layout: the device mesh.
      memory_limit: the memory limit.

    Returns:
      The number of traces, or 0 if not even one trace per device fits.
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
        """True if the run fits with `rows` traces in the portion."""
        changed = with_portion(work, portion, rows)
        return peak_of_phase(changed, layout) <= memory_limit.limit

    return _largest(sizes, fits)


def decoding_peak(work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> float:
    """Returns the peak bytes per device of decoding, during training and evaluations."""
    training = memory_limit.of_rollout(work, layout)
    if not work.evaluated:
        return training
    return max(training, memory_limit.of_evaluation(work, layout))


def peak_of(work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> float:
    """Returns the peak bytes per device of a run over all phases."""
    return max(
        memory_limit.of_update(work, layout),
        memory.score_phase(work, layout).peak,
        decoding_peak(work, layout, memory_limit),
        memory_limit.of_warmup_step(work, layout),
    )


def layouts(work: Workload, num_devices: int) -> list[MeshShape]:
    """Returns all valid mesh shapes, ordered by increasing communication."""
    legal = parallel.layouts(
        num_devices,
        hidden_size=work.model.hidden_size,
        intermediate_size=work.model.intermediate_size,
        num_kv_heads=work.model.num_kv_heads,
    )
    # Tensor parallelism communicates twice per layer and, in decoding, for every token. FSDP
    # communicates once per layer.
    return sorted(
        legal,
        key=lambda layout: (layout.tensor, layout.decode_tensor, layout.fsdp),
    )


def suggest(work: Workload, num_devices: int, memory_limit: MemoryLimit) -> Choice | None:
    """Returns the first mesh on which a run fits, and its batch sizes. None if no mesh fits.

    The config's micro-batch and number of slots are kept if they fit. Otherwise, the largest values
    that fit are used. A mesh is accepted if a slot has to decode at most eight traces. If no mesh
    has enough slots for this, the mesh with the most slots is returned.
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

    The config's values are kept if they fit. Padding is computed if the mesh has several devices,
    which `train.padding_free` does not support. Returns None if no values fit.
    """
    needs_padding = work.config.train.padding_free and layout.num_devices > 1
    if needs_padding:
        train = dataclasses.replace(work.config.train, padding_free=False)
        work = dataclasses.replace(work, config=dataclasses.replace(work.config, train=train))
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
    changed = dataclasses.replace(work.with_micro_rows(micro_rows), slots=slots)
    choice = fewer_eval_slots(changed, layout, memory_limit)
    if choice is None:
        return None
    return dataclasses.replace(choice, needs_padding=needs_padding)


def fewer_warmup_tokens(work: Workload, layout: MeshShape, memory_limit: MemoryLimit) -> Workload:
    """Reduces the number of tokens per warm-up step until a step fits.

    The number is halved repeatedly. The search ends at one example per step, even if the step does
    not fit.
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

    Evaluations get fewer decoding slots, and the warm-up gets fewer tokens per step.

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

    This key sets the tensor parallelism of decoding. With more shards, each device reads a smaller
    part of the weights per decoding step, and fewer traces have to wait for the longest trace. In
    return, each layer needs two all-reduces. The other mesh axes are not changed. The candidates
    are the current mesh and all meshes that fit.

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
