"""Intervals cover, estimators are unbiased: against brute force, textbooks and simulation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from bacr_jax.evaluation.metrics import (
    accuracy_interval,
    anytime_accuracy,
    majority_at_k,
    paired_difference_interval,
    pass_at_k,
    wilson_interval,
)

Z = 1.959963984540054


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


def rates_of(kind, rng, shape):
    """True success rates of problems: alike, mixed, or all or nothing."""
    if kind == "alike":
        return np.full(shape, 0.7)
    if kind == "mixed":
        return rng.beta(1.4, 0.6, shape)
    return (rng.random(shape) < 0.7).astype(float)


class TestAccuracyInterval:
    def test_with_one_sample_per_problem_is_wilsons(self):
        assert accuracy_interval(column(81, 263)) == pytest.approx(wilson_interval(81, 263))

    def test_copies_of_a_sample_tell_nothing_new(self):
        once = column(30, 100)
        assert accuracy_interval(np.repeat(once, 8, axis=1)) == pytest.approx(
            accuracy_interval(once)
        )

    def test_samples_that_are_independent_count_each(self):
        # Every problem has one right sample of two: nothing is more even.
        correct = np.tile(np.array([[0.0, 1.0]], np.float32), (50, 1))
        assert accuracy_interval(correct) == pytest.approx(wilson_interval(50, 100))

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_all_alike_still_has_a_width_that_counts_problems(self, value):
        correct = np.full((40, 16), value, np.float32)
        assert accuracy_interval(correct) == pytest.approx(wilson_interval(40 * value, 40))

    @pytest.mark.parametrize("kind", ["alike", "mixed", "all or nothing"])
    @pytest.mark.parametrize(("problems", "samples"), [(500, 1), (500, 4), (60, 4)])
    def test_covers_the_true_accuracy_19_times_in_20(self, kind, problems, samples):
        rng = np.random.default_rng(0)
        trials, covered = 1500, 0
        for _ in range(trials):
            rates = rates_of(kind, rng, (problems, 1))
            correct = (rng.random((problems, samples)) < rates).astype(np.float32)
            low, high = accuracy_interval(correct)
            covered += low <= 0.7 <= high
        # Three standard errors of the simulation, and half a point for the approximation.
        assert 0.95 - 0.022 < covered / trials < 0.95 + 0.025

    def test_is_that_of_a_bootstrap_over_problems_where_both_apply(self):
        rng = np.random.default_rng(1)
        correct = (rng.random((800, 4)) < rng.beta(1, 1, (800, 1))).astype(np.float32)
        means = correct.mean(1)[rng.integers(0, 800, (4000, 800))].mean(1)
        bootstrap = np.quantile(means, [0.025, 0.975])
        assert accuracy_interval(correct) == pytest.approx(bootstrap, abs=0.004)

    @given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 2**32 - 1))
    def test_holds_the_mean_and_stays_in_range(self, problems, samples, seed):
        correct = np.random.default_rng(seed).integers(0, 2, (problems, samples))
        low, high = accuracy_interval(correct.astype(np.float32))
        assert 0.0 <= low <= correct.mean() <= high <= 1.0
        assert low < high


class TestPairedDifference:
    def test_by_hand(self):
        # 10 problems, 3 won and 1 lost: n + 2 = 12, m = 2/12, v = (4 + 1)/12 - 1/36 = 14/36.
        one = np.array([1, 1, 1, 0, 1, 1, 1, 0, 0, 0], np.float32)[:, None]
        other = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0, 0], np.float32)[:, None]
        half = Z * np.sqrt(14 / 36 / 12)
        expected = (1 / 6 - half, 1 / 6 + half)
        assert paired_difference_interval(one, other) == pytest.approx(expected)

    def test_exchanging_the_policies_mirrors_it(self):
        rng = np.random.default_rng(2)
        one, other = rng.integers(0, 2, (2, 50, 3)).astype(np.float32)
        low, high = paired_difference_interval(one, other)
        assert paired_difference_interval(other, one) == pytest.approx((-high, -low))

    def test_equal_policies_are_not_told_apart_but_not_known_to_be_equal_either(self):
        one = column(30, 100)
        low, high = paired_difference_interval(one, one)
        assert low < 0.0 < high < 0.04

    def test_is_narrower_than_independent_samples_would_give_when_problems_are_shared(self):
        rng = np.random.default_rng(3)
        base = rng.random((500, 1)) < 0.5
        one = (base ^ (rng.random((500, 1)) < 0.05)).astype(np.float32)
        other = (base ^ (rng.random((500, 1)) < 0.05)).astype(np.float32)
        low, high = paired_difference_interval(one, other)
        widths = [np.diff(accuracy_interval(x))[0] / 2 for x in (one, other)]
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
            low, high = paired_difference_interval(one, other)
            covered += low <= share * 2 / 3 <= high
        assert covered / trials > 0.93

    def test_numbers_of_samples_may_differ(self):
        low, high = paired_difference_interval(np.ones((9, 4), np.float32), column(0, 9))
        assert 0.5 < low < high <= 1.0


class TestPassAtK:
    def test_by_hand(self):
        # 2 of 4 right, k = 2: one of six pairs is all wrong.
        correct = np.array([[True, False, True, False]])
        assert pass_at_k(correct, 2) == pytest.approx(5 / 6)

    @given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32 - 1), st.data())
    @settings(deadline=None)
    def test_is_the_mean_over_all_subsets(self, problems, samples, seed, data):
        correct = np.random.default_rng(seed).integers(0, 2, (problems, samples)).astype(bool)
        k = data.draw(st.integers(1, samples))
        subsets = list(itertools.combinations(range(samples), k))
        expected = np.mean([correct[:, list(s)].any(1).mean() for s in subsets])
        assert pass_at_k(correct, k) == pytest.approx(expected)

    def test_one_sample_gives_the_accuracy(self):
        correct = np.random.default_rng(5).random((20, 6)) < 0.4
        assert pass_at_k(correct, 1) == pytest.approx(correct.mean())

    @pytest.mark.parametrize("k", [0, 5])
    def test_more_samples_than_there_are_is_refused(self, k):
        with pytest.raises(ValueError, match=f"found {k} for 4 samples; write 1 to 4"):
            pass_at_k(np.ones((1, 4), bool), k)


def vote_by_brute_force(answers, correct, k):
    """Mean over all subsets of the share of right answers among the most frequent ones."""
    total, subsets = 0.0, list(itertools.combinations(range(len(answers)), k))
    for subset in subsets:
        votes = {}
        for i in subset:
            if answers[i] >= 0:
                votes.setdefault(answers[i], []).append(correct[i])
        most = max(map(len, votes.values()), default=0)
        tied = [v[0] for v in votes.values() if len(v) == most]
        total += float(np.mean(tied)) if tied else 0.0
    return total / len(subsets)


class TestMajorityAtK:
    def test_by_hand(self):
        # Right, right, wrong; pairs: right-right wins, the two right-wrong pairs are ties.
        answers, correct = np.array([[4, 4, 7]]), np.array([[True, True, False]])
        assert majority_at_k(answers, correct, 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
        assert majority_at_k(answers, correct, 3) == pytest.approx(1.0)

    @given(st.integers(1, 8), st.data())
    @settings(deadline=None, max_examples=200)
    def test_is_the_mean_over_all_subsets(self, samples, data):
        answers = np.array(
            data.draw(st.lists(st.integers(-1, 4), min_size=samples, max_size=samples))
        )
        right = np.array(data.draw(st.lists(st.booleans(), min_size=5, max_size=5)))
        correct = right[answers] & (answers >= 0)
        k = data.draw(st.integers(1, samples))
        expected = vote_by_brute_force(answers, correct, k)
        assert majority_at_k(answers[None], correct[None], k) == pytest.approx(expected, abs=1e-12)

    def test_one_vote_is_the_accuracy(self):
        answers = np.array([[0, 1, -1, 0], [2, 2, 3, 4]])
        correct = np.array([[True, False, False, True], [False, False, True, False]])
        assert majority_at_k(answers, correct, 1) == pytest.approx(3 / 8)

    def test_nobody_answers(self):
        assert majority_at_k(np.full((1, 5), -1), np.zeros((1, 5), bool), 3) == 0.0

    def test_many_samples_are_no_problem(self):
        # 40 of 64 give the right answer: the vote of any 63 of them does too.
        answers = np.repeat([[0, 1]], [40, 24], axis=1)
        assert majority_at_k(answers, answers == 0, 63) == pytest.approx(1.0)
        singles = np.arange(64)[None]
        assert majority_at_k(singles, singles == 0, 32) == pytest.approx(1 / 64)

    def test_one_answer_with_two_verdicts_is_refused(self):
        with pytest.raises(ValueError, match="both right and wrong"):
            majority_at_k(np.zeros((1, 2), int), np.array([[True, False]]), 1)


class TestAnytime:
    def test_by_hand(self):
        # Doublings: (.2 + .4)/2, (.4 + .9)/2; then two at once: (.9 + 1)/2 twice.
        found = anytime_accuracy([8, 16, 32, 128], [0.2, 0.4, 0.9, 1.0])
        assert found.mean == pytest.approx(2.5 / 4)
        assert found.area == pytest.approx((0.3 + 0.65 + 0.95 * 2) / 4)

    def test_one_budget_is_its_accuracy(self):
        assert anytime_accuracy([64], [0.7]) == pytest.approx((0.7, 0.7))

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
    def test_the_area_does_not_depend_on_budgets_put_in_between(self, accuracies):
        budgets = [4**i for i in range(1, len(accuracies) + 1)]
        middle = [(a + b) / 2 for a, b in itertools.pairwise(accuracies)]
        finer = [x for pair in zip(accuracies, middle) for x in pair] + accuracies[-1:]
        between = [2 ** (i + 2) for i in range(len(finer))]
        coarse = anytime_accuracy(budgets, accuracies).area
        assert anytime_accuracy(between, finer).area == pytest.approx(coarse)

    @pytest.mark.parametrize(
        ("budgets", "accuracies"),
        [([], []), ([8], [0.1, 0.2]), ([8, 8], [0.1, 0.2]), ([16, 8], [0.1, 0.2]), ([0], [0.1])],
    )
    def test_budgets_that_do_not_rise_are_refused(self, budgets, accuracies):
        with pytest.raises(ValueError, match="budgets"):
            anytime_accuracy(budgets, accuracies)
