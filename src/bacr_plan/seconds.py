"""Predicts the duration of an iteration and of an evaluation.

The floating-point operations and bytes of a schedule are divided by the rates that a GPU is assumed
to reach, as fractions of its data-sheet rates. The fractions are assumptions and are printed with
every prediction. docs/performance.md lists the rates measured on one GPU. The overhead of kernel
launches is not included.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bacr_jax.config import MeshConfig
from bacr_jax.errors import UserError
from bacr_jax.parallel import MeshShape
from bacr_jax.runs.setup import decoding_mesh
from bacr_plan import costs, schedule
from bacr_plan.devices import Device
from bacr_plan.lengths import Lengths
from bacr_plan.schedule import PlannedIteration, PlannedMicroBatch, Schedule
from bacr_plan.workload import Workload, sizes_of


@dataclass(frozen=True)
class Shares:
    """Fractions of the data-sheet rates that programs are assumed to reach.

    Attributes:
      matmul: fraction of the dense bfloat16 rate, for matrix products and everything around them.
      bandwidth: fraction of the memory bandwidth, for decoding and the optimizer.
      links: fraction of the bandwidth between GPUs.
      wait: latency of a collective operation in seconds, in addition to the transfer time.
    """

    matmul: float = 0.5
    bandwidth: float = 0.7
    links: float = 0.7
    wait: float = 20e-6


ASSUMED = Shares()


def rollout_seconds(
    work: Workload, layout: MeshShape, device: Device, rollout: Schedule
) -> dict[str, float]:
    """Predicts the durations of prefill and decoding in a rollout, in seconds.

    A chunk of decoding steps takes the maximum of its memory time and its compute time. With tensor
    parallelism, two all-reduces per layer are added.
    """
    rate = _flops_per_second(work, layout, device)
    bandwidth = device.memory_bandwidth * ASSUMED.bandwidth
    decode = 0.0
    for chunk in rollout.chunks:
        product_seconds = costs.chunk_flops(work, chunk) / rate
        memory_seconds = costs.chunk_bytes(work, layout, chunk) / bandwidth
        decode += max(product_seconds, memory_seconds)
    answers = 0.0
    for rows, length, steps in rollout.answers:
        product_seconds = costs.answer_flops(work, rows, steps) / rate
        moved = costs.answer_bytes(work, layout, rows, length, steps)
        answers += max(product_seconds, moved / bandwidth)
    prefill_flops = sum(costs.prefill_flops(work, rows, width) for rows, width in rollout.prefills)
    return {
        "prefill": prefill_flops / rate,
        "decode": decode + answers + _sum_seconds(work, layout, device, rollout),
    }


def _sum_seconds(work: Workload, layout: MeshShape, device: Device, rollout: Schedule) -> float:
    """Returns the seconds of all-reduces in decoding with tensor parallelism, otherwise 0."""
    if layout.decode_tensor == 1:
        return 0.0
    links = device.link_bandwidth * ASSUMED.links
    rows = work.slots / layout.slot_shards
    # Two all-reduces per layer.
    wait = 2 * work.model.num_layers * ASSUMED.wait
    trunk_bytes = costs.decode_link_bytes(work, layout, rows)
    answer_bytes = costs.decode_link_bytes(work, layout, rows * work.cuts)
    answer_steps = sum(steps for _, _, steps in rollout.answers)
    trunks = rollout.steps * (wait + trunk_bytes / links)
    return trunks + answer_steps * (wait + answer_bytes / links)


def step_seconds(
    work: Workload, layout: MeshShape, device: Device, planned: PlannedIteration | None = None
) -> dict[str, float]:
    """Predicts the seconds of each phase of an iteration, without grading and evaluation.

    A micro-batch takes the maximum of its compute time and the time of its FSDP gathers, because
    they overlap. Data-parallel replicas are assumed to be connected as fast as the GPUs of one
    host.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      device: the GPU model.
      planned: the schedule of the iteration. Computed from `work` by default.
    """
    planned = planned or schedule.iteration(work, layout)
    rate = _flops_per_second(work, layout, device)
    per_byte = 1 / (device.link_bandwidth * ASSUMED.links)
    bandwidth = device.memory_bandwidth * ASSUMED.bandwidth
    gathers = costs.gathered_bytes(work, layout) * per_byte
    micro_batches = [batch for update in planned.updates for batch in update]
    products = [costs.train_flops(work, batch) / rate for batch in micro_batches]
    forward = [costs.forward_flops(work, batch) / rate for batch in micro_batches]
    optimizer = costs.optimizer_bytes(work, layout) / bandwidth
    copies = costs.copied_bytes(work, layout) * per_byte
    gradients = sum(max(seconds, gathers) for seconds in products)
    num_updates = work.config.train.minibatches
    return {
        "update": gradients + num_updates * (optimizer + copies),
        "score": work.scored * sum(forward),
        **rollout_seconds(work, layout, device, planned.rollout),
    }


def warmup_seconds(work: Workload, layout: MeshShape, device: Device) -> float:
    """Predicts the duration of `warmup.steps` supervised steps in seconds.

    Evaluations during the warm-up and additional rounds of the warm-up are not included.
    """
    warmup = work.warmup
    if warmup is None:
        return 0.0
    batch = PlannedMicroBatch(warmup.micro_rows, warmup.thinking, 0)
    step = PlannedIteration(Schedule(), [[batch]])
    by_phase = step_seconds(warmup, layout, device, step)
    return work.config.warmup.steps * by_phase["update"]


def _flops_per_second(work: Workload, layout: MeshShape, device: Device) -> float:
    """Returns the assumed FLOP/s of all devices. The rate of float32 products is halved."""
    type_factor = 1.0 if work.float_bytes == 2 else 0.5
    return device.matmul_flops * ASSUMED.matmul * type_factor * layout.num_devices


def evaluation_seconds(work: Workload, layout: MeshShape, device: Device) -> float:
    """Predicts the duration of one evaluation on all evaluation sets, in seconds.

    Every response is assumed to use its complete budget and to have one answer.
    """
    seconds_of_call: dict[tuple[tuple[int, int], ...], float] = {}
    for call in set(work.evaluated):
        call_work = _work_of_call(work, call)
        rollout = schedule.rollout(call_work, layout)
        by_phase = rollout_seconds(call_work, layout, device, rollout)
        seconds_of_call[call] = sum(by_phase.values())
    return sum(seconds_of_call[call] for call in work.evaluated)


def _work_of_call(work: Workload, call: tuple[tuple[int, int], ...]) -> Workload:
    """Returns the sizes of one decoding call of an evaluation.

    All slots are decoded, as in training, even if the call has fewer traces.

    Args:
      work: the sizes of the run.
      call: the number of traces and the largest budget in tokens of each part of the call.
    """
    evaluation = work.evaluation
    row_counts = [rows for rows, _ in call]
    budgets = [budget for _, budget in call]
    thinking = np.repeat(budgets, row_counts)
    rows = len(thinking)
    prompts = np.resize(work.lengths.prompts, rows)
    answers = np.resize(work.lengths.answers[:, 0], (rows, 1))
    lengths = Lengths(prompts, thinking.astype(prompts.dtype), answers)
    return dataclasses.replace(
        evaluation,
        cuts=1,
        draw=functools.partial(dataclasses.replace, lengths),
    )


# Devices split between a learner and servers that sample (rollout.engine=vllm) --------------------
#
# Servers are assumed to reach the rates of `ASSUMED`, and to decode all their rows at once. This
# code does not check that the learner fits into the memory of its devices; run `bacr plan` with the
# learner's number of devices to check it.

# Rate in bytes/s at which a policy is written to an in-memory folder, and also read back.
POLICY_BANDWIDTH = 2e9


@dataclass(frozen=True)
class DeviceSplit:
    """A split of the devices between a learner and samplers, with its predicted durations.

    Attributes:
      learner: number of devices used for learning.
      samplers: number of devices used for sampling.
      learn: duration of learning in one iteration, in seconds.
      sample: duration of sampling in one iteration, in seconds.
      transfer: duration of copying the policy to the samplers, in seconds. Learner and samplers are
        idle during the copy.
    """

    learner: int
    samplers: int
    learn: float
    sample: float
    transfer: float

    @property
    def in_turn(self) -> float:
        """Returns the seconds of an iteration if learning follows sampling (async_steps=0)."""
        return self.learn + self.sample + self.transfer

    @property
    def ahead(self) -> float:
        """Returns the seconds of an iteration if learning and sampling overlap (async_steps=1)."""
        return max(self.learn, self.sample) + self.transfer


def splits(
    work: Workload, layout: MeshShape, device: Device, planned: PlannedIteration
) -> list[DeviceSplit]:
    """Returns the possible splits of the devices between a learner and vLLM servers.

    Splits for which the learner has no valid mesh are left out.

    Args:
      work: the sizes of the run.
      layout: the mesh of all devices.
      device: the GPU model.
      planned: the schedule of an iteration on all devices.
    """
    config = dataclasses.replace(work.config, mesh=type(work.config.mesh)())
    policy_bytes = work.float_bytes * costs.policy_parameters(work)
    transfer = 2 * policy_bytes / POLICY_BANDWIDTH
    result = []
    for samplers in range(1, layout.num_devices):
        learner = layout.num_devices - samplers
        try:
            learner_work, learner_layout = sizes_of(config, learner)
        except UserError:
            continue
        updates = schedule.updates(learner_work, learner_layout)
        iteration = PlannedIteration(planned.rollout, updates)
        by_phase = step_seconds(learner_work, learner_layout, device, iteration)
        split = DeviceSplit(
            learner=learner,
            samplers=samplers,
            learn=by_phase["update"] + by_phase["score"],
            sample=_sampling_seconds(work, device, samplers, config.mesh),
            transfer=transfer,
        )
        result.append(split)
    return result


def _sampling_seconds(work: Workload, device: Device, samplers: int, mesh: MeshConfig) -> float:
    """Predicts the duration of a rollout in seconds on servers with `samplers` devices.

    Args:
      work: the sizes of the run.
      device: the GPU model.
      samplers: number of devices used for sampling.
      mesh: the mesh settings of the config.
    """
    layout = decoding_mesh(mesh, work.model, samplers)
    shards = layout.slot_shards
    all_rows = dataclasses.replace(work, slots=-(-work.rows // shards) * shards)
    rollout = schedule.rollout(all_rows, layout)
    by_phase = rollout_seconds(all_rows, layout, device, rollout)
    return sum(by_phase.values())


def split_lines(
    all_splits: Sequence[DeviceSplit], together: float, *, accepts_async: bool
) -> list[str]:
    """Describes the best splits, and compares them with a run that does not split the devices.

    Args:
      all_splits: the splits. If empty, no lines are returned.
      together: duration of an iteration in seconds if all devices alternate between sampling and
        learning.
      accepts_async: True if the run accepts `rollout.async_steps=1`. Otherwise this setting is left
        out.
    """
    if not all_splits:
        return []
    in_turn = min(all_splits, key=lambda split: split.in_turn)
    ways = {
        "all in turn, own decoder": together,
        f"in turn: {_split_text(in_turn)}": in_turn.in_turn,
    }
    if accepts_async:
        ahead = min(all_splits, key=lambda split: split.ahead)
        ways[f"rollout.async_steps=1: {_split_text(ahead)}"] = ahead.ahead
    fastest = min(ways, key=lambda way: ways[way])
    lines = [f"  {way:52}{seconds:8.0f}" for way, seconds in ways.items()]
    return [
        "",
        "Seconds of an iteration if servers of vLLM sample on some of the devices",
        *lines,
        f"  fastest: {fastest}; of each {in_turn.transfer:.0f} s to hand the policy over, at "
        f"{POLICY_BANDWIDTH / 1e9:g} GB/s",
    ]


def _split_text(split: DeviceSplit) -> str:
    """Describes a split by its numbers of devices, such as `6 learn, 2 sample`."""
    return f"{split.learner} learn, {split.samplers} sample"
