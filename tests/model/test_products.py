"""Products with gradients of their own: those of plain products, the narrow side first on a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.model import products


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def gradients(product, x, y, weights):
    """Of sum(weights * product)."""
    return jax.jit(jax.grad(lambda x, y: (product(x, y) * weights).sum(), argnums=(0, 1)))(x, y)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("d", "e"), [(2, 7), (7, 2), (4, 4)])
def test_values_and_gradients_are_those_of_plain_products(batch, d, e):
    x, y, weights = normal(0, *batch, 5, d), normal(1, *batch, d, e), normal(2, *batch, 5, e)
    transposed = y.swapaxes(-1, -2)
    np.testing.assert_allclose(products.times(x, y), x @ y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        products.times_transposed(x, transposed), x @ y, rtol=1e-5, atol=1e-6
    )
    of_x, of_y = weights @ transposed, x.swapaxes(-1, -2) @ weights
    found = gradients(products.times, x, y, weights)
    np.testing.assert_allclose(found[0], of_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], of_y, rtol=1e-5, atol=1e-5)
    found = gradients(products.times_transposed, x, transposed, weights)
    np.testing.assert_allclose(found[0], of_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], of_y.swapaxes(-1, -2), rtol=1e-5, atol=1e-5)


def test_gradients_of_many_rows_at_once_are_those_of_one_after_the_other():
    x, y, weights = normal(0, 4, 5, 7), normal(1, 7, 2), normal(2, 4, 5, 2)
    of_row = lambda x, w: jax.grad(lambda y: (products.times(x, y) * w).sum())(y)
    np.testing.assert_allclose(
        jax.vmap(of_row)(x, weights), x.swapaxes(1, 2) @ weights, rtol=1e-5, atol=1e-5
    )


def test_16_bit_operands_give_what_is_asked_for():
    x, y = (jnp.asarray(normal(i, 3, 3), jnp.bfloat16) for i in range(2))
    assert products.times(x, y).dtype == jnp.bfloat16
    assert products.times(x, y, dtype=jnp.float32).dtype == jnp.float32
    assert products.times_transposed(x, y).dtype == jnp.float32


def test_rounded_operands_are_summed_in_fp32():
    # In bfloat16 1 + 2^-9 is 1, but 2^-9 is itself; a sum in bfloat16 would lose it.
    x = jnp.array([[1.0 + 2.0**-9, 2.0**-9]])
    y = jnp.array([[1.0], [1.0]])
    found = products.rounded_times(x, y, jnp.bfloat16)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [[1.0 + 2.0**-9]])


def test_the_gradient_of_rounded_operands_is_of_rounded_operands():
    x, y, weights = normal(0, 5, 3), normal(1, 3, 4), normal(2, 5, 4)
    found = gradients(lambda x, y: products.rounded_times(x, y, jnp.bfloat16), x, y, weights)
    x, y, weights = (np.float64(a.astype(jnp.bfloat16)) for a in (x, y, weights))
    np.testing.assert_allclose(found[0], weights @ y.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], x.T @ weights, rtol=1e-5, atol=1e-5)
    assert found[0].dtype == found[1].dtype == jnp.float32


def lowered(platform):
    """The program of a weight's gradient whose result has more rows than columns."""
    make = jax.jit(products.row_products).trace(normal(0, 8, 64), normal(1, 8, 4))
    return make.lower(lowering_platforms=(platform,)).as_text()


def test_the_narrow_side_comes_first_on_a_cpu_alone():
    assert re.search(r"dot_general.*tensor<4x64xf32>", lowered("cpu"))
    assert "optimization_barrier" in lowered("cpu")
    cuda = lowered("cuda")
    assert re.search(r"dot_general.*tensor<64x4xf32>", cuda)
    assert "barrier" not in cuda
