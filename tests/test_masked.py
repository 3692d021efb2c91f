import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bacr_jax import masked

X = jnp.array([[1.0, 2.0, jnp.nan], [jnp.inf, 6.0, -3.0]])
MASK = jnp.array([[1, 1, 0], [0, 1, 0]])
REDUCTIONS = [masked.masked_sum, masked.masked_mean, masked.masked_std, masked.masked_rms]


def test_values_by_hand():
    assert masked.masked_sum(X, MASK) == 9.0
    assert masked.masked_mean(X, MASK) == 3.0
    np.testing.assert_allclose(masked.masked_mean(X, MASK, axis=1), [1.5, 6.0])
    np.testing.assert_allclose(masked.masked_std(X, MASK), np.sqrt(14 / 3), rtol=1e-6)
    np.testing.assert_allclose(masked.masked_std(X, MASK, ddof=1), np.sqrt(7.0), rtol=1e-6)
    np.testing.assert_allclose(masked.masked_rms(X, MASK), np.sqrt(41 / 3), rtol=1e-6)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_nothing_kept_gives_zero_with_finite_gradients(reduce):
    value, gradient = jax.value_and_grad(lambda x: reduce(x, jnp.zeros_like(MASK)))(X)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_masked_out_nan_and_inf_reach_neither_value_nor_gradient(reduce):
    value, gradient = jax.value_and_grad(lambda x: reduce(x, MASK))(X)
    clean = jnp.where(MASK, X, 123.0)
    assert value == reduce(clean, MASK)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(np.asarray(gradient)[np.asarray(MASK) == 0], 0.0)
    assert np.any(np.asarray(gradient)[np.asarray(MASK) == 1] != 0.0)


def test_spread_of_equal_values_has_zero_gradient():
    gradient = jax.grad(lambda x: masked.masked_std(x, jnp.ones(4)))(jnp.full(4, 2.5))
    np.testing.assert_array_equal(gradient, np.zeros(4))


def test_spread_survives_a_large_offset_in_float32():
    x = jnp.array([1.0, 2.0, 3.0, 4.0]) + 1e6
    np.testing.assert_allclose(masked.masked_std(x, jnp.ones(4)), np.sqrt(1.25), rtol=1e-6)


def test_half_precision_is_summed_in_float32():
    x = jnp.full(4096, 1.0, jnp.bfloat16)
    assert masked.masked_sum(x, jnp.ones(4096)) == 4096.0


@settings(max_examples=50)
@given(
    hnp.arrays(np.float32, (3, 5), elements=st.floats(-100, 100, width=32)),
    hnp.arrays(np.bool_, (3, 5)),
    st.sampled_from([0, 1, (0, 1)]),
)
def test_agrees_with_numpy_masked_arrays(x, mask, axis):
    reference = np.ma.masked_array(x.astype(np.float64), ~mask)
    for ours, theirs in [
        (masked.masked_sum, reference.sum(axis=axis)),
        (masked.masked_mean, reference.mean(axis=axis)),
        (masked.masked_std, reference.std(axis=axis)),
    ]:
        want = np.ma.filled(theirs, 0.0)
        got = ours(jnp.asarray(x), jnp.asarray(mask), axis)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
