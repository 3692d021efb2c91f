"""A plan: does it fit, what does it cost, what would fit; as an object and as text."""

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
from bacr_plan.search import Choice, Room
from bacr_plan.seconds import ASSUMED, Iteration, Split
from bacr_plan.workload import Workload

# Boxes tried when a run doesn't fit into the given one, as multiples of its devices.
LARGER = (2, 4, 8, 16)

PREDICTED_FOR = ("a100-80", "h100", "h200")


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it starts.

    Attributes:
      suggestion: what would fit on these devices, if the config does not; else None.
      larger: what would fit on more such devices, if nothing fits on these.
      card: the known device with the least memory on as many of which it fits, likewise.
      faster: a layout with which decoding takes less, and its seconds, if there is one that fits.
      remat: the model.remat that recomputes less and fits, if there is one, and the seconds of an
        iteration's updates with it.
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
    larger: Choice | None = None
    card: tuple[str, Choice] | None = None
    faster: tuple[MeshShape, float] | None = None
    remat: tuple[Remat, float] | None = None

    @functools.cached_property
    def iteration(self) -> Iteration:
        """What an iteration runs."""
        return seconds.iteration(self.work, self.layout)

    @functools.cached_property
    def operations(self) -> dict[str, float]:
        """Operations of an iteration by phase, on all devices."""
        return costs.step_flops(self.work, self.iteration.rollout, self.iteration.updates)

    @functools.cached_property
    def splits(self) -> list[Split]:
        """The same devices, some of which sample by servers of vLLM."""
        return seconds.splits(self.work, self.device, self.iteration, self.layout.num_devices)

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
    work: Workload, layout: MeshShape, limit: float, compilation: Compilation
) -> tuple[dict[str, MemoryPhase], Room]:
    """Phases by arithmetic, with what a compiler knows better put in its place."""
    update, rollout = memory.update_phase(work, layout), memory.rollout_phase(work, layout)
    state, own = update.resident, rollout.own
    of_update, of_rollout = update.temporaries, rollout.temporaries
    train, decode = compilation.programs.get("train"), compilation.programs.get("decode")
    # Gradients alone don't read the moments: by tokens only arithmetic knows the state.
    if train is not None and not work.by_tokens:
        # The arguments of an update are the train state and a batch; a reference is kept beside.
        reference = memory.parameter_bytes(work, layout) if work.config.loss.kl_coef > 0 else 0.0
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
    return phases, Room(limit, of_update / update.temporaries, factor)


def make_plan(
    work: Workload,
    layout: MeshShape,
    *,
    device: Device,
    memory_gib: float,
    compilation: Compilation,
) -> Plan:
    """Puts arithmetic and compiled programs together."""
    limit = memory_gib * GIB * MEMORY_FRACTION
    phases, room = _corrected_phases(work, layout, limit, compilation)
    plan = Plan(
        work=work,
        layout=layout,
        device=device,
        memory_gib=memory_gib,
        compilation=compilation,
        phases=phases,
        max_micro_batch=search.largest_micro_batch(work, layout, room),
        max_slots=search.largest_slots(work, layout, room),
        max_eval_slots=search.largest_eval_slots(work, layout, room),
    )
    if plan.fits:
        remat = memory.least_remat(work, layout, limit, room.update)
        if remat in (work.remat, "full"):
            return dataclasses.replace(plan, faster=_faster(plan, room))
        less = dataclasses.replace(work, remat=remat)
        updates = seconds.step_seconds(less, layout, device, plan.iteration)["update"]
        return dataclasses.replace(plan, faster=_faster(plan, room), remat=(remat, updates))
    smaller = search.fewer_eval_slots(work, layout, room)
    if smaller is not None:
        return dataclasses.replace(plan, suggestion=smaller)
    suggestion = search.suggest(work, layout.num_devices, room)
    if suggestion is not None:
        own = suggestion.of(work)
        best, _ = search.fastest_decoding(own, suggestion.layout, room, device)
        peak = search.peak_of(own, best, room)
        suggestion = dataclasses.replace(suggestion, layout=best, peak=peak)
        return dataclasses.replace(plan, suggestion=suggestion)
    larger = (search.suggest(work, layout.num_devices * factor, room) for factor in LARGER)
    return dataclasses.replace(
        plan,
        larger=next((choice for choice in larger if choice is not None), None),
        card=_larger_card(work, layout.num_devices, memory_gib, room),
    )


# What a change of layout must save before a plan speaks of it: it is a prediction.
_WORTH = 0.95


