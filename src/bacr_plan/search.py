"""Which portions and layouts fit into a given memory."""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bacr_jax import parallel
from bacr_jax.parallel import MeshShape
from bacr_plan import memory, schedule, seconds
from bacr_plan.devices import Device
from bacr_plan.workload import Workload

# What a run does together, by its names in a workload.
PORTIONS = ("micro_rows", "slots", "eval_slots")


@dataclass(frozen=True)
class Room:
    """Bytes of a device that may be used, and how much of them a phase takes.

    Attributes:
      update: the compiler's temporaries over the arithmetic ones, in an update.
      rollout: the same in a rollout.
    """

    limit: float
    update: float = 1.0
    rollout: float = 1.0

    def of_update(self, work: Workload, layout: MeshShape) -> float:
        """Bytes of an update at its worst moment."""
        return memory.update_phase(work, layout).peak_with(self.update)

    def of_rollout(self, work: Workload, layout: MeshShape) -> float:
        """Bytes of a rollout at its worst moment."""
        return memory.rollout_phase(work, layout).peak_with(self.rollout)

    def of_evaluation(self, work: Workload, layout: MeshShape) -> float:
        """Bytes of an evaluation at its worst moment, in training or in the warm-up."""
        peak = self.of_rollout(work.evaluation, layout)
        measured = memory.warmup_phases(work, layout).get("warmup_accuracy")
        return peak if measured is None else max(peak, measured.peak_with(self.rollout))

    def of_warmup_step(self, work: Workload, layout: MeshShape) -> float:
        """Bytes of a step of the warm-up at its worst moment; 0 without one."""
        phase = memory.warmup_phases(work, layout).get("warmup")
        return 0.0 if phase is None else phase.peak_with(self.update)


@dataclass(frozen=True)
class Choice:
    """A run with portions and a layout that fit, and the bytes of a device that they take."""

    work: Workload
    layout: MeshShape
    peak: float

    def overrides(self) -> str:
        """The choice as config keys."""
        work = self.work
        keys = {
            **{f"mesh.{axis}": size for axis, size in self.layout._asdict().items()},
            **work.micro_batch(work.micro_rows),
            "rollout.slots": work.slots,
            **({"eval.slots": work.eval_slots} if work.eval_slots else {}),
            **({"warmup.batch_tokens": work.warmup_tokens} if work.warmup_tokens else {}),
        }
        return " ".join(f"{key}={value}" for key, value in keys.items())


def _micro_batches(work: Workload, layout: MeshShape, most: int) -> list[int]:
    """Rows of a micro-batch that split evenly, over devices and into an update."""
    multiples = range(layout.row_shards, most + 1, layout.row_shards)
    return [rows for rows in multiples if work.by_tokens or work.update_rows % rows == 0]


