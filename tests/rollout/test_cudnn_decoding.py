"""Attention by rows: the right keys of the right heads, or one line that says why not.

The kernel itself needs an NVIDIA GPU (tests/gpu). Here a plain attention stands in its place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from bacr_jax.errors import UserError
from bacr_jax.model import attention
from bacr_jax.model.kv_cache import LayerCache
from bacr_jax.rollout import cudnn_decoding
from bacr_jax.rollout.cudnn_decoding import attend_rows, check_kernel, partial_rows
from rollout_world import make_prompts


def plain(q, k, v, *, q_seqlen, kv_seqlen, scale, mask_type, qkv_layout, return_residual):
    """What cuDNN computes of [B, N, T, H], and the logarithm of the softmax's denominator."""
    assert mask_type == fused_attention_stablehlo.MaskType.PADDING and qkv_layout == "BNTH"
    assert q_seqlen.dtype == kv_seqlen.dtype == jnp.int32 and q_seqlen.shape == q.shape[:1]
    seen = (jnp.arange(k.shape[2]) < kv_seqlen[:, None])[:, None]
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * scale
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    out = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores, axis=-1), v)
    return (out, jax.nn.logsumexp(scores, axis=-1)) if return_residual else out


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", plain)
    cudnn_decoding._compile.cache_clear()
    yield
    cudnn_decoding._compile.cache_clear()


def test_every_row_sees_its_own_keys(kernel):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    q, k, v = make(3, 1, 6, 4), make(3, 2, 7, 4), make(3, 2, 7, 4)
    lengths = jnp.array([1, 4, 7])
    mask = (jnp.arange(7) < lengths[:, None])[:, None]
    want = attention.merge([attention.cached_attention(q, k, v, mask)], q.dtype)
    np.testing.assert_allclose(attend_rows(q, LayerCache(k, v), lengths), want, atol=1e-6)


def test_every_branch_sees_its_trunk_up_to_its_cut_and_itself(kernel):
    """Merged with a segment of its own, against one softmax over both."""
    rng = np.random.default_rng(1)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    q, k, v = make(2, 3, 4, 4), make(2, 2, 6, 4), make(2, 2, 6, 4)
    cuts = jnp.array([[1, 4, 6], [2, 2, 5]])
    over_trunk = partial_rows(q, LayerCache(k, v), cuts)
    own = make(2, 2, 3, 4), make(2, 2, 3, 4)
    sees_own = jnp.broadcast_to(jnp.eye(3, dtype=bool), (2, 3, 3))
    over_own = attention.cached_attention(q, *own, sees_own)
    found = attention.merge([over_trunk, over_own], q.dtype)
    both = [jnp.concatenate(pair, axis=2) for pair in zip((k, v), own)]
    mask = jnp.concatenate([jnp.arange(6) < cuts[..., None], sees_own], axis=-1)
    want = attention.merge([attention.cached_attention(q, *both, mask)], q.dtype)
    np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.slow
def test_rollouts_say_the_same(kernel, world):
    prompts, budgets = make_prompts([1, 5, 3, 2, 4], 5), np.array([12, 0, 1, 7, 12])
    want = world.roll(prompts, budgets)
    found = world.roll(prompts, budgets, spec=world.spec(attention="cudnn"))
    np.testing.assert_array_equal(found.trunks.tokens, want.trunks.tokens)
    np.testing.assert_array_equal(found.branches.tokens, want.branches.tokens)
    np.testing.assert_allclose(found.trunks.logprobs, want.trunks.logprobs, atol=1e-5)


def test_a_device_without_the_kernel_is_refused_in_one_line(world):
    if jax.default_backend() == "gpu":
        pytest.skip("for machines without cuDNN")
    # No length of the rollouts above, whose traces JAX keeps.
    check_kernel(world.spec(), 23)
    with pytest.raises(
        UserError, match=r"^rollout\.attention=cudnn: .*set rollout\.attention=xla$"
    ):
        check_kernel(world.spec(attention="cudnn"), 23)
