"""What to write in a config whose run has run out of memory: what the plan would choose."""

import jax
import jax.numpy as jnp

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.learner.policy import mesh_shape
from bacr_jax.methods import load_method
from bacr_jax.oom import OutOfMemory
from bacr_jax.parallel import MeshShape
from bacr_jax.planning import costs, memory, search
from bacr_jax.planning.devices import GIB, MEMORY_FRACTION
from bacr_jax.planning.search import Choice, Correction
from bacr_jax.planning.workload import Workload, model_shape, workload_of

# Keys that make a phase smaller, the ones that cost the least speed first.
KEYS = {
    "prefill": ("rollout.slots", "mesh.decode_tensor"),
    "decode": ("rollout.slots", "mesh.decode_tensor"),
    "answers": ("rollout.slots", "mesh.decode_tensor"),
    "scoring": ("train.micro_batch_rows", "mesh.fsdp"),
    "learner": ("train.micro_batch_rows", "model.logprob_chunk", "mesh.fsdp"),
    "value head": ("rollout.questions", "mesh.fsdp"),
    "warm-up": ("warmup.batch_tokens",),
    "cold start": ("selfbudgeter.cold_start_tokens",),
    "start": ("mesh.fsdp", "mesh.tensor"),
}
ROLLOUT, UPDATE = ("prefill", "decode", "answers"), ("scoring", "learner")
# A phase that has failed needs more than the limit, by a part of it that nobody knows.
EXCESS = 0.1


def sizes_of(config: Config, devices: int) -> tuple[Workload, MeshShape]:
    """Sizes and mesh of a run on so many devices, without touching one.

    Args:
      config: checked settings.
      devices: number of devices.

    Raises:
      UserError: the model's shape can't be known, or the mesh or the portions don't fit it.
    """
    method = load_method(config)
    wanted = config.model.attention
    fused = wanted == "cudnn" or (wanted == "auto" and config.model.compute_dtype == "bfloat16")
    shape, source = model_shape(config)
    layout = mesh_shape(config, shape, devices)
    shards = costs.slot_shards(layout)
    slots = config.rollout.slots
    if slots is not None and slots % shards:
        raise UserError(
            f"rollout.slots={slots}: can't be split evenly over the {shards} devices that decode "
            f"rows of their own; write rollout.slots={max(slots // shards, 1) * shards}"
        )
    one_budget = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    work = workload_of(
        config,
        shape,
        source,
        row_shards=layout.row_shards,
        conditioned=method.conditioned,
        uses_value=method.uses_value,
        branches=method.answers * int(jax.eval_shape(method.cuts, one_budget).shape[-1]),
        fused_attention=fused,
    )
    return work, layout


def smaller_choice(config: Config, devices: int, limit: float, phase: str) -> Choice | None:
    """The portions, or else the layout too, that the plan would choose for a run that failed.

    By arithmetic alone, in a moment. Where that says that the phase does fit, it has overlooked
    something, and what it has overlooked is taken off the limit.

    Args:
      config: checked settings, of a run that has run out of memory.
      devices: number of devices.
      limit: bytes that JAX may use on one.
      phase: where memory ran out.

    Returns:
      None if nothing smaller fits, or if the phase is none of a plan.

    Raises:
      UserError: as `sizes_of`.
    """
    work, layout = sizes_of(config, devices)
    exact = Correction()
    if phase in ROLLOUT:
        planned = memory.rollout_phase(work, layout).peak
    elif phase in UPDATE:
        planned = memory.update_phase(work, layout).peak
    else:
        return None
    tight = min(limit, planned - EXCESS * limit)
    # Else the next smaller portion there is.
    for most in (tight, min(limit, planned - 1.0)):
        if phase in ROLLOUT and (slots := search.largest_slots(work, layout, most, exact)):
            return Choice(layout, work.micro_rows, slots, most)
        if phase in UPDATE and (rows := search.largest_micro_batch(work, layout, most, exact)):
            return Choice(layout, rows, work.slots, most)
    return search.suggest(work, devices, tight, exact)


def device_memory() -> float | None:
    """Bytes that JAX may use on a device of this process; None if it doesn't say (CPUs)."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return None if limit is None else float(limit)


def explain(error: OutOfMemory, config: Config) -> str:
    """The line for a run that has run out of memory: where, how much, what to write instead.

    Args:
      error: what happened.
      config: the run's settings.
    """
    if error.on_host:
        return f"{error}; free some, or write a smaller rollout.questions or data set"
    limit, devices = device_memory(), jax.device_count()
    remat = "" if config.model.remat or error.phases[0] != "learner" else " model.remat=true"
    if limit is not None:
        try:
            choice = smaller_choice(config, devices, limit, error.phases[0])
            work = sizes_of(config, devices)[0]
        # The run has started, so its config has a plan, unless it is of a model no plan knows.
        except UserError:
            choice = None
        if choice is not None:
            return f"{error}; the plan would choose {choice.overrides(work)}{remat}"
    keys = list(KEYS.get(error.phases[0], ("rollout.slots", "train.micro_batch_rows", "mesh.fsdp")))
    if config.train.micro_batch_tokens is not None:
        keys = [key.replace("micro_batch_rows", "micro_batch_tokens") for key in keys]
    larger = [key for key in keys if key.startswith("mesh.")]
    smaller = [key for key in keys if key not in larger]
    advice = [f"a smaller {' or '.join(smaller)}"] if smaller else []
    advice += [f"a larger {' or '.join(larger)}"] if larger and devices > 1 else []
    given = "GIB" if limit is None else f"{limit / GIB / MEMORY_FRACTION:.0f}"
    return (
        f"{error}; write {', or '.join(advice) or 'a smaller model'}{remat}; python -m "
        f"bacr_jax.plan --config {config.output.dir}/config.yaml --devices {devices} "
        f"--device-memory {given} says what fits"
    )
