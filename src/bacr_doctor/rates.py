"""Measures the library's speed on this machine.

The speed is compared with the data sheet of the device and with the rates that `bacr plan` assumes.
`checks` lists the functions that return a `Record`. They time a few layers with the shape of the
run's model. To time whole models, use the scripts in `benchmarks/`.
"""

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bacr_doctor.children import MOST_SECONDS, Check, child_process
from bacr_doctor.records import Record, Subject, ok_or_broken
from bacr_doctor.trial import Trial, make_trial, run_dtype
from bacr_jax.config.atomics import FLAG
from bacr_jax.parallel import processes
from bacr_plan import schedule, seconds
from bacr_plan.devices import DEVICES, Device, find
from bacr_plan.lengths import Lengths
from bacr_plan.seconds import ASSUMED
from bacr_plan.workload import planned_shape, sizes_of

_GIGA = 1e9
_TERA = 1e12
# Maximum number of layers to time. In a whole model, embedding and output head are a smaller share.
_LAYERS = 4
# Number of timed runs, after one run that includes compilation.
_RUNS = 3
# A device counts as slow below this fraction of the rates that `bacr plan` assumes.
_SLOW = 0.75
# Benchmark of scatter-add: number of rows to add, width of a row, and number of rows of the target
# array. The sizes resemble the tokens of a micro-batch in which most tokens have one of a few ids.
# In xla issue 46225, adding all rows into one row took 1 ms with atomic additions, and 500 ms with
# compare-and-swap loops.
_ADDED_ROWS = 40_960
_WIDTH = 128
_ARRAY_ROWS = 399
# Maximum time of the scatter-add, as a multiple of the time to read its rows once. In xla issue
# 46225, the multiple was 40 with atomic additions and 20,000 with compare-and-swap loops.
_MOST_READS = 1000.0
# Number of float32 values per device in the array that collectives transfer.
_GPU_VALUES = 2**26
_CPU_VALUES = 2**21
# The values are integers below this limit, so that their float32 sums are exact.
_LARGEST_VALUE = 1021
# Number of copies between two waits. One copy of 1 GiB takes about 0.5 ms on an H200, so a wait
# after each copy would be a noticeable part of the time.
_COPIES = 8

# Copies an array within the memory of its device. XLA compiles this function to one copy
# instruction. An element-wise pass, such as a negation, reached a lower bandwidth on an H200.
copy_array = jax.jit(jnp.copy)


