"""Statistics agree with numbers by hand and with other implementations, and intervals cover."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bacr_study.statistics import (
    NO_SPREAD,
    OVER_BOTH,
    OVER_PROBLEMS,
    OVER_SEEDS,
    crossed_test,
    holm,
    mean_interval,
    rounded,
    sign_flip_p,
    sign_test_p,
    simultaneous_interval,
    two_sided,
    variance_parts,
)

# By hand: mean 2, rows 1 and 3, columns 0, 2, 4; the rest is +-1, 0, -+1.
TABLE = np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 6.0]])


class TestMeanInterval:
    def test_agrees_with_another_implementation(self):
        values = [0.5, 0.55, 0.61, 0.48, 0.57]
        found = mean_interval(values)
        expected = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
        assert (found.low, found.high) == pytest.approx(expected, abs=1e-12)
        assert found.mean == pytest.approx(0.542)

    def test_of_one_value_there_is_none(self):
        found = mean_interval([0.5])
        assert (found.low, found.high, found.basis) == (None, None, NO_SPREAD)


class TestCrossedTest:
    def test_parts_of_the_variance_are_mean_squares_by_hand(self):
        # 3 (1 + 1) / 1, 2 (4 + 0 + 4) / 2, and four residuals of size 1 over 2; each over 2 x 3.
        found = variance_parts(TABLE)
        assert found == pytest.approx((6 / 6, 8 / 6, 2 / 6))

    def test_variance_and_degrees_of_freedom_are_those_by_hand(self):
        found = crossed_test(TABLE)
        assert found.difference == pytest.approx(2.0)
        # (6 + 8 - 2) / 6, and 12^2 / (36 / 1 + 64 / 2 + 4 / 2).
        assert found.standard_error == pytest.approx(2.0**0.5)
        assert found.df == pytest.approx(144 / 70)
        assert found.p == pytest.approx(2 * stats.t.sf(2 / 2**0.5, 144 / 70))
        half = stats.t.ppf(0.975, 144 / 70) * 2**0.5
        assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
        assert (found.seeds, found.problems, found.basis) == (2, 3, OVER_BOTH)

    def test_no_negative_component_lowers_the_variance_below_that_of_problems(self):
        # Seeds agree on average: MS_seed is 0, and MS_problem + MS_seed - MS_rest < MS_problem.
        values = np.array([[1.0, 0.0, 0.2, 0.0], [0.0, 1.0, 0.0, 0.2]])
        of_seeds, of_problems, rest = variance_parts(values)
        assert of_seeds == pytest.approx(0.0)
        assert rest > 0
        floor = max(of_problems, 1 / 36)
        assert crossed_test(values).standard_error ** 2 == pytest.approx(floor)

    def test_one_seed_is_the_t_test_over_problems(self):
        values = np.random.default_rng(0).normal(0.1, 0.5, 40)
        found = crossed_test(values[None])
        expected = stats.ttest_1samp(values, 0.0)
        assert found.p == pytest.approx(expected.pvalue)
        assert found.basis == OVER_PROBLEMS

    def test_means_over_problems_are_the_t_test_over_seeds(self):
        values = np.array([0.02, 0.05, 0.01, 0.04])
        found = crossed_test(values[:, None])
        assert found.p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
        assert (found.basis, found.df) == (OVER_SEEDS, 3)

    def test_one_number_is_not_tested(self):
        assert crossed_test(np.array([[0.3]])) is None

    def test_runs_that_agree_everywhere_differ_by_zero_give_or_take(self):
        found = crossed_test(np.zeros((5, 100)))
        assert found.p == 1.0
        assert found.low < 0.0 < found.high
        assert found.standard_error == pytest.approx(1 / 102)

    @given(st.integers(0, 1000))
    def test_the_sign_turns_with_the_arms(self, seed):
        values = np.random.default_rng(seed).integers(-4, 5, (3, 7)) / 4
        one, other = crossed_test(values), crossed_test(-values)
        assert one.p == pytest.approx(other.p)
        assert (one.low, one.high) == pytest.approx((-other.high, -other.low))

    @given(st.integers(0, 1000))
    def test_the_interval_leaves_out_zero_where_p_is_below_five_percent(self, seed):
        found = crossed_test(np.random.default_rng(seed).normal(0.3, 0.5, (4, 9)))
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


def simulated(rng, runs, seeds, problems, seed_effect):
    """Differences of two arms with equal accuracy, of four samples a problem."""
    shape = (runs, seeds, problems)
    base = 0.5 + rng.normal(0, 0.25, (runs, 1, problems))
    own = rng.normal(0, 0.15, (runs, 1, problems))
    effect = rng.normal(0, seed_effect, (runs, seeds, 1))
    one = np.clip(base + rng.normal(0, 0.1, shape) + effect, 0, 1)
    # Clipping is symmetric about 1/2, and so are both arms: the true difference is 0.
    other = np.clip(base + own + rng.normal(0, 0.1, shape), 0, 1)
    return (rng.binomial(4, one) - rng.binomial(4, other)) / 4


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize("problems", [60, 300])
@pytest.mark.parametrize("seed_effect", [0.0, 0.02, 0.1])
def test_intervals_cover_and_false_positives_are_five_percent(seeds, problems, seed_effect):
    runs = 3000
    values = simulated(np.random.default_rng(1), runs, seeds, problems, seed_effect)
    found = [crossed_test(one) for one in values]
    covered = np.mean([one.low <= 0.0 <= one.high for one in found])
    # With three seeds the degrees of freedom are themselves rough.
    low, high = (0.92, 0.985) if seeds == 3 else (0.93, 0.98)
    assert low <= covered <= high
    assert np.mean([one.p < 0.05 for one in found]) == pytest.approx(1 - covered, abs=1e-9)


class TestHolm:
    def test_is_that_by_hand(self):
        # Times 4, 3, 2, 1 in rising order, and never below the one before.
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    def test_stays_at_one(self):
        assert holm([0.9, 0.6]) == [1.0, 1.0]

    def test_of_no_test_is_nothing(self):
        assert holm([]) == []

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
    def test_lies_between_the_value_and_bonferronis(self, values):
        for p, adjusted in zip(values, holm(values)):
            assert p <= adjusted <= min(len(values) * p, 1.0) + 1e-12


class TestSimultaneousInterval:
    def test_is_that_by_hand(self):
        # With 2 degrees of freedom the quantile q is (2 q - 1) / sqrt(2 q (1 - q)). Five intervals
        # have the level .99 each, so q = .995: .99 / sqrt(.00995) = 9.9248.
        low, high = simultaneous_interval(0.3, 0.01, 2.0, 5)
        assert (low, high) == pytest.approx((0.3 - 0.099248, 0.3 + 0.099248), abs=1e-6)

    def test_of_one_difference_is_the_t_interval(self):
        contrast = crossed_test(TABLE)
        ends = simultaneous_interval(contrast.difference, contrast.standard_error, contrast.df, 1)
        assert ends == pytest.approx((contrast.low, contrast.high))

    @given(st.floats(-9, 9), st.floats(1, 50), st.integers(1, 200))
    def test_leaves_out_zero_where_bonferronis_p_is_below_five_percent(self, t, df, tests):
        low, high = simultaneous_interval(t, 1.0, df, tests)
        p = tests * two_sided(t, 1.0, df)
        if abs(p - 0.05) > 1e-9:
            assert (low > 0 or high < 0) == (p < 0.05)


def test_rounded_numbers_have_so_many_digits_and_what_is_none_is_none():
    given = {"a": [1 / 3, 12345678.9, 7, None, "x"], "b": np.array([np.nan, 2 / 3], np.float32)}
    assert rounded(given, 6) == {"a": [0.333333, 12345700.0, 7, None, "x"], "b": [None, 0.666667]}


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        # The observed signs and their opposite, of 2^5.
        ([1, 2, 3, 4, 5], 2 / 32),
        # Sums as far from 0 as 2: all but +1 -1 and -1 +1, of 4 combinations with one zero.
        ([1.0, 1.0], 2 / 4),
        # |sum| >= 1 of +-3 +-2: all.
        ([3.0, -2.0], 1.0),
        ([0.0, 0.0, 0.0], 1.0),
        ([4.0], None),
        ([1.0] * 17, None),
    ],
)
def test_sign_flips_by_enumeration(differences, p):
    assert sign_flip_p(np.array(differences, float)) == p


def test_sign_flips_agree_with_another_implementation():
    differences = np.random.default_rng(0).normal(0.3, 1.0, 7)
    expected = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip_p(differences) == pytest.approx(expected.pvalue)


def test_the_sign_test_of_a_loss():
    # Of four problems that changed, all four were lost: (1/2)^4; three of four: 5 / 16.
    before = np.array([1, 1, 1, 1, 0, 0, 1])
    assert sign_test_p(before, np.array([0, 0, 0, 0, 0, 0, 1])) == pytest.approx(1 / 16)
    assert sign_test_p(before, np.array([0, 0, 0, 1, 1, 0, 1])) == pytest.approx(5 / 16)
    assert sign_test_p(before, before) == 1.0
    # Fractions of several samples count by their sign.
    assert sign_test_p(np.array([0.5, 0.75]), np.array([0.25, 0.0])) == pytest.approx(1 / 4)
