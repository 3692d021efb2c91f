"""A plan: does it fit, what does it cost, what would fit; as an object and as text."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bacr_jax.parallel import MeshShape
from bacr_jax.planning import costs, memory, search
from bacr_jax.planning.compiling import Measured
from bacr_jax.planning.devices import DEVICES, GIB, MEMORY_FRACTION, Device
from bacr_jax.planning.memory import Phase
from bacr_jax.planning.search import Choice, Correction
from bacr_jax.planning.workload import Workload

# Boxes tried when a run doesn't fit into the given one, as multiples of its devices.
LARGER = (2, 4, 8, 16)

PREDICTED_FOR = ("a100-80", "h100", "h200")


@dataclass(frozen=True)
class Plan:
    """What was found out about a run.

    Attributes:
      work: sizes.
      layout: mesh.
      device: kind of device.
      memory_gib: memory of a device.
      source: how temporaries were found.
      phases: bytes per device, by phase.
      correction: of the arithmetic temporaries.
      max_micro_batch: the most rows per gradient accumulation step that fit.
      max_slots: the most rows decoded together that fit.
      suggestion: what would fit on these devices, if the config does not; else None.
      larger: what would fit on more such devices, if nothing fits on these.
      smaller: a smaller model that fits on these devices, and how, if this one does not.
      compiled: what the compiler said, by program.
    """

    work: Workload
    layout: MeshShape
    device: Device
    memory_gib: float
    source: str
    phases: dict[str, Phase]
    correction: Correction
    max_micro_batch: int
    max_slots: int
    suggestion: Choice | None
    larger: Choice | None
    smaller: tuple[str, Choice] | None
    compiled: dict[str, Measured]

    @property
    def limit(self) -> float:
        """Bytes that JAX may use on a device."""
        return self.memory_gib * GIB * MEMORY_FRACTION

    @property
    def peak(self) -> float:
        """Bytes on a device at the worst moment of an iteration."""
        return max(phase.peak for phase in self.phases.values())

    @property
    def fits(self) -> bool:
        """Whether every phase stays within the limit."""
        return self.peak <= self.limit


def _measured_phases(
    work: Workload, layout: MeshShape, compiled: dict[str, Measured], *, exact: bool
) -> tuple[dict[str, Phase], Correction]:
    """Phases by arithmetic, with what the compiler knows better put in its place.

    The CPU compiler knows arguments and outputs only (`exact` False).
    """
    phases = {
        "rollout": memory.rollout_phase(work, layout),
        "score": memory.score_phase(work, layout),
        "update": memory.update_phase(work, layout),
    }
    factors = {}
    state = phases["update"].resident
    if "train" in compiled and not work.by_tokens:
        # The arguments of an update are the train state and a batch; a reference is kept beside.
        extra = memory.parameter_bytes(work, layout) if work.reference else 0.0
        state = compiled["train"].arguments + compiled["train"].outputs + extra
    elsewhere = {
        # Gradients alone don't read the moments, so that only arithmetic knows the state.
        "update": memory.gradient_bytes(work, layout) / 2 if work.by_tokens else 0.0,
        "rollout": memory.answer_cache_bytes(work, layout),
    }
    for name, program in (("update", "train"), ("rollout", "decode")):
        found, phase = compiled.get(program), phases[name]
        own, temporaries = phase.own, phase.temporaries
        if found is not None and program == "decode":
            own = found.arguments + found.outputs + elsewhere[name]
        if found is not None and exact:
            temporaries = float(found.temporaries + elsewhere["update"])
            if program == "decode":
                cache = memory.kv_cache_bytes(work, layout)
                prefill = memory.prefill_bytes(work, layout) - cache
                temporaries = max(float(found.temporaries), prefill)
            factors[name] = temporaries / phase.temporaries
        phases[name] = Phase(state, own, temporaries)
    phases["score"] = dataclasses.replace(phases["score"], resident=state)
    return phases, Correction(**factors)


def make_plan(
    work: Workload,
    layout: MeshShape,
    *,
    device: Device,
    memory_gib: float,
    compiled: dict[str, Measured],
    source: str,
    exact: bool,
) -> Plan:
    """Puts arithmetic and compiled programs together.

    Args:
      work: sizes.
      layout: mesh.
      device: kind of device.
      memory_gib: memory of a device.
      compiled: programs by name; may be empty.
      source: how they were compiled, in words.
      exact: the compiler was that of GPUs.
    """
    phases, correction = _measured_phases(work, layout, compiled, exact=exact)
    limit = memory_gib * GIB * MEMORY_FRACTION
    plan = Plan(
        work=work,
        layout=layout,
        device=device,
        memory_gib=memory_gib,
        source=source,
        phases=phases,
        correction=correction,
        max_micro_batch=search.largest_micro_batch(work, layout, limit, correction),
        max_slots=search.largest_slots(work, layout, limit, correction),
        suggestion=None,
        larger=None,
        smaller=None,
        compiled=compiled,
    )
    if plan.fits:
        return plan
    suggestion = search.suggest(work, layout.devices, limit, correction)
    if suggestion is not None:
        return dataclasses.replace(plan, suggestion=suggestion)
    larger = (search.suggest(work, layout.devices * factor, limit, correction) for factor in LARGER)
    return dataclasses.replace(
        plan,
        larger=next((choice for choice in larger if choice is not None), None),
        smaller=search.smaller_model(work, layout.devices, limit, correction),
    )


def parts(plan: Plan) -> dict[str, float]:
    """Bytes on one device by what they are for; not all of them are there at the same time."""
    work, layout = plan.work, plan.layout
    gradients = memory.gradient_bytes(work, layout)
    found = {
        "parameters": memory.parameter_bytes(work, layout),
        "optimizer": 2 * memory.parameter_bytes(work, layout),
        "value_head": memory.head_bytes(work),
        "gradients": gradients,
        "activations": max(plan.phases["update"].temporaries - gradients, 0.0),
        "score_temporaries": plan.phases["score"].temporaries,
        "decode_copy": costs.decode_copy_bytes(work, layout),
        "kv_cache": memory.kv_cache_bytes(work, layout),
        "decode_temporaries": plan.phases["rollout"].temporaries,
    }
    if work.reference:
        found["reference"] = memory.parameter_bytes(work, layout)
    return found


def traffic(plan: Plan) -> dict[str, float]:
    """Bytes that one device moves in an iteration."""
    work, layout = plan.work, plan.layout
    return {
        "decode": costs.decode_bytes(work, layout),
        "optimizer": work.minibatches * costs.optimizer_bytes(work, layout),
        "links": work.minibatches * costs.gathered_bytes(work, layout),
    }


def predictions(plan: Plan) -> dict[str, dict[str, float]]:
    """Seconds of an iteration by device and phase."""
    names = list(PREDICTED_FOR)
    own = next(name for name, device in DEVICES.items() if device == plan.device)
    if own not in names:
        names.insert(0, own)
    return {name: costs.step_seconds(plan.work, plan.layout, DEVICES[name]) for name in names}


def _choice(choice: Choice, work: Workload) -> dict[str, Any]:
    return {
        "devices": choice.layout.devices,
        "overrides": choice.overrides(work),
        "peak_gib": round(choice.peak / GIB, 3),
    }


def as_object(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    gib = lambda values: {name: round(value / GIB, 3) for name, value in values.items()}
    flops = costs.step_flops(plan.work)
    seconds = predictions(plan)
    work = plan.work
    smaller = None
    if plan.smaller is not None:
        smaller = {"model.preset": plan.smaller[0], **_choice(plan.smaller[1], work)}
    return {
        "fits": plan.fits,
        "peak_gib": round(plan.peak / GIB, 3),
        "limit_gib": round(plan.limit / GIB, 3),
        "phases_gib": gib({name: phase.peak for name, phase in plan.phases.items()}),
        "parts_gib": gib(parts(plan)),
        "flops": sum(flops.values()),
        "flops_by_phase": flops,
        "bytes_per_device": traffic(plan),
        "predicted_step_s": {
            name: round(sum(phases.values()), 1) for name, phases in seconds.items()
        },
        "predicted_s_by_phase": {
            name: {phase: round(value, 1) for phase, value in phases.items()}
            for name, phases in seconds.items()
        },
        "assumed_shares": {
            "matmul": costs.MATMUL_SHARE,
            "memory_bandwidth": costs.BANDWIDTH_SHARE,
            "links": costs.LINK_SHARE,
        },
        "max_micro_batch": plan.max_micro_batch,
        "max_slots": plan.max_slots,
        "model": plan.work.shape_source,
        "devices": plan.layout.devices,
        "device": plan.device.name,
        "device_memory_gib": plan.memory_gib,
        "mesh": plan.layout._asdict(),
        "memory_from": plan.source,
        "compile_s": {name: round(one.seconds, 1) for name, one in plan.compiled.items()},
        "suggestion": plan.suggestion and _choice(plan.suggestion, work),
        "more_devices": plan.larger and _choice(plan.larger, work),
        "smaller_model": smaller,
    }


_PHASE_NAMES = {
    "rollout": "rollout (state, decode copy, cache, temporaries)",
    "score": "scoring (state, temporaries)",
    "update": "update (state, gradients, activations)",
}


def _size(value: float) -> str:
    return f"{value / GIB:7.2f}"


def _verdict(plan: Plan) -> list[str]:
    share = f"{MEMORY_FRACTION:.0%} of {plan.memory_gib:g}"
    limit = f"{plan.limit / GIB:.1f} GiB ({share}; the launch scripts give JAX as much)"
    if plan.fits:
        spare = (plan.limit - plan.peak) / GIB
        return [f"FITS: peak {plan.peak / GIB:.1f} of {limit}, {spare:.1f} GiB to spare"]
    over = (plan.peak - plan.limit) / GIB
    lines = [f"DOES NOT FIT: peak {plan.peak / GIB:.1f} of {limit}, {over:.1f} GiB too much"]
    if plan.suggestion is not None:
        lines += _shown("What would fit here", plan.suggestion, plan.work)
        return lines
    lines.append(f"No mesh, micro-batch and number of slots fits {plan.layout.devices} of these.")
    if plan.larger is not None:
        devices = plan.larger.layout.devices
        lines += _shown(f"What would fit on {devices} of them", plan.larger, plan.work)
    if plan.smaller is not None:
        name, choice = plan.smaller
        lines += _shown(f"What would fit here: model.preset={name}", choice, plan.work)
    return lines


def _shown(title: str, choice: Choice, work: Workload) -> list[str]:
    return [f"{title} ({choice.peak / GIB:.1f} GiB):", f"  {choice.overrides(work)}"]


def as_text(plan: Plan) -> str:
    """The plan for a terminal."""
    work, layout = plan.work, plan.layout
    mesh = f"data {layout.data}, fsdp {layout.fsdp}, tensor {layout.tensor}"
    phases = plan.phases
    lines = [
        f"Model    {costs.policy_parameters(work) / 1e9:.2f}e9 parameters ({work.shape_source})",
        f"Devices  {layout.devices} x {plan.device.name}, {plan.memory_gib:g} GiB; {mesh}, decode "
        f"tensor {layout.decode_tensor}",
        f"Rows     {work.rows} an iteration, {work.micro_rows} per micro-batch, {work.slots} "
        f"slots; up to {work.prompt} + {work.thinking} tokens and {work.cuts} x {work.branch} in "
        "branches",
        f"Memory   {plan.source}",
        "",
        "Per device, GiB",
    ]
    for name, value in parts(plan).items():
        lines.append(f"  {name.replace('_', ' '):52}{_size(value)}")
    lines += ["", "Peak of each phase, GiB"]
    for name, meaning in _PHASE_NAMES.items():
        if name != "score" or work.scored:
            lines.append(f"  {meaning:52}{_size(phases[name].peak)}")
    lines += ["", *_verdict(plan)]
    lines.append(
        f"Largest on this mesh: train.micro_batch_rows={plan.max_micro_batch}, "
        f"rollout.slots={plan.max_slots}" + (" (0: none fits)" if not plan.max_slots else "")
    )
    flops, moved = costs.step_flops(work), traffic(plan)
    lines += [
        "",
        f"Work of an iteration: {sum(flops.values()):.3g} FLOP on all devices ("
        + ", ".join(f"{name} {value:.2g}" for name, value in flops.items())
        + ")",
        "Bytes moved by each device: "
        + ", ".join(f"{name} {value:.2g}" for name, value in moved.items()),
        "",
        "Predicted seconds of an iteration, grading left out",
        f"  {'':10}{'total':>8}{'rollout':>9}{'score':>8}{'update':>8}",
    ]
    for name, seconds in predictions(plan).items():
        rollout = seconds["prefill"] + seconds["decode"]
        lines.append(
            f"  {name:10}{sum(seconds.values()):8.0f}{rollout:9.0f}{seconds['score']:8.0f}"
            f"{seconds['update']:8.0f}"
        )
    lines.append(
        f"  if products reach {costs.MATMUL_SHARE:.0%} of the data sheet's rate, memory "
        f"{costs.BANDWIDTH_SHARE:.0%}, links {costs.LINK_SHARE:.0%}, and every trace uses its "
        f"budget up ({work.mean_thinking:.0f} tokens on average)"
    )
    return "\n".join(lines)
