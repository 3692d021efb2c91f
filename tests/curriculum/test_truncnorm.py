import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bacr_jax.curriculum import truncnorm
from bacr_jax.curriculum.truncnorm import truncnorm_ppf

# mu, sigma, low, high: usual, mode on an edge, 20 sigma outside on either side, 10,000 sigma
# outside, nearly fixed, nearly uniform, one-sided.
CASES = [
    (1500.0, 512.0, 256.0, 4096.0),
    (256.0, 512.0, 256.0, 4096.0),
    (4096.0, 512.0, 256.0, 4096.0),
    (256.0 - 20 * 512.0, 512.0, 256.0, 4096.0),
    (4096.0 + 20 * 512.0, 512.0, 256.0, 4096.0),
    (-1e6, 100.0, 256.0, 4096.0),
    (1500.0, 0.01, 256.0, 4096.0),
    (1500.0, 1e6, 256.0, 4096.0),
    (2e3, 3e5, 256.0, 4096.0),
    (0.0, 1.0, -1.0, 40.0),
    (0.0, 1.0, -40.0, -1e-3),
    (0.0, 1.0, 3.0, 3.05),
]
PROBABILITIES = np.concatenate([np.linspace(0, 1, 41), [1e-6, 1e-4, 1 - 1e-4]]).astype(np.float32)


def scipy_frozen(mu, sigma, low, high):
    return scipy.stats.truncnorm((low - mu) / sigma, (high - mu) / sigma, loc=mu, scale=sigma)


@pytest.mark.parametrize("case", CASES)
def test_quantiles_agree_with_scipy_in_double_precision(case):
    got = jax.jit(truncnorm_ppf)(jnp.asarray(PROBABILITIES), *case)
    want = scipy_frozen(*case).ppf(PROBABILITIES.astype(np.float64))
    # Intervals of about 1/100 sigma (case 8) lose most: CDF differences have the fewest digits.
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=6e-6 * (case[3] - case[2]))


@pytest.mark.parametrize("offset", [5.0, 20.0, 100.0])
def test_far_tail_quantiles_resolve_the_distance_from_the_edge(offset):
    # Relative to the distance from the edge, not to the value: the textbook formula returns the
    # edge itself, and would pass a test relative to the value.
    u = jnp.asarray([0.05, 0.25, 0.5, 0.75, 0.95])
    got = np.asarray(truncnorm_ppf(u, -offset, 1.0, 0.0, 40.0), np.float64)
    want = scipy_frozen(-offset, 1.0, 0.0, 40.0).ppf(np.asarray(u, np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    mirrored = np.asarray(truncnorm_ppf(1.0 - u, offset, 1.0, -40.0, 0.0), np.float64)
    np.testing.assert_allclose(-mirrored, want, rtol=1e-4)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], CASES[4], CASES[9]])
def test_samples_pass_a_kolmogorov_smirnov_test(case):
    shares = jax.random.uniform(jax.random.key(0), (20_000,))
    samples = np.asarray(truncnorm_ppf(shares, *case), np.float64)
    assert samples.min() >= case[2]
    assert samples.max() <= case[3]
    assert scipy.stats.kstest(samples, scipy_frozen(*case).cdf).pvalue > 1e-4


def test_far_tails_agree_with_scipy_where_jax_has_no_erfcx():
    """JAX's is 0 where its argument is 9.2 to 9.4: 13 standard deviations outside."""
    x = np.linspace(0.0, 60.0, 20_001, dtype=np.float32)
    expected = scipy.special.erfcx(x.astype(np.float64))
    np.testing.assert_allclose(truncnorm._erfcx(jnp.asarray(x)), expected, rtol=2e-6)
    u = np.array([0.1, 0.5, 0.9], np.float32)
    for edge in (12.9, 13.0, 13.1, 13.3):
        found = truncnorm_ppf(u, 0.0, 1.0, edge, edge + 2.0)
        quantiles = scipy.stats.truncnorm.ppf(u.astype(np.float64), edge, edge + 2.0)
        np.testing.assert_allclose(found - edge, quantiles - edge, rtol=2e-4)


@settings(max_examples=100)
@example(mu=3827.0, log_sigma=2.46875, low=0.0, width=3.0)
@given(
    mu=st.floats(-1e7, 1e7),
    log_sigma=st.floats(-3, 7),
    low=st.floats(-1e4, 1e4),
    width=st.floats(1.0, 1e4),
)
def test_quantiles_are_finite_ordered_and_inside_for_any_parameters(mu, log_sigma, low, width):
    u = jnp.asarray(PROBABILITIES[:41])
    x = np.asarray(truncnorm_ppf(u, mu, 10.0**log_sigma, low, low + width))
    low32, high32 = np.float32(low), np.float32(low + width)
    assert np.isfinite(x).all()
    assert x[0] == low32
    assert x[-1] == high32
    # Neighbouring branches of the computation may disagree in the last digits.
    assert np.all(np.diff(x) >= -1e-5 * max(abs(low32), abs(high32)))


def test_parameters_broadcast_and_vmap():
    mu = jnp.array([1000.0, 3000.0])
    whole = truncnorm_ppf(jnp.array([0.5]), mu, 512.0, 256.0, 4096.0)
    each = jax.vmap(lambda m: truncnorm_ppf(jnp.array(0.5), m, 512.0, 256.0, 4096.0))(mu)
    np.testing.assert_allclose(whole, each)


@pytest.mark.parametrize("position", range(4))
def test_a_parameter_of_another_rank_is_refused(position):
    """A location for each of three questions would be one for each rollout of [3, 3]."""
    parameters = [1000.0, 512.0, 256.0, 4096.0]
    shares = jnp.full((3, 3), 0.5)
    for shape in ((3,), (1, 3, 3)):
        wrong = [jnp.full(shape, x) if i == position else x for i, x in enumerate(parameters)]
        with pytest.raises(AssertionError, match="rank"):
            jax.eval_shape(inspect.unwrap(truncnorm_ppf), shares, *wrong)
