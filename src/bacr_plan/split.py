"""Devices split between a learner and servers that sample (rollout.engine=vllm), priced.

Nothing of it was measured on a GPU: servers are taken to reach the shares of `seconds.ASSUMED`,
with all their rows in flight at once. Whether the learner's part fits is said by a plan of its
devices.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from bacr_jax.errors import UserError
from bacr_jax.runs.setup import decoding_mesh
from bacr_plan import costs, schedule
from bacr_plan.devices import Device
from bacr_plan.seconds import Iteration, rollout_seconds, step_seconds
from bacr_plan.workload import Workload, sizes_of

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


def splits(work: Workload, device: Device, made: Iteration, num_devices: int) -> list[Split]:
    """Every split of so many devices whose learner's part the batch can be spread over.

    Args:
      work: of a run on all of them.
      made: its schedule.
    """
    config = dataclasses.replace(work.config, mesh=type(work.config.mesh)())
    hand = 2 * work.float_bytes * costs.policy_parameters(work) / HANDED
    found = []
    for samplers in range(1, num_devices):
        try:
            own, layout = sizes_of(config, num_devices - samplers)
        except UserError:
            continue
        updates = Iteration(made.rollout, schedule.updates(own, layout))
        seconds = step_seconds(own, layout, device, updates)
        servers = decoding_mesh(config, work.model, samplers)
        asked = dataclasses.replace(
            work, slots=-(-work.rows // servers.slot_shards) * servers.slot_shards
        )
        sampled = schedule.rollout(schedule.rollout_spec(asked, servers), work.lengths, work.prompt)
        sample = sum(rollout_seconds(asked, servers, device, sampled).values())
        learn = seconds["update"] + seconds["score"]
        found.append(Split(num_devices - samplers, samplers, learn, sample, hand))
    return found


def as_lines(found: Sequence[Split], together: float) -> list[str]:
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
