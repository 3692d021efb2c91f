"""How fast the devices are, on the library's own programs: against data sheets and the plan."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bacr_doctor.children import MOST_SECONDS, Check, working
from bacr_doctor.paths import run_dtype, trial
from bacr_doctor.records import Record, Subject, held
from bacr_jax.config.atomics import FLAG
from bacr_jax.parallel import processes
from bacr_plan import schedule, seconds
from bacr_plan.devices import DEVICES, Device, find
from bacr_plan.lengths import Lengths
from bacr_plan.seconds import ASSUMED
from bacr_plan.workload import planned_shape, sizes_of

# Layers that are timed; what stands around them weighs less in a whole model.
_LAYERS = 4
# What is said to be slow: below this share of what a plan assumes.
_SLOW = 0.75
# Rows that are added, their width, and rows of the array: tokens of a micro-batch, most of them one
# of a few. xla issue 46225 took 1 ms for all of them in one row, and 500 ms by compare-and-swap.
_ADDED, _WIDTH, _ROWS = 40_960, 128, 399
# Times the seconds in which memory could be read once, between 40 and 20,000 in that issue.
_MOST_ADDING = 1000.0


def _best_of(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of three runs, after one that compiles."""
    taken = []
    for _ in range(4):
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def sheet(subject: Subject) -> Device | None:
    """The data sheet of the device; None: nobody has written down one."""
    if subject.device is not None:
        return find(subject.device)
    kind = jax.devices()[0].device_kind
    near = [device for device in DEVICES.values() if kind in device.name or device.name in kind]
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30
    return min(near, key=lambda device: abs(device.memory_gib - limit), default=None)


@functools.cache
def bare(dtype: str) -> tuple[float, float]:
    """FLOP/s of one large product, and bytes/s of one large copy."""
    side, count = (8192, 2**28) if jax.default_backend() == "gpu" else (1024, 2**24)
    square, line = jnp.ones((side, side), dtype), jnp.ones(count, jnp.float32)
    product, copy = jax.jit(jnp.matmul), jax.jit(jnp.negative)
    flops = 2 * side**3 / _best_of(lambda: product(square, square))
    return flops, 2 * line.nbytes / _best_of(lambda: copy(line))


def ceiling(subject: Subject) -> Device:
    """The device as its data sheet has it, or else as a bare product and a bare copy do."""
    if (known := sheet(subject)) is not None:
        return known
    flops, moved = bare(run_dtype(subject))
    # A plan takes products in float32 to have half the rate.
    flops *= _per_float32(subject)
    name = "a bare product and copy (no data sheet)"
    return Device(name, 1.0, flops, moved, moved, (0, 0), 1, 1, 1.0)


def _per_float32(subject: Subject) -> int:
    return 2 if run_dtype(subject) == "float32" else 1


def _sizes(subject: Subject) -> dict[str, Any]:
    """A few layers of the run's widths, and enough rows and tokens to keep the device busy."""
    large = jax.default_backend() == "gpu"
    guessed = {"model.preset": "qwen2.5-1.5b"} if large and not subject.named else {}
    shape, rows = planned_shape(subject.under(guessed).config)[0], 128 if large else 16
    names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    return {
        **{f"model.{name}": getattr(shape, name) for name in names},
        "model.num_layers": min(_LAYERS, shape.num_layers),
        "rollout.questions": rows // 8,
        "rollout.group_size": 8,
        "rollout.slots": rows,
        "budget.max": 512 if large else 64,
    }


@functools.cache
def measured(subject: Subject) -> dict[str, float]:
    """Tokens/s of decoding and of updates, and the shares of ceilings by the plan's arithmetic."""
    tried = trial(subject, run_dtype(subject), **_sizes(subject))
    # The first one, of which the batch is made, compiles.
    batch, counters = tried.batch, tried.rollout()[1].counters
    states = [tried.start()]

    def update() -> Any:
        state, metrics = tried.step(states.pop(), batch)
        states.append(state)
        return metrics

    taken, decode = _best_of(update), counters["decode_s"] + counters["answer_s"]
    work, layout = sizes_of(tried.config, 1)
    prompts, sampled, answered = map(
        np.asarray, (batch.prompt_lengths, batch.sampled, batch.answered)
    )
    lengths = Lengths(prompts, sampled, answered)
    work = dataclasses.replace(work, cuts=2, scored=0, draw=lambda: lengths)
    device = ceiling(subject)
    planned = seconds.step_seconds(work, layout, device)
    shares = {
        "matmul": ASSUMED.matmul * planned["update"] / taken,
        "bandwidth": ASSUMED.bandwidth * planned["decode"] / decode,
    }
    tokens = int(sampled.sum() + answered.sum())
    return {
        **shares,
        "decoded_per_s": tokens / decode,
        "learned_per_s": (tokens + int(prompts.sum())) / taken,
        "flops_per_s": shares["matmul"] * device.matmul_flops / _per_float32(subject),
        "bytes_per_s": shares["bandwidth"] * device.memory_bandwidth,
    }


