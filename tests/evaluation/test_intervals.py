"""Intervals cover, and agree with other implementations and with the normal limit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from bacr_jax.evaluation.intervals import (
    bootstrap_intervals,
    difference_intervals,
    paired_difference_interval,
    rate_intervals,
    resampled_means,
    wilson_interval,
)

Z = 1.959963984540054


def of_two(one, other):
    """The interval of two policies' verdicts, problems by samples."""
    mine, theirs = (of.mean(1, dtype=np.float64) for of in (one, other))
    return paired_difference_interval(mine - theirs)


def column(successes, trials):
    return (np.arange(trials) < successes).astype(np.float32)[:, None]


class TestWilson:
    @pytest.mark.parametrize(("successes", "trials"), [(0, 10), (1, 10), (81, 263), (263, 263)])
    def test_agrees_with_another_implementation(self, successes, trials):
        expected = stats.binomtest(successes, trials).proportion_ci(method="wilson")
        assert wilson_interval(successes, trials) == pytest.approx(tuple(expected), abs=1e-12)

    def test_ends_solve_the_equation_that_defines_them(self):
        low, high = wilson_interval(30, 100)
        gap = lambda p: abs(0.3 - p) - Z * np.sqrt(p * (1 - p) / 100)
        assert low == pytest.approx(optimize.brentq(gap, 0.01, 0.3), abs=1e-9)
        assert high == pytest.approx(optimize.brentq(gap, 0.3, 0.99), abs=1e-9)

    @given(st.integers(1, 5000), st.data())
    def test_holds_the_rate_and_stays_in_range(self, trials, data):
        successes = data.draw(st.integers(0, trials))
        low, high = wilson_interval(successes, trials)
        assert 0.0 <= low <= successes / trials <= high <= 1.0
        assert low < high


class TestPairedDifference:
    def test_by_hand(self):
        # 10 problems, 3 won and 1 lost: n + 2 = 12, m = 2/12, v = (4 + 1)/12 - 1/36 = 14/36.
        one = np.array([1, 1, 1, 0, 1, 1, 1, 0, 0, 0], np.float32)[:, None]
        other = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0, 0], np.float32)[:, None]
        half = Z * np.sqrt(14 / 36 / 12)
        expected = (1 / 6 - half, 1 / 6 + half)
        assert of_two(one, other) == pytest.approx(expected)

    def test_exchanging_the_policies_mirrors_it(self):
        rng = np.random.default_rng(2)
        one, other = rng.integers(0, 2, (2, 50, 3)).astype(np.float32)
        low, high = of_two(one, other)
        assert of_two(other, one) == pytest.approx((-high, -low))

    def test_equal_policies_are_not_told_apart_but_not_known_to_be_equal_either(self):
        one = column(30, 100)
        low, high = of_two(one, one)
        assert low < 0.0 < high < 0.04

    def test_is_narrower_than_independent_samples_would_give_when_problems_are_shared(self):
        rng = np.random.default_rng(3)
        base = rng.random((500, 1)) < 0.5
        one = (base ^ (rng.random((500, 1)) < 0.05)).astype(np.float32)
        other = (base ^ (rng.random((500, 1)) < 0.05)).astype(np.float32)
        low, high = of_two(one, other)
        widths = [np.diff(wilson_interval(float(x.sum()), 500))[0] / 2 for x in (one, other)]
        assert high - low < np.hypot(*widths)

    @pytest.mark.parametrize("share", [0.02, 0.3])
    def test_covers_the_true_difference_19_times_in_20(self, share):
        rng = np.random.default_rng(4)
        covered, trials = 0, 1500
        for _ in range(trials):
            # A problem is won with chance `share`, lost with a third of it.
            u = rng.random((200, 1))
            one = (u < share).astype(np.float32)
            other = ((u >= share) & (u < share * 4 / 3)).astype(np.float32)
            low, high = of_two(one, other)
            covered += low <= share * 2 / 3 <= high
        assert covered / trials > 0.93

    def test_numbers_of_samples_may_differ(self):
        low, high = of_two(np.ones((9, 4), np.float32), column(0, 9))
        assert 0.5 < low < high <= 1.0


