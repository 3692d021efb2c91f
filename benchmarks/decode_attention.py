"""Measures the attention of one decoded token in one layer on a GPU, with cuDNN and with XLA.

    python benchmarks/decode_attention.py [--rows 256] [--keys 384] [--record FILE]
    JAX_PLATFORMS=cpu python benchmarks/decode_attention.py --rows 4 --keys 16 --variants xla
        trial on a CPU; its figures have no meaning

Each row attends to all of its keys, and then to half of them: cuDNN's kernel reads only the valid
keys of a row, XLA's attention reads the full cache. Several caches take turns, so that the keys
come from the memory of the device and not from its L2 cache. The variants alternate. Their results
are compared with plain attention in float32.

The last line is one JSON object: microseconds per layer and TB/s of valid keys and values.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import record
from bacr_jax.model import attention
from bacr_jax.model.kv_cache import LayerCache
from bacr_jax.rollout.cudnn_decoding import attend_rows

# Number of different caches, and of passes over all of them in one call.
CACHES = 8
PASSES = 16
# Largest absolute difference from float32: bfloat16 has 8 significant bits, and values are near 1.
TOLERANCE = 0.02

Attend = Callable[[jax.Array, LayerCache, jax.Array], jax.Array]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--keys", type=int, default=384, help="length of the cache")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--group", type=int, default=3, help="query heads per key/value head")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--variants", nargs="+", choices=("cudnn", "xla"), default=["cudnn", "xla"])
    record.add_option(parser)
    return parser.parse_args()


def with_cudnn(query: jax.Array, cache: LayerCache, lengths: jax.Array) -> jax.Array:
    """Returns the attention output [B, 1, N, H] by cuDNN."""
    return attend_rows(query, cache, lengths)


def with_xla(query: jax.Array, cache: LayerCache, lengths: jax.Array) -> jax.Array:
    """Returns the attention output [B, 1, N, H] by XLA's operations."""
    visible = jnp.arange(cache.k.shape[2]) < lengths[:, None]
    part = attention.cached_attention(query, cache.k, cache.v, visible[:, None])
    return attention.merge([part], query.dtype)


VARIANTS: dict[str, Attend] = {"cudnn": with_cudnn, "xla": with_xla}


@functools.partial(jax.jit, static_argnums=0)
def attend_often(
    attend: Attend, query: jax.Array, caches: list[LayerCache], lengths: jax.Array
) -> jax.Array:
    """Attends CACHES * PASSES times, each time with a query that depends on the last output."""

    def one_pass(_, query):
        for cache in caches:
            query = (query + 0.01 * attend(query, cache, lengths)).astype(query.dtype)
        return query

    return jax.lax.fori_loop(0, PASSES, one_pass, query)


def largest_difference(
    attend: Attend, query: jax.Array, cache: LayerCache, lengths: jax.Array
) -> float:
    """Returns the largest absolute difference from plain attention in float32."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (query, cache))
    expected = with_xla(*exact, lengths)
    actual = jax.jit(attend)(query, cache, lengths)
    return float(jnp.abs(actual.astype(jnp.float32) - expected).max())


def main() -> None:
    arguments = parse()
    rows, keys = arguments.rows, arguments.keys
    cache_shape = (rows, arguments.kv_heads, keys, arguments.head_dim)
    query_shape = (rows, 1, arguments.kv_heads * arguments.group, arguments.head_dim)
    random = jax.jit(jax.random.normal, static_argnums=(1, 2))
    seeds = jax.random.split(jax.random.key(0), 2 * CACHES + 1)
    arrays = [random(seed, cache_shape, jnp.bfloat16) for seed in seeds[1:]]
    caches = [LayerCache(k, v) for k, v in zip(arrays[::2], arrays[1::2], strict=True)]
    query = random(seeds[0], query_shape, jnp.bfloat16)
    measurements = {}
    result: dict[str, object] = {"device": jax.devices()[0].device_kind}
    for valid in (keys, keys // 2):
        lengths = jnp.full(rows, valid, jnp.int32)
        moved = 2 * rows * arguments.kv_heads * valid * arguments.head_dim * query.dtype.itemsize
        seconds: dict[str, list[float]] = {name: [] for name in arguments.variants}
        for name in arguments.variants:
            difference = largest_difference(VARIANTS[name], query, caches[0], lengths)
            if difference > TOLERANCE:
                raise SystemExit(f"{name}: differs by {difference:.2g} from attention in float32")
            jax.block_until_ready(attend_often(VARIANTS[name], query, caches, lengths))
        for _ in range(arguments.rounds):
            for name in arguments.variants:
                started = time.perf_counter()
                jax.block_until_ready(attend_often(VARIANTS[name], query, caches, lengths))
                seconds[name].append((time.perf_counter() - started) / CACHES / PASSES)
        for name, values in seconds.items():
            microseconds = [value * 1e6 for value in values]
            median = statistics.median(microseconds)
            rate = moved / median / 1e6
            print(f"{valid} of {keys} keys  {name:6} {median:8.1f} us  {rate:6.3f} TB/s")
            measurements[f"{valid} of {keys} keys, {name}"] = record.measurement(microseconds, "us")
            result[f"{name}_{valid}_us"] = round(median, 1)
            result[f"{name}_{valid}_tb_per_s"] = round(rate, 3)
    record.write(arguments, measurements)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
