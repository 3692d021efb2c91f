"""Attention against a plain fp32 softmax, over masks, lengths, groups and odd shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.errors import UserError
from bacr_jax.model import attention


def reference(q, k, v, mask):
    """Loops over rows, heads and queries; float64; zeros where a query sees nothing."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    b, t, n, h = q.shape
    group = n // k.shape[2]
    out = np.zeros_like(q)
    for i in range(b):
        for j in range(n):
            for s in range(t):
                seen = np.flatnonzero(np.broadcast_to(mask, (b, t, k.shape[1]))[i, s])
                if len(seen) == 0:
                    continue
                scores = k[i, seen, j // group] @ q[i, s, j] / np.sqrt(h)
                weights = np.exp(scores - scores.max())
                out[i, s, j] = weights @ v[i, seen, j // group] / weights.sum()
    return out


def random_qkv(seed, b, t, s, n, kv, h):
    rng = np.random.default_rng(seed)
    shapes = (b, t, n, h), (b, s, kv, h), (b, s, kv, h)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@jax.jit
def plain_softmax(q, k, v, mask):
    return attention.merge(
        [attention.cached_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)], q.dtype
    )


def value_and_gradients(attend, q, k, v):
    """The gradient of half the sum of squares: the output itself is what flows back."""
    run = jax.jit(lambda *x: (lambda out, vjp: (out, vjp(out)))(*jax.vjp(attend, *x)))
    return run(q, k, v)


@pytest.mark.slow
@settings(max_examples=5)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]),
    st.sampled_from([2, 5, 8]),
    st.integers(0, 100),
)
def test_any_mask_gives_the_plain_softmax(b, t, s, heads, h, seed):
    q, k, v = random_qkv(seed, b, t, s, *heads, h)
    mask = np.random.default_rng(seed).random((b, t, s)) < 0.6
    found = plain_softmax(q, k, v, mask)
    np.testing.assert_allclose(found, reference(q, k, v, mask), atol=2e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_token_a_row_sees_its_own_keys_alone(transposed):
    q, k, v = random_qkv(3, 3, 1, 9, 6, 2, 8)
    # Scores far apart in size, and a hidden key with the largest one of all.
    k[:, 2] *= 50
    k[:, 8] *= 500
    seen = np.arange(9) < np.array([[1], [5], [8]])
    keys = k.transpose((0, 2, 3, 1) if transposed else (0, 2, 1, 3))
    values = v.transpose(0, 2, 1, 3)
    attend = jax.jit(attention.token_attention, static_argnames="transposed")
    found = attend(q, keys, values, seen, transposed=transposed)
    np.testing.assert_allclose(found, reference(q, k, v, seen[:, None]), atol=3e-5)


def test_a_token_s_scores_are_not_rounded():
    """Keys that lie apart or together give the same in 16 bits: sums are taken in 32."""
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(3, 2, 1, 40, 2, 1, 64))
    seen = np.ones((2, 40), bool)
    attend = jax.jit(attention.token_attention, static_argnames="transposed")
    values = v.transpose(0, 2, 1, 3)
    one = attend(q, k.transpose(0, 2, 3, 1), values, seen, transposed=True)
    other = attend(q, k.transpose(0, 2, 1, 3), values, seen)
    np.testing.assert_array_equal(one, other)


def test_segments_merge_into_one_softmax():
    q, k, v = random_qkv(0, 2, 3, 9, 4, 2, 8)
    # scores far apart in size: a merge without the maximum would overflow
    k[:, 4:] *= 30
    mask = np.random.default_rng(1).random((2, 3, 9)) < 0.7

    @jax.jit
    def merged(q, k, v, mask):
        of = lambda a, b: attention.cached_attention(
            q, k[:, a:b].swapaxes(1, 2), v[:, a:b].swapaxes(1, 2), mask[:, :, a:b]
        )
        return attention.merge([of(0, 4), of(4, 5), of(5, 9)], q.dtype)

    np.testing.assert_allclose(merged(q, k, v, mask), reference(q, k, v, mask), atol=3e-5)


def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients():
    q, k, v = random_qkv(0, 1, 2, 3, 2, 1, 4)
    total = lambda q: plain_softmax(q, k, v, np.zeros((1, 2, 3), bool)).sum()
    value, gradient = jax.jit(jax.value_and_grad(total))(q)
    assert value == 0
    assert np.isfinite(gradient).all()


def test_causal_rows_see_themselves_and_the_past():
    q, k, v = random_qkv(3, 2, 6, 6, 4, 2, 8)
    mask = np.tril(np.ones((6, 6), bool))[None]
    found = jax.jit(attention.causal_attention)(q, k, v)
    np.testing.assert_allclose(found, reference(q, k, v, mask), atol=2e-5)