def _fastest_seconds(run: Callable[[], Any]) -> float:
    """Returns the shortest time of three calls in seconds, after one call to compile."""
    times = []
    for _ in range(1 + _RUNS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return min(times[1:])


def data_sheet(subject: Subject) -> Device | None:
    """Returns the data sheet of the device that --device names, or of this machine's first device.

    A data sheet matches if the device's name contains its name as whole words, or the other way
    round: "NVIDIA A10" does not match "NVIDIA A100-SXM4-40GB". If several data sheets match, the
    one with the closest memory size is returned. The result is None if no data sheet matches.
    """
    if subject.device is not None:
        return find(subject.device)
    device = jax.devices()[0]
    kind = device.device_kind
    memory = device.memory_stats() or {}
    memory_gib = memory.get("bytes_limit", 0) / 2**30
    similar = [
        sheet
        for sheet in DEVICES.values()
        if _has_words(kind, sheet.name) or _has_words(sheet.name, kind)
    ]

    def memory_difference(sheet: Device) -> float:
        return abs(sheet.memory_gib - memory_gib)

    return min(similar, key=memory_difference, default=None)


def _has_words(text: str, words: str) -> bool:
    """True if `words` occurs in a text and ends at the end of a word."""
    return re.search(rf"{re.escape(words)}(?!\w)", text) is not None


@functools.cache
def measure_peak(dtype: str) -> tuple[float, float]:
    """Measures the peak rates of this device.

    Returns:
      FLOP/s of a large matrix product in `dtype`, and bytes/s (read and written) of copies of a
      large array.
    """
    on_gpu = jax.default_backend() == "gpu"
    side = 8192 if on_gpu else 1024
    count = 2**28 if on_gpu else 2**24
    square = jnp.ones((side, side), dtype)
    product = jax.jit(jnp.matmul)
    product_seconds = _fastest_seconds(lambda: product(square, square))
    flops_per_s = 2 * side**3 / product_seconds

    line = jnp.ones(count, jnp.float32)

    def copy_often() -> jax.Array:
        copied = line
        for _ in range(_COPIES):
            copied = copy_array(copied)
        return copied

    copy_seconds = _fastest_seconds(copy_often) / _COPIES
    # A copy reads and writes every byte.
    bytes_per_s = 2 * line.nbytes / copy_seconds
    return flops_per_s, bytes_per_s


def device_peak(subject: Subject) -> Device:
    """Returns the peak rates of the device: from its data sheet, or measured if it has no sheet."""
    sheet = data_sheet(subject)
    if sheet is not None:
        return sheet
    flops_per_s, bytes_per_s = measure_peak(run_dtype(subject))
    return Device(
        name="a bare product and copy (no data sheet)",
        memory_gib=1.0,
        # Compensate for `bacr plan`, which halves the rate for float32.
        matmul_flops=flops_per_s * _float32_factor(subject),
        memory_bandwidth=bytes_per_s,
        link_bandwidth=bytes_per_s,
        # The remaining fields are placeholders that the planner does not use here.
        capability=(0, 0),
        cores=1,
        l2_mib=1,
        clock_ghz=1.0,
    )


def _float32_factor(subject: Subject) -> int:
    """Returns the divisor that `bacr plan` applies to FLOP/s: 2 in float32, otherwise 1."""
    return 2 if run_dtype(subject) == "float32" else 1


def _sizes(subject: Subject) -> dict[str, Any]:
    """Returns config overrides for the timed model, a few layers of the run's model.

    Without a config on the command line, a GPU uses the widths of Qwen2.5-1.5B.
    """
    on_gpu = jax.default_backend() == "gpu"
    preset = {"model.preset": "qwen2.5-1.5b"} if on_gpu and not subject.named else {}
    config = subject.with_keys(preset).config
    shape, _ = planned_shape(config.data, config.model)
    rows = 128 if on_gpu else 16
    keys: dict[str, Any] = {}
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        keys[f"model.{name}"] = getattr(shape, name)
    return {
        **keys,
        "model.num_layers": min(_LAYERS, shape.num_layers),
        "rollout.questions": rows // 8,
        "rollout.group_size": 8,
        "rollout.slots": rows,
        "budget.max": 512 if on_gpu else 64,
    }


@functools.cache
def measure_throughput(subject: Subject) -> dict[str, float]:
    """Times a rollout and an update.

    Returns:
      `matmul`, `bandwidth`: fraction of the device's peak FLOP/s that updates reach, and fraction
      of its peak bandwidth that decoding reaches, computed with the cost model of `bacr plan`.
      `decoded_per_s`, `learned_per_s`: throughput in tokens/s. `flops_per_s`, `bytes_per_s`: the
      absolute rates for the two fractions.
    """
    trial = make_trial(subject, run_dtype(subject), **_sizes(subject))
    # The access to `batch` samples a first rollout, which includes compilation. Only the second
    # rollout is timed.
    batch = trial.batch
    counters = trial.rollout().counters
    decode_seconds = counters["decode_s"] + counters["answer_s"]
    update_seconds = _update_seconds(trial)

    prompt_lengths = np.asarray(batch.prompt_lengths)
    sampled = np.asarray(batch.sampled)
    answered = np.asarray(batch.answered)
    lengths = Lengths(prompt_lengths, sampled, answered)
    work, layout = sizes_of(trial.config, 1)
    work = dataclasses.replace(
        work,
        cuts=2,
        scored=0,
        draw=lambda: lengths,
    )
    device = device_peak(subject)
    # The times of a bandwidth-bound and of a launch-bound step are not comparable, so the share of
    # the bandwidth is computed without the time of kernel launches.
    planned = seconds.step_seconds(work, layout, device, launch=0.0)
    matmul_share = ASSUMED.matmul * planned["update"] / update_seconds
    bandwidth_share = ASSUMED.bandwidth * planned["decode"] / decode_seconds
    tokens = int(sampled.sum() + answered.sum())
    return {
        "matmul": matmul_share,
        "bandwidth": bandwidth_share,
        "decoded_per_s": tokens / decode_seconds,
        "learned_per_s": (tokens + int(prompt_lengths.sum())) / update_seconds,
        "flops_per_s": matmul_share * device.matmul_flops / _float32_factor(subject),
        "bytes_per_s": bandwidth_share * device.memory_bandwidth,
    }


def _update_seconds(trial: Trial) -> float:
    """Returns the shortest wall-clock time of an update, in seconds."""
    # A train step donates its input state, so each update starts from the state that the last one
    # returned.
    states = [trial.start()]

    def update() -> Any:
        state, metrics = trial.step(states.pop(), trial.batch)
        states.append(state)
        return metrics

    return _fastest_seconds(update)


def rates(subject: Subject) -> Record:
    """Reports throughput and the fraction of the device's peak rates that the library reaches.

    The status is `warn` if a fraction is well below the fraction that `bacr plan` assumes.
    """
    dtype = run_dtype(subject)
    throughput = measure_throughput(subject)
    peak_name = device_peak(subject).name
    peak_flops, peak_bytes = measure_peak(dtype)
    measured = (
        f"{dtype}: {throughput['decoded_per_s']:,.0f} tokens/s decoded, "
        f"{throughput['learned_per_s']:,.0f} learned; "
        f"updates reach {throughput['flops_per_s'] / _TERA:.3g} TFLOP/s, "
        f"{throughput['matmul']:.1%}, "
        f"decoding {throughput['bytes_per_s'] / _GIGA:.3g} GB/s, "
        f"{throughput['bandwidth']:.1%} of {peak_name}; "
        f"a bare product {peak_flops / _TERA:.3g} TFLOP/s, "
        f"a bare copy {peak_bytes / _GIGA:.3g} GB/s"
    )
    values = {
        **throughput,
        "bare_flops_per_s": peak_flops,
        "bare_bytes_per_s": peak_bytes,
        "against": peak_name,
    }
    slow_matmul = throughput["matmul"] < _SLOW * ASSUMED.matmul
    slow_bandwidth = throughput["bandwidth"] < _SLOW * ASSUMED.bandwidth
    if data_sheet(subject) is None or not (slow_matmul or slow_bandwidth):
        return Record("ok", measured, values=values)
    advice = (
        f"plan assumes {ASSUMED.matmul:.0%} and {ASSUMED.bandwidth:.0%}: look for other processes, "
        "low clocks or a power limit; if there are none, use the seconds below and not plan's"
    )
    return Record("warn", measured, advice, values=values)


def additions(subject: Subject) -> Record:
    """Measures the speed of scatter-add on a GPU, which the gradient of the embedding uses."""
    if jax.default_backend() != "gpu":
        return Record("ok", "no GPU: additions are not parallel")
    rows = jnp.ones((_ADDED_ROWS, _WIDTH), jnp.float32)
    array = jnp.zeros((_ARRAY_ROWS, _WIDTH), jnp.float32)
    to_all_rows = jnp.arange(_ADDED_ROWS) % _ARRAY_ROWS
    to_one_row = jnp.zeros_like(to_all_rows)

    @jax.jit
    def add(array: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
        return array.at[indices].add(rows)

    times = {
        "one_row": _fastest_seconds(lambda: add(array, to_one_row, rows)),
        "all_rows": _fastest_seconds(lambda: add(array, to_all_rows, rows)),
    }
    _, bytes_per_s = measure_peak(run_dtype(subject))
    read_seconds = rows.nbytes / bytes_per_s
    longest = max(times.values())
    return additions_record(times, longest / read_seconds)


def additions_record(times: Mapping[str, float], reads: float) -> Record:
    """Builds the record of the `additions` check. The status is `warn` if scatter-add is slow.

    Args:
      times: time in seconds to add many rows to one row of an array (`one_row`), and to add them
        to all rows in turn (`all_rows`).
      reads: the longer of these times, as a multiple of the time to read the added rows once.
    """
    one_row_ms = 1e3 * times["one_row"]
    all_rows_ms = 1e3 * times["all_rows"]
    measured = (
        f"{_ADDED_ROWS:,} rows of {_WIDTH} added into one row in {one_row_ms:.3g} ms, "
        f"into {_ARRAY_ROWS} rows in {all_rows_ms:.3g} ms: "
        f"{reads:,.0f} times one read of the memory"
    )
    if reads <= _MOST_READS:
        return Record("ok", measured, values=dict(times))
    advice = (
        "gradients of the embedding are slow on jaxlib 0.10.2 to 0.11.0: install jax 0.11.2 "
        f"or newer, on Python 3.12 or newer, or set XLA_FLAGS={FLAG}"
    )
    return Record("warn", measured, advice, values=dict(times))


def plan(subject: Subject) -> Record:
    """Predicts the duration of one iteration of the run from the measured throughput."""
    if not subject.named:
        return Record("ok", "no --config to plan")
    throughput = measure_throughput(subject)
    work, layout = sizes_of(subject.config, jax.device_count())
    device = device_peak(subject)
    iteration = schedule.iteration(work, layout)
    # The planner multiplies peak rates by the fractions in `ASSUMED`. Scale the peak rates so that
    # the products are the measured rates.
    matmul_flops = device.matmul_flops * throughput["matmul"] / ASSUMED.matmul
    bandwidth = device.memory_bandwidth * throughput["bandwidth"] / ASSUMED.bandwidth
    measured_device = dataclasses.replace(
        device,
        matmul_flops=matmul_flops,
        memory_bandwidth=bandwidth,
    )
    # Only GPUs wait for the launches of their kernels.
    launch = ASSUMED.launch if jax.default_backend() == "gpu" else 0.0
    predict = functools.partial(
        seconds.step_seconds, work, layout, planned=iteration, launch=launch
    )
    assumed_seconds = predict(device=device)
    measured_seconds = predict(device=measured_device)
    measured = (
        f"an iteration {sum(measured_seconds.values()):.3g} s with the measured shares, "
        f"{sum(assumed_seconds.values()):.3g} s with the shares assumed of {device.name}; "
        "grading left out"
    )
    values = {"measured": measured_seconds, "assumed": assumed_seconds}
    return Record("ok", measured, values=values)


def collectives(subject: Subject) -> Record:
    """Checks the results and the speed of all-gather and reduce-scatter on this machine's devices.

    A CPU is split into two JAX devices in a child process. With a single GPU, the check is skipped.
    """
    on_gpu = jax.default_backend() == "gpu"
    if jax.device_count() > 1:
        return _check_collectives(subject, large=on_gpu)
    if on_gpu:
        return Record("ok", "one GPU: no data between devices")
    check = Check("pair", _collectives_of_two_cpu_devices)
    with child_process([check], subject) as next_record:
        record = next_record(check, time.monotonic() + MOST_SECONDS)
    return record or check.broken_record("has not ended")


def _check_collectives(subject: Subject, *, large: bool) -> Record:
    """Runs all-gather and reduce-scatter over all devices.

    The status is `warn` if the speed on GPUs is well below the link bandwidth that `bacr plan`
    assumes.

    Args:
      large: True for arrays of a size suitable for GPUs, False for smaller arrays.
    """
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("x",))
    spec = PartitionSpec("x")
    split = jax.NamedSharding(mesh, spec)
    replicated = jax.NamedSharding(mesh, PartitionSpec())
    per_device = _GPU_VALUES if large else _CPU_VALUES
    numbers = np.arange(count * per_device, dtype=np.float32) % _LARGEST_VALUE

    parts = jax.device_put(numbers, split)
    gather = jax.jit(lambda x: x, out_shardings=replicated)

    def reduce_scatter(x: jax.Array) -> jax.Array:
        numbers_here = x[0]
        return jax.lax.psum_scatter(numbers_here, "x", tiled=True)

    # Every device has the same values, so their sum is `count` times the values.
    rows = jax.device_put(np.stack([numbers] * count), split)
    scatter = jax.jit(
        jax.shard_map(
            reduce_scatter,
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
    )

    received_bytes = numbers.nbytes * (count - 1) / count
    speeds = {
        "all-gather": received_bytes / _fastest_seconds(lambda: gather(parts)),
        "reduce-scatter": received_bytes / _fastest_seconds(lambda: scatter(rows)),
    }
    problems = []
    gathered = np.asarray(gather(parts))
    if not np.array_equal(gathered, numbers):
        problems.append("all-gather gave wrong numbers")
    scattered = np.asarray(scatter(rows))
    if not np.array_equal(scattered, count * numbers):
        problems.append("reduce-scatter gave wrong numbers")
    speeds_text = ", ".join(f"{name} {speed / _GIGA:.3g} GB/s" for name, speed in speeds.items())
    record = ok_or_broken(f"{count} devices: {speeds_text}", problems, speeds)
    sheet = data_sheet(subject)
    if problems or not large or sheet is None:
        return record
    share = min(speeds.values()) / sheet.link_bandwidth
    if share >= _SLOW * ASSUMED.links:
        return record
    advice = (
        f"{share:.0%} of the links' data sheet, where plan assumes {ASSUMED.links:.0%}: see how "
        "GPUs are joined (devices), NCCL_DEBUG=INFO"
    )
    return Record("warn", record.measured, advice, values=speeds)


def _collectives_of_two_cpu_devices(subject: Subject) -> Record:
    """Splits the CPU of this process into two JAX devices and checks the collectives."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    processes.reserve_threads(os.environ)
    return collectives(subject)
