"""The graders' interface: modes, counters, interruption; exact match."""

import pytest

from bacr_grading import ExactGrader, Grader
from bacr_jax.errors import UserError


def test_a_verdict_says_what_was_found_and_how(grader):
    texts = ["<answer>7</answer>", "\\boxed{\\text{odd}}", "\\boxed{1,2}", "\\boxed{x+1}", "none"]
    verdicts = grader.grade(texts, ["7", "odd", "2,1", "1+x", "1"])
    assert [verdict.path for verdict in verdicts] == [
        "number",
        "string",
        "list",
        "symbolic",
        "none",
    ]
    assert [verdict.correct for verdict in verdicts] == [True, True, True, True, False]
    assert [v.extracted for v in verdicts] == ["7", "\\text{odd}", "1,2", "x+1", None]
    assert not any(verdict.timed_out for verdict in verdicts)


@pytest.mark.parametrize(
    ("pred", "reference"),
    [
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("(r+5)(r+5)", "(r+5)^2"),
        ("\\tan^2(y)+1", "\\sec^2(y)"),
        ("3 \\pm 2\\sqrt{2}", "3 - 2\\sqrt{2}, 3 + 2\\sqrt{2}"),
        ("(-\\infty, 1) \\cup (1, \\infty)", "(-\\infty,1)\\cup(1,\\infty)"),
        ("\\frac{\\pi}{2}", "\\pi/2"),
        ("5 \\geq x", "x \\leq 5"),
        ("\\frac\\pi 2", "\\frac{\\pi}{2}"),
        ("1 - \\frac{1}{\\mathrm{e}}", "1 - e^{-1}"),
    ],
)
def test_mathematics_is_compared_by_value(grader, pred, reference):
    verdict = grader.grade([f"\\boxed{{{pred}}}"], [reference])[0]
    assert verdict.correct
    assert verdict.strict


@pytest.mark.parametrize(
    ("pred", "reference"),
    [
        ("\\sqrt{3}", "\\sqrt{5}"),
        ("x+1", "x+2n+1"),
        ("f(y)", "f(x)"),
        ("x \\leq 5", "x \\geq 5"),
        ("2", "2007 + \\frac\\pi 2"),
        ("1 + \\frac{1}{\\mathrm{e}}", "1 - \\frac{1}{\\mathrm{e}}"),
        ("12_3 + x", "12_4 + x"),
    ],
)
def test_different_mathematics_is_wrong(grader, pred, reference):
    assert not grader.grade([f"\\boxed{{{pred}}}"], [reference])[0].correct


def test_rewards_need_a_closed_answer_and_reports_do_not(grader):
    texts = ["so the answer is 42", "The answer is $\\frac{84}{2}$.", "\\boxed{42", "#### 42"]
    strict = grader.grade(texts, ["42"] * 4, mode="strict")
    lenient = grader.grade(texts, ["42"] * 4, mode="lenient")
    assert [verdict.correct for verdict in strict] == [False] * 4
    assert [verdict.correct for verdict in lenient] == [True, True, False, True]
    assert [verdict.strict for verdict in lenient] == [False] * 4


def test_the_modes_disagreements_are_counted():
    with Grader(workers=1) as grader:
        texts = ["\\boxed{1}", "\\boxed{0.33}", "#### 5", "\\boxed{25\\text{ m}}", "\\boxed{2}"]
        grader.grade(texts, ["1", "1/3", "5", "25\\text{ ft}", "3"], mode="lenient")
        counters = grader.counters()
        assert counters["compared_modes"] == 5
        assert counters["mode_disagreements"] == 3
        grader.grade(texts, ["1", "1/3", "5", "25\\text{ ft}", "3"], mode="strict")
        assert grader.counters()["compared_modes"] == 5
        assert grader.counters()["graded"] == 10
        assert grader.counters()["correct"] == 5


