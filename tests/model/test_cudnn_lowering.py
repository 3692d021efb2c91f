"""The cuDNN path traced and lowered for CUDA on a machine without a GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from bacr_jax.model import attention, qwen2
from bacr_jax.model.compute import Compute
from bacr_jax.model.sizes import Qwen2Config


@pytest.fixture
def as_if_on_an_a100(monkeypatch):
    """The checks ask the machine for its cuDNN and its GPU; an A100 would answer 9.10 and 8.0."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: float(wanted) <= 8.0)


def lowered(f, *arguments):
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(4, 4, 128), (28, 4, 320), (6, 2, 101)])
def test_forward_and_backward_are_fused_kernels(as_if_on_an_a100, heads, kv_heads, length):
    q, k = abstract(2, length, heads, 128), abstract(2, length, kv_heads, 128)
    lengths = abstract(2, dtype=jnp.int32)

    def attend(q, k, v, lengths):
        return attention.causal_attention(q, k, v, implementation="cudnn", lengths=lengths)

    assert "__cudnn$fmhaSoftmax" in lowered(attend, q, k, k, lengths)
    total = lambda *inputs: attend(*inputs).astype(jnp.float32).sum()
    assert "__cudnn$fmhaSoftmaxBackward" in lowered(jax.grad(total, (0, 1, 2)), q, k, k, lengths)


def test_the_learners_tree_pass_uses_it(as_if_on_an_a100):
    shape = Qwen2Config(64, 256, 320, 2, 4, 2, 64)
    params = jax.eval_shape(lambda: qwen2.init(jax.random.key(0), shape))
    ids = lambda *size: abstract(*size, dtype=jnp.int32)

    def loss(params, trunk, branches, context, lengths):
        states = qwen2.forward_tree(
            params,
            qwen2.Tree(trunk, branches, context, lengths=lengths),
            config=shape,
            compute=Compute(dtype=jnp.bfloat16, implementation="cudnn"),
        )
        return sum(x.astype(jnp.float32).sum() for x in states)

    text = lowered(jax.grad(loss), params, ids(2, 128), ids(2, 2, 16), ids(2, 2), ids(2))
    assert "__cudnn$fmhaSoftmaxBackward" in text
