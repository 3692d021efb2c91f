"""Caches of decoded tokens: one array a layer, position == index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import kv_cache, qwen2
from bacr_jax.model.sizes import Qwen2Config

SHAPE = Qwen2Config(13, 8, 16, 2, 2, 1, 4, tie_embeddings=True)


def test_an_empty_cache_has_an_entry_a_layer():
    cache = kv_cache.empty(SHAPE, rows=3, length=5, dtype=jnp.bfloat16)
    assert len(cache) == 2 and cache[0].k.shape == cache[1].v.shape == (3, 1, 5, 4)
    assert cache[0].k.dtype == jnp.bfloat16 and not cache[0].k.any()


def test_a_token_is_written_at_its_own_position_and_past_the_end_nowhere():
    (cache, _) = kv_cache.empty(SHAPE, rows=3, length=5, dtype=jnp.float32)
    token = jnp.arange(1.0, 13.0).reshape(3, 1, 1, 4)
    written = kv_cache.write(cache, token, -token, jnp.array([0, 4, 5]))
    want = np.zeros((3, 1, 5, 4), np.float32)
    want[0, 0, 0], want[1, 0, 4] = token[0, 0, 0], token[1, 0, 0]
    np.testing.assert_array_equal(written.k, want)
    np.testing.assert_array_equal(written.v, -want)


def test_keys_of_a_block_are_turned_heads_first():
    x = jnp.arange(24.0).reshape(1, 3, 2, 4)
    turned = kv_cache.heads_first(x)
    np.testing.assert_array_equal(turned[0, 1, 2], x[0, 2, 1])


@pytest.mark.parametrize("length", [2, 5, 7])
def test_another_length_keeps_the_positions(length):
    values = jnp.arange(1.0, 21.0).reshape(1, 1, 5, 4)
    resized = kv_cache.resize(kv_cache.LayerCache(values, -values), length)
    kept = min(length, 5)
    assert resized.k.shape == (1, 1, length, 4)
    np.testing.assert_array_equal(resized.k[:, :, :kept], values[:, :, :kept])
    np.testing.assert_array_equal(resized.v[:, :, :kept], -values[:, :, :kept])
    assert not resized.k[:, :, kept:].any()


@pytest.mark.parametrize("tied", [True, False])
def test_decode_params_are_cast_and_cut_by_layer(tied):
    shape = Qwen2Config(13, 8, 16, 2, 2, 1, 4, tie_embeddings=tied)
    params = qwen2.init(jax.random.key(0), shape, conditioning=ConditioningConfig())
    decode = kv_cache.decode_params(params, dtype=jnp.bfloat16, conditioned=True)
    kernel = params["layers"]["q_kernel"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(decode.layers[1]["q_kernel"], kernel[1])
    head = params["embed"] if tied else params["lm_head"]
    np.testing.assert_array_equal(decode.head, head.astype(jnp.bfloat16))
    # Gates are multiplied in float32.
    assert len(decode.gates) == 2 and decode.gates[0].dtype == jnp.float32
    plain = kv_cache.decode_params(params, dtype=jnp.bfloat16, conditioned=False)
    assert plain.gates is None
