"""The real programs of a tiny run, compiled for made-up devices in a process of their own."""

import math

import jax
import pytest

from bacr_jax.config import io as config_io
from bacr_jax.planning import compiling, workload

TINY = """
model: {hidden_size: 16, intermediate_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 2,
        compute_dtype: float32, logprob_chunk: 16}
data: {max_prompt_tokens: 8}
budget: {min: 4, max: 16}
cuts: {count: 2}
rollout: {questions: 4, group_size: 2, answer_tokens: 4, chunk: 4}
eval: {budgets: [16]}
"""


@pytest.fixture
def config_of(tmp_path):
    def make(*overrides):
        path = tmp_path / "tiny.yaml"
        path.write_text(TINY)
        config = config_io.load([path], overrides)
        config_io.check(config)
        return config

    return make


@pytest.mark.slow
def test_two_devices_hold_half_of_the_state_each(config_of):
    config = config_of("train.micro_batch_rows=2")
    shape, _ = workload.model_shape(config)
    how = {"device": "a100-80", "backend": "cpu", "fused_attention": False}
    two = compiling.measure(config, shape, devices=2, **how)
    assert two.keys() == {"train", "decode"}
    assert two["train"].temporaries > 0
    embed = shape.vocab_size * shape.hidden_size
    # fp32 masters and moments of everything but the small whole things, and then those.
    assert two["train"].arguments > 12 * embed / 2


@pytest.mark.parametrize("by", ["train.micro_batch_rows=4", "train.micro_batch_tokens=200"])
def test_every_way_to_split_an_update_can_be_lowered(config_of, by):
    config = config_of(by, "loss.kl_coef=0.1")
    shape, _ = workload.model_shape(config)
    described = compiling.described(config, shape, fused_attention=False)
    programs = compiling.Programs(described, shape.vocab_size, jax.devices()[:1])
    state = 12 * shape.num_parameters
    size = lambda leaf: math.prod(leaf.shape) * leaf.dtype.itemsize
    given = sum(map(size, jax.tree.leaves(programs.train().args_info)))
    assert given > state


def test_a_decoding_step_can_be_lowered(config_of):
    config = config_of("rollout.slots=4")
    shape, _ = workload.model_shape(config)
    described = compiling.described(config, shape, fused_attention=False)
    programs = compiling.Programs(described, shape.vocab_size, jax.devices()[:1])
    shapes = [leaf.shape for leaf in jax.tree.leaves(programs.decode().args_info)]
    # Keys and values of two layers: 4 slots of 8 + 16 positions, 2 heads of 8.
    cached = [x for x in shapes if math.prod(x) == 4 * 24 * 2 * 8 and x[0] == 4 and len(x) == 4]
    assert len(cached) == 4
