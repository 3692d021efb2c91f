"""Measures a decoding step on a GPU: its time, its kernels, and its distance from the memory bound.

    python benchmarks/decoding.py --preset smollm2-135m --rows 256 [--kernels] [--record FILE]
    JAX_PLATFORMS=cpu python benchmarks/decoding.py --preset smollm2-135m --layers 2 --rows 4 \
        --attention xla --copy-mib 16       trial on a CPU; its figures have no meaning

All slots decode random weights in bfloat16, and no row ends. Calls of the decoding program are
timed one by one, each with the copy of its status to the host, as in a rollout. The memory bound is
the time to read all weights and the filled part of the KV cache once, at the bandwidth of a bare
copy on the same device.

With `--kernels`, one more call is profiled. Under the profiler, XLA launches the kernels one by one
and not as CUDA graphs, so only the durations of the kernels are reported: their sum per step
(`busy_ms`) and the most expensive ones. If the sum is far below the time of a step, the step waits
for launches.

The last line is one JSON object.
"""

import argparse
import collections
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import record
from bacr_doctor.rates import copy_array
from bacr_jax.model import kv_cache, qwen2
from bacr_jax.model.sizes import PRESETS, Qwen2Config
from bacr_jax.rollout import RolloutRequest
from bacr_jax.rollout.engine import SlotDecoder
from rollout import World

# The first calls compile the program and fill its buffers.
WARMUP_CALLS = 2
# Copies between two waits, because a wait takes a noticeable part of the time of one copy.
COPIES = 64
COPY_ROUNDS = 9
# Number of kernels in the printed table.
LISTED_KERNELS = 16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=tuple(PRESETS), default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="number of layers (as in the preset)")
    parser.add_argument("--rows", type=int, default=256, help="number of slots")
    parser.add_argument("--prompt", type=int, default=160, help="prompt tokens of each row")
    parser.add_argument("--chunk", type=int, default=16, help="decoding steps in one call")
    parser.add_argument("--rounds", type=int, default=8, help="number of timed calls")
    parser.add_argument("--attention", choices=("cudnn", "xla"), default="cudnn")
    parser.add_argument("--kernels", action="store_true", help="profile one call")
    parser.add_argument("--copy-mib", type=int, default=2048, help="size of the copied array")
    record.add_option(parser)
    return parser.parse_args()


def model_shape(arguments: argparse.Namespace) -> Qwen2Config:
    """Returns the preset with the number of layers of `--layers`."""
    shape = PRESETS[arguments.preset]
    if arguments.layers is None:
        return shape
    return dataclasses.replace(shape, num_layers=arguments.layers)


def random_policy(shape: Qwen2Config) -> World:
    """Returns a policy of random weights in bfloat16 that never closes its thinking."""

    def init(key):
        params = qwen2.init(key, shape)
        return kv_cache.decode_params(params, dtype=jnp.bfloat16, conditioned=False)

    return World(shape, jax.jit(init)(jax.random.key(0)), jnp.bfloat16)


def filled_decoder(arguments: argparse.Namespace, world: World) -> SlotDecoder:
    """Returns a decoder whose slots all have a prompt and enough budget for all calls."""
    rows = arguments.rows
    # One call more, because the profiled call follows the timed ones.
    new_tokens = arguments.chunk * (WARMUP_CALLS + arguments.rounds + 1)
    spec = world.spec(
        max_thinking=new_tokens,
        answer_tokens=1,
        slots=rows,
        windows=1,
        chunk=arguments.chunk,
        attention=arguments.attention,
    )
    decoder = world.engine(world.prompts(rows, arguments.prompt), spec)
    every_row = np.arange(rows)
    budgets = np.full(rows, new_tokens, np.int32)
    request = RolloutRequest(budgets, budgets[:, None]).complete(spec)
    decoder.prefill(request, every_row, every_row)
    return decoder


