"""Estimates and votes by hand; completion and adherence; which samples give the same answer."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_grading import ExactGrader, Grader
from bacr_jax.evaluation import metrics
from bacr_jax.evaluation.intervals import ratio_interval, wilson_interval
from bacr_jax.evaluation.metrics import (
    adherence,
    answer_clusters,
    anytime_weights,
    completion,
    majority_at_k,
    pass_at_k,
    thinking_by_verdict,
)
from bacr_jax.evaluation.samples import SAMPLED, EvalSetting, graded
from bacr_jax.types import NO_BUDGET
from evaluation_world import GOLD, sample


class TestPassAtK:
    def test_by_hand(self):
        # 2 of 4 right, k = 2: one of six pairs is all wrong.
        correct = np.array([[True, False, True, False]])
        assert pass_at_k(correct, 2).mean() == pytest.approx(5 / 6)

    @given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32 - 1), st.data())
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
        with pytest.raises(ValueError, match=f"found {k}, but with 4 samples .*; use 1 to 4"):
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
    @settings(max_examples=200)
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

    @pytest.mark.parametrize("samples", [1028, 1030, 2048])
    def test_votes_of_thousands_of_samples_are_computed(self, samples):
        # Two answers that are equally frequent win equally often.
        answers = np.arange(samples)[None] % 2
        for k in (1, 512, samples):
            assert majority_at_k(answers, answers == 0, k)[0] == pytest.approx(0.5, abs=1e-12)
        # Half of the samples have no answer, so the only answer wins.
        blank = np.where(answers == 0, 0, -1)
        assert majority_at_k(blank, blank == 0, 600)[0] == pytest.approx(1.0, abs=1e-12)
        singles = np.arange(samples)[None]
        assert majority_at_k(singles, singles == 0, 512)[0] == pytest.approx(1 / samples)
        assert majority_at_k(answers, answers < 0, 512)[0] == 0.0

    @given(st.integers(1, 40), st.data())
    @settings(max_examples=100)
    def test_weights_of_many_samples_give_the_shares_of_few(self, samples, data):
        numbers = st.lists(st.integers(-1, 4), min_size=samples, max_size=samples)
        answers = np.array([data.draw(numbers)])
        k = data.draw(st.integers(1, samples))
        counted = majority_at_k(answers, answers == 0, k)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(metrics, "_MOST_COUNTED", 0)
            metrics._win_probability.cache_clear()
            weighted = majority_at_k(answers, answers == 0, k)
        metrics._win_probability.cache_clear()
        assert weighted == pytest.approx(counted, abs=1e-13)


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


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=1) as made:
        yield made


def test_right_answers_vote_together_however_they_are_written(grader):
    correct = np.array([[True, False, True, False]])
    numbers = answer_clusters([["0.5", "3", r"\frac12", None]], correct, grader)
    assert numbers.tolist() == [[0, 1, 0, -1]]


def test_equal_wrong_answers_vote_together(grader):
    answers = [["0.25", "7", r"\frac{1}{4}", "7.0"], ["7", "8", "8", "7"]]
    numbers = answer_clusters(answers, np.zeros((2, 4), bool), grader)
    assert numbers.tolist() == [[1, 2, 1, 2], [1, 2, 2, 1]]


class Comparing:
    """A grader that counts what it is asked: answers are equal if `equal` says so of two."""

    def __init__(self, equal):
        self.equal, self.calls = equal, []

    def grade(self, texts, references, *, mode, poll):
        self.calls.append(len(texts))
        value = lambda text: int(text.removeprefix("<answer>").removesuffix("</answer>"))
        return [
            SimpleNamespace(correct=self.equal(value(t), int(g)))
            for t, g in zip(texts, references, strict=True)
        ]


def test_an_answer_joins_the_first_whose_first_answer_it_equals():
    neighbours = Comparing(lambda a, b: abs(a - b) == 1)
    numbers = answer_clusters([["1", "3", "2", "9"]], np.zeros((1, 4), bool), neighbours)
    assert numbers.tolist() == [[1, 2, 1, 3]]


def test_answers_are_compared_with_one_of_each_kind_for_all_problems_at_once():
    parity = Comparing(lambda a, b: a % 2 == b % 2)
    answers = [[str(n) for n in range(16)], [str(n) for n in range(0, 32, 2)]]
    numbers = answer_clusters(answers, np.zeros((2, 16), bool), parity)
    assert numbers.tolist() == [[1, 2] * 8, [1] * 16]
    # With the first answer all others; then the odd ones with the first of them.
    assert parity.calls == [15 + 15, 7]


def test_a_right_sample_without_a_named_answer_still_votes():
    numbers = answer_clusters([[None, None]], np.array([[True, False]]), ExactGrader())
    assert numbers.tolist() == [[0, -1]]


# Thinking tokens and answer of two samples of three problems; the budget is 8.
DRAWN = [[(8, GOLD), (8, "1")], [(4, GOLD), (6, "1")], [(2, GOLD), (8, GOLD)]]


def cells(budget=8, drawn=DRAWN, **fields):
    made = [
        sample(i, j, answer, budget=budget, thinking=n, **fields)
        for i, row in enumerate(drawn)
        for j, (n, answer) in enumerate(row)
    ]
    return graded(made, EvalSetting(SAMPLED, budget, 2))


def test_completion_tells_a_cut_from_a_mistake():
    found = completion(cells())
    # Three of six traces ended by themselves, two of them right; of the three that were cut two.
    assert found["completion_rate"] == pytest.approx(1 / 2)
    assert found["accuracy_if_complete"] == pytest.approx(2 / 3)
    assert found["accuracy_if_cut"] == pytest.approx(2 / 3)
    assert found["closed_rate"] == 1.0
    for name, ends in (("accuracy_if_complete", "if_complete_ci95"), ("completion_rate",) * 2):
        ends = "completion_ci95" if ends == name else ends
        low, high = found[ends]
        assert 0 <= low < found[name] < high <= 1
    assert found["closed_ci95"] == pytest.approx(wilson_interval(3, 3))


def test_thinking_is_split_by_the_verdict():
    """Right answers thought 8, 4, 2 and 8 tokens, wrong ones 8 and 6."""
    found = thinking_by_verdict(cells())
    assert (found["thinking_if_right"], found["thinking_if_wrong"]) == (5.5, 7.0)
    # Resamples of three problems have the right sums 8, 4 and 10 over 1, 1 and 2 answers.
    drawn = np.array(list(itertools.product(range(3), repeat=3)))
    means = np.array([8, 4, 10])[drawn].sum(1) / np.array([1, 1, 2])[drawn].sum(1)
    expected = np.quantile(np.repeat(means, 1000), [0.025, 0.975])
    assert found["thinking_right_ci95"] == pytest.approx(expected, abs=0.2)


def test_a_verdict_without_answers_has_no_thinking():
    found = thinking_by_verdict(cells(drawn=[[(8, GOLD), (4, GOLD)]]))
    assert (found["thinking_if_right"], found["thinking_right_ci95"]) == (6.0, [6.0, 6.0])
    assert found["thinking_if_wrong"] is None and found["thinking_wrong_ci95"] is None


def test_no_share_of_nothing():
    found = completion(cells(drawn=[[(8, GOLD), (8, "1")]], finished=False))
    assert found["accuracy_if_complete"] is None and found["if_complete_ci95"] is None
    assert found["accuracy_if_cut"] == 0.5 and found["closed_rate"] == 0.0


def test_a_ratio_has_the_interval_of_problems_drawn_again():
    part, whole = np.array([0.5, 0.0, 0.25, 0.0]), np.array([0.5, 0.0, 0.5, 1.0])
    drawn = np.random.default_rng(5).integers(0, 4, (200_000, 4))
    top, bottom = part[drawn].sum(1), whole[drawn].sum(1)
    expected = np.quantile(top[bottom > 0] / bottom[bottom > 0], [0.025, 0.975])
    np.testing.assert_allclose(ratio_interval(part, whole), expected, atol=0.02)
    # All alike: as wide as two problems are, since the others have nothing to show.
    alike = ratio_interval(np.array([0.5, 0.0, 1.0]), np.array([0.5, 0.0, 1.0]))
    assert alike == pytest.approx(wilson_interval(2, 2))


def test_adherence_by_hand():
    found = adherence(cells())
    assert (found["requested"], found["used"]) == (8, 6.0)
    assert found["ratio"] == pytest.approx(6 / 8)
    # Problems use 8, 5 and 5 of 8.
    assert found["ratio_ci95"] == pytest.approx([5 / 8, 1.0])
    assert found["quantiles"] == {"p10": 3.0, "p50": 7.0, "p90": 8.0, "max": 8.0}
    assert (found["over_share"], found["mean_excess"]) == (0.0, 0.0)


def test_tokens_above_the_budget_are_counted():
    found = adherence(cells(budget=4, closed_by="budget"))
    # 8 8 | 4 6 | 2 8: above 4 by 4 4 0 2 0 4.
    assert found["over_share"] == pytest.approx(4 / 6)
    assert found["mean_excess"] == pytest.approx(14 / 6)


@pytest.mark.parametrize(("budget", "requested"), [(0, 0), (NO_BUDGET, None)])
def test_nothing_requested_has_no_ratio(budget, requested):
    found = adherence(cells(budget=budget))
    assert found["requested"] == requested and found["ratio"] is found["ratio_ci95"] is None
    assert found["used"] == 6.0 and found["mean_excess"] == (6.0 if budget == 0 else 0.0)
