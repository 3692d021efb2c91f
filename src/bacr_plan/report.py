"""A plan: does it fit, what does it cost, what would fit; as an object (as text: `text`)."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from bacr_jax.model.compute import Remat
from bacr_jax.parallel import MeshShape
from bacr_plan import costs, memory, schedule, search, seconds
from bacr_plan.compiling import Compilation
from bacr_plan.devices import DEVICES, GIB, MEMORY_FRACTION, Device
from bacr_plan.memory import MemoryPhase
from bacr_plan.search import Choice, Correction
from bacr_plan.seconds import ASSUMED, Iteration
from bacr_plan.workload import Workload

# Boxes tried when a run doesn't fit into the given one, as multiples of its devices.
LARGER = (2, 4, 8, 16)

PREDICTED_FOR = ("a100-80", "h100", "h200")


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it starts.

    Attributes:
      phases: bytes per device, by phase.
      max_micro_batch: the most rows per gradient accumulation step that fit.
      max_slots: the most rows decoded together in training that fit.
      max_eval_slots: the same in evaluations; 0 without any.
      suggestion: what would fit on these devices, if the config does not; else None.
      smaller: a smaller model that fits on these devices, and how, if this one does not.
      shorter: a smaller largest budget that fits on these devices, and how, likewise.
      larger: what would fit on more such devices, if nothing fits on these.
      card: the known device with the least memory on as many of which it fits, likewise.
      faster: a layout with which decoding takes less, and its seconds, if there is one that fits.
      remat: the model.remat that recomputes less and fits, if there is one.
    """

    work: Workload
    layout: MeshShape
    device: Device
    memory_gib: float
    compilation: Compilation
    phases: dict[str, MemoryPhase]
    max_micro_batch: int
    max_slots: int
    max_eval_slots: int
    suggestion: Choice | None = None
    smaller: tuple[str, Choice] | None = None
    shorter: tuple[int, Choice] | None = None
    larger: Choice | None = None
    card: tuple[str, Choice] | None = None
    faster: tuple[MeshShape, float] | None = None
    remat: Remat | None = None

    @functools.cached_property
    def iteration(self) -> Iteration:
        """What an iteration runs."""
        return seconds.iteration(self.work, self.layout)

    @functools.cached_property
    def evaluation(self) -> float:
        """Seconds of an evaluation."""
        return seconds.evaluation_seconds(self.work, self.layout, self.device)

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
    evaluation = memory.rollout_phase(work.evaluation, layout)
    factor = of_rollout / rollout.temporaries
    phases = {
        "rollout": MemoryPhase(state, own, of_rollout),
        "score": dataclasses.replace(memory.score_phase(work, layout), resident=state),
        "update": MemoryPhase(state, update.own, of_update),
    }
    if work.evaluated:
        of_evaluation = factor * evaluation.temporaries
        phases["evaluation"] = MemoryPhase(state, evaluation.own, of_evaluation)
    return phases, Correction(of_update / update.temporaries, factor)


def make_plan(
    work: Workload,
    layout: MeshShape,
    *,
    device: Device,
    memory_gib: float,
    compilation: Compilation,
) -> Plan:
    """Puts arithmetic and compiled programs together."""
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
        max_eval_slots=search.largest_eval_slots(work, layout, limit, correction),
    )
    if plan.fits:
        remat = memory.least_remat(work, layout, limit, correction.update)
        return dataclasses.replace(
            plan,
            faster=_faster(plan, correction),
            remat=None if remat in (work.remat, "full") else remat,
        )
    smaller = search.fewer_eval_slots(work, layout, limit, correction)
    if smaller is not None:
        return dataclasses.replace(plan, suggestion=smaller)
    suggest_on = lambda count: search.suggest(work, count, limit, correction)
    suggestion = suggest_on(layout.num_devices)
    if suggestion is not None:
        own = suggestion.of(work)
        best, _ = search.fastest_decoding(own, suggestion.layout, limit, correction, device)
        return dataclasses.replace(
            plan, suggestion=search.with_layout(suggestion, best, own, correction)
        )
    larger = (suggest_on(layout.num_devices * factor) for factor in LARGER)
    return dataclasses.replace(
        plan,
        smaller=search.smaller_model(work, layout.num_devices, limit, correction),
        shorter=search.shorter_budget(work, layout.num_devices, limit, correction),
        larger=next((choice for choice in larger if choice is not None), None),
        card=_larger_card(work, layout.num_devices, memory_gib, correction),
    )


