"""Seconds of an iteration and of an evaluation, from a device's ceilings and a run's schedule.

The shares of the ceilings are assumptions, and are printed with every prediction; what one GPU
reached is in docs/performance.md. The time in which kernels are launched is left out.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

import numpy as np

from bacr_jax.errors import UserError
from bacr_jax.parallel import MeshShape
from bacr_jax.runs.setup import decoding_mesh
from bacr_plan import costs, schedule
from bacr_plan.devices import Device
from bacr_plan.lengths import Lengths
from bacr_plan.schedule import Iteration, Padded, Schedule
from bacr_plan.workload import Workload, sizes_of


@dataclass(frozen=True)
class Shares:
    """Shares of the data-sheet ceilings that programs are taken to reach.

    Attributes:
      matmul: of the dense bfloat16 rate, by products with everything around them.
      bandwidth: of the memory's bandwidth, while decoding and by the optimizer.
      wait: seconds that a collective takes beside its bytes.
    """

    matmul: float = 0.5
    bandwidth: float = 0.7
    links: float = 0.7
    wait: float = 20e-6


ASSUMED = Shares()


def rollout_seconds(
    work: Workload, layout: MeshShape, device: Device, made: Schedule
) -> dict[str, float]:
    """Seconds of prefill and decoding.

    A chunk takes the larger of what its bytes and its products take; with tensor shards two sums a
    layer are waited for besides.
    """
    rate = _products_a_second(work, layout, device)
    bandwidth = device.memory_bandwidth * ASSUMED.bandwidth
    longer = lambda flops, moved: max(flops / rate, moved / bandwidth)
    decode = sum(
        longer(costs.chunk_flops(work, chunk), costs.chunk_bytes(work, layout, chunk))
        for chunk in made.chunks
    )
    decode += sum(
        longer(
            costs.answer_flops(work, rows, steps),
            costs.answer_bytes(work, layout, rows, length, steps),
        )
        for rows, length, steps in made.answers
    )
    prefill = sum(costs.prefill_flops(work, *one) for one in made.prefills) / rate
    sums = 0.0
    if layout.decode_tensor > 1:
        links = device.link_bandwidth * ASSUMED.links
        rows = work.slots / layout.slot_shards
        each = 2 * work.model.num_layers * ASSUMED.wait
        sums += made.steps * (each + costs.decode_link_bytes(work, layout, rows) / links)
        answers = costs.decode_link_bytes(work, layout, rows * work.cuts) / links
        sums += sum(steps for *_, steps in made.answers) * (each + answers)
    return {"prefill": prefill, "decode": decode + sums}


def step_seconds(
    work: Workload, layout: MeshShape, device: Device, made: Iteration | None = None
) -> dict[str, float]:
    """Predicted seconds of one iteration by phase; grading and evaluation left out.

    The learner's gathers run beside its products: a micro-batch takes the longer of the two. Copies
    of the policy are taken to be as near as the devices of a box. `made` is worked out by default.
    """
    made = made or schedule.iteration(work, layout)
    rate = _products_a_second(work, layout, device)
    per_byte = 1 / (device.link_bandwidth * ASSUMED.links)
    links = costs.gathered_bytes(work, layout) * per_byte
    parts = [one for update in made.updates for one in update]
    adam = costs.optimizer_bytes(work, layout) / (device.memory_bandwidth * ASSUMED.bandwidth)
    products = [costs.train_flops(work, one) / rate for one in parts]
    forward = [costs.forward_flops(work, one) / rate for one in parts]
    return {
        "update": sum(max(one, links) for one in products)
        + work.config.train.minibatches * (adam + costs.copied_bytes(work, layout) * per_byte),
        "score": work.scored * sum(forward),
        **rollout_seconds(work, layout, device, made.rollout),
    }


def warmup_seconds(work: Workload, layout: MeshShape, device: Device) -> float:
    """Seconds of `warmup.steps` supervised steps; measuring and further rounds left out."""
    warmup = work.warmup
    if warmup is None:
        return 0.0
    batch = Padded(warmup.micro_rows, warmup.thinking, 0)
    one = step_seconds(warmup, layout, device, Iteration(Schedule(), [[batch]]))
    return work.config.warmup.steps * one["update"]


def _products_a_second(work: Workload, layout: MeshShape, device: Device) -> float:
    """Operations a second of all devices; float32 products take twice as long."""
    of_type = 1.0 if work.float_bytes == 2 else 0.5
    return device.matmul_flops * ASSUMED.matmul * of_type * layout.num_devices


def evaluation_seconds(work: Workload, layout: MeshShape, device: Device) -> float:
    """Seconds of one evaluation: every call of every set, budgets used up, one answer a trace."""
    found: dict[tuple[tuple[int, int], ...], float] = {}
    evaluation = work.evaluation
    for call in set(work.evaluated):
        limits = np.repeat([limit for _, limit in call], [rows for rows, _ in call])
        rows, shards = len(limits), layout.slot_shards
        slots = min(evaluation.slots, -(-rows // shards) * shards)
        prompts = np.resize(work.lengths.prompts, rows)
        answers = np.resize(work.lengths.answers[:, 0], (rows, 1))
        asked = Lengths(prompts, limits.astype(prompts.dtype), answers)
        draw = functools.partial(dataclasses.replace, asked)
        own = dataclasses.replace(evaluation, slots=slots, cuts=1, draw=draw)
        made = schedule.rollout(own, layout)
        found[call] = sum(rollout_seconds(own, layout, device, made).values())
    return sum(found[call] for call in work.evaluated)


# Devices split between a learner and servers that sample (rollout.engine=vllm) -------------------
#
# Servers are taken to reach the shares of `ASSUMED`, with all their rows in flight at once. Whether
# the learner's part fits is said by a plan of its devices.

# Bytes a second at which a policy is written to a folder in memory and read again, either of them.
HANDED = 2e9


@dataclass(frozen=True)
class Split:
    """Devices that learn and that sample, and seconds of an iteration by part.

    `hand`: of handing a policy over, while neither works.
    """

    learner: int
    samplers: int
    learn: float
    sample: float
    hand: float

    @property
    def in_turn(self) -> float:
        """Of an iteration with rollout.ahead=0."""
        return self.learn + self.sample + self.hand

    @property
    def ahead(self) -> float:
        """Of an iteration with rollout.ahead=1."""
        return max(self.learn, self.sample) + self.hand


def splits(work: Workload, layout: MeshShape, device: Device, made: Iteration) -> list[Split]:
    """Every split of a run's devices whose learner's part the batch can be spread over."""
    config = dataclasses.replace(work.config, mesh=type(work.config.mesh)())
    hand = 2 * work.float_bytes * costs.policy_parameters(work) / HANDED
    found = []
    for samplers in range(1, layout.num_devices):
        learner = layout.num_devices - samplers
        try:
            own, learners = sizes_of(config, learner)
        except UserError:
            continue
        updates = Iteration(made.rollout, schedule.updates(own, learners))
        taken = step_seconds(own, learners, device, updates)
        servers = decoding_mesh(config, work.model, samplers)
        shards = servers.slot_shards
        asked = dataclasses.replace(work, slots=-(-work.rows // shards) * shards)
        sampled = schedule.rollout(asked, servers)
        sample = sum(rollout_seconds(asked, servers, device, sampled).values())
        learn = taken["update"] + taken["score"]
        found.append(Split(learner, samplers, learn, sample, hand))
    return found


def split_lines(found: Sequence[Split], together: float) -> list[str]:
    """The best splits beside what the run takes where all devices do everything in turn."""
    if not found:
        return []
    turn, ahead = (min(found, key=attrgetter(name)) for name in ("in_turn", "ahead"))
    at = lambda one: f"{one.learner} learn, {one.samplers} sample"
    ways = [
        ("all in turn, own decoder", together),
        (f"in turn: {at(turn)}", turn.in_turn),
        (f"rollout.ahead=1: {at(ahead)}", ahead.ahead),
    ]
    fastest, _ = min(ways, key=itemgetter(1))
    return [
        "",
        "Seconds of an iteration if servers of vLLM sample on some of the devices",
        *(f"  {way:52}{seconds:8.0f}" for way, seconds in ways),
        f"  fastest: {fastest}; of each {ahead.hand:.0f} s to hand the policy over, at "
        f"{HANDED / 1e9:g} GB/s",
    ]
