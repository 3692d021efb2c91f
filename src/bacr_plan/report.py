"""Computes the plan of a run: whether it fits, how long it takes, and which settings are better."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bacr_jax.config.settings import resolve
from bacr_jax.methods import Method, load_method
from bacr_jax.model.compute import Remat
from bacr_jax.parallel import MeshShape
from bacr_plan import costs, memory, schedule, search, seconds
from bacr_plan.compiling import Compilation
from bacr_plan.devices import DEVICES, GIB, MEMORY_FRACTION, Device
from bacr_plan.memory import MemoryPhase
from bacr_plan.schedule import PlannedIteration
from bacr_plan.search import Choice, MemoryLimit
from bacr_plan.seconds import ASSUMED, DeviceSplit
from bacr_plan.workload import Workload

# Factors by which the number of devices is multiplied if a run does not fit.
LARGER = (2, 4, 8, 16)

PREDICTED_FOR = ("a100-80", "h100", "h200")

# A suggestion is only made if its predicted duration is below this fraction of the current one,
# because predictions are uncertain.
_WORTH = 0.95


@dataclass(frozen=True)
class Plan:
    """The plan of a run. Each property is computed when it is first accessed.

    Attributes:
      work: the sizes of the run.
      layout: the device mesh.
      device: the GPU model.
      memory_gib: memory per device in GiB.
      compilation: the compiled programs. Empty if memory is only predicted by formulas.
    """

    work: Workload
    layout: MeshShape
    device: Device
    memory_gib: float
    compilation: Compilation

    @property
    def limit(self) -> float:
        """Returns the number of bytes that JAX may use per device."""
        return self.memory_gib * GIB * MEMORY_FRACTION

    @functools.cached_property
    def phases(self) -> dict[str, MemoryPhase]:
        """Returns the memory of each phase, from compiled programs if available."""
        work = self.work
        layout = self.layout
        update = memory.update_phase(work, layout)
        rollout = memory.rollout_phase(work, layout)
        # The compiled program processes traces with the maximum length. Micro-batches that are
        # formed by tokens can have more tokens, if their traces are shorter.
        longest_traces = memory.update_phase(work.with_micro_rows(work.micro_rows), layout)
        resident, compiled_temporaries = self._compiled_update(longest_traces)
        update_factor = compiled_temporaries / longest_traces.temporaries
        rollout_arguments, rollout_temporaries = self._compiled_rollout(rollout)
        score = memory.score_phase(work, layout)
        phases = {
            "rollout": MemoryPhase(resident, rollout_temporaries, rollout_arguments),
            "score": dataclasses.replace(score, resident=resident),
            "update": MemoryPhase(resident, update_factor * update.temporaries, update.own),
        }
        # Other phases are not compiled. Their predicted temporaries are multiplied by the ratio of
        # compiled to predicted temporaries of these two phases.
        rollout_factor = rollout_temporaries / rollout.temporaries
        if work.evaluated:
            evaluation = memory.rollout_phase(work.evaluation, layout)
            temporaries = rollout_factor * evaluation.temporaries
            phases["evaluation"] = MemoryPhase(resident, temporaries, evaluation.own)
        factors = {
            "warmup": update_factor,
            "warmup_accuracy": rollout_factor,
        }
        for name, phase in memory.warmup_phases(work, layout).items():
            temporaries = factors[name] * phase.temporaries
            phases[name] = dataclasses.replace(phase, temporaries=temporaries)
        return phases

    def _compiled_update(self, update: MemoryPhase) -> tuple[float, float]:
        """Returns the bytes of the train state and of an update's temporaries.

        Args:
          update: the analytical prediction, which is used if no program was compiled.
        """
        programs = self.compilation.programs
        resident = update.resident
        temporaries = update.temporaries
        if not programs:
            return resident, temporaries
        train = programs["train"]
        # The arguments of the compiled update are the state and a batch. The reference policy is
        # not an argument, so its size is added. If micro-batches are formed by tokens, the compiled
        # program only computes gradients, and its arguments do not include the optimizer moments.
        if not self.work.by_tokens:
            state = memory.state_parts(self.work, self.layout)
            resident = train.arguments + train.outputs + state["reference"]
        if self.compilation.exact:
            temporaries = train.temporaries
            # The accumulated gradients are an argument of this program, so its temporaries do not
            # include them.
            if self.work.by_tokens:
                temporaries += memory.gradient_bytes(self.work, self.layout) / 2
        return resident, temporaries

    def _compiled_rollout(self, rollout: MemoryPhase) -> tuple[float, float]:
        """Returns the bytes of a rollout's arguments and temporaries.

        Args:
          rollout: the analytical prediction, which is used if no program was compiled.
        """
        programs = self.compilation.programs
        if not programs:
            return rollout.own, rollout.temporaries
        decode = programs["decode"]
        answers = memory.answer_cache_bytes(self.work, self.layout)
        arguments = decode.arguments + decode.outputs + answers
        if not self.compilation.exact:
            return arguments, rollout.temporaries
        prefill = memory.prefill_bytes(self.work, self.layout)
        cache = memory.kv_cache_bytes(self.work, self.layout)
        return arguments, max(float(decode.temporaries), prefill - cache)

    @functools.cached_property
    def memory_limit(self) -> MemoryLimit:
        """Returns the memory limit, with the ratios of compiled to predicted temporaries."""
        update = memory.update_phase(self.work, self.layout)
        rollout = memory.rollout_phase(self.work, self.layout)
        return MemoryLimit(
            self.limit,
            update=self.phases["update"].temporaries / update.temporaries,
            rollout=self.phases["rollout"].temporaries / rollout.temporaries,
        )

    @property
    def peak(self) -> float:
        """Returns the peak bytes per device over all phases."""
        return max(phase.peak for phase in self.phases.values())

    @property
    def fits(self) -> bool:
        """True if no phase exceeds the memory limit."""
        return self.peak <= self.limit

    @functools.cached_property
    def largest(self) -> dict[str, int]:
        """Returns the maximum number of traces that fit, for each setting in `search.PORTIONS`.

        The number is 0 if not even one trace per device fits.
        """
        return {
            portion: search.largest(portion, self.work, self.layout, self.memory_limit)
            for portion in search.PORTIONS
        }

    @functools.cached_property
    def suggestion(self) -> Choice | None:
        """Returns settings with which the run fits on these devices.

        Returns None if the config already fits, or if no settings fit.
        """
        if self.fits:
            return None
        smaller = search.fewer_eval_slots(self.work, self.layout, self.memory_limit)
        if smaller is not None:
            return smaller
        choice = search.suggest(self.work, self.layout.num_devices, self.memory_limit)
        if choice is None:
            return None
        layout, _ = search.fastest_decoding(
            choice.work, choice.layout, self.memory_limit, self.device
        )
        peak = search.peak_of(choice.work, layout, self.memory_limit)
        return dataclasses.replace(choice, layout=layout, peak=peak)

    @property
    def fits_without_warmup(self) -> bool:
        """True if any settings fit on these devices when the warm-up is run elsewhere."""
        without_warmup = dataclasses.replace(self.work, warmup_tokens=0)
        num_devices = self.layout.num_devices
        return search.suggest(without_warmup, num_devices, self.memory_limit) is not None

    @functools.cached_property
    def larger(self) -> Choice | None:
        """Returns settings that fit on a larger number of these devices.

        Returns None if any settings fit on the current number of devices, or if none of the factors
        in `LARGER` is enough.
        """
        if self.fits or self.suggestion is not None:
            return None
        for factor in LARGER:
            count = self.layout.num_devices * factor
            choice = search.suggest(self.work, count, self.memory_limit)
            if choice is not None:
                return choice
        return None

    @functools.cached_property
    def larger_gpu(self) -> tuple[str, Choice] | None:
        """Returns the smallest GPU model with more memory on which the run would fit.

        The number of devices stays the same.

        Returns:
          The GPU's name in `DEVICES` and the settings that fit. None if the run fits on the current
          devices with its own or with the suggested settings, or if no known GPU is large enough.
        """
        if self.fits or self.suggestion is not None:
            return None
        names = sorted(DEVICES, key=lambda name: DEVICES[name].memory_gib)
        for name in names:
            memory_gib = DEVICES[name].memory_gib
            if memory_gib <= self.memory_gib:
                continue
            memory_limit = dataclasses.replace(
                self.memory_limit, limit=memory_gib * GIB * MEMORY_FRACTION
            )
            choice = search.suggest(self.work, self.layout.num_devices, memory_limit)
            if choice is not None:
                return name, choice
        return None

    @functools.cached_property
    def faster(self) -> tuple[MeshShape, float] | None:
        """Returns the mesh with the fastest decoding and its rollout time in seconds.

        Returns None if the current mesh is about as fast, or if the run does not fit.
        """
        if not self.fits:
            return None
        layout, fastest_seconds = search.fastest_decoding(
            self.work,
            self.layout,
            self.memory_limit,
            self.device,
        )
        by_phase = seconds.rollout_seconds(
            self.work,
            self.layout,
            self.device,
            self.iteration.rollout,
        )
        if fastest_seconds >= _WORTH * sum(by_phase.values()):
            return None
        return layout, fastest_seconds

    @functools.cached_property
    def remat(self) -> tuple[Remat, float] | None:
        """Returns a setting of model.remat with less recomputation that still fits.

        Returns:
          The setting and the resulting duration of the updates in seconds. None if the run does not
          fit, if no such setting exists, or if updates would not be clearly faster.
        """
        if not self.fits:
            return None
        remat = memory.least_remat(self.work, self.layout, self.limit, self.memory_limit.update)
        if remat in (self.work.remat, "full"):
            return None
        changed = dataclasses.replace(self.work, remat=remat)
        by_phase = seconds.step_seconds(changed, self.layout, self.device, self.iteration)
        if by_phase["update"] >= _WORTH * self.predictions[self.device_name]["update"]:
            return None
        return remat, by_phase["update"]

    @functools.cached_property
    def less_padding(self) -> tuple[dict[str, Any], float] | None:
        """Returns config keys that reduce the learner's padding.

        The keys form micro-batches by tokens and, on a single device, remove padding completely.
        The micro-batches have as many tokens as the current micro-batches, or the maximum number
        that fits.

        Returns:
          The keys and the resulting duration of the updates in seconds. None if updates would not
          be clearly faster.
        """
        train = self.work.config.train
        layout = self.layout
        if not self.fits or train.padding_free:
            return None
        one_device = layout.row_shards * layout.tensor == 1
        if self.work.by_tokens and not one_device:
            return None
        row_tokens = self.work.row_tokens
        rows = max(self.work.micro_rows, layout.row_shards)
        config_tokens = train.micro_batch_tokens or rows * row_tokens
        candidates = []
        for tokens in (config_tokens, self.largest["micro_rows"] * row_tokens):
            tokens = max(tokens, row_tokens)
            changed = self.work.by_real_tokens(tokens, padding_free=one_device)
            if self.memory_limit.of_update(changed, layout) <= self.limit:
                candidates.append((self._update_seconds(changed), tokens))
        fastest, tokens = min(candidates, default=(float("inf"), config_tokens))
        if fastest >= _WORTH * self.predictions[self.device_name]["update"]:
            return None
        keys: dict[str, Any] = {}
        if train.micro_batch_rows is not None:
            keys["train.micro_batch_rows"] = None
        if tokens != train.micro_batch_tokens:
            keys["train.micro_batch_tokens"] = tokens
        if one_device:
            keys["train.padding_free"] = True
        return keys, fastest

    def _update_seconds(self, work: Workload) -> float:
        """Returns the duration of the updates of a modified workload in seconds."""
        updates = schedule.updates(work, self.layout)
        iteration = PlannedIteration(self.iteration.rollout, updates)
        by_phase = seconds.step_seconds(work, self.layout, self.device, iteration)
        return by_phase["update"]

    @functools.cached_property
    def iteration(self) -> PlannedIteration:
        """Returns the predicted schedule of an iteration."""
        return schedule.iteration(self.work, self.layout)

    @functools.cached_property
    def splits(self) -> list[DeviceSplit]:
        """Returns the possible splits of these devices between a learner and vLLM servers."""
        return seconds.splits(self.work, self.layout, self.device, self.iteration)

    @functools.cached_property
    def method(self) -> Method:
        """Returns the method of the run."""
        return load_method(resolve(self.work.config).method)

    @property
    def accepts_async(self) -> bool:
        """True if the run can use `rollout.async_steps=1`.

        The config check refuses this setting for methods with dynamic sampling and for runs that
        may undo an update.
        """
        train = self.work.config.train
        undoes = train.undo_closed_answers is not None or train.undo_filled_budgets is not None
        return self.method.dynamic_sampling is None and not undoes

    @functools.cached_property
    def not_counted(self) -> list[str]:
        """Describes the work of the run's method that the predicted durations do not contain.

        Its amount depends on the policy's answers, so it can't be predicted from the config.
        """
        lines = []
        sampling = self.method.dynamic_sampling
        if sampling is not None and sampling.max_rounds > 1:
            lines.append(
                f"rollout: 1 to {sampling.max_rounds} rounds, one is counted, because dynamic "
                "sampling repeats the rollout until enough questions are useful"
            )
        stage = self.method.rejection_sft
        if stage is not None:
            questions = "every training question"
            if stage.questions is not None:
                questions = f"{stage.questions:,} training questions"
            lines.append(
                f"not counted: the first supervised stage of method={self.work.config.method}, "
                f"which answers {questions} once and trains for {stage.steps:,} steps of "
                f"{stage.batch_tokens:,} tokens"
            )
        return lines

    @property
    def device_name(self) -> str:
        """Returns the name of the GPU model in `DEVICES`."""
        names = [name for name, device in DEVICES.items() if device.name == self.device.name]
        return names[0]

    @functools.cached_property
    def predictions(self) -> dict[str, dict[str, float]]:
        """Returns the duration of an iteration in seconds by GPU model and phase.

        The GPU models are those in `PREDICTED_FOR` and the GPU model of the plan.
        """
        names = list(PREDICTED_FOR)
        if self.device_name not in names:
            names.insert(0, self.device_name)
        by_device = {}
        for name in names:
            device = dataclasses.replace(
                DEVICES[name], network_bandwidth=self.device.network_bandwidth
            )
            by_device[name] = seconds.step_seconds(
                self.work,
                self.layout,
                device,
                self.iteration,
            )
        return by_device


def parts(plan: Plan) -> dict[str, float]:
    """Returns the bytes per device by purpose, such as "optimizer".

    Not all parts are in use at the same time.
    """
    work = plan.work
    layout = plan.layout
    state = memory.state_parts(work, layout)
    gradients = memory.gradient_bytes(work, layout)
    activations = plan.phases["update"].temporaries - gradients
    sizes = {
        "parameters": state["parameters"],
        "optimizer": state["optimizer"],
        "value_head": state["value_head"],
        "gradients": gradients,
        "activations": max(activations, 0.0),
        "score_temporaries": plan.phases["score"].temporaries,
        "decode_copy": costs.decode_copy_bytes(work, layout),
        "kv_cache": memory.kv_cache_bytes(work, layout),
        "decode_temporaries": plan.phases["rollout"].temporaries,
    }
    # Only included if they are not 0, because most runs do not use them.
    rare_sizes = {
        "frozen_base": state["frozen_base"],
        "reference": state["reference"],
        "parameters_before_update": memory.bounded_update_bytes(work, layout),
    }
    for name, size in rare_sizes.items():
        if size:
            sizes[name] = size
    return sizes


# As an object -------------------------------------------------------------------------------------


def _choice_object(choice: Choice) -> dict[str, Any]:
    """Converts a choice of settings to a JSON object."""
    return {
        "devices": choice.layout.num_devices,
        "overrides": choice.overrides(),
        "peak_gib": round(choice.peak / GIB, 3),
    }


def _gib(sizes: Mapping[str, float]) -> dict[str, float]:
    """Converts bytes to GiB, rounded to three decimals."""
    return {name: round(size / GIB, 3) for name, size in sizes.items()}


def _tenths(values: Mapping[str, float]) -> dict[str, float]:
    """Rounds numbers to one decimal."""
    return {name: round(value, 1) for name, value in values.items()}


def as_object(plan: Plan) -> dict[str, Any]:
    """Converts the plan to a JSON object for `bacr plan --json`."""
    work = plan.work
    flops = costs.step_flops(work, plan.iteration)
    evaluation = seconds.evaluation_seconds(work, plan.layout, plan.device)
    warmup = seconds.warmup_seconds(work, plan.layout, plan.device)
    compile_seconds = {name: program.seconds for name, program in plan.compilation.programs.items()}
    return {
        "fits": plan.fits,
        "peak_gib": round(plan.peak / GIB, 3),
        "limit_gib": round(plan.limit / GIB, 3),
        "phases_gib": _gib({name: phase.peak for name, phase in plan.phases.items()}),
        "parts_gib": _gib(parts(plan)),
        "host_gib": round(memory.host_snapshot_bytes(work) / GIB, 3),
        "flops": sum(flops.values()),
        "flops_by_phase": flops,
        **_prediction_objects(plan),
        "predicted_evaluation_s": round(evaluation, 1),
        "predicted_warmup_s": round(warmup, 1),
        "predicted_splits_s": [_split_object(split, plan.accepts_async) for split in plan.splits],
        "assumed_shares": {
            "matmul": ASSUMED.matmul,
            "memory_bandwidth": ASSUMED.bandwidth,
            "links": ASSUMED.links,
        },
        "assumed_network_gb_per_s": plan.device.network_bandwidth / 1e9,
        "assumed_launch_s_per_layer": ASSUMED.launch,
        "not_counted": plan.not_counted,
        "prompts": work.lengths.source,
        "positions_real": round(schedule.real_share(work, plan.iteration.updates), 3),
        **_suggestion_objects(plan),
        "max_micro_batch": plan.largest["micro_rows"],
        "max_slots": plan.largest["slots"],
        "max_eval_slots": plan.largest["eval_slots"],
        "model": work.shape_source,
        "devices": plan.layout.num_devices,
        "device": plan.device.name,
        "device_memory_gib": plan.memory_gib,
        "mesh": plan.layout._asdict(),
        "memory_from": plan.compilation.source,
        "compile_s": _tenths(compile_seconds),
        **_choice_objects(plan),
    }


def _prediction_objects(plan: Plan) -> dict[str, Any]:
    """Returns the JSON fields of the predicted durations for each GPU model."""
    totals = {name: sum(phases.values()) for name, phases in plan.predictions.items()}
    by_phase = {name: _tenths(phases) for name, phases in plan.predictions.items()}
    return {
        "predicted_step_s": _tenths(totals),
        "predicted_s_by_phase": by_phase,
    }


def _split_object(split: DeviceSplit, accepts_async: bool) -> dict[str, Any]:
    """Converts a split of the devices between learner and samplers to a JSON object.

    The field `ahead` is None if the run does not accept `rollout.async_steps=1`.
    """
    return {
        "learner": split.learner,
        "samplers": split.samplers,
        "in_turn": round(split.in_turn, 1),
        "ahead": round(split.ahead, 1) if accepts_async else None,
    }


def _suggestion_objects(plan: Plan) -> dict[str, Any]:
    """Returns the JSON fields of faster settings. A field is None without a suggestion."""
    faster = None
    if plan.faster is not None:
        layout, rollout_seconds = plan.faster
        faster = {
            "mesh.decode_tensor": layout.decode_tensor,
            "rollout_s": round(rollout_seconds, 1),
        }
    less_remat = None
    if plan.remat is not None:
        remat, update_seconds = plan.remat
        less_remat = {
            "model.remat": remat,
            "update_s": round(update_seconds, 1),
        }
    less_padding = None
    if plan.less_padding is not None:
        keys, update_seconds = plan.less_padding
        less_padding = {**keys, "update_s": round(update_seconds, 1)}
    return {
        "faster": faster,
        "less_remat": less_remat,
        "less_padding": less_padding,
    }


def _choice_objects(plan: Plan) -> dict[str, Any]:
    """Returns the JSON fields of settings with which the run would fit.

    A field is None if nothing fits, or if the config already fits.
    """
    larger_card = None
    if plan.larger_gpu is not None:
        name, choice = plan.larger_gpu
        larger_card = {"device": name, **_choice_object(choice)}
    return {
        "suggestion": plan.suggestion and _choice_object(plan.suggestion),
        "more_devices": plan.larger and _choice_object(plan.larger),
        "larger_card": larger_card,
    }