def test_hedging_is_never_right_by_union(grader):
    texts = [
        "\\boxed{41 \\text{ or } 42}",
        "\\boxed{42} or \\boxed{41}",
        "<answer>42</answer><answer>41</answer>",
        "\\boxed{42, 41}",
        "\\boxed{\\pm 42}",
    ]
    for mode in ("strict", "lenient"):
        assert not any(v.correct for v in grader.grade(texts, ["42"] * 5, mode=mode))


def test_a_list_in_several_boxes_is_right_only_as_a_whole(grader):
    text = "$\\boxed{-2}$ and $\\boxed{1}$"
    references = ["1,-2", "1", "-2", "1,-2,3"]
    verdicts = grader.grade([text] * 4, references)
    assert [verdict.correct for verdict in verdicts] == [True, True, False, False]


def test_prose_in_a_box_counts_in_reports_only(grader):
    text = "<answer>We find that $x \\lt 3$</answer>"
    assert not grader.grade([text], ["x < 3"], mode="strict")[0].correct
    assert grader.grade([text], ["x < 3"], mode="lenient")[0].correct


def test_equal_questions_are_asked_once():
    with Grader(workers=1) as grader:
        grader.grade(["\\boxed{x+1}"] * 8, ["1+x"] * 8)
        grader.grade(["\\boxed{x+1}"], ["1+x"])
        assert grader.counters()["cache_hits"] == 8


def test_poll_is_called_while_waiting_and_may_interrupt():
    class Stop(Exception):
        pass

    calls = []

    def poll():
        calls.append(1)
        if len(calls) == 3:
            raise Stop

    slow = [f"\\boxed{{\\int_0^1 \\sin(\\tan(x^{n}))e^{{x^3}} dx}}" for n in range(2, 30)]
    with Grader(workers=1, deadline=5) as grader:
        with pytest.raises(Stop):
            grader.grade(slow, ["1+x"] * len(slow), poll=poll)
        assert len(calls) == 3
        assert grader.grade(["\\boxed{1}"], ["1"])[0].correct


def test_a_missing_text_or_reference_is_incorrect(grader):
    verdicts = grader.grade([None, "\\boxed{1}", "\\boxed{1}"], ["1", None, "\\boxed{}"])
    assert [verdict.correct for verdict in verdicts] == [False] * 3
    assert [verdict.path for verdict in verdicts] == ["none"] * 3