def verdicts(seed, n=200, share=0.4):
    return (np.random.default_rng(seed).random((n, 1)) < share).astype(np.float64)


def test_agrees_with_scipys_percentile_bootstrap():
    scores = np.random.default_rng(0).gamma(2.0, size=(80, 1))
    expected = stats.bootstrap(
        (scores[:, 0],), np.mean, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    width = expected.high - expected.low
    assert bootstrap_intervals(scores)[0] == pytest.approx(tuple(expected), abs=0.03 * width)


def test_paired_differences_agree_with_scipys_paired_bootstrap():
    one, other = verdicts(1), verdicts(2, share=0.5)
    other[:100] = one[:100]  # half of the problems turn out alike
    expected = stats.bootstrap(
        (one[:, 0], other[:, 0]),
        lambda a, b, axis: a.mean(axis) - b.mean(axis),
        paired=True,
        n_resamples=20_000,
        method="percentile",
        rng=1,
    ).confidence_interval
    found = difference_intervals(one, other)[0]
    # Ends are multiples of 1/200 here, so that they may lie one step apart.
    assert found == pytest.approx(tuple(expected), abs=0.0051)


def test_many_problems_give_the_normal_interval():
    one, other = verdicts(3, n=4000), verdicts(4, n=4000, share=0.42)
    differences = (one - other)[:, 0]
    half = Z * differences.std() / np.sqrt(4000)
    low, high = difference_intervals(one, other)[0]
    assert low == pytest.approx(differences.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(differences.mean() + half, abs=0.05 * half)


def test_pairing_makes_the_interval_narrower_where_problems_agree():
    one = verdicts(5)
    other = one.copy()
    other[:6] = 1 - other[:6]
    paired = np.ptp(difference_intervals(one, other)[0])
    apart = np.hypot(*(np.ptp(rate_intervals(x)[0]) for x in (one, other)))
    assert paired < 0.5 * apart


def test_all_columns_see_the_same_draws():
    scores = np.random.default_rng(6).random((30, 1))
    means = resampled_means(np.hstack([scores, 2 * scores, 1 - scores]), resamples=700)
    assert means[:, 1] == pytest.approx(2 * means[:, 0])
    assert means[:, 2] == pytest.approx(1 - means[:, 0])
    assert means.shape == (700, 3) and len(np.unique(means[:, 0])) > 600


def test_problems_that_are_all_alike_give_a_rate_wilsons_interval():
    scores = np.hstack(
        [np.ones((30, 1)), np.zeros((30, 1)), np.full((30, 1), 0.5), verdicts(7, 30)]
    )
    ends = rate_intervals(scores)
    assert ends[0] == pytest.approx(wilson_interval(30, 30))
    assert ends[1] == pytest.approx(wilson_interval(0, 30))
    assert ends[2] == pytest.approx(wilson_interval(15, 30))
    assert ends[3] == pytest.approx(bootstrap_intervals(scores)[3])


def test_equal_policies_are_not_known_to_be_equal():
    one = verdicts(8, n=50)
    low, high = difference_intervals(one, one)[0]
    assert low < 0 < high < 0.1


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_covers_the_true_rate_about_19_times_in_20(share):
    rng = np.random.default_rng(9)
    covered = 0
    for seed in range(300):
        scores = (rng.random((150, 1)) < share).astype(float)
        means = np.quantile(resampled_means(scores, seed=seed, resamples=500), (0.025, 0.975))
        covered += means[0] <= share <= means[1]
    # Three standard errors of 300 trials.
    assert covered / 300 > 0.95 - 0.04


@pytest.mark.parametrize("problems", [20, 1100])
def test_each_seed_gives_its_own_resamples_and_the_same_each_time(problems):
    scores = np.random.default_rng(0).random((problems, 1))
    of = lambda seed: resampled_means(scores, seed=seed, resamples=50)
    np.testing.assert_array_equal(of(1), of(1))
    assert (of(1) != of(2)).any()
