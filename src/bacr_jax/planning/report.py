"""A plan: does it fit, what does it cost, what would fit; as an object and as text."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bacr_jax.parallel import MeshShape
from bacr_jax.planning import costs, memory, search
from bacr_jax.planning.compiling import Compilation
from bacr_jax.planning.devices import DEVICES, GIB, MEMORY_FRACTION, Device
from bacr_jax.planning.memory import MemoryPhase
from bacr_jax.planning.search import Choice, Correction
from bacr_jax.planning.workload import Workload

# Boxes tried when a run doesn't fit into the given one, as multiples of its devices.
LARGER = (2, 4, 8, 16)

PREDICTED_FOR = ("a100-80", "h100", "h200")


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it starts.

    Attributes:
      work: sizes.
      layout: mesh.
      device: kind of device.
      memory_gib: memory of a device.
      compilation: what compilers said.
      phases: bytes per device, by phase.
      max_micro_batch: the most rows per gradient accumulation step that fit.
      max_slots: the most rows decoded together that fit.
      suggestion: what would fit on these devices, if the config does not; else None.
      smaller: a smaller model that fits on these devices, and how, if this one does not.
      shorter: a smaller largest budget that fits on these devices, and how, likewise.
      larger: what would fit on more such devices, if nothing fits on these.
      card: the known device with the least memory on as many of which it fits, likewise.
    """

    work: Workload
    layout: MeshShape
    device: Device
    memory_gib: float
    compilation: Compilation
    phases: dict[str, MemoryPhase]
    max_micro_batch: int
    max_slots: int
    suggestion: Choice | None = None
    smaller: tuple[str, Choice] | None = None
    shorter: tuple[int, Choice] | None = None
    larger: Choice | None = None
    card: tuple[str, Choice] | None = None

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


def _corrected_phases(
    work: Workload, layout: MeshShape, compilation: Compilation
) -> tuple[dict[str, MemoryPhase], Correction]:
    """Phases by arithmetic, with what a compiler knows better put in its place."""
    update, rollout = memory.update_phase(work, layout), memory.rollout_phase(work, layout)
    state, own = update.resident, rollout.own
    of_update, of_rollout = update.temporaries, rollout.temporaries
    train, decode = compilation.programs.get("train"), compilation.programs.get("decode")
    # Gradients alone don't read the moments: by tokens only arithmetic knows the state.
    if train is not None and not work.by_tokens:
        # The arguments of an update are the train state and a batch; a reference is kept beside.
        reference = memory.parameter_bytes(work, layout) if work.reference else 0.0
        state = train.arguments + train.outputs + reference
    if decode is not None:
        own = decode.arguments + decode.outputs + memory.answer_cache_bytes(work, layout)
        if work.beside:
            # Counted with the state.
            own -= memory.frozen_bytes(work, layout)
    if compilation.exact and train is not None and decode is not None:
        # The sum of earlier gradients is given to the program of a micro-batch.
        earlier = memory.gradient_bytes(work, layout) / 2 if work.by_tokens else 0.0
        of_update = train.temporaries + earlier
        prefill = memory.prefill_bytes(work, layout) - memory.kv_cache_bytes(work, layout)
        of_rollout = max(float(decode.temporaries), prefill)
    phases = {
        "rollout": MemoryPhase(state, own, of_rollout),
        "score": dataclasses.replace(memory.score_phase(work, layout), resident=state),
        "update": MemoryPhase(state, update.own, of_update),
    }
    return phases, Correction(of_update / update.temporaries, of_rollout / rollout.temporaries)


def make_plan(
    work: Workload,
    layout: MeshShape,
    *,
    device: Device,
    memory_gib: float,
    compilation: Compilation,
) -> Plan:
    """Puts arithmetic and compiled programs together.

    Args:
      work: sizes.
      layout: mesh.
      device: kind of device.
      memory_gib: memory of a device.
      compilation: what compilers said.
    """
    phases, correction = _corrected_phases(work, layout, compilation)
    limit = memory_gib * GIB * MEMORY_FRACTION
    plan = Plan(
        work=work,
        layout=layout,
        device=device,
        memory_gib=memory_gib,
        compilation=compilation,
        phases=phases,
        max_micro_batch=search.largest_micro_batch(work, layout, limit, correction),
        max_slots=search.largest_slots(work, layout, limit, correction),
    )
    if plan.fits:
        return plan
    suggest_on = lambda count: search.suggest(work, count, limit, correction)
    suggestion = suggest_on(layout.num_devices)
    if suggestion is not None:
        return dataclasses.replace(plan, suggestion=suggestion)
    larger = (suggest_on(layout.num_devices * factor) for factor in LARGER)
    return dataclasses.replace(
        plan,
        smaller=search.smaller_model(work, layout.num_devices, limit, correction),
        shorter=search.shorter_budget(work, layout.num_devices, limit, correction),
        larger=next((choice for choice in larger if choice is not None), None),
        card=_larger_card(work, layout.num_devices, memory_gib, correction),
    )


def _larger_card(
    work: Workload, num_devices: int, memory_gib: float, correction: Correction
) -> tuple[str, Choice] | None:
    """The device with the least memory above this on which a run fits, and how; None: none."""
    for name, device in sorted(DEVICES.items(), key=lambda item: item[1].memory_gib):
        if device.memory_gib > memory_gib:
            limit = device.memory_gib * GIB * MEMORY_FRACTION
            choice = search.suggest(work, num_devices, limit, correction)
            if choice is not None:
                return name, choice
    return None


