"""Estimators of gradient noise against exact formulas, by listing every pool a toy can sample."""

import dataclasses
import itertools

import numpy as np
import pytest

from research.variance import noise

PROBS = np.array([0.2, 0.5, 0.3])
REWARDS = np.array([1.0, 0.0, 0.6])
SCORES = np.eye(3) - PROBS  # d log softmax / d logits
MU = PROBS @ REWARDS
NORMS = (SCORES**2).sum(-1)
TRACES, GROUP = 4, 2
PARTITION = np.array([[[0, 1], [2, 3]], [[0, 2], [3, 1]]])


def exact(probability, scores, rewards):
    """g, |g|^2, F, H, kappa and sigma^2 of traces with these probabilities."""
    error = rewards - probability @ rewards
    g = (probability * error) @ scores
    norms = (scores**2).sum(-1)
    return {
        "g2": g @ g,
        "F": probability @ norms,
        "H": probability @ (norms * error**2),
        "kappa": probability @ (norms * error),
        "sigma2": probability @ error**2,
    }


def pools(probability):
    index = np.array(list(itertools.product(range(len(probability)), repeat=TRACES)))
    return index, probability[index].prod(-1)


def expected(probability, scores, make_arms, reference=0):
    """Expectation of every estimator over all pools."""
    total = None
    for index, chance in zip(*pools(probability)):
        given = scores[index]
        gram = (given @ given.T)[:, None, :, None]
        arms = np.stack([arm(index[PARTITION]) for arm in make_arms])[..., None]
        given = gram[None], arms[:, None], PARTITION, reference, np.ones((1, 1))
        found = noise.measured(np.zeros(1, int), *given)
        parts = np.concatenate([*found.variance, *found.own, *found.shared, found.signal])
        total = chance * parts if total is None else total + chance * parts
    return *total[:-1].reshape(3, -1), total[-1]


def test_the_three_exact_statements():
    def loo(index):
        r = REWARDS[index]
        return r - (r.sum(-1, keepdims=True) - r) / (GROUP - 1)

    mean = lambda index: REWARDS[index] - REWARDS[index].mean(-1, keepdims=True)
    off = lambda index: REWARDS[index] - (MU + 0.3)
    variance, own, shared, signal = expected(PROBS, SCORES, (loo, mean, off))
    e, n = exact(PROBS, SCORES, REWARDS), GROUP
    of_loo = (e["H"] - e["g2"]) / n + (e["F"] * e["sigma2"] + e["g2"]) / (n * (n - 1))
    of_off = (e["H"] - e["g2"] + 0.09 * e["F"] - 0.6 * e["kappa"]) / n
    np.testing.assert_allclose(variance, [of_loo, of_loo / 4, of_off], rtol=1e-9)
    np.testing.assert_allclose(own, np.array([1, 0.25, 1]) * e["g2"], rtol=1e-9)
    np.testing.assert_allclose(shared, np.array([1, 0.5, 1]) * e["g2"], rtol=1e-9)
    np.testing.assert_allclose(signal, e["g2"], rtol=1e-9)


def test_mixed_budgets_are_leave_one_out_over_responses_and_budgets_at_once():
    """What a value that knows the budget saves against it is 1 - (1 - ICC)(1 - 1/G), about."""
    budgets, chances = np.array([0.3, 1.0]), np.array([0.6, 0.4])
    pairs = np.array(list(itertools.product(range(3), range(2))))
    probability = PROBS[pairs[:, 0]] * chances[pairs[:, 1]]
    rewards = REWARDS[pairs[:, 0]] * budgets[pairs[:, 1]]
    values = MU * budgets[pairs[:, 1]]
    scores = SCORES[pairs[:, 0]]

    def mixed(index):
        r = rewards[index]
        return r - (r.sum(-1, keepdims=True) - r) / (GROUP - 1)

    aware = lambda index: rewards[index] - values[index]
    variance, own, _, _ = expected(probability, scores, (mixed, aware))
    e, n = exact(probability, scores, rewards), GROUP
    want = (e["H"] - e["g2"]) / n + (e["F"] * e["sigma2"] + e["g2"]) / (n * (n - 1))
    norms = (scores**2).sum(-1)
    knowing = (probability @ (norms * (rewards - values) ** 2) - e["g2"]) / n
    np.testing.assert_allclose(variance, [want, knowing], rtol=1e-9)
    np.testing.assert_allclose(own, e["g2"], rtol=1e-9)