def updates_in(plan: Plan, remat: Remat) -> float:
    """Seconds of an iteration's updates with another model.remat."""
    work = dataclasses.replace(plan.work, remat=remat)
    return seconds.step_seconds(work, plan.layout, plan.device, plan.iteration)["update"]


# What a change of layout must save before a plan speaks of it: it is a prediction.
_WORTH = 0.95


def _faster(plan: Plan, correction: Correction) -> tuple[MeshShape, float] | None:
    """The layout with which decoding takes least, if that is worth a line."""
    work, layout, device = plan.work, plan.layout, plan.device
    best, taken = search.fastest_decoding(work, layout, plan.limit, correction, device)
    now = seconds.rollout_seconds(work, layout, device, plan.iteration.rollout)
    return (best, taken) if taken < _WORTH * sum(now.values()) else None


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
    parts = sum(map(len, plan.iteration.updates))
    return {
        "decode": costs.decode_bytes(work, layout, plan.iteration.rollout),
        "optimizer": work.minibatches * costs.optimizer_bytes(work, layout),
        "links": parts * costs.gathered_bytes(work, layout)
        + work.minibatches * costs.copied_bytes(work, layout),
    }


def operations(plan: Plan) -> dict[str, float]:
    """Operations of an iteration by phase."""
    return costs.step_flops(plan.work, plan.iteration.rollout, plan.iteration.updates)


def real_share(plan: Plan) -> float:
    """Share of the learner's positions that hold a token."""
    return schedule.real_share(plan.work, plan.iteration.updates)


def predictions(plan: Plan) -> dict[str, dict[str, float]]:
    """Seconds of an iteration by device and phase."""
    names = list(PREDICTED_FOR)
    own = next(name for name, device in DEVICES.items() if device == plan.device)
    if own not in names:
        names.insert(0, own)
    of = lambda name: seconds.step_seconds(plan.work, plan.layout, DEVICES[name], plan.iteration)
    return {name: of(name) for name in names}


def _choice(choice: Choice, work: Workload) -> dict[str, Any]:
    return {
        "devices": choice.layout.num_devices,
        "overrides": choice.overrides(work),
        "peak_gib": round(choice.peak / GIB, 3),
    }


def as_object(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    gib = lambda values: {name: round(value / GIB, 3) for name, value in values.items()}
    flops, predicted, work = operations(plan), predictions(plan), plan.work
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
            name: round(sum(phases.values()), 1) for name, phases in predicted.items()
        },
        "predicted_s_by_phase": {
            name: {phase: round(value, 1) for phase, value in phases.items()}
            for name, phases in predicted.items()
        },
        "predicted_evaluation_s": round(plan.evaluation, 1),
        "assumed_shares": {
            "matmul": ASSUMED.matmul,
            "memory_bandwidth": ASSUMED.bandwidth,
            "links": ASSUMED.links,
        },
        "prompts": work.lengths.source,
        "positions_real": round(real_share(plan), 3),
        "faster": plan.faster
        and {
            "mesh.decode_tensor": plan.faster[0].decode_tensor,
            "rollout_s": round(plan.faster[1], 1),
        },
        "less_remat": plan.remat
        and {"model.remat": plan.remat, "update_s": round(updates_in(plan, plan.remat), 1)},
        "max_micro_batch": plan.max_micro_batch,
        "max_slots": plan.max_slots,
        "max_eval_slots": plan.max_eval_slots,
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
