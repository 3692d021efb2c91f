"""What to write in a config whose run has run out of memory: what the plan would choose."""

import dataclasses
from typing import Any

import jax

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.oom import OutOfMemory
from bacr_jax.parallel import MeshShape
from bacr_plan import memory, search
from bacr_plan.devices import GIB, MEMORY_FRACTION
from bacr_plan.search import Choice, Room
from bacr_plan.workload import Workload, sizes_of

ROLLOUT, UPDATE = ("prefill", "decode", "answers"), ("scoring", "learner")
# Keys that make a phase smaller, the ones that cost the least speed first.
KEYS = {
    **dict.fromkeys(ROLLOUT, ("rollout.slots", "mesh.decode_tensor")),
    "scoring": ("train.micro_batch_rows", "mesh.fsdp"),
    "learner": ("train.micro_batch_rows", "model.logprob_chunk", "mesh.fsdp"),
    "value head": ("rollout.questions", "mesh.fsdp"),
    "warm-up": ("warmup.batch_tokens",),
    "cold start": ("selfbudgeter.cold_start_tokens",),
    "start": ("mesh.fsdp", "mesh.tensor"),
}
# A phase that has failed needs more than the limit, by a part of it that nobody knows.
EXCESS = 0.1


def smaller_choice(
    work: Workload, layout: MeshShape, limit: float, phase: str, *, evaluating: bool = False
) -> Choice | None:
    """The portions, or else the layout too, that the plan would choose for a run that failed.

    By arithmetic alone, in a moment. Where that says that the phase does fit, it has overlooked
    something, and what it has overlooked is taken off the limit (bytes that JAX may use on a
    device). None: nothing smaller fits, or the phase is none of a plan.
    """
    if phase in ROLLOUT:
        of = work.evaluation if evaluating else work
        planned = memory.rollout_phase(of, layout).peak
        portion = "eval_slots" if evaluating else "slots"
    elif phase in UPDATE:
        planned, portion = memory.update_phase(work, layout).peak, "micro_rows"
    else:
        return None
    tight = min(limit, planned - EXCESS * limit)
    # Else the next smaller portion there is.
    for most in (tight, min(limit, planned - 1.0)):
        if rows := search.largest(portion, work, layout, Room(most)):
            smaller: dict[str, Any] = {portion: rows}
            return Choice(dataclasses.replace(work, **smaller), layout, most)
    return search.suggest(work, layout.num_devices, Room(tight))


def device_memory() -> float | None:
    """Bytes that JAX may use on a device of this process; None if it doesn't say (CPUs)."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return None if limit is None else float(limit)


def explain(error: OutOfMemory, config: Config) -> str:
    """The line for a run that has run out of memory: where, how much, what to write instead."""
    if error.on_host:
        return f"{error}; free some, or write a smaller rollout.questions or data set"
    phase, limit, num_devices = error.phases[0], device_memory(), jax.device_count()
    evaluating = "evaluation" in error.phases
    least = config.model.remat == "full" or phase != "learner"
    remat = "" if least else " model.remat=full"
    if limit is not None:
        try:
            work, layout = sizes_of(config, num_devices)
            choice = smaller_choice(work, layout, limit, phase, evaluating=evaluating)
        # The run has started, so its config has a plan, unless it is of a model no plan knows.
        except UserError:
            choice = None
        if choice is not None:
            return f"{error}; the plan would choose {choice.overrides()}{remat}"
    keys = list(KEYS.get(phase, ("rollout.slots", "train.micro_batch_rows", "mesh.fsdp")))
    if evaluating:
        keys = [key.replace("rollout.slots", "eval.slots") for key in keys]
    if config.train.micro_batch_tokens is not None:
        keys = [key.replace("micro_batch_rows", "micro_batch_tokens") for key in keys]
    larger = [key for key in keys if key.startswith("mesh.")]
    smaller = [key for key in keys if key not in larger]
    advice = [f"a smaller {' or '.join(smaller)}"] if smaller else []
    advice += [f"a larger {' or '.join(larger)}"] if larger and num_devices > 1 else []
    given = "GIB" if limit is None else f"{limit / GIB / MEMORY_FRACTION:.0f}"
    return (
        f"{error}; write {', or '.join(advice) or 'a smaller model'}{remat}; "
        f"bacr plan --config {config.output.dir}/config.yaml --devices {num_devices} "
        f"--device-memory {given} says what fits"
    )
