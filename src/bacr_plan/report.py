"""A plan: does it fit, what does it cost, what would fit; as an object and as text."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from bacr_jax.config.values import shown
from bacr_jax.model.compute import Remat
from bacr_jax.parallel import MeshShape
from bacr_plan import costs, memory, schedule, search, seconds
from bacr_plan.compiling import Compilation
from bacr_plan.devices import DEVICES, GIB, MEMORY_FRACTION, Device
from bacr_plan.memory import MemoryPhase
from bacr_plan.schedule import Iteration
from bacr_plan.search import Choice, Room
from bacr_plan.seconds import ASSUMED, Split
from bacr_plan.workload import Workload

# Boxes tried when a run doesn't fit into the given one, as multiples of its devices.
LARGER = (2, 4, 8, 16)

PREDICTED_FOR = ("a100-80", "h100", "h200")

# What a change of layout must save before a plan speaks of it: it is a prediction.
_WORTH = 0.95


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it starts, each part worked out when it is asked for."""

    work: Workload
    layout: MeshShape
    device: Device
    memory_gib: float
    compilation: Compilation

    @property
    def limit(self) -> float:
        """Bytes that JAX may use on a device."""
        return self.memory_gib * GIB * MEMORY_FRACTION

    @functools.cached_property
    def phases(self) -> dict[str, MemoryPhase]:
        """Phases by arithmetic, with what a compiler knows better put in its place."""
        work, layout, programs = self.work, self.layout, self.compilation.programs
        update, rollout = memory.update_phase(work, layout), memory.rollout_phase(work, layout)
        state, own = update.resident, rollout.own
        of_update, of_rollout = update.temporaries, rollout.temporaries
        if programs:
            train, decode = programs["train"], programs["decode"]
            of_state = memory.state_parts(work, layout)
            # Gradients alone don't read the moments: by tokens only arithmetic knows the state.
            # Else an update's arguments are that and a batch; a reference is kept beside.
            if not work.by_tokens:
                state = train.arguments + train.outputs + of_state["reference"]
            own = decode.arguments + decode.outputs + memory.answer_cache_bytes(work, layout)
            if self.compilation.exact:
                # The sum of earlier gradients is given to the program of a micro-batch.
                earlier = memory.gradient_bytes(work, layout) / 2 if work.by_tokens else 0.0
                of_update = train.temporaries + earlier
                prefill = memory.prefill_bytes(work, layout) - memory.kv_cache_bytes(work, layout)
                of_rollout = max(float(decode.temporaries), prefill)
        phases = {
            "rollout": MemoryPhase(state, of_rollout, own),
            "score": dataclasses.replace(memory.score_phase(work, layout), resident=state),
            "update": MemoryPhase(state, of_update, update.own),
        }
        if work.evaluated:
            evaluation = memory.rollout_phase(work.evaluation, layout)
            of_evaluation = of_rollout / rollout.temporaries * evaluation.temporaries
            phases["evaluation"] = MemoryPhase(state, of_evaluation, evaluation.own)
        # A warm-up has programs of its own, which are not compiled: only their factors are taken.
        factors = {"warmup": of_update / update.temporaries}
        factors["warmup_accuracy"] = of_rollout / rollout.temporaries
        for name, phase in memory.warmup_phases(work, layout).items():
            temporaries = factors[name] * phase.temporaries
            phases[name] = dataclasses.replace(phase, temporaries=temporaries)
        return phases

    @functools.cached_property
    def room(self) -> Room:
        """The limit, and how much of it a phase takes by the compiler's numbers."""
        update = memory.update_phase(self.work, self.layout).temporaries
        rollout = memory.rollout_phase(self.work, self.layout).temporaries
        return Room(
            self.limit,
            update=self.phases["update"].temporaries / update,
            rollout=self.phases["rollout"].temporaries / rollout,
        )

    @property
    def peak(self) -> float:
        """Bytes on a device at the worst moment of an iteration."""
        return max(phase.peak for phase in self.phases.values())

    @property
    def fits(self) -> bool:
        """Whether every phase stays within the limit."""
        return self.peak <= self.limit

    @functools.cached_property
    def largest(self) -> dict[str, int]:
        """The most rows of each portion that fit; 0: not one a device."""
        sizes = self.work, self.layout, self.room
        return {portion: search.largest(portion, *sizes) for portion in search.PORTIONS}

    @functools.cached_property
    def suggestion(self) -> Choice | None:
        """What would fit on these devices, if the config does not."""
        if self.fits:
            return None
        if smaller := search.fewer_eval_slots(self.work, self.layout, self.room):
            return smaller
        choice = search.suggest(self.work, self.layout.num_devices, self.room)
        if choice is None:
            return None
        best, _ = search.fastest_decoding(choice.work, choice.layout, self.room, self.device)
        peak = search.peak_of(choice.work, best, self.room)
        return dataclasses.replace(choice, layout=best, peak=peak)

    @functools.cached_property
    def larger(self) -> Choice | None:
        """What would fit on more such devices, if nothing fits on these."""
        if self.fits or self.suggestion is not None:
            return None
        counts = (self.layout.num_devices * factor for factor in LARGER)
        found = (search.suggest(self.work, count, self.room) for count in counts)
        return next((choice for choice in found if choice is not None), None)

    @functools.cached_property
    def card(self) -> tuple[str, Choice] | None:
        """The known device with the least memory on as many of which it would fit, likewise."""
        if self.fits or self.suggestion is not None:
            return None
        larger = [one for one in DEVICES.items() if one[1].memory_gib > self.memory_gib]
        for name, device in sorted(larger, key=lambda one: one[1].memory_gib):
            room = dataclasses.replace(self.room, limit=device.memory_gib * GIB * MEMORY_FRACTION)
            if choice := search.suggest(self.work, self.layout.num_devices, room):
                return name, choice
        return None

    @functools.cached_property
    def faster(self) -> tuple[MeshShape, float] | None:
        """The layout with which decoding takes least, and its seconds, if worth a line."""
        if not self.fits:
            return None
        sizes = self.work, self.layout
        best, taken = search.fastest_decoding(*sizes, self.room, self.device)
        now = seconds.rollout_seconds(*sizes, self.device, self.iteration.rollout)
        return (best, taken) if taken < _WORTH * sum(now.values()) else None

    @functools.cached_property
    def remat(self) -> tuple[Remat, float] | None:
        """The model.remat that recomputes less and fits, and seconds of updates with it."""
        if not self.fits:
            return None
        remat = memory.least_remat(self.work, self.layout, self.limit, self.room.update)
        if remat in (self.work.remat, "full"):
            return None
        less = dataclasses.replace(self.work, remat=remat)
        taken = seconds.step_seconds(less, self.layout, self.device, self.iteration)
        return remat, taken["update"]

    @functools.cached_property
    def less_padding(self) -> tuple[dict[str, Any], float] | None:
        """The keys with which the learner computes less padding, and seconds of updates with them.

        Micro-batches by tokens, on one device without padding: of as many tokens as the config's
        micro-batches have, or as fit. None if that is not worth a line.
        """
        train, layout = self.work.config.train, self.layout
        if not self.fits or train.padding_free:
            return None
        alone = layout.row_shards * layout.tensor == 1
        if not alone and self.work.by_tokens:
            return None
        rows = max(self.work.micro_rows, layout.row_shards)
        asked = train.micro_batch_tokens or rows * self.work.row_tokens
        found = []
        for tokens in (asked, self.largest["micro_rows"] * self.work.row_tokens):
            tokens = max(tokens, self.work.row_tokens)
            less = self.work.by_real_tokens(tokens, padding_free=alone)
            if self.room.of_update(less, layout) > self.limit:
                continue
            made = Iteration(self.iteration.rollout, schedule.updates(less, layout))
            taken = seconds.step_seconds(less, layout, self.device, made)["update"]
            found.append((taken, tokens))
        taken, tokens = min(found, default=(float("inf"), asked))
        now = self.predictions[self.device_name]["update"]
        if taken >= _WORTH * now:
            return None
        keys: dict[str, Any] = {}
        if tokens != train.micro_batch_tokens:
            keys["train.micro_batch_tokens"] = tokens
        if alone:
            keys["train.padding_free"] = True
        return keys, taken

    @functools.cached_property
    def iteration(self) -> Iteration:
        """What an iteration runs."""
        return schedule.iteration(self.work, self.layout)

    @functools.cached_property
    def splits(self) -> list[Split]:
        """The same devices, some of which sample by servers of vLLM."""
        return seconds.splits(self.work, self.layout, self.device, self.iteration)

    @property
    def device_name(self) -> str:
        """What --device calls its card."""
        return next(name for name, device in DEVICES.items() if device == self.device)

    @functools.cached_property
    def predictions(self) -> dict[str, dict[str, float]]:
        """Seconds of an iteration by device and phase."""
        own = [self.device_name] if self.device_name not in PREDICTED_FOR else []
        predict = functools.partial(seconds.step_seconds, self.work, self.layout)
        return {name: predict(DEVICES[name], self.iteration) for name in (*own, *PREDICTED_FOR)}


