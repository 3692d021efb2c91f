"""The table: every parameter is in it, moments follow parameters, decoding keeps weights whole."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from bacr_jax.config import ConditioningConfig, OptimizerConfig
from bacr_jax.learner.optimizer import policy_optimizer
from bacr_jax.model import kv_cache, qwen2
from bacr_jax.model.sizes import preset
from bacr_jax.parallel import AXES, DECODE, sharding_of, shardings
from bacr_jax.parallel.shardings import AXES_OF

MESH = AbstractMesh((2, 2, 2), AXES)
SHAPE = preset("qwen2.5-7b")
PARAMS = jax.eval_shape(
    lambda key: qwen2.init(key, SHAPE, conditioning=ConditioningConfig()), jax.random.key(0)
)


def specs(tree, **how):
    found = shardings(tree, MESH, **how)
    return {
        jax.tree_util.keystr(path): where.spec
        for path, where in jax.tree_util.tree_flatten_with_path(found)[0]
    }


def test_every_parameter_is_in_the_table_with_its_rank():
    normed = dataclasses.replace(SHAPE, num_layers=2, qk_norm=True)
    others = jax.eval_shape(lambda: qwen2.init(jax.random.key(0), normed))
    for path, leaf in jax.tree_util.tree_flatten_with_path((PARAMS, others))[0]:
        axes = AXES_OF[path[-1].key]
        assert len(axes) - (axes[0] == "layers") <= leaf.ndim <= len(axes)


def test_parameters_are_split_over_fsdp_and_tensor():
    found = specs(PARAMS)
    assert found["['layers']['q_kernel']"] == P(None, "fsdp", "tensor")
    assert found["['layers']['o_kernel']"] == P(None, "tensor", "fsdp")
    assert found["['layers']['down_kernel']"] == P(None, "tensor", "fsdp")
    assert found["['layers']['k_bias']"] == P(None, "tensor")
    assert found["['embed']"] == found["['lm_head']"] == P("tensor", "fsdp")
    assert found["['final_norm']"] == P()
    assert found["['budget']['w2']"] == P(None, "fsdp")


def test_a_device_holds_its_share_of_nearly_everything():
    size = lambda leaf, where: math.prod(where.shard_shape(leaf.shape))
    held = jax.tree.map(size, PARAMS, shardings(PARAMS, MESH))
    whole = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    # fsdp 2 x tensor 2; norms are whole, the budget module is split over fsdp alone
    assert 0.25 <= sum(jax.tree.leaves(held)) / whole < 0.251


def test_moments_are_split_like_their_parameters():
    tx = policy_optimizer(OptimizerConfig(), 10)
    found = specs(jax.eval_shape(tx.init, PARAMS))
    want = specs(PARAMS)
    moments = {path: spec for path, spec in found.items() if ".mu[" in path or ".nu[" in path}
    assert len(moments) == 2 * len(want)
    for path, spec in moments.items():
        assert spec == next(w for p, w in want.items() if path.endswith(p))


def decode_copy(**types):
    make = functools.partial(kv_cache.decode_params, conditioned=True, shards=2, **types)
    return specs(jax.eval_shape(make, PARAMS), rules=DECODE)


def test_matrices_that_are_transposed_are_split_over_the_same_columns():
    found = decode_copy(dtype=jnp.float32, product_dtype=jnp.bfloat16)
    assert found[".layers[3]['qkv_transposed']"] == P("tensor")
    assert found[".layers[3]['gate_up_transposed']"] == P("tensor")
    assert found[".layers[3]['o_transposed']"] == P(None, "tensor")
    assert found[".layers[3]['down_transposed']"] == P(None, "tensor")


def test_the_decode_copy_is_split_over_tensor_only():
    found = decode_copy(dtype=jnp.bfloat16)
    assert found[".layers[3]['qkv_kernel']"] == P(None, "tensor")
    assert found[".layers[3]['qkv_bias']"] == P("tensor")
    assert found[".layers[3]['down_kernel']"] == P("tensor")
    assert found[".embed"] == found[".head"] == P("tensor")
    assert found[".gates[0]"] == P()


def test_an_odd_vocabulary_stays_whole():
    where = sharding_of(MESH)
    assert where("embed", (29, 64)).spec == P(None, "fsdp")
    assert where("layers/k_kernel", (3, 64, 32)).spec == P(None, "fsdp", "tensor")
    assert where("hidden/kernel", (96, 64)).spec == P()
