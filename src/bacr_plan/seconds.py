"""Predicts the duration of an iteration and of an evaluation.

The floating-point operations and bytes of a schedule are divided by the rates that a GPU is assumed
to reach, as fractions of its data-sheet rates. A decoding step also takes at least the time to
launch its kernels. The fractions and the time of a launch are assumptions and are printed with
every prediction. docs/performance.md lists the rates measured on one GPU.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from bacr_jax.config import MeshConfig
from bacr_jax.errors import UserError
from bacr_jax.parallel import MeshShape
from bacr_jax.runs.setup import decoding_mesh
from bacr_plan import costs, schedule
from bacr_plan.devices import PER_HOST, Device
from bacr_plan.lengths import Lengths
from bacr_plan.schedule import PlannedIteration, PlannedMicroBatch, Schedule
from bacr_plan.workload import Workload, sizes_of


@dataclass(frozen=True)
class Shares:
    """Fractions of the data-sheet rates that programs are assumed to reach, and latencies.

    Attributes:
      matmul: fraction of the dense bfloat16 rate, for matrix products and everything around them.
      bandwidth: fraction of the memory bandwidth, for decoding and the optimizer.
      links: fraction of the bandwidth between GPUs, within a machine and between machines.
      wait: latency of a collective operation in seconds, in addition to the transfer time.
      launch: minimum time of a decoding step on a GPU in seconds per layer. Small models wait for
        the launches of their kernels instead of their products or bytes. Measured once, for all
        kernels of a step: SmolLM2-135M, with 30 layers and 256 rows, took 2.6 ms a step on an H200
        (docs/performance.md).
    """

    matmul: float = 0.5
    bandwidth: float = 0.7
    links: float = 0.7
    wait: float = 20e-6
    launch: float = 85e-6


ASSUMED = Shares()


def _bytes_per_second(device: Device, layout: MeshShape, *, stride: int, size: int) -> float:
    """Returns the assumed rate at which a GPU receives the data of a collective operation.

    A group within a machine uses the links between its GPUs. For a group that spans machines, NCCL
    uses the network cards of all of its GPUs in a machine at the same time: all-reduces of 16 and
    24 A100 with four cards of 25 GB/s per machine reached 91 and 85 GB/s
    (github.com/NVIDIA/nccl-tests/issues/100 and 119).

    Args:
      device: the GPU model.
      layout: the device mesh. Consecutive devices are on the same machine.
      stride: distance between the devices of a group, which is the product of the inner mesh axes.
      size: number of devices in a group.
    """
    bandwidth = device.link_bandwidth
    span = stride * size
    if layout.num_devices > PER_HOST and PER_HOST % span:
        # The smallest number of devices of a group on one machine.
        on_machine = max(math.gcd(PER_HOST, span) // stride, 1)
        bandwidth = min(bandwidth, on_machine * device.network_bandwidth)
    return bandwidth * ASSUMED.links


def rollout_seconds(
    work: Workload,
    layout: MeshShape,
    device: Device,
    rollout: Schedule,
    *,
    launch: float = ASSUMED.launch,
) -> dict[str, float]:
    """Predicts the durations of prefill and decoding in a rollout, in seconds.

    A chunk of decoding steps takes the maximum of its memory time, its compute time and the time to
    launch its kernels. With tensor parallelism, two all-reduces per layer are added.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      device: the GPU model.
      rollout: the decoding calls of the rollout.
      launch: minimum time of a decoding step in seconds per layer. 0 for a CPU, which launches no
        kernels.
    """
    shortest_step = work.model.num_layers * launch
    rate = _flops_per_second(work, layout, device)
    bandwidth = device.memory_bandwidth * ASSUMED.bandwidth
    decode = 0.0
    for chunk in rollout.chunks:
        product_seconds = costs.chunk_flops(work, chunk) / rate
        memory_seconds = costs.chunk_bytes(work, layout, chunk) / bandwidth
        decode += max(product_seconds, memory_seconds, chunk.steps * shortest_step)
    answers = 0.0
    for rows, length, steps in rollout.answers:
        product_seconds = costs.answer_flops(work, rows, steps) / rate
        moved = costs.answer_bytes(work, layout, rows, length, steps)
        answers += max(product_seconds, moved / bandwidth, steps * shortest_step)
    prefill_flops = sum(costs.prefill_flops(work, rows, width) for rows, width in rollout.prefills)
    return {
        "prefill": prefill_flops / rate,
        "decode": decode + answers + _sum_seconds(work, layout, device, rollout),
    }


def _sum_seconds(work: Workload, layout: MeshShape, device: Device, rollout: Schedule) -> float:
    """Returns the seconds of all-reduces in decoding with tensor parallelism, otherwise 0."""
    if layout.decode_tensor == 1:
        return 0.0
    links = _bytes_per_second(device, layout, stride=1, size=layout.decode_tensor)
    rows = work.slots / layout.slot_shards
    # Two all-reduces per layer.
    wait = 2 * work.model.num_layers * ASSUMED.wait
    trunk_bytes = costs.decode_link_bytes(work, layout, rows)
    answer_bytes = costs.decode_link_bytes(work, layout, rows * work.cuts)
    answer_steps = sum(steps for _, _, steps in rollout.answers)
    trunks = rollout.steps * (wait + trunk_bytes / links)
    return trunks + answer_steps * (wait + answer_bytes / links)


def step_seconds(
    work: Workload,
    layout: MeshShape,
    device: Device,
    planned: PlannedIteration | None = None,
    *,
    launch: float = ASSUMED.launch,
) -> dict[str, float]:
    """Predicts the seconds of each phase of an iteration, without grading and evaluation.

    A micro-batch takes the maximum of its compute time and the time of its FSDP gathers, because
    they overlap. Machines are assumed to have `PER_HOST` GPUs.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      device: the GPU model.
      planned: the schedule of the iteration. Computed from `work` by default.
      launch: minimum time of a decoding step in seconds per layer, 0 for a CPU.
    """
    planned = planned or schedule.iteration(work, layout)
    rate = _flops_per_second(work, layout, device)
    bandwidth = device.memory_bandwidth * ASSUMED.bandwidth
    fsdp_rate = _bytes_per_second(device, layout, stride=layout.tensor, size=layout.fsdp)
    data_rate = _bytes_per_second(device, layout, stride=layout.param_shards, size=layout.data)
    gathers = costs.gathered_bytes(work, layout) / fsdp_rate
    scored_gathers = costs.scored_gathered_bytes(work, layout) / fsdp_rate
    micro_batches = [batch for update in planned.updates for batch in update]
    products = [costs.train_flops(work, batch) / rate for batch in micro_batches]
    forward = [costs.forward_flops(work, batch) / rate for batch in micro_batches]
    optimizer = costs.optimizer_bytes(work, layout) / bandwidth
    copies = costs.copied_bytes(work, layout) / data_rate
    gradients = sum(max(seconds, gathers) for seconds in products)
    scores = sum(max(seconds, scored_gathers) for seconds in forward)
    num_updates = work.config.train.minibatches
    return {
        "update": gradients + num_updates * (optimizer + copies),
        "score": work.scored * scores,
        **rollout_seconds(work, layout, device, planned.rollout, launch=launch),
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
        draw=lambda: lengths,
    )


# Devices split between a learner and servers that sample (rollout.engine=vllm) --------------------
#
# Servers are assumed to reach the rates of `ASSUMED`, to need as long for the launches of a
# decoding step as our decoder, and to decode all their rows at once. This code does not check that
# the learner fits into the memory of its devices; run `bacr plan` with the learner's number of
# devices to check it.

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
