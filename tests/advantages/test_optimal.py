import functools

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import advantages


def test_a_segment_is_as_surprising_as_its_own_tokens():
    logprobs = jnp.log(jnp.array([[0.5, 0.9, 0.2, 1.0], [0.4, 0.7, 0.1, 0.1]]))
    # The second row has two tokens; what stands behind them is of no row.
    found = advantages.segment_score_norm_proxy(
        logprobs, jnp.array([4, 2]), jnp.array([[1, 3, 4], [1, 1, 4]])
    )
    want = [[0.25, 0.01 + 0.64, 0.0], [0.36, 0.0, 0.09]]
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)


def test_slopes_are_those_of_weighted_least_squares():
    rng = np.random.default_rng(0)
    expected = rng.random((6, 4, 2)).astype(np.float32)
    credit, weights = rng.normal(size=expected.shape), rng.random(expected.shape)
    square, product, _ = advantages.optimal_moments(*map(jnp.float32, (credit, expected, weights)))
    slopes = advantages.optimal_slopes(square, product, jnp.full(2, 1e9))
    for s in range(2):
        root = np.sqrt(weights[..., s].ravel())
        x = np.stack([root, root * expected[..., s].ravel()], -1)
        want = np.linalg.lstsq(x, root * credit[..., s].ravel(), rcond=None)[0]
        np.testing.assert_allclose(slopes[s], want, atol=0.02)  # the ridge is a thousandth


def test_before_any_batch_the_baseline_stays_as_it_is():
    slopes = advantages.optimal_slopes(jnp.zeros((3, 2, 2)), jnp.zeros((3, 2)), jnp.zeros(3))
    credit = jnp.arange(6.0).reshape(1, 2, 3)
    np.testing.assert_array_equal(advantages.optimal_shift(credit, slopes), jnp.zeros_like(credit))
    half = functools.partial(jnp.zeros, dtype=jnp.float16)
    slopes = advantages.optimal_slopes(half((3, 2, 2)), half((3, 2)), half(3))
    np.testing.assert_array_equal(slopes, np.zeros((3, 2)))


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
    score_norm_proxy = advantages.segment_score_norm_proxy(
        jnp.log(jnp.float32(p[draws]))[:, None], jnp.ones(1000, int), jnp.ones((1000, 1), int)
    )
    expected = jnp.full_like(credit, mean)
    square, product, _ = advantages.optimal_moments(credit, expected, score_norm_proxy[:, None])
    slopes = advantages.optimal_slopes(square, product, jnp.full(1, 1e9))
    baseline = float(mean + advantages.optimal_shift(expected, slopes)[0, 0, 0])
    best = (p * score**2 * paid).sum() / (p * score**2).sum()
    assert baseline == pytest.approx(best, abs=1e-3)
    others = [noise(b) for b in (mean, 0.0, 0.5, best + 0.05, best - 0.05)]
    assert noise(baseline) <= min(others) + 1e-6


def test_the_slopes_of_few_effective_traces_stay_near_zero():
    """One trace has nearly all the weight: Kish counts 1.002 of them."""
    weights = jnp.array([1.0] + [0.001] * 99)[:, None, None]
    credit = jnp.ones((100, 1, 1))
    square, product, spread = advantages.optimal_moments(credit, 0 * credit, weights)
    traces = advantages.effective_traces(square, spread)
    np.testing.assert_allclose(traces, [1.099**2 / (1 + 99e-6)], rtol=1e-4)
    # 1 / (1 + (1e-3 + 2 / n) / 2): of regressors (1, 0) half the trace is E w / 2.
    few = advantages.optimal_slopes(square, product, traces)
    want = 1 / (1 + (1e-3 + 2 / float(traces[0])) / 2)
    np.testing.assert_allclose(few, [[want, 0.0]], rtol=1e-4)
    many = advantages.optimal_slopes(square, product, jnp.full(1, 1e6))
    np.testing.assert_allclose(many, [[1.0, 0.0]], atol=1e-3)


def test_running_moments_count_traces_as_kish_does():
    """Batches weighted by .1 x .9^age: the effective number is that of all their traces."""
    rng = np.random.default_rng(2)
    batches = [rng.exponential(size=(5, 4, 1)).astype(np.float32) for _ in range(4)]
    square, spread = jnp.zeros((1, 2, 2)), jnp.zeros(1)
    for weights in batches:
        one, _, own = advantages.optimal_moments(*3 * [jnp.asarray(weights)])
        square, spread = 0.9 * square + 0.1 * one, 0.81 * spread + 0.01 * own
    share = 0.1 * 0.9 ** np.arange(3, -1, -1)
    every = np.concatenate([a * weights.ravel() for a, weights in zip(share, batches)])
    want = every.sum() ** 2 / np.square(every).sum()
    np.testing.assert_allclose(advantages.effective_traces(square, spread), [want], rtol=1e-5)


def test_the_token_baseline_weighs_each_trace_by_its_path_so_far():
    # Two traces; the second has one token, so that the first is alone at the second position.
    path = jnp.array([[[0.5, 2.0], [1.5, 0.0]]])
    returns = jnp.array([[[1.0, 1.0], [0.0, 0.0]]])
    found = advantages.token_baseline(returns, path)
    np.testing.assert_allclose(found, [[[0.25, 1.0]]])
    nothing = advantages.token_baseline(returns, 0 * path)
    np.testing.assert_array_equal(nothing, [[[0.0, 0.0]]])
    half = advantages.token_baseline(returns.astype(jnp.float16), (0 * path).astype(jnp.float16))
    np.testing.assert_array_equal(half, [[[0.0, 0.0]]])


def test_the_predicted_saving_is_that_of_the_best_constant():
    """Two questions of two traces, errors against the other trace by hand."""
    returns = jnp.array([[1.0, 0.0], [1.0, 0.0]])[..., None]
    score_norm_proxy = jnp.array([[1.0, 3.0], [1.0, 3.0]])[..., None]
    found = advantages.score_statistics(returns, score_norm_proxy)
    # e = +1, -1; F = 2, kappa = (1 - 3) / 2 = -1, H = 2: 1 / (2 x 2).
    assert float(found["predicted_saving"]) == pytest.approx(0.25)
    assert float(found["cv"]) == pytest.approx(0.5)
    assert float(found["correlation"]) == pytest.approx(-1.0)
    assert float(found["effective_traces"]) == pytest.approx(8**2 / 20)


def test_statistics_of_several_segments_are_weighted_by_their_scores():
    """The first segment is the one above. The second has equal weights of 6, and saves nothing."""
    returns = jnp.array([[[1.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]])
    score_norm_proxy = jnp.array([[[1.0, 6.0], [3.0, 6.0]], [[1.0, 6.0], [3.0, 6.0]]])
    statistics = advantages.score_statistics(returns, score_norm_proxy)
    # F = 2, 6; kappa = -1, 0; H = 2, 6: (1 / 2 + 0) / (2 + 6). The shares of w are 1/4 and 3/4.
    assert float(statistics["predicted_saving"]) == pytest.approx(1 / 16)
    assert float(statistics["cv"]) == pytest.approx(0.25 * 0.5)
    assert float(statistics["correlation"]) == pytest.approx(-0.25)
    assert float(statistics["effective_traces"]) == pytest.approx(0.25 * 3.2 + 0.75 * 4)
