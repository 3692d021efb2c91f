"""Estimators are unbiased: against brute force and by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.evaluation.metrics import anytime_weights, majority_at_k, pass_at_k


class TestPassAtK:
    def test_by_hand(self):
        # 2 of 4 right, k = 2: one of six pairs is all wrong.
        correct = np.array([[True, False, True, False]])
        assert pass_at_k(correct, 2).mean() == pytest.approx(5 / 6)

    @given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32 - 1), st.data())
    @settings(deadline=None)
    def test_is_the_mean_over_all_subsets(self, problems, samples, seed, data):
        correct = np.random.default_rng(seed).integers(0, 2, (problems, samples)).astype(bool)
        k = data.draw(st.integers(1, samples))
        subsets = list(itertools.combinations(range(samples), k))
        expected = np.mean([correct[:, list(s)].any(1).mean() for s in subsets])
        assert pass_at_k(correct, k).mean() == pytest.approx(expected)

    def test_one_sample_gives_the_accuracy(self):
        correct = np.random.default_rng(5).random((20, 6)) < 0.4
        assert pass_at_k(correct, 1).mean() == pytest.approx(correct.mean())

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
        assert majority_at_k(answers, correct, 2).mean() == pytest.approx((1 + 0.5 + 0.5) / 3)
        assert majority_at_k(answers, correct, 3).mean() == pytest.approx(1.0)

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
        assert majority_at_k(answers[None], correct[None], k)[0] == pytest.approx(
            expected, abs=1e-12
        )

    def test_one_vote_is_the_accuracy(self):
        answers = np.array([[0, 1, -1, 0], [2, 2, 3, 4]])
        correct = np.array([[True, False, False, True], [False, False, True, False]])
        assert majority_at_k(answers, correct, 1).mean() == pytest.approx(3 / 8)

    def test_nobody_answers(self):
        assert majority_at_k(np.full((1, 5), -1), np.zeros((1, 5), bool), 3)[0] == 0.0

    def test_many_samples_are_no_problem(self):
        # 40 of 64 give the right answer: the vote of any 63 of them does too.
        answers = np.repeat([[0, 1]], [40, 24], axis=1)
        assert majority_at_k(answers, answers == 0, 63)[0] == pytest.approx(1.0)
        singles = np.arange(64)[None]
        assert majority_at_k(singles, singles == 0, 32)[0] == pytest.approx(1 / 64)

    def test_one_answer_with_two_verdicts_is_refused(self):
        with pytest.raises(ValueError, match="both right and wrong"):
            majority_at_k(np.zeros((1, 2), int), np.array([[True, False]]), 1)


def anytime(budgets, accuracies):
    """Mean and area."""
    return anytime_weights(budgets) @ np.array(accuracies, np.float64)


class TestAnytime:
    def test_by_hand(self):
        # Doublings: (.2 + .4)/2, (.4 + .9)/2; then two at once: (.9 + 1)/2 twice.
        mean, area = anytime([8, 16, 32, 128], [0.2, 0.4, 0.9, 1.0])
        assert mean == pytest.approx(2.5 / 4)
        assert area == pytest.approx((0.3 + 0.65 + 0.95 * 2) / 4)

    def test_one_budget_is_its_accuracy(self):
        assert anytime([64], [0.7]) == pytest.approx((0.7, 0.7))

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
    def test_the_area_does_not_depend_on_budgets_put_in_between(self, accuracies):
        budgets = [4**i for i in range(1, len(accuracies) + 1)]
        middle = [(a + b) / 2 for a, b in itertools.pairwise(accuracies)]
        finer = [x for pair in zip(accuracies, middle) for x in pair] + accuracies[-1:]
        between = [2 ** (i + 2) for i in range(len(finer))]
        assert anytime(between, finer)[1] == pytest.approx(anytime(budgets, accuracies)[1])

    @pytest.mark.parametrize("budgets", [[], [8, 8], [16, 8], [0]])
    def test_budgets_that_do_not_rise_are_refused(self, budgets):
        with pytest.raises(ValueError, match="budgets"):
            anytime_weights(budgets)