def _largest(tried: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The largest of rising portions that fits, 0 if none."""
    # Memory rises but for the last: a slot for every row needs no copies for answers.
    if not tried or fits(tried[-1]):
        return max(tried, default=0)
    count = bisect.bisect_left(tried, True, hi=len(tried) - 1, key=lambda size: not fits(size))
    return tried[count - 1] if count else 0


def largest(portion: str, work: Workload, layout: MeshShape, room: Room) -> int:
    """The most rows of one of `PORTIONS` that fit; 0: not one a device.

    A micro-batch's divide an update's; slots are at most the rows of an iteration, those of an
    evaluation at most a call's.
    """
    shards, changed = layout.slot_shards, lambda rows: dataclasses.replace(work, **{portion: rows})
    if portion == "micro_rows":
        tried: Sequence[int] = _micro_batches(work, layout, work.update_rows)
        peak = lambda rows: room.of_update(changed(rows), layout)
    elif portion == "slots":
        tried = range(shards, work.rows + 1, shards)
        peak = lambda rows: room.of_rollout(changed(rows), layout)
    else:
        tried = range(shards, work.evaluation.rows + shards, shards)
        peak = lambda rows: room.of_evaluation(changed(rows), layout)
    return _largest(tried, lambda rows: peak(rows) <= room.limit)


def decoding_peak(work: Workload, layout: MeshShape, room: Room) -> float:
    """Bytes on one device at the worst moment of decoding, in training and in evaluations."""
    training = room.of_rollout(work, layout)
    return max(training, room.of_evaluation(work, layout)) if work.evaluated else training


def peak_of(work: Workload, layout: MeshShape, room: Room) -> float:
    """Bytes on one device at the worst moment of a run."""
    return max(
        room.of_update(work, layout),
        memory.score_phase(work, layout).peak,
        decoding_peak(work, layout, room),
        room.of_warmup_step(work, layout),
    )


def layouts(work: Workload, num_devices: int) -> list[MeshShape]:
    """Every legal layout, the ones with the least communication first."""
    legal = parallel.layouts(
        num_devices,
        hidden_size=work.model.hidden_size,
        intermediate_size=work.model.intermediate_size,
        num_kv_heads=work.model.num_kv_heads,
    )
    # Tensor parallelism talks twice per layer, in decoding at every token; FSDP once per layer.
    return sorted(legal, key=lambda layout: (layout.tensor, layout.decode_tensor, layout.fsdp))


def suggest(work: Workload, num_devices: int, room: Room) -> Choice | None:
    """The first layout that fits so many bytes per device, with portions worth having, or None.

    Portions are the config's own where they fit, else the largest that do. Worth having: enough
    slots that decoding takes at most eight waves. If no layout has as many, the one with the most
    slots is taken.
    """
    fitting: list[Choice] = []
    for layout in layouts(work, num_devices):
        most = largest("micro_rows", work, layout, room)
        if work.rows % layout.row_shards or not most:
            continue
        micro = work.micro_rows if work.micro_rows in _micro_batches(work, layout, most) else most
        slots = min(largest("slots", work, layout, room), work.slots)
        slots -= slots % layout.slot_shards
        if not slots:
            continue
        asked = dataclasses.replace(work, micro_rows=micro, slots=slots)
        choice = fewer_eval_slots(asked, layout, room)
        if choice is None:
            continue
        if slots * 8 >= work.rows:
            return choice
        fitting.append(choice)
    return max(fitting, key=lambda choice: choice.work.slots, default=None)


def fewer_warmup_tokens(work: Workload, layout: MeshShape, room: Room) -> Workload:
    """The run with fewer tokens in a step of its warm-up, halved until it fits or holds one row."""
    warmup = work.warmup
    while warmup is not None and warmup.rows > 1:
        if room.of_warmup_step(work, layout) <= room.limit:
            break
        tokens = max(work.warmup_tokens // 2, warmup.thinking)
        work = dataclasses.replace(work, warmup_tokens=tokens)
        warmup = work.warmup
    return work


def fewer_eval_slots(work: Workload, layout: MeshShape, room: Room) -> Choice | None:
    """The run with smaller evaluations and warm-up if they are too large; None: more is too large.

    Evaluations get fewer slots, a warm-up gets fewer tokens.
    """
    shards, wanted = layout.slot_shards, work.evaluation.slots
    fewer = work
    if wanted % shards or decoding_peak(work, layout, room) > room.limit:
        most = min(largest("eval_slots", work, layout, room), wanted)
        fewer = dataclasses.replace(work, eval_slots=max(most // shards, 1) * shards)
    fewer = fewer_warmup_tokens(fewer, layout, room)
    peak = peak_of(fewer, layout, room)
    return Choice(fewer, layout, peak) if peak <= room.limit else None


def fastest_decoding(
    work: Workload, layout: MeshShape, room: Room, device: Device
) -> tuple[MeshShape, float]:
    """The mesh.decode_tensor with which a rollout takes least, of those that fit, and its seconds.

    A step reads a part of the weights only, and fewer rows wait for the longest one; two sums a
    layer come on top. Seconds are of prefill and decoding; the given layout where no other fits.
    """
    found = []
    for tried in layouts(work, layout.num_devices):
        if tried[:3] != layout[:3]:
            continue
        if any(slots % tried.slot_shards for slots in (work.slots, work.evaluation.slots)):
            continue
        if decoding_peak(work, tried, room) > room.limit and tried != layout:
            continue
        made = schedule.rollout(work, tried)
        taken = sum(seconds.rollout_seconds(work, tried, device, made).values())
        found.append((taken, tried))
    taken, best = min(found)
    return best, taken
