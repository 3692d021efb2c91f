"""One decoder layer, part by part: norm, rotation, product, and where the budget joins."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.model import block
from bacr_jax.model.budget import Conditioned
from bacr_jax.model.sizes import Qwen2Config

# width 4, one layer of one head of width 4
SHAPE = Qwen2Config(5, 4, 6, 1, 1, 1, 4, rope_theta=1e4, tie_embeddings=True)
X = np.array([[[1.0, -2.0, 0.5, 3.0], [0.0, 1.0, 2.0, -1.0]]], np.float32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


norm = jax.jit(block.rms_norm, static_argnums=2)


@functools.partial(jax.jit, static_argnames=("theta",))
def turned(x, positions, *, theta):
    """Each head of x at its position."""
    shape = dataclasses.replace(SHAPE, head_dim=x.shape[-1], rope_theta=theta)
    return block.rotate(x, block.rotation(positions, shape))


def turns():
    """Of positions 0 and 1."""
    return block.rotation(jnp.array([[0, 1]]), SHAPE)


def values(q, k, v):
    """In place of attention: each position's own value."""
    return v, (q, k)


def plus_one(x):
    return x + 1.0


@functools.partial(jax.jit, static_argnums=2)
def run(layer, x, condition=None):
    return block.Block(SHAPE).apply({"params": layer}, x, turns(), values, condition)


@jax.jit
def gated(layer, conditioned):
    x = jnp.asarray(X)
    return block.apply_block(layer, x, turns(), values, config=SHAPE, conditioned=conditioned)[0]


@pytest.fixture(scope="module")
def layer():
    make = lambda key: block.Block(SHAPE).init(key, jnp.asarray(X), turns(), values)
    shapes = jax.eval_shape(make, jax.random.key(0))["params"]
    return {name: normal(i, *leaf.shape) for i, (name, leaf) in enumerate(shapes.items())}


class TestNorm:
    def test_by_hand(self):
        # mean of squares (9 + 16) / 2
        found = norm(np.float32([[3, -4]]), np.float32([1, 2]), 0.0)
        np.testing.assert_allclose(found, np.array([[3, -8]]) / np.sqrt(12.5), rtol=1e-6)

    def test_epsilon_stands_inside_the_root(self):
        found = norm(np.float32([[0.1]]), np.ones(1, np.float32), 0.15)
        np.testing.assert_allclose(found, [[0.1 / np.sqrt(0.16)]], rtol=1e-6)

    def test_16_bit_streams_are_normed_in_32_bits(self):
        # squares of 300 overflow float16; 300 / 300 does not
        found = norm(np.full((1, 2), 300, np.float16), np.ones(2, np.float32), 0.0)
        assert found.dtype == jnp.float16
        np.testing.assert_array_equal(found, [[1, 1]])


class TestRotation:
    def test_pairs_the_halves_of_a_head_at_the_published_angles(self):
        # frequencies 1 and 100^(-1/2); components 0 and 2 turn together, 1 and 3
        found = turned(np.float32([[[[1, 0, 0, 2]]]]), np.array([[3]]), theta=100.0)
        expected = [np.cos(3), -2 * np.sin(0.3), np.sin(3), 2 * np.cos(0.3)]
        np.testing.assert_allclose(found[0, 0, 0], expected, atol=1e-6)

    def test_scores_depend_on_how_far_apart_positions_are(self):
        """One query and one key: 3 apart, 3 apart elsewhere, and the other way round."""
        same = lambda seed: np.tile(normal(seed, 1, 1, 1, 8), (1, 3, 1, 1))
        q = turned(same(1), np.array([[7, 103, 4]]), theta=1e4)
        k = turned(same(2), np.array([[4, 100, 7]]), theta=1e4)
        here, elsewhere, back = (np.asarray(q) * np.asarray(k)).sum((0, 2, 3))
        assert here == pytest.approx(elsewhere, abs=1e-4)
        assert here != pytest.approx(back, abs=1e-2)


def test_a_product_is_the_same_whatever_the_leading_axes():
    x, weight = normal(1, 2, 3, 4), normal(2, 4, 5)
    expected = np.einsum("abd,de->abe", x, weight)
    np.testing.assert_allclose(jax.jit(block.matmul)(x, weight), expected, rtol=1e-5, atol=1e-6)


class TestBlock:
    def test_equals_its_formula(self, layer):
        """x + o(v), then + down(silu(gate) * up), each on the normed stream."""
        found, (q, k) = run(layer, X)
        p = {name: leaf.astype(np.float64) for name, leaf in layer.items()}

        def normed(x, scale):
            rms = np.sqrt((x**2).mean(-1, keepdims=True) + SHAPE.rms_norm_eps)
            return x / rms * scale

        y = normed(X, p["attention_norm"])
        x = X + (y @ p["v_kernel"] + p["v_bias"]) @ p["o_kernel"]
        z = normed(x, p["mlp_norm"])
        gate, up = z @ p["gate_kernel"], z @ p["up_kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down_kernel"]
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-4)
        # Queries and keys are turned, but nothing turns position 0.
        for found, name in ((q, "q"), (k, "k")):
            plain = y @ p[f"{name}_kernel"] + p[f"{name}_bias"]
            np.testing.assert_allclose(found[0, 0, 0], plain[0, 0], rtol=1e-4, atol=1e-5)
            assert np.abs(np.asarray(found)[0, 1, 0] - plain[0, 1]).max() > 0.1

    def test_a_budget_after_the_block_is_a_change_of_its_output(self, layer):
        told, _ = run(layer, X, plus_one)
        np.testing.assert_allclose(told, run(layer, X)[0] + 1.0, rtol=1e-5)


class TestGatedBlock:
    GIVEN = {"phi": np.array([[1, 2, 3, 4]], np.float32), "gate": normal(3, 4)}

    def test_adds_the_gated_embedding_where_the_mask_is_true(self, layer):
        """Eq. 3: h + sigmoid(w . h) phi, after the block."""
        plain = run(layer, X)[0]
        mask = np.array([[False, True]])
        told = gated(layer, Conditioned(mask=mask, **self.GIVEN))
        np.testing.assert_allclose(told[0, 0], plain[0, 0], rtol=1e-6)
        opened = 1 / (1 + np.exp(-float(plain[0, 1] @ self.GIVEN["gate"])))
        want = plain[0, 1] + opened * self.GIVEN["phi"][0]
        np.testing.assert_allclose(told[0, 1], want, rtol=1e-5)

    def test_without_an_embedding_it_is_the_plain_layer(self, layer):
        np.testing.assert_array_equal(gated(layer, None), run(layer, X)[0])


def test_positions_below_a_length_are_looked_up_in_one_table():
    positions = jnp.array([[0, 5, 2], [7, 7, 1]])
    of = lambda **how: jax.jit(lambda p: block.rotation(p, SHAPE, **how))(positions)
    for found, expected in zip(of(length=8), of()):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