def _faster(plan: Plan, room: Room) -> tuple[MeshShape, float] | None:
    """The layout with which decoding takes least, if that is worth a line."""
    work, layout, device = plan.work, plan.layout, plan.device
    best, taken = search.fastest_decoding(work, layout, room, device)
    now = seconds.rollout_seconds(work, layout, device, plan.iteration.rollout)
    return (best, taken) if taken < _WORTH * sum(now.values()) else None


def _larger_card(
    work: Workload, num_devices: int, memory_gib: float, room: Room
) -> tuple[str, Choice] | None:
    """The device with the least memory above this on which a run fits, and how; None: none."""
    for name, device in sorted(DEVICES.items(), key=lambda item: item[1].memory_gib):
        if device.memory_gib > memory_gib:
            limit = device.memory_gib * GIB * MEMORY_FRACTION
            choice = search.suggest(work, num_devices, dataclasses.replace(room, limit=limit))
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
    if work.config.loss.kl_coef > 0:
        bytes_of["reference"] = memory.parameter_bytes(work, layout)
    return bytes_of


def _name(plan: Plan) -> str:
    """What --device calls its card."""
    return next(name for name, device in DEVICES.items() if device == plan.device)


def predictions(plan: Plan) -> dict[str, dict[str, float]]:
    """Seconds of an iteration by device and phase."""
    names = list(PREDICTED_FOR)
    if _name(plan) not in names:
        names.insert(0, _name(plan))
    return {
        name: seconds.step_seconds(plan.work, plan.layout, DEVICES[name], plan.iteration)
        for name in names
    }


def _choice(choice: Choice, work: Workload) -> dict[str, Any]:
    return {
        "devices": choice.layout.num_devices,
        "overrides": choice.overrides(work),
        "peak_gib": round(choice.peak / GIB, 3),
    }