def test_an_empty_batch_is_graded(grader):
    assert grader.grade([], []) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers=0"),
        ({"deadline": 0.0}, "deadline=0.0"),
        ({"memory_mb": 1}, "memory_mb=1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Grader(**arguments)


def test_requests_that_make_no_sense_are_refused(grader):
    with pytest.raises(UserError, match="mode='loose'"):
        grader.grade([], [], mode="loose")
    with pytest.raises(UserError, match="1 texts and 2 references"):
        grader.grade(["a"], ["a", "b"])


def test_only_the_exact_text_between_tags_is_right():
    texts = ["<answer> 12 </answer>", "<answer>12.0</answer>", "12", "\\boxed{12}", "<answer>12"]
    with ExactGrader() as grader:
        verdicts = grader.grade(texts, ["12"] * 5)
        assert [verdict.correct for verdict in verdicts] == [True, False, False, False, False]
        assert [verdict.extracted for verdict in verdicts] == ["12", "12.0", None, None, None]
        assert grader.counters() == {"graded": 5, "correct": 1, "no_answer": 3}


def test_in_exact_match_the_last_tag_after_the_thinking_counts():
    text = "<think><answer>1</answer></think><answer>2</answer><answer>3</answer>"
    assert ExactGrader().grade([text], ["3"])[0].correct
    assert not ExactGrader().grade(["<think><answer>1</answer></think>"], ["1"])[0].correct
    verdict = ExactGrader().grade(["<think>maybe <answer>5</answer> no, wait"], ["5"])[0]
    assert (verdict.correct, verdict.path) == (False, "none")


def test_an_empty_answer_is_never_right():
    assert not ExactGrader().grade(["<answer></answer>"], [""])[0].correct


def test_exact_match_refuses_the_same_requests():
    with pytest.raises(UserError, match="mode='loose'"):
        ExactGrader().grade([], [], mode="loose")
    with pytest.raises(UserError, match="1 texts and 2 references"):
        ExactGrader().grade(["a"], ["a", "b"])


STATEMENTS = [
    ("The answer is 12. No, wait. The answer is 15.", "15", "12"),
    ("I think the answer is 12. No, that's wrong. The answer is 15.", "15", "12"),
    ("The final answer is 3. Actually, the final answer is 4.", "4", "3"),
    ("Answer: 4. Let me recheck. Answer: 9", "9", "4"),
    ("The answer is not 13. It is 14.", "14", "13"),
    ("The answer is 14, not 13.", "14", "13"),
    ("13 is wrong. The answer is 12.", "12", "13"),
    ("The answer is 12. Actually, it is 15.", "15", "12"),
    ("The answer is 12. No, 15.", "15", "12"),
    ("The answer is 12. Sorry, it should be $15$.", "15", "12"),
    ("The answer is 12 -- I mean 15", "15", "12"),
    ("The answer is 12. Wait, let me check: 5 + 7 = 12.", "12", "13"),
    ("I do not think that the answer is 13, the answer is 14.", "14", "13"),
    ("I have no doubt the answer is 14.", "14", "13"),
    ("The answer is 13. On reflection it is 14.", "14", "13"),
    ("The answer is 13. I take that back. It is 14.", "14", "13"),
    ("We cannot use it, so the answer is 7.", "7", "8"),
    ("There is no way to pair them, so the answer is 7", "7", "8"),
    ("It is impossible to fill half a bus so the answer is 7.", "7", "8"),
    ("The answer is $\\frac{84}{2}$.", "42", "84"),
    ("so it is 50%", "50", "51"),
    ("The final value is 13.20%", "13.2", "1.32"),
    ("net change of -$40", "-40", "40"),
]


@pytest.mark.parametrize(("text", "right", "wrong"), STATEMENTS)
def test_reports_read_the_last_statement_and_nothing_that_is_denied(grader, text, right, wrong):
    verdicts = grader.grade([text, text], [right, wrong], mode="lenient")
    assert [verdict.correct for verdict in verdicts] == [True, False]


DENIALS = [
    "The answer is not 13.",
    "The answer isn't 13",
    "It is not 13.",
    "13 is not the answer.",
    "13 isn't the right answer.",
    "13 cannot be right.",
    "The answer can't be 13.",
    "I doubt that the answer is 13.",
    "I do not think the answer is 13.",
    "It is not true that the answer is 13.",
    "The answer is anything but 13.",
    "The answer is no longer 13.",
    "The answer is 13. That is wrong.",
    "The answer is hardly 13.",
    "The answer \\neq 13",
    "It's false that the answer is 13.",
    "The answer is 13, which is wrong.",
]


@pytest.mark.parametrize("text", DENIALS)
def test_a_denied_value_is_no_answer(grader, text):
    assert not grader.grade([text], ["13"], mode="lenient")[0].correct


@pytest.mark.parametrize(
    "text",
    [
        "The total is \\boxed{42}. It stands in \\boxed as asked.",
        "\\boxed{42} (I used \\boxed notation)",
        "\\boxed{42}, which is in \\boxed{}.",
        "\\boxed{42}, in the form \\boxed{...}",
    ],
)
@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_a_mention_of_the_command_is_no_box(grader, text, mode):
    assert grader.grade([text], ["42"], mode=mode)[0].correct


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_a_sequence_with_an_elision_is_compared_member_by_member(grader, mode):
    texts = ["\\boxed{1, 3, 5, \\ldots, 2n-1}", "\\boxed{1,2,\\dots,9}"]
    verdicts = grader.grade(texts, ["1, 2, \\ldots, n", "1, 2, \\ldots, 9"], mode=mode)
    assert [verdict.correct for verdict in verdicts] == [False, True]
