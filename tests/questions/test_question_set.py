"""A set keeps its rows together and says what is not in it."""

import dataclasses

import numpy as np
import pytest

from bacr_jax.questions.question_set import LeftOut, QuestionSet


def small_set():
    return QuestionSet(
        name="s",
        questions=["q0", "q1", "q2"],
        answers=["0", "1", "2"],
        levels=np.array([1, 3, 5], np.int32),
        groups=np.array([0, 1, 3], np.int32),
        ids=["a", "b", "c"],
    )


def test_rows_stay_together():
    taken = small_set().take([2, 0])
    assert (taken.questions, taken.answers, taken.ids) == (["q2", "q0"], ["2", "0"], ["c", "a"])
    assert (taken.levels.tolist(), taken.groups.tolist()) == ([5, 1], [3, 0])


def test_rows_can_be_left_out():
    assert small_set().without(np.array([1])).ids == ["a", "c"]
    assert small_set().without(np.array([], np.int64)).ids == ["a", "b", "c"]


def test_fields_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="different lengths"):
        dataclasses.replace(small_set(), answers=["0"])


def test_what_is_taken_out_is_noted_only_under_a_reason():
    gone = small_set().without([2, 0], "too long")
    assert gone.ids == ["b"]
    assert gone.left_out == (LeftOut("c", "too long"), LeftOut("a", "too long"))
    assert gone.without([0]).left_out == gone.left_out
    assert gone.without([0], "no answer").left_out[2] == LeftOut("b", "no answer")


def test_without_subjects_and_marks_there_are_none():
    made = small_set()
    assert made.subjects == ["", "", ""] and made.duplicates.tolist() == [False] * 3
    assert made.unique().ids == made.ids


def test_near_duplicates_are_counted_and_can_be_left_out():
    marked = dataclasses.replace(small_set(), duplicates=np.array([True, False, False]))
    assert marked.unique().ids == ["b", "c"] and len(marked.unique()) == 2
    assert marked.take([1, 0]).duplicates.tolist() == [False, True]
    assert marked.summary() == [
        "s: 3 questions, 1 of them near-duplicates of training questions (2 without)"
    ]


def test_a_summary_names_reasons_and_three_rows_of_each():
    rows = [LeftOut(f"r{i}", "no answer") for i in range(5)] + [LeftOut("x", "too long")]
    found = dataclasses.replace(
        small_set(), left_out=tuple(rows), relative_tolerance=0.05, note="half of it is public"
    )
    assert found.summary() == [
        "s: 3 questions, numbers within 5% are right",
        "  half of it is public",
        "  left out, no answer: 5 (r0, r1, r2 and 2 more)",
        "  left out, too long: 1 (x)",
    ]
