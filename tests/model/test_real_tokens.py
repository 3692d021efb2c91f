"""Rows as a list of their tokens and back: plain indexing, with gradients that scatter nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.model.real_tokens import RealTokens

# Two rows of the prompt (a, b), of which the second thinks one token more; then a row of one token.
#   a b c .
#   a b d e
#   f . . .
REAL = RealTokens(
    source=jnp.array([0, 1, 2, 6, 7, 8, 0, 0]),
    slot=jnp.array([[0, 1, 2, 0], [0, 1, 3, 4], [5, 0, 0, 0]]),
    is_source=jnp.array([[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]], bool),
    owner=jnp.array([0, 0, 2]),
    shared=jnp.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]], bool),
)
IS_TOKEN = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], bool)


def test_a_list_and_its_rows_by_hand():
    rows = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(REAL.listed(rows), [[0, 1, 2, 6, 7, 8, 0, 0]])
    listed = jnp.arange(10.0, 18.0)[None]
    found = np.where(IS_TOKEN, REAL.spread(listed), 0)
    np.testing.assert_array_equal(found, [[10, 11, 12, 0], [10, 11, 13, 14], [15, 0, 0, 0]])
    np.testing.assert_array_equal(REAL.row[:6], [0, 0, 0, 1, 1, 2])


def test_what_an_entry_sees_by_hand():
    """Trunks a b, with a branch after each: c sees all of it, d and e its first token alone."""
    found = REAL.visible(jnp.array([[2], [1], [1]]), 2)
    before = np.tril(np.ones((8, 8), bool))
    want = ["a", "ab", "abc", "ad", "ade", "f"]
    for entry, names in enumerate(want):
        seen = {"abcdef"[i] for i in np.flatnonzero((found & before)[entry])}
        assert seen == set(names), entry


def test_rows_without_branches():
    found = REAL.visible(jnp.zeros((3, 0), jnp.int32), 4)
    want = ["a", "ab", "abc", "abd", "abde", "f"]
    for entry, names in enumerate(want):
        seen = {"abcdef"[i] for i in np.flatnonzero(found[entry, : entry + 1])}
        assert seen == set(names), entry


def test_which_has_fewer_pairs():
    assert not REAL.has_fewer_pairs  # 8 x 8 against 3 x 4 x 4
    few = dataclasses.replace(REAL, source=REAL.source[:6])
    assert few.has_fewer_pairs


def test_gradients_are_those_of_indexing():
    """Of what is read: tokens of rows, and entries that hold one."""
    rng = np.random.default_rng(0)
    listed, rows = rng.normal(size=(1, 8, 2, 3)), rng.normal(size=(3, 4, 2, 3))
    of_rows = jnp.asarray(rng.normal(size=rows.shape) * np.asarray(IS_TOKEN)[..., None, None])
    of_list = jnp.asarray(rng.normal(size=listed.shape) * (np.arange(8) < 6)[:, None, None])
    gradient = lambda total, x: jax.jit(jax.grad(total))(jnp.asarray(x))
    want = gradient(lambda x: (x[0][REAL.slot] * of_rows).sum(), listed)
    found = gradient(lambda x: (REAL.spread(x) * of_rows).sum(), listed)
    np.testing.assert_allclose(found, want, rtol=1e-6)
    flat = lambda x: x.reshape(12, 2, 3)[REAL.source][None]
    want = gradient(lambda x: (flat(x) * of_list).sum(), rows)
    found = gradient(lambda x: (REAL.listed(x) * of_list).sum(), rows)
    np.testing.assert_allclose(found, want, rtol=1e-6)
