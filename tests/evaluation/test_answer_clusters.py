"""Samples vote together when their answers are equal."""

import numpy as np
import pytest

from bacr_jax.evaluation.answer_clusters import answer_clusters
from bacr_jax.grading import ExactGrader, Grader


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


def test_equality_reaches_through_a_third_answer():
    class Chain:
        """Takes neighbours for equal."""

        def grade(self, texts, references, *, mode):
            value = lambda text: int(text.removeprefix("<answer>").removesuffix("</answer>"))
            return [
                type("V", (), {"correct": abs(value(t) - value(g)) == 1})
                for t, g in zip(texts, references)
            ]

    numbers = answer_clusters([["1", "3", "2", "9"]], np.zeros((1, 4), bool), Chain())
    assert numbers.tolist() == [[1, 1, 1, 2]]


def test_a_right_sample_without_a_named_answer_still_votes():
    numbers = answer_clusters([[None, None]], np.array([[True, False]]), ExactGrader())
    assert numbers.tolist() == [[0, -1]]