def as_object(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    gib = lambda values: {name: round(value / GIB, 3) for name, value in values.items()}
    tenths = lambda values: {name: round(value, 1) for name, value in values.items()}
    flops, predicted, work = plan.operations, predictions(plan), plan.work
    return {
        "fits": plan.fits,
        "peak_gib": round(plan.peak / GIB, 3),
        "limit_gib": round(plan.limit / GIB, 3),
        "phases_gib": gib({name: phase.peak for name, phase in plan.phases.items()}),
        "parts_gib": gib(parts(plan)),
        "flops": sum(flops.values()),
        "flops_by_phase": flops,
        "predicted_step_s": tenths({name: sum(by.values()) for name, by in predicted.items()}),
        "predicted_s_by_phase": {name: tenths(phases) for name, phases in predicted.items()},
        "predicted_evaluation_s": round(plan.evaluation, 1),
        "predicted_splits_s": [
            {"learner": one.learner, "samplers": one.samplers}
            | tenths({"in_turn": one.in_turn, "ahead": one.ahead})
            for one in plan.splits
        ],
        "assumed_shares": {
            "matmul": ASSUMED.matmul,
            "memory_bandwidth": ASSUMED.bandwidth,
            "links": ASSUMED.links,
        },
        "prompts": work.lengths.source,
        "positions_real": round(schedule.real_share(work, plan.iteration.updates), 3),
        "faster": plan.faster
        and {
            "mesh.decode_tensor": plan.faster[0].decode_tensor,
            "rollout_s": round(plan.faster[1], 1),
        },
        "less_remat": plan.remat
        and {"model.remat": plan.remat[0], "update_s": round(plan.remat[1], 1)},
        "max_micro_batch": plan.max_micro_batch,
        "max_slots": plan.max_slots,
        "max_eval_slots": plan.max_eval_slots,
        "model": plan.work.shape_source,
        "devices": plan.layout.num_devices,
        "device": plan.device.name,
        "device_memory_gib": plan.memory_gib,
        "mesh": plan.layout._asdict(),
        "memory_from": plan.compilation.source,
        "compile_s": tenths({n: one.seconds for n, one in plan.compilation.programs.items()}),
        "suggestion": plan.suggestion and _choice(plan.suggestion, work),
        "more_devices": plan.larger and _choice(plan.larger, work),
        "larger_card": plan.card and {"device": plan.card[0], **_choice(plan.card[1], work)},
    }


# For a terminal -----------------------------------------------------------------------------------

_PHASE_NAMES = {
    "rollout": "rollout (state, decode copy, cache, temporaries)",
    "score": "scoring (state, temporaries)",
    "update": "update (state, gradients, activations)",
    "evaluation": "evaluation (state, decode copy, cache, temporaries)",
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
    count = plan.layout.num_devices
    lines.append(
        f"No mesh, micro-batch and number of slots fits {count} of these, not even one row a "
        "device."
    )
    if plan.larger is not None:
        title = f"What would fit on {plan.larger.layout.num_devices} of them"
        lines += _shown(title, plan.larger, plan.work)
    if plan.card is not None:
        name, choice = plan.card
        lines += _shown(f"What would fit on as many {name}", choice, plan.work)
    if plan.larger is None and plan.card is None:
        lines.append("No more, and no larger known GPUs would do.")
    return lines


def _shown(title: str, choice: Choice, work: Workload) -> list[str]:
    return [f"{title} ({choice.peak / GIB:.1f} GiB):", f"  {choice.overrides(work)}"]


def _largest(plan: Plan) -> str:
    """The largest portions that fit; nobody can write a portion of 0 rows."""
    micro = {"train.micro_batch_rows": plan.max_micro_batch}
    if plan.work.by_tokens:
        micro = {"train.micro_batch_tokens": plan.max_micro_batch * plan.work.row_tokens}
    most = {**micro, "rollout.slots": plan.max_slots}
    if plan.work.evaluated:
        most["eval.slots"] = plan.max_eval_slots
    fits = ", ".join(f"{key}={rows}" for key, rows in most.items() if rows)
    none = " and ".join(key for key, rows in most.items() if not rows)
    parts = [f"Largest on this mesh: {fits}"] if fits else []
    parts += [f"On this mesh no {none} fits, not even one row a device"] if none else []
    return "; ".join(parts)


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
        if name in phases and (name != "score" or work.scored):
            lines.append(f"  {meaning:52}{_size(phases[name].peak)}")
    lines += ["", *_verdict(plan)]
    lines.append(_largest(plan))
    if work.adapters:
        million = costs.trained_parameters(work) / 1e6
        read = "the base where it lies" if work.beside else "a copy with the adapters merged in"
        lines.append(
            f"Trained: {million:.1f}e6 numbers beside the frozen base; the sampler reads {read}"
        )
    flops, share = plan.operations, schedule.real_share(work, plan.iteration.updates)
    lines += [
        "",
        f"Work of an iteration: {sum(flops.values()):.3g} FLOP on all devices ("
        + ", ".join(f"{name} {value:.2g}" for name, value in flops.items())
        + ")",
        f"Of the positions that the learner computes {share:.0%} hold a token; prompts: "
        + work.lengths.source,
        "",
    ]
    together = sum(predictions(plan)[_name(plan)].values())
    return "\n".join([*lines, *_seconds(plan), *seconds.split_lines(plan.splits, together)])


def _seconds(plan: Plan) -> list[str]:
    """Predictions, what they assume, and what would be faster."""
    work = plan.work
    lines = [
        "Predicted seconds of an iteration, grading left out",
        f"  {'':10}{'total':>8}{'rollout':>9}{'score':>8}{'update':>8}",
    ]
    for name, phases in predictions(plan).items():
        rollout = phases["prefill"] + phases["decode"]
        lines.append(
            f"  {name:10}{sum(phases.values()):8.0f}{rollout:9.0f}{phases['score']:8.0f}"
            f"{phases['update']:8.0f}"
        )
    lines.append(
        f"  if products reach {ASSUMED.matmul:.0%} of the data sheet's rate, memory "
        f"{ASSUMED.bandwidth:.0%}, links {ASSUMED.links:.0%}, and every trace uses its "
        f"budget up ({work.lengths.thinking.mean():.0f} tokens on average)"
    )
    ways = []
    if plan.faster is not None:
        layout, taken = plan.faster
        ways.append(f"mesh.decode_tensor={layout.decode_tensor} (a rollout in {taken:.0f} s)")
    if plan.remat is not None:
        remat, taken = plan.remat
        ways.append(f"model.remat={remat} (updates in {taken:.0f} s)")
    if ways:
        lines.append(f"Faster here, and it fits: {', '.join(ways)}")
    if work.evaluated:
        lines.append(
            f"An evaluation: {sum(rows for call in work.evaluated for rows, _ in call):,} answers "
            f"in {len(work.evaluated)} calls (a set's budgets, greedy and sampled, share "
            f"{work.evaluation.slots} slots), "
            f"{plan.evaluation / 60:.0f} minutes"
        )
    return lines
