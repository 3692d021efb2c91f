"""Scores between 0 and 1 instead of verdicts: means, votes, best of k, intervals, records."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.errors import UserError
from bacr_jax.evaluation.comparison import check_comparable
from bacr_jax.evaluation.intervals import (
    paired_difference_interval,
    rate_intervals,
    wilson_interval,
)
from bacr_jax.evaluation.metrics import answer_clusters, completion, majority_at_k, pass_at_k
from bacr_jax.evaluation.samples import SAMPLED, EvalSetting, Sample, graded
from bacr_jax.evaluation.summary import entry_of
from evaluation_world import sample

SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=4, max_size=4)


def scored(rows, answers, **fields):
    """Samples with scores, problems by samples."""
    made = [
        sample(i, j, answer, **{"correct": score, "strict": score, "path": "verifier", **fields})
        for i, (row, texts) in enumerate(zip(rows, answers))
        for j, (score, answer) in enumerate(zip(row, texts))
    ]
    return made, graded(made, EvalSetting(SAMPLED, 8, len(rows[0])))


def test_accuracy_is_the_mean_score_and_records_keep_it():
    made, found = scored([[0.5, 1.0], [0.0, 0.25]], [["a", "b"], ["c", "d"]])
    assert found.correct.dtype == float
    entry = entry_of(found, grader=None)
    assert entry["accuracy"] == entry["strict_accuracy"] == 0.4375
    assert entry["disagreement"] == 0.0
    # Best of both, and the vote of two answers of which each wins half of the time.
    assert entry["pass_at"]["2"]["value"] == (1.0 + 0.25) / 2
    assert entry["maj_at"]["2"]["value"] == (0.75 + 0.125) / 2
    assert Sample(**json.loads(json.dumps(dataclasses.asdict(made[0])))) == made[0]


def test_verdicts_stay_verdicts():
    made = [sample(0, j, answer) for j, answer in enumerate(["4", "5"])]
    assert graded(made, EvalSetting(SAMPLED, 8, 2)).correct.dtype == bool


@given(SCORES, st.integers(1, 4))
def test_best_of_k_is_the_mean_over_all_subsets(scores, k):
    expected = np.mean([max(subset) for subset in itertools.combinations(scores, k)])
    np.testing.assert_allclose(pass_at_k(np.array([scores]), k), expected, atol=1e-12)


@given(SCORES, st.lists(st.integers(-1, 2), min_size=4, max_size=4), st.integers(1, 4))
def test_the_vote_of_k_is_the_mean_over_all_subsets(scores, answers, k):
    value = {a: np.mean([s for s, b in zip(scores, answers) if b == a]) for a in set(answers)}
    outcomes = []
    for subset in itertools.combinations(answers, k):
        votes = {a: subset.count(a) for a in subset if a >= 0}
        winners = [a for a, n in votes.items() if n == max(votes.values())]
        outcomes.append(np.mean([value[a] for a in winners]) if winners else 0.0)
    found = majority_at_k(np.array([answers]), np.array([scores]), k)
    np.testing.assert_allclose(found, np.mean(outcomes), atol=1e-12)


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(1, 4))
def test_scores_of_0_and_1_are_verdicts(right, k):
    verdicts = np.array([right])
    # Right answers are one answer, wrong ones differ.
    answers = np.array([[0 if r else 1 + i for i, r in enumerate(right)]])
    as_scores = verdicts.astype(float)
    np.testing.assert_allclose(pass_at_k(as_scores, k), pass_at_k(verdicts, k), atol=1e-12)
    one, other = majority_at_k(answers, as_scores, k), majority_at_k(answers, verdicts, k)
    np.testing.assert_allclose(one, other, atol=1e-12)


def test_answers_vote_together_when_they_are_written_alike():
    answers = [["x  =\n1", "x = 1", None, "x=1"], ["a", "b", "a", "b"]]
    clusters = answer_clusters(answers, np.full((2, 4), 0.5), grader=None)
    assert clusters.tolist() == [[0, 0, -1, 1], [0, 1, 0, 1]]


def test_accuracy_of_complete_and_of_cut_traces_are_mean_scores():
    made = [
        sample(i, 0, "a", correct=score, strict=score, closed_by=ends)
        for i, (score, ends) in enumerate([(0.5, "tag"), (1.0, "tag"), (0.25, "budget")])
    ]
    found = completion(graded(made, EvalSetting(SAMPLED, 8, 1)))
    assert (found["accuracy_if_complete"], found["accuracy_if_cut"]) == (0.75, 0.25)
    low, high = found["if_complete_ci95"]
    assert 0.5 <= low < 0.75 < high <= 1.0


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2.0, 5.0), (0.3, 1.5)])
def test_intervals_of_mean_scores_hold_the_mean(a, b):
    """About 95 times in 100, as for verdicts; 40 problems, 300 evaluations."""
    rng = np.random.default_rng(7)
    mean, n, times = a / (a + b), 40, 300
    draws = rng.beta(a, b, (n, times))
    ends = rate_intervals(draws)
    assert 0.91 <= np.mean((ends[:, 0] <= mean) & (mean <= ends[:, 1])) <= 0.99
    # Wilson's, which stands in where all problems score alike, is wider than it need be.
    wilson = np.array([wilson_interval(float(column.sum()), n) for column in draws.T])
    assert np.mean((wilson[:, 0] <= mean) & (mean <= wilson[:, 1])) >= 0.95
    other = rng.beta(a, b, (n, times))
    pairs = [paired_difference_interval(column) for column in (draws - other).T]
    assert np.mean([low <= 0.0 <= high for low, high in pairs]) >= 0.93


def test_evaluations_by_other_verifiers_are_not_compared():
    mine, theirs = {"file": "a.py:f", "digest": "1"}, {"sets": {}, "grader": None}
    with pytest.raises(UserError, match="the built-in rules and this one by a.py:f"):
        check_comparable({"grader": mine}, theirs, "there")
    with pytest.raises(UserError, match="or by another version of the same file"):
        check_comparable({"grader": mine}, {**theirs, "grader": {**mine, "digest": "2"}}, "x")