def made(variance, signal, parts, factors):
    q, arms = np.shape(variance)
    ones = np.ones((q, arms))
    return noise.Noise(
        np.arange(q),
        *(np.asarray(x, float) for x in (variance, ones, ones, signal, parts, factors)),
    )


class TestNoise:
    # Two arms: unbiased, and one that keeps .5 and 1 of the two segments' gradients.
    NOISE = made(
        [[4.0, 2.0], [8.0, 2.0]], [1.0, 3.0], [[0.5, 0.5], [0.5, 2.5]], [[1, 1], [0.5, 1.0]]
    )

    def test_scale_weighs_what_is_left_of_each_segment_by_its_share_of_the_signal(self):
        # (0.5 * 1 + 1 * 3) / 4
        np.testing.assert_allclose(self.NOISE.scale(np.ones(2)), [1.0, 0.875])

    def test_reduction_compares_variances_at_equal_scale(self):
        reduction = self.NOISE.reduction(0, resamples=200)
        np.testing.assert_allclose(reduction[1, 0], 1 - (4 / 0.875**2) / 12)
        np.testing.assert_array_equal(reduction[0], 0.0)
        assert reduction[1, 1] <= reduction[1, 0] <= reduction[1, 2]

    def test_resamples_of_questions_without_noise_are_left_out(self):
        solved = made([[4.0, 2.0], [1e-16, 1.0]], [1.0, 0.0], [[1.0], [0.0]], [[1], [1]])
        # Half as noisy on the first question; the second has only what rounding leaves.
        np.testing.assert_allclose(solved.reduction(0, resamples=200)[1, 0], 1 - 3 / 4)
        np.testing.assert_allclose(solved.reduction(0, resamples=200)[1, 1:], [0.25, 0.5])

    def test_an_arm_of_half_the_cost_has_twice_the_groups(self):
        plain = self.NOISE.reduction(0, resamples=1)
        cheap = self.NOISE.reduction(0, costs=np.array([2.0, 1.0]), resamples=1)
        np.testing.assert_allclose(1 - cheap[1, 0], (1 - plain[1, 0]) / 2)

    def test_entries_of_a_question_are_added_up(self):
        whole = noise.by_question([dataclasses.replace(self.NOISE, questions=np.array([7, 7]))])
        np.testing.assert_allclose(whole.variance, [[12.0, 4.0]])
        np.testing.assert_allclose(whole.parts, [[1.0, 3.0]])

    def test_an_arm_without_exact_factors_has_the_scale_that_the_pool_shows(self):
        shared = np.array([[1.0, 0.5], [3.0, 1.5]])
        factors = np.array([[1, 1], [np.nan, np.nan]])
        given = dataclasses.replace(self.NOISE, shared=shared, factors=factors)
        np.testing.assert_allclose(given.scale(np.ones(2)), [1.0, 0.5])
        np.testing.assert_allclose(given.scaled(np.ones(2)), [12.0, 4 / 0.5**2])
        assert np.isfinite(given.reduction(0, resamples=100)).all()

    def test_noise_at_equal_scale(self):
        np.testing.assert_allclose(self.NOISE.scaled(np.ones(2)), [12.0, 4 / 0.875**2])


def test_partitions_are_disjoint_and_repeat_with_their_seed():
    found = noise.partitions([3, 1], 10, 4, 5)
    assert found.shape == (5, 2, 4)
    assert all(len(set(one.reshape(-1))) == 8 for one in found)
    np.testing.assert_array_equal(found, noise.partitions([3, 1], 10, 4, 5))


def test_squared_error_leaves_sampling_noise_out():
    rng = np.random.default_rng(0)
    returns = 0.5 + rng.normal(size=(4000, 8))
    error2, deviation, sigma2 = noise.squared_error(np.full((4000, 8), 0.8), returns)
    assert abs(error2 - 0.09) < 4 * deviation
    assert sigma2 == pytest.approx(1.0, abs=0.05)


def test_advantage_variance_counts_segments_with_tokens():
    returns, mask = np.array([0.0, 1.0, 9.0]), np.array([True, True, False])
    assert noise.advantage_variance(returns / 2, returns, mask) == pytest.approx(0.25)
