"""Suggests changes to the config of a run that ran out of memory."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import jax

from bacr_jax.errors import UserError
from bacr_jax.out_of_memory import OutOfMemory
from bacr_jax.parallel import MeshShape
from bacr_jax.runs.folder import read_config_file
from bacr_plan import memory, search
from bacr_plan.devices import GIB, MEMORY_FRACTION
from bacr_plan.search import Choice, MemoryLimit
from bacr_plan.workload import Workload, sizes_of

ROLLOUT = ("prefill", "decode", "answers")
UPDATE = ("scoring", "learner")
# Config keys that reduce the memory of a phase. Keys with the smallest effect on speed come first.
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
_OTHER_KEYS = ("rollout.slots", "train.micro_batch_rows", "mesh.fsdp")
# A failed phase needs more memory than the limit, but the difference is unknown. It is assumed to
# be this fraction of the limit.
EXCESS = 0.1


def smaller_choice(
    work: Workload, layout: MeshShape, limit: float, phase: str, *, evaluating: bool
) -> Choice | None:
    """Searches for smaller sizes, or another mesh, with which a failed run would fit.

    The search uses the analytical predictions of `memory`. If they predict that the failed phase
    fits, they underestimate its memory, and the limit is reduced by the difference.

    Args:
      work: the sizes of the failed run.
      layout: its device mesh.
      limit: number of bytes that JAX may use per device.
      phase: the phase that failed, a key of `KEYS`.
      evaluating: True if the failure happened during an evaluation.

    Returns:
      The sizes and the mesh, or None if nothing smaller fits. Also None if the phase is neither in
      `ROLLOUT` nor in `UPDATE`.
    """
    if phase in ROLLOUT:
        sizes = work.evaluation if evaluating else work
        planned = memory.rollout_phase(sizes, layout).peak
        portion = "eval_slots" if evaluating else "slots"
    elif phase in UPDATE:
        planned = memory.update_phase(work, layout).peak
        portion = "micro_rows"
    else:
        return None
    tight_limit = min(limit, planned - EXCESS * limit)
    # If nothing fits within the tight limit, accept any reduction.
    for tried_limit in (tight_limit, min(limit, planned - 1.0)):
        rows = search.largest(portion, work, layout, MemoryLimit(tried_limit))
        if rows:
            smaller = search.with_portion(work, portion, rows)
            return Choice(smaller, layout, tried_limit)
    return search.suggest(work, layout.num_devices, MemoryLimit(tight_limit))


def device_memory() -> float | None:
    """Returns the number of bytes that JAX may use per device of this process.

    Returns None if the limit is unknown, as on CPUs.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return None if limit is None else float(limit)


def explain(error: OutOfMemory, config_file: Path) -> str:
    """Builds the error message for a run that ran out of memory.

    The message contains the original error and config keys with which the run should fit.

    Args:
      error: the error, with the phases of the run in which it occurred.
      config_file: path of the run's config.yaml.
    """
    if error.on_host:
        return f"{error}; free some memory, or use a smaller rollout.questions or data set"
    config = read_config_file(config_file)
    phase = error.phases[0]
    limit = device_memory()
    num_devices = jax.device_count()
    evaluating = "evaluation" in error.phases
    remat_helps = phase == "learner" and config.model.remat != "full"
    remat = " model.remat=full" if remat_helps else ""
    if limit is not None:
        choice = None
        # `sizes_of` raises UserError if the sizes are unknown. The message then lists general
        # advice.
        with contextlib.suppress(UserError):
            work, layout = sizes_of(config, num_devices)
            choice = smaller_choice(work, layout, limit, phase, evaluating=evaluating)
        if choice is not None:
            return f"{error}; the plan would choose {choice.overrides()}{remat}"

    keys = list(KEYS.get(phase, _OTHER_KEYS))
    if evaluating:
        keys = [key.replace("rollout.slots", "eval.slots") for key in keys]
    if config.train.micro_batch_tokens is not None:
        keys = [key.replace("micro_batch_rows", "micro_batch_tokens") for key in keys]
    gib = "GIB" if limit is None else f"{limit / GIB / MEMORY_FRACTION:.0f}"
    return (
        f"{error}; use {_advice(keys, num_devices)}{remat}; bacr plan --config {config_file} "
        f"--devices {num_devices} --device-memory {gib} prints what fits"
    )


def _advice(keys: Sequence[str], num_devices: int) -> str:
    """Describes which keys to decrease and, with several devices, which mesh keys to increase."""
    mesh_keys = [key for key in keys if key.startswith("mesh.")]
    other_keys = [key for key in keys if key not in mesh_keys]
    advice = []
    if other_keys:
        advice.append(f"a smaller {' or '.join(other_keys)}")
    if mesh_keys and num_devices > 1:
        advice.append(f"a larger {' or '.join(mesh_keys)}")
    return ", or ".join(advice) or "a smaller model"
