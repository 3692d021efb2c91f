import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import advantages


def test_a_segment_is_as_surprising_as_its_own_tokens():
    logprobs = jnp.log(jnp.array([[0.5, 0.9, 0.2, 1.0], [0.4, 0.7, 0.1, 0.1]]))
    # The second row has two tokens; what stands behind them is of no row.
    found = advantages.segment_surprise(
        logprobs, jnp.array([4, 2]), jnp.array([[1, 3, 4], [1, 1, 4]])
    )
    want = [[0.25, 0.01 + 0.64, 0.0], [0.36, 0.0, 0.09]]
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)


def test_slopes_are_those_of_weighted_least_squares():
    rng = np.random.default_rng(0)
    expected = rng.random((6, 4, 2)).astype(np.float32)
    credit, weights = rng.normal(size=expected.shape), rng.random(expected.shape)
    moments = advantages.optimal_moments(*map(jnp.float32, (credit, expected, weights)))
    slopes = advantages.optimal_slopes(*moments)
    for s in range(2):
        root = np.sqrt(weights[..., s].ravel())
        x = np.stack([root, root * expected[..., s].ravel()], -1)
        want = np.linalg.lstsq(x, root * credit[..., s].ravel(), rcond=None)[0]
        np.testing.assert_allclose(slopes[s], want, atol=0.02)  # the ridge is a thousandth


def test_before_any_batch_the_baseline_stays_as_it_is():
    slopes = advantages.optimal_slopes(jnp.zeros((3, 2, 2)), jnp.zeros((3, 2)))
    credit = jnp.arange(6.0).reshape(1, 2, 3)
    np.testing.assert_array_equal(advantages.optimal_advantage(credit, credit, slopes), credit)


@pytest.mark.parametrize("chance", [0.5, 0.9, 0.98])
def test_it_leaves_the_least_noise_that_one_number_can(chance):
    """One token of two, the usual one paid .8, the other .1: every draw can be listed."""
    p, paid = np.array([chance, 1 - chance]), np.array([0.8, 0.1])
    score = np.array([1 - chance, -chance])  # of the first token's logit
    noise = lambda baseline: (p * np.square(score * (paid - baseline))).sum()
    mean = (p * paid).sum()
    # A thousand draws, each as often as it is probable; a logit's score is 1 - p of the token.
    draws = np.repeat([0, 1], np.round(1000 * p).astype(int))
    credit = jnp.float32((paid - mean)[draws])[:, None, None]
    surprise = advantages.segment_surprise(
        jnp.log(jnp.float32(p[draws]))[:, None], jnp.ones(1000, int), jnp.ones((1000, 1), int)
    )
    expected = jnp.full_like(credit, mean)
    moments = advantages.optimal_moments(credit, expected, surprise[:, None])
    moved = advantages.optimal_advantage(credit, expected, advantages.optimal_slopes(*moments))
    baseline = float(mean + (credit - moved)[0, 0, 0])
    best = (p * score**2 * paid).sum() / (p * score**2).sum()
    assert baseline == pytest.approx(best, abs=1e-3)
    others = [noise(b) for b in (mean, 0.0, 0.5, best + 0.05, best - 0.05)]
    assert noise(baseline) <= min(others) + 1e-6