def parts(plan: Plan) -> dict[str, float]:
    """Bytes on one device by what they are for; not all of them are there at the same time."""
    work, layout = plan.work, plan.layout
    gradients = memory.gradient_bytes(work, layout)
    state = memory.state_parts(work, layout)
    seldom = {name: state.pop(name) for name in ("frozen_base", "reference")}
    copy = memory.bounded_update_bytes(work, layout)
    return {
        **state,
        **({"parameters_before_update": copy} if copy else {}),
        "gradients": gradients,
        "activations": max(plan.phases["update"].temporaries - gradients, 0.0),
        "score_temporaries": plan.phases["score"].temporaries,
        "decode_copy": costs.decode_copy_bytes(work, layout),
        "kv_cache": memory.kv_cache_bytes(work, layout),
        "decode_temporaries": plan.phases["rollout"].temporaries,
        **{name: size for name, size in seldom.items() if size},
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "devices": choice.layout.num_devices,
        "overrides": choice.overrides(),
        "peak_gib": round(choice.peak / GIB, 3),
    }


def as_object(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    gib = lambda values: {name: round(value / GIB, 3) for name, value in values.items()}
    tenths = lambda values: {name: round(value, 1) for name, value in values.items()}
    work, predicted = plan.work, plan.predictions
    flops = costs.step_flops(work, plan.iteration)
    evaluation = seconds.evaluation_seconds(work, plan.layout, plan.device)
    return {
        "fits": plan.fits,
        "peak_gib": round(plan.peak / GIB, 3),
        "limit_gib": round(plan.limit / GIB, 3),
        "phases_gib": gib({name: phase.peak for name, phase in plan.phases.items()}),
        "parts_gib": gib(parts(plan)),
        "host_gib": round(memory.host_snapshot_bytes(work) / GIB, 3),
        "flops": sum(flops.values()),
        "flops_by_phase": flops,
        "predicted_step_s": tenths({name: sum(by.values()) for name, by in predicted.items()}),
        "predicted_s_by_phase": {name: tenths(phases) for name, phases in predicted.items()},
        "predicted_evaluation_s": round(evaluation, 1),
        "predicted_warmup_s": round(seconds.warmup_seconds(work, plan.layout, plan.device), 1),
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
        "less_padding": plan.less_padding
        and {**plan.less_padding[0], "update_s": round(plan.less_padding[1], 1)},
        "max_micro_batch": plan.largest["micro_rows"],
        "max_slots": plan.largest["slots"],
        "max_eval_slots": plan.largest["eval_slots"],
        "model": work.shape_source,
        "devices": plan.layout.num_devices,
        "device": plan.device.name,
        "device_memory_gib": plan.memory_gib,
        "mesh": plan.layout._asdict(),
        "memory_from": plan.compilation.source,
        "compile_s": tenths({n: one.seconds for n, one in plan.compilation.programs.items()}),
        "suggestion": plan.suggestion and _choice(plan.suggestion),
        "more_devices": plan.larger and _choice(plan.larger),
        "larger_card": plan.card and {"device": plan.card[0], **_choice(plan.card[1])},
    }


# For a terminal -----------------------------------------------------------------------------------

_PHASE_NAMES = {
    "rollout": "rollout (state, decode copy, cache, temporaries)",
    "score": "scoring (state, temporaries)",
    "update": "update (state, gradients, activations)",
    "evaluation": "evaluation (state, decode copy, cache, temporaries)",
    "warmup": "warm-up (all weights, fp32; gradients, activations)",
    "warmup_accuracy": "warm-up, accuracy (its state, decode copy, cache)",
}


def _verdict(plan: Plan) -> list[str]:
    share = f"{MEMORY_FRACTION:.0%} of {plan.memory_gib:g}"
    limit = f"{plan.limit / GIB:.1f} GiB ({share}; the launch scripts give JAX as much)"
    if plan.fits:
        spare = (plan.limit - plan.peak) / GIB
        return [f"FITS: peak {plan.peak / GIB:.1f} of {limit}, {spare:.1f} GiB to spare"]
    over = (plan.peak - plan.limit) / GIB
    lines = [f"DOES NOT FIT: peak {plan.peak / GIB:.1f} of {limit}, {over:.1f} GiB too much"]
    if plan.suggestion is not None:
        return lines + _shown("What would fit here", plan.suggestion)
    count = plan.layout.num_devices
    lines.append(
        f"No mesh, micro-batch and number of slots fits {count} of these, not even one row a "
        "device."
    )
    if plan.larger is not None:
        title = f"What would fit on {plan.larger.layout.num_devices} of them"
        lines += _shown(title, plan.larger)
    if plan.card is not None:
        name, choice = plan.card
        lines += _shown(f"What would fit on as many {name}", choice)
    if plan.larger is None and plan.card is None:
        lines.append("No more, and no larger known GPUs would do.")
    fewest = search.fewer_warmup_tokens(plan.work, plan.layout, plan.room)
    if plan.room.of_warmup_step(fewest, plan.layout) > plan.limit:
        lines.append(
            "The warm-up alone is too large: make it once where it fits, and name its folder in "
            "warmup.dir."
        )
    return lines


def _shown(title: str, choice: Choice) -> list[str]:
    return [f"{title} ({choice.peak / GIB:.1f} GiB):", f"  {choice.overrides()}"]


def _largest(plan: Plan) -> str:
    """The largest portions that fit; nobody can write a portion of 0 rows."""
    work, largest = plan.work, plan.largest
    most = {**work.micro_batch(largest["micro_rows"]), "rollout.slots": largest["slots"]}
    if work.evaluated:
        most["eval.slots"] = largest["eval_slots"]
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
        lines.append(f"  {name.replace('_', ' '):52}{value / GIB:7.2f}")
    lines += ["", "Peak of each phase, GiB"]
    for name, meaning in _PHASE_NAMES.items():
        if name in phases and (name != "score" or work.scored):
            lines.append(f"  {meaning:52}{phases[name].peak / GIB:7.2f}")
    if snapshot := memory.host_snapshot_bytes(work):
        lines += [
            "",
            f"Host memory, all hosts: {snapshot / GIB:.2f} GiB for the state from before an update "
            "(train.undo_closed_answers, train.undo_filled_budgets)",
        ]
    lines += ["", *_verdict(plan), _largest(plan)]
    if work.adapters:
        million = costs.trained_parameters(work) / 1e6
        lines.append(
            f"Trained: {million:.1f}e6 numbers beside the frozen base; the sampler reads a copy "
            "with the adapters merged in"
        )
    flops = costs.step_flops(work, plan.iteration)
    by_phase = ", ".join(f"{name} {value:.2g}" for name, value in flops.items())
    share = schedule.real_share(work, plan.iteration.updates)
    lines += [
        "",
        f"Work of an iteration: {sum(flops.values()):.3g} FLOP on all devices ({by_phase})",
        f"Of the positions that the learner computes {share:.0%} hold a token; prompts: "
        f"{work.lengths.source}",
        "",
    ]
    together = sum(plan.predictions[plan.device_name].values())
    return "\n".join([*lines, *_seconds(plan), *seconds.split_lines(plan.splits, together)])


def _seconds(plan: Plan) -> list[str]:
    """Predictions, what they assume, and what would be faster."""
    work = plan.work
    lines = [
        "Predicted seconds of an iteration, grading left out",
        f"  {'':10}{'total':>8}{'rollout':>9}{'score':>8}{'update':>8}",
    ]
    for name, phases in plan.predictions.items():
        rollout = phases["prefill"] + phases["decode"]
        each = sum(phases.values()), rollout, phases["score"], phases["update"]
        total, *parts = (f"{x:.0f}" if x >= 10 else f"{x:.2g}" for x in each)
        lines.append(f"  {name:10}{total:>8}{parts[0]:>9}{parts[1]:>8}{parts[2]:>8}")
    lines.append(
        f"  if products reach {ASSUMED.matmul:.0%} of the data sheet's rate, memory "
        f"{ASSUMED.bandwidth:.0%}, links {ASSUMED.links:.0%}, and every trace uses its "
        f"budget up ({work.lengths.thinking.mean():.0f} tokens on average)"
    )
    ways = []
    if plan.faster is not None:
        layout, taken = plan.faster
        ways.append(f"mesh.decode_tensor={layout.decode_tensor} (a rollout in {taken:.3g} s)")
    if plan.remat is not None:
        remat, taken = plan.remat
        ways.append(f"model.remat={remat} (updates in {taken:.3g} s)")
    if plan.less_padding is not None:
        keys, taken = plan.less_padding
        written = " ".join(f"{key}={shown(value)}" for key, value in keys.items())
        ways.append(f"{written} (updates in {taken:.3g} s)")
    if ways:
        lines.append(f"Faster here, and it fits: {', '.join(ways)}")
    if work.warmup is not None:
        warmup = work.config.warmup
        minutes = seconds.warmup_seconds(work, plan.layout, plan.device) / 60
        lines.append(
            f"Warm-up before the first iteration: {warmup.steps:,} steps of {work.warmup_tokens:,} "
            f"tokens, {minutes:.3g} minutes; up to {warmup.max_hold} rounds more, and measuring "
            "its accuracy, are left out"
        )
    if work.evaluated:
        minutes = seconds.evaluation_seconds(work, plan.layout, plan.device) / 60
        lines.append(
            f"An evaluation: {sum(rows for call in work.evaluated for rows, _ in call):,} answers "
            f"in {len(work.evaluated)} calls (a set's budgets, greedy and sampled, share "
            f"{work.evaluation.slots} slots), {minutes:.3g} minutes"
        )
    return lines