def parts(plan: Plan) -> dict[str, float]:
    """Bytes on one device by what they are for; not all of them are there at the same time."""
    work, layout = plan.work, plan.layout
    gradients = memory.gradient_bytes(work, layout)
    bytes_of = {
        "parameters": memory.parameter_bytes(work, layout),
        "optimizer": memory.moment_bytes(work, layout),
        "value_head": memory.head_bytes(work),
        "gradients": gradients,
        "activations": max(plan.phases["update"].temporaries - gradients, 0.0),
        "score_temporaries": plan.phases["score"].temporaries,
        "decode_copy": costs.decode_copy_bytes(work, layout),
        "kv_cache": memory.kv_cache_bytes(work, layout),
        "decode_temporaries": plan.phases["rollout"].temporaries,
    }
    if work.adapters:
        bytes_of["frozen_base"] = memory.frozen_bytes(work, layout)
    if work.reference:
        bytes_of["reference"] = memory.parameter_bytes(work, layout)
    return bytes_of


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
        "devices": choice.layout.num_devices,
        "overrides": choice.overrides(work),
        "peak_gib": round(choice.peak / GIB, 3),
    }


def as_object(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    gib = lambda values: {name: round(value / GIB, 3) for name, value in values.items()}
    flops = costs.step_flops(plan.work)
    seconds = predictions(plan)
    work = plan.work
    named = lambda key, found: found and {key: found[0], **_choice(found[1], work)}
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
        "devices": plan.layout.num_devices,
        "device": plan.device.name,
        "device_memory_gib": plan.memory_gib,
        "mesh": plan.layout._asdict(),
        "memory_from": plan.compilation.source,
        "compile_s": {
            name: round(one.seconds, 1) for name, one in plan.compilation.programs.items()
        },
        "suggestion": plan.suggestion and _choice(plan.suggestion, work),
        "smaller_model": named("model.preset", plan.smaller),
        "shorter_budget": named("budget.max", plan.shorter),
        "more_devices": plan.larger and _choice(plan.larger, work),
        "larger_card": named("device", plan.card),
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
        return lines + _shown("What would fit here", plan.suggestion, plan.work)
    lines.append(
        f"No mesh, micro-batch and number of slots fits {plan.layout.num_devices} of these, not "
        "even one row a device."
    )
    return lines + _changes(plan)


def _changes(plan: Plan) -> list[str]:
    """What would fit if something else were changed: the model, the budget, the devices."""
    lines, work = [], plan.work
    if plan.smaller is not None:
        name, choice = plan.smaller
        lines += _shown(f"What would fit here: model.preset={name}", choice, work)
    if plan.shorter is not None:
        budget, choice = plan.shorter
        keys = f"budget.max={budget} eval.budgets=[{budget}]"
        lines += _shown(f"What would fit here: {keys}", choice, work)
    if plan.larger is not None:
        count = plan.larger.layout.num_devices
        lines += _shown(f"What would fit on {count} of them", plan.larger, work)
    if plan.card is not None:
        name, choice = plan.card
        lines += _shown(f"What would fit on as many {name}", choice, work)
    return lines or ["No smaller model, shorter budget, more or larger known GPUs would do."]


def _shown(title: str, choice: Choice, work: Workload) -> list[str]:
    return [f"{title} ({choice.peak / GIB:.1f} GiB):", f"  {choice.overrides(work)}"]


def _largest(plan: Plan) -> str:
    """The largest portions that fit; nobody can write a portion of 0 rows."""
    most = {"train.micro_batch_rows": plan.max_micro_batch, "rollout.slots": plan.max_slots}
    fits = ", ".join(f"{key}={rows}" for key, rows in most.items() if rows)
    none = " and ".join(key for key, rows in most.items() if not rows)
    parts = [f"Largest on this mesh: {fits}"] if fits else []
    parts += [f"On this mesh no {none} fits, not even one row a device"] if none else []
    return "; ".join(parts)


def _adapters(work: Workload) -> str:
    """What is trained beside the frozen base, and what the sampler reads."""
    million = costs.trained_parameters(work) / 1e6
    read = "the base where it lies" if work.beside else "a copy with the adapters merged in"
    return f"Trained: {million:.1f}e6 numbers beside the frozen base; the sampler reads {read}"


def as_text(plan: Plan) -> str:
    """The plan for a terminal."""
    work, layout = plan.work, plan.layout
    mesh = f"data {layout.data}, fsdp {layout.fsdp}, tensor {layout.tensor}"
    phases = plan.phases
    lines = [
        f"Model    {costs.policy_parameters(work) / 1e9:.2f}e9 parameters ({work.shape_source})",
        f"Devices  {layout.num_devices} x {plan.device.name}, {plan.memory_gib:g} GiB; {mesh}, "
        f"decode tensor {layout.decode_tensor}",
        f"Rows     {work.rows} an iteration, {work.micro_rows} per micro-batch, {work.slots} "
        f"slots; up to {work.prompt} + {work.thinking} tokens and {work.cuts} x {work.branch} in "
        "branches",
        f"Memory   {plan.compilation.source}",
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
    lines.append(_largest(plan))
    if work.adapters:
        lines.append(_adapters(work))
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