def decode_call(decoder: SlotDecoder, chunk: int) -> tuple[float, bool]:
    """Decodes one chunk.

    Returns:
      Seconds per step, and True if all logits were finite.
    """
    started = time.perf_counter()
    decoder.decode()
    _, broken, _ = decoder.status()
    return (time.perf_counter() - started) / chunk, not bool(np.any(broken))


def copy_bandwidth(mib: int) -> list[float]:
    """Returns the bandwidth of a copy in bytes read and written per second, one value per round."""
    block = jnp.ones(mib * 2**20 // 2, jnp.bfloat16)
    rates = []
    for _ in range(COPY_ROUNDS + 1):
        started = time.perf_counter()
        copied = block
        for _ in range(COPIES):
            copied = copy_array(copied)
        jax.block_until_ready(copied)
        rates.append(COPIES * 2 * block.nbytes / (time.perf_counter() - started))
    return rates[1:]  # the first round compiles the copy


def profile_kernels(decoder: SlotDecoder, chunk: int) -> dict[str, tuple[float, float]]:
    """Returns the kernels of one call, without those of the host.

    Returns:
      For each kernel, its microseconds per step and its number of launches per step, the most
      expensive kernel first. Empty on a device without a GPU's streams.
    """
    durations: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            decode_call(decoder, chunk)
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if "Stream" not in line.name:
                    continue
                for event in line.events:
                    durations[event.name] += event.duration_ns
                    launches[event.name] += 1
    kernels = {}
    for name, nanoseconds in durations.most_common():
        kernels[name] = (nanoseconds / chunk / 1e3, launches[name] / chunk)
    return kernels


def bytes_per_step(world: World, rows: int, keys: int) -> int:
    """Returns the minimum number of bytes that a step reads: all weights, and the keys and values.

    Args:
      keys: number of filled positions of each row.
    """
    shape = world.shape
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(world.params))
    entries = 2 * shape.num_layers * rows * shape.num_kv_heads * keys * shape.head_dim
    return weights + entries * jnp.dtype(jnp.bfloat16).itemsize


def main() -> None:
    arguments = parse()
    world = random_policy(model_shape(arguments))
    rates = copy_bandwidth(arguments.copy_mib)
    decoder = filled_decoder(arguments, world)
    calls = [decode_call(decoder, arguments.chunk) for _ in range(WARMUP_CALLS + arguments.rounds)]
    step_seconds = [seconds for seconds, _ in calls[WARMUP_CALLS:]]
    step = statistics.median(step_seconds)
    # The number of keys halfway through the timed calls.
    keys = arguments.prompt + arguments.chunk * (2 * WARMUP_CALLS + arguments.rounds) // 2
    bound = bytes_per_step(world, arguments.rows, keys) / statistics.median(rates)
    result = {
        "preset": arguments.preset,
        "device": jax.devices()[0].device_kind,
        "rows": arguments.rows,
        "keys": keys,
        "attention": arguments.attention,
        "chunk": arguments.chunk,
        "step_ms": round(step * 1e3, 3),
        "bound_ms": round(bound * 1e3, 3),
        "roofline_share": round(bound / step, 3),
        "tokens_per_s": round(arguments.rows / step),
        "copy_gb_per_s": round(statistics.median(rates) / 1e9),
        "finite": all(finite for _, finite in calls),
    }
    milliseconds = [seconds * 1e3 for seconds in step_seconds]
    measurements = {"decoding step": record.measurement(milliseconds, "ms")}
    measurements["bare copy"] = record.measurement([rate / 1e9 for rate in rates], "GB/s", "higher")
    if arguments.kernels:
        kernels = profile_kernels(decoder, arguments.chunk)
        for name, (microseconds, count) in list(kernels.items())[:LISTED_KERNELS]:
            print(f"{microseconds:8.1f} us a step, {count:6.1f} launches  {name[:100]}")
        busy = sum(microseconds for microseconds, _ in kernels.values()) / 1e3
        result["busy_ms"] = round(busy, 3)
        result["kernels_per_step"] = round(sum(count for _, count in kernels.values()), 1)
        measurements["kernels of a step"] = record.measurement([busy], "ms")
    record.write(arguments, measurements)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