def test_tree_mask_token_by_token():
    """Two branches of two tokens on a trunk of five; the picture is the mask."""
    trunk, context = 5, [[2, 5]]
    q, k, v = random_qkv(4, 1, 9, 9, 2, 1, 4)
    picture = """
        x.... .. ..
        xx... .. ..
        xxx.. .. ..
        xxxx. .. ..
        xxxxx .. ..
        xx... x. ..
        xx... xx ..
        xxxxx .. x.
        xxxxx .. xx
    """
    rows = [line.replace(" ", "") for line in picture.split("\n") if line.strip()]
    mask = np.array([[c == "x" for c in row] for row in rows])[None]
    attend = jax.jit(attention.tree_attention, static_argnames="trunk_length")
    found = attend(q, k, v, np.array(context), trunk_length=trunk)
    np.testing.assert_allclose(found, reference(q, k, v, mask), atol=2e-5)


@pytest.mark.parametrize("trunk", [20, 126, 131, pytest.param(1100, marks=pytest.mark.slow)])
def test_a_tree_equals_one_softmax_over_its_mask(trunk):
    """Whether the branches are a block of their own or join the trunk's last one."""
    context, count = jnp.asarray([[3, trunk], [0, 17]]), 6
    q, k, v = random_qkv(6, 2, trunk + count, trunk + count, 2, 1, 4)
    tree = lambda q, k, v: attention.tree_attention(q, k, v, context, trunk_length=trunk)

    def whole(q, k, v):
        of_trunk = jnp.pad(attention.causal_mask(trunk), ((0, 0), (0, 0), (0, count)))
        of_branches = attention.branch_mask(context, None, trunk, count)
        mask = jnp.concatenate([jnp.repeat(of_trunk, 2, 0), of_branches], axis=1)
        return plain_softmax(q, k, v, mask)

    (out, found), (whole_out, want) = (value_and_gradients(f, q, k, v) for f in (tree, whole))
    np.testing.assert_allclose(out, whole_out, atol=2e-6)
    for a, b in zip(found, want):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_cudnn_refuses_32_bit_floats():
    q, k, v = map(jnp.asarray, random_qkv(0, 1, 2, 2, 2, 1, 4))
    with pytest.raises(UserError, match="bfloat16"):
        attention.causal_attention(q, k, v, implementation="cudnn")


def test_cudnn_is_given_an_even_number_of_positions(monkeypatch):
    """Its results and gradients are those without the position that makes it even."""
    seen, public = [], jax.nn.dot_product_attention

    def in_its_place(q, k, v, *, implementation, **rest):
        seen.append(q.shape[1])
        return public(q, k, v, implementation="xla", **rest)

    monkeypatch.setattr(jax.nn, "dot_product_attention", in_its_place)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in random_qkv(3, 2, 7, 7, 4, 2, 8))
    lengths = jnp.asarray([7, 4])
    fused = lambda q, k, v: attention.causal_attention(
        q, k, v, implementation="cudnn", lengths=lengths
    )
    plain = lambda q, k, v: attention.causal_attention(q, k, v)
    real = (np.arange(7) < np.asarray(lengths)[:, None])[..., None, None]
    of_real = lambda f: lambda *x: jnp.where(real, f(*x), 0)
    (out, found), (want_out, want) = (
        value_and_gradients(of_real(f), q, k, v) for f in (fused, plain)
    )
    assert set(seen) == {8}
    np.testing.assert_allclose(out, want_out, atol=0.02)
    for one, other in zip(found, want):
        np.testing.assert_allclose(one, other, atol=0.1)


@pytest.mark.parametrize("length", [127, 128, 129, pytest.param(1100, marks=pytest.mark.slow)])
def test_causal_blocks_equal_one_softmax_over_the_full_mask(length):
    q, k, v = random_qkv(5, 2, length, length, 2, 1, 4)
    real = np.arange(length) >= np.array([[0], [130]])
    visible = jnp.asarray(np.broadcast_to(real[:, None], (2, length, length)))
    blocked = lambda q, k, v: attention.masked_attention(q, k, v, visible)
    mask = jnp.asarray(np.tril(np.ones((length, length), bool)) & real[:, None])
    whole = lambda q, k, v: plain_softmax(q, k, v, mask)
    (out, found), (whole_out, want) = (value_and_gradients(f, q, k, v) for f in (blocked, whole))
    np.testing.assert_allclose(out, whole_out, atol=2e-6)
    for a, b in zip(found, want):
        np.testing.assert_allclose(a, b, atol=1e-4)