def rates(subject: Subject) -> Record:
    """Measures the rates of the library's programs, next to the rates that a plan assumes."""
    dtype, found, against = run_dtype(subject), measured(subject), ceiling(subject).name
    (flops, moved), tera, giga = bare(dtype), 1e12, 1e9
    seen = (
        f"{dtype}: {found['decoded_per_s']:,.0f} tokens/s decoded, {found['learned_per_s']:,.0f} "
        f"learned; updates reach {found['flops_per_s'] / tera:.3g} TFLOP/s, {found['matmul']:.1%}, "
        f"decoding {found['bytes_per_s'] / giga:.3g} GB/s, {found['bandwidth']:.1%} of {against}; "
        f"a bare product {flops / tera:.3g} TFLOP/s, a bare copy {moved / giga:.3g} GB/s"
    )
    values = {**found, "bare_flops_per_s": flops, "bare_bytes_per_s": moved, "against": against}
    assumed = {"matmul": ASSUMED.matmul, "bandwidth": ASSUMED.bandwidth}
    slow = any(found[name] < _SLOW * share for name, share in assumed.items())
    if sheet(subject) is None or not slow:
        return Record("ok", seen, values=values)
    advice = (
        f"plan assumes {ASSUMED.matmul:.0%} and {ASSUMED.bandwidth:.0%}: look for other processes, "
        "low clocks or a power limit; else believe the seconds below, not plan's"
    )
    return Record("warn", seen, advice, values=values)


def additions(subject: Subject) -> Record:
    """How fast a GPU adds rows into an array by index, as the embedding's gradient does."""
    if jax.default_backend() != "gpu":
        return Record("ok", "no GPU: nothing is added by several at once")
    rows, array = jnp.ones((_ADDED, _WIDTH), jnp.float32), jnp.zeros((_ROWS, _WIDTH), jnp.float32)
    add = jax.jit(lambda array, places, rows: array.at[places].add(rows))
    spread = jnp.arange(_ADDED) % _ROWS
    taken = {
        "one_row": _best_of(lambda: add(array, jnp.zeros_like(spread), rows)),
        "all_rows": _best_of(lambda: add(array, spread, rows)),
    }
    _, moved = bare(run_dtype(subject))
    times = max(taken.values()) * moved / rows.nbytes
    return added(taken, times)


def added(taken: Mapping[str, float], times: float) -> Record:
    """The record of seconds of additions; `times`: the longest over one read of the memory."""
    one, every = (f"{1e3 * taken[name]:.3g} ms" for name in ("one_row", "all_rows"))
    seen = (
        f"{_ADDED:,} rows of {_WIDTH} added into one row in {one}, into {_ROWS} rows in {every}: "
        f"{times:,.0f} times one read of the memory"
    )
    if times <= _MOST_ADDING:
        return Record("ok", seen, values=dict(taken))
    advice = "gradients of the embedding are slow on jaxlib 0.10.2 to 0.11.0: install jax 0.11.2 "
    advice += f"or newer, on Python 3.12 or newer, or set XLA_FLAGS={FLAG}"
    return Record("warn", seen, advice, values=dict(taken))


def plan(subject: Subject) -> Record:
    """Plan's seconds of an iteration of the run, with the shares that were measured."""
    if not subject.named:
        return Record("ok", "no --config to plan")
    found, (work, layout) = measured(subject), sizes_of(subject.config, jax.device_count())
    device, made = ceiling(subject), schedule.iteration(work, layout)
    here = dataclasses.replace(
        device,
        matmul_flops=device.matmul_flops * found["matmul"] / ASSUMED.matmul,
        memory_bandwidth=device.memory_bandwidth * found["bandwidth"] / ASSUMED.bandwidth,
    )
    assumed, real = (seconds.step_seconds(work, layout, one, made) for one in (device, here))
    seen = (
        f"an iteration {sum(real.values()):.3g} s with the measured shares, "
        f"{sum(assumed.values()):.3g} s with those assumed of {device.name}; grading left out"
    )
    return Record("ok", seen, values={"measured": real, "assumed": assumed})


def collectives(subject: Subject) -> Record:
    """All-gather and reduce-scatter over the devices of this machine; two of a CPU stand in."""
    if jax.device_count() == 1 and jax.default_backend() == "gpu":
        return Record("ok", "one GPU: nothing travels")
    if jax.device_count() == 1:
        pair = Check("pair", _over_two_of_a_cpu)
        with working([pair], subject) as following:
            record = following(pair, time.monotonic() + MOST_SECONDS)
        return record or pair.broken("has not ended")
    count, large = jax.device_count(), jax.default_backend() == "gpu"
    mesh, spec = jax.make_mesh((count,), ("x",)), PartitionSpec("x")
    along, whole = (jax.NamedSharding(mesh, part) for part in (spec, PartitionSpec()))
    numbers = np.arange(count * (2**26 if large else 2**21), dtype=np.float32) % 1021
    parts, rows = jax.device_put(numbers, along), jax.device_put(np.stack([numbers] * count), along)
    gather = jax.jit(lambda x: x, out_shardings=whole)
    summed = lambda x: jax.lax.psum_scatter(x[0], "x", tiled=True)
    scatter = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec))
    received = numbers.nbytes * (count - 1) / count
    found = {
        "all-gather": received / _best_of(lambda: gather(parts)),
        "reduce-scatter": received / _best_of(lambda: scatter(rows)),
    }
    off = (np.asarray(gather(parts)) - numbers, np.asarray(scatter(rows)) - count * numbers)
    wrong = [f"{name} gave wrong numbers" for name, by in zip(found, off) if np.abs(by).max() != 0]
    rated = ", ".join(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in found.items())
    record = held(f"{count} devices: {rated}", wrong, found)
    known = sheet(subject)
    share = min(found.values()) / known.link_bandwidth if known else 1.0
    if wrong or not large or share >= _SLOW * ASSUMED.links:
        return record
    advice = f"{share:.0%} of the links' data sheet, where plan assumes {ASSUMED.links:.0%}: see "
    advice += "how GPUs are joined (devices), NCCL_DEBUG=INFO"
    return Record("warn", record.measured, advice, values=found)


def _over_two_of_a_cpu(subject: Subject) -> Record:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    processes.reserve_threads(os.environ)
    return collectives(subject)
