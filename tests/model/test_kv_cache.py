"""Caches of decoded tokens: one array a layer, position == index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import block, kv_cache
from bacr_jax.model.sizes import Qwen2Config
from rollout_world import init

decode_params = jax.jit(
    kv_cache.decode_params, static_argnames=("dtype", "conditioned", "product_dtype")
)
SHAPE = Qwen2Config(13, 8, 16, 2, 2, 1, 4, tie_embeddings=True)


def test_an_empty_cache_has_an_entry_a_layer():
    cache = kv_cache.empty(SHAPE, rows=3, length=5, dtype=jnp.bfloat16)
    assert len(cache) == 2 and cache[0].k.shape == cache[1].v.shape == (3, 1, 5, 4)
    assert cache[0].k.dtype == jnp.bfloat16 and not cache[0].k.any()


def straight(cache):
    """Keys [B, K, S, H] of a cache of either kind."""
    return cache.k.swapaxes(2, 3) if cache.transposed else cache.k


@pytest.mark.parametrize("transposed", [False, True])
def test_a_token_is_written_at_its_own_position_and_past_the_end_nowhere(transposed):
    (cache, _) = kv_cache.empty(SHAPE, rows=3, length=5, dtype=jnp.float32, transposed=transposed)
    assert cache.k.shape == ((3, 1, 4, 5) if transposed else (3, 1, 5, 4)) and cache.length == 5
    token = jnp.arange(1.0, 13.0).reshape(3, 1, 1, 4)
    written = kv_cache.write(cache, token, -token, jnp.array([0, 4, 5]))
    want = np.zeros((3, 1, 5, 4), np.float32)
    want[0, 0, 0], want[1, 0, 4] = token[0, 0, 0], token[1, 0, 0]
    np.testing.assert_array_equal(straight(written), want)
    np.testing.assert_array_equal(written.v, -want)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_cache_of_what_a_block_made_has_heads_first(transposed):
    x = jnp.arange(24.0).reshape(1, 3, 2, 4)
    cache = kv_cache.make(x, -x, transposed=transposed)
    np.testing.assert_array_equal(straight(cache)[0, 1, 2], x[0, 2, 1])
    np.testing.assert_array_equal(cache.v[0, 1, 2], -x[0, 2, 1])


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_go_to_their_places_with_the_positions_there_is_room_for(transposed):
    (cache, _) = kv_cache.empty(SHAPE, rows=3, length=5, dtype=jnp.float32, transposed=transposed)
    x = jnp.arange(1.0, 57.0).reshape(2, 7, 1, 4)
    put = kv_cache.put_rows(cache, kv_cache.make(x, -x, transposed=transposed), jnp.array([2, 3]))
    np.testing.assert_array_equal(straight(put)[2, 0], x[0, :5, 0])
    np.testing.assert_array_equal(put.v[2, 0], -x[0, :5, 0])
    assert not put.k[:2].any() and not put.v[:2].any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("length", [2, 5, 7])
def test_another_length_keeps_the_positions(length, transposed):
    values = jnp.arange(1.0, 21.0).reshape(1, 1, 5, 4)
    keys = values.swapaxes(2, 3) if transposed else values
    resized = kv_cache.resize(kv_cache.LayerCache(keys, -values, transposed), length)
    kept = min(length, 5)
    assert straight(resized).shape == (1, 1, length, 4) == resized.v.shape
    np.testing.assert_array_equal(straight(resized)[:, :, :kept], values[:, :, :kept])
    np.testing.assert_array_equal(resized.v[:, :, :kept], -values[:, :, :kept])
    assert not straight(resized)[:, :, kept:].any()


@pytest.mark.parametrize("tied", [True, False])
def test_decode_params_are_cast_and_cut_by_layer(tied):
    shape = Qwen2Config(13, 8, 16, 2, 2, 1, 4, tie_embeddings=tied)
    params = init(jax.random.key(0), shape, conditioning=ConditioningConfig())
    decode = decode_params(params, dtype=jnp.bfloat16, conditioned=True)
    kernel = params["layers"]["o_kernel"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(decode.layers[1]["o_kernel"], kernel[1])
    head = params["embed"] if tied else params["lm_head"]
    np.testing.assert_array_equal(decode.head, head.astype(jnp.bfloat16))
    # Gates are multiplied in float32.
    assert len(decode.gates) == 2 and decode.gates[0].dtype == jnp.float32
    plain = decode_params(params, dtype=jnp.bfloat16, conditioned=False)
    assert plain.gates is None


def test_matrices_alone_may_be_of_another_type():
    shape = Qwen2Config(13, 8, 16, 2, 2, 1, 4, tie_embeddings=True)
    params = init(jax.random.key(0), shape)
    types = {"dtype": jnp.float32, "product_dtype": jnp.bfloat16}
    decode = decode_params(params, conditioned=False, **types)
    found = {name: leaf.dtype for name, leaf in decode.layers[0].items()}
    assert {name for name, dtype in found.items() if dtype == jnp.bfloat16} == {
        "qkv_transposed",
        "o_transposed",
        "gate_up_transposed",
        "down_transposed",
    }
    # Read row by row the embedding is as it was; as the output matrix it is rounded.
    assert (decode.embed.dtype, decode.head.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(decode.head, decode.embed.astype(jnp.bfloat16))


def test_joined_columns_stand_by_shard():
    """Heads of 2: two of queries, one of keys, one of values on each of two shards."""
    number = lambda start, width: start + np.arange(width, dtype=np.float32)[None]
    layer = {
        "q_kernel": number(0, 8),
        "k_kernel": number(100, 4),
        "v_kernel": number(200, 4),
        "q_bias": number(0, 8)[0],
        "k_bias": number(100, 4)[0],
        "v_bias": number(200, 4)[0],
        "gate_kernel": number(300, 4),
        "up_kernel": number(400, 4),
        "o_kernel": number(500, 3),
    }
    joined = kv_cache.join_products(layer, 2)
    want = [[0, 1, 2, 3, 100, 101, 200, 201], [4, 5, 6, 7, 102, 103, 202, 203]]
    np.testing.assert_array_equal(joined["qkv_kernel"][0], want)
    np.testing.assert_array_equal(joined["qkv_bias"], want)
    np.testing.assert_array_equal(
        joined["gate_up_kernel"][0], [[300, 301, 400, 401], [302, 303, 402, 403]]
    )
    assert sorted(joined) == ["gate_up_kernel", "o_kernel", "qkv_bias", "qkv_kernel"]


@pytest.mark.parametrize(("shards", "rounded"), [(1, None), (2, None), (2, jnp.bfloat16)])
def test_a_joined_layer_computes_what_its_parts_compute(shards, rounded):
    shape = Qwen2Config(13, 8, 16, 1, 4, 2, 4, rope_theta=1e4, tie_embeddings=True)
    params = init(jax.random.key(0), shape)
    layer = jax.tree.map(lambda x: x[0], params["layers"])
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.standard_normal(16, np.float32))
    layer |= {"q_bias": bias, "k_bias": bias[:8], "v_bias": 2 * bias[:8]}
    x = jnp.asarray(rng.standard_normal((2, 3, 8), np.float32))
    rotary = block.rotation(jnp.arange(6).reshape(2, 3), shape)
    seen = lambda q, k, v: (q + jnp.repeat(k - v, 2, axis=2), (q, k, v))
    run = lambda layer: block.apply_block(
        layer, x, rotary, seen, config=shape, product_dtype=rounded
    )

    def as_copied(layer):
        copy = kv_cache.join_products(layer, shards)
        if rounded is None:
            return copy
        is_matrix = lambda name: name.endswith("_kernel")
        copy = {n: x.astype(rounded) if is_matrix(n) else x for n, x in copy.items()}
        return kv_cache.transpose_products(copy)

    apart, joined = jax.jit(run)(layer), jax.jit(lambda layer: run(as_copied(layer)))(layer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), apart, joined)
