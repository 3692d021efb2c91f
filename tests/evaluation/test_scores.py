"""Scores between 0 and 1 instead of verdicts: means, intervals, records, and no votes."""

import json

import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.evaluation.comparison import check_comparable
from bacr_jax.evaluation.intervals import (
    paired_difference_interval,
    rate_intervals,
    wilson_interval,
)
from bacr_jax.evaluation.metrics import completion
from bacr_jax.evaluation.samples import SAMPLED, EvalSetting, Sample, graded
from bacr_jax.evaluation.summary import entry_of
from evaluation_world import sample


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
    # No answer of these is right or wrong.
    assert entry["pass_at"] == {} and "maj_at" not in entry
    assert Sample.from_json(json.loads(json.dumps(made[0].to_json()))) == made[0]


def test_verdicts_stay_verdicts():
    made = [sample(0, j, answer) for j, answer in enumerate(["4", "5"])]
    assert graded(made, EvalSetting(SAMPLED, 8, 2)).correct.dtype == bool


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
    ends = rate_intervals(draws, seed=1)
    assert 0.91 <= np.mean((ends[:, 0] <= mean) & (mean <= ends[:, 1])) <= 0.99
    # Wilson's, which stands in where all problems score alike, is wider than it need be.
    wilson = np.array([wilson_interval(float(column.sum()), n) for column in draws.T])
    assert np.mean((wilson[:, 0] <= mean) & (mean <= wilson[:, 1])) >= 0.95
    other = rng.beta(a, b, (n, times))
    pairs = [paired_difference_interval(x[:, None], y[:, None]) for x, y in zip(draws.T, other.T)]
    assert np.mean([low <= 0.0 <= high for low, high in pairs]) >= 0.93


def test_evaluations_by_other_verifiers_are_not_compared():
    mine, theirs = {"file": "a.py:f", "digest": "1"}, {"sets": {}, "grader": None}
    with pytest.raises(UserError, match="the built-in rules, and this one by a.py:f"):
        check_comparable({}, theirs, {}, "there", grader=mine)
    with pytest.raises(UserError, match="or by another version of the file"):
        check_comparable({}, {**theirs, "grader": {**mine, "digest": "2"}}, {}, "x", grader=mine)
