"""Exact match for the procedural task."""

import pytest

from bacr_jax.errors import UserError
from bacr_jax.grading import ExactGrader


def test_only_the_exact_text_between_tags_is_right():
    texts = ["<answer> 12 </answer>", "<answer>12.0</answer>", "12", "\\boxed{12}", "<answer>12"]
    with ExactGrader() as grader:
        verdicts = grader.grade(texts, ["12"] * 5)
        assert [verdict.correct for verdict in verdicts] == [True, False, False, False, False]
        assert [verdict.extracted for verdict in verdicts] == ["12", "12.0", None, None, None]
        assert grader.counters() == {"graded": 5, "correct": 1, "no_answer": 3}


def test_the_last_tag_after_the_thinking_counts():
    text = "<think><answer>1</answer></think><answer>2</answer><answer>3</answer>"
    assert ExactGrader().grade([text], ["3"])[0].correct
    assert not ExactGrader().grade(["<think><answer>1</answer></think>"], ["1"])[0].correct


def test_an_empty_answer_is_never_right():
    assert not ExactGrader().grade(["<answer></answer>"], [""])[0].correct


def test_submit_has_the_interface_of_the_pool():
    pending = ExactGrader().submit(["<answer>1</answer>"], ["1"], mode="lenient")
    assert pending.done()
    assert pending.result()[0].correct


def test_requests_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match="mode='loose'"):
        ExactGrader().grade([], [], mode="loose")
    with pytest.raises(UserError, match="1 texts and 2 golds"):
        ExactGrader().grade(["a"], ["a", "b"])
