"""References as the data is loaded, and what is decided or left open without math-verify."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_grading import Reference, parse_reference
from bacr_grading.judge import Undecided, judge


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("18", Reference("18", "number")),
        ("$\\frac{1}{2}$", Reference("\\frac{1}{2}", "number")),
        ("Adding gives $\\boxed{x^2}$.", Reference("x^2", "expression")),
        ("6 * 3 = 18\n#### 1,800", Reference("1,800", "number")),
        ("\\text{(C)}", Reference("\\text{(C)}", "text")),
        ("(1, 2)", Reference("(1, 2)", "list")),
        ("204_5", Reference("204_5", "number")),
        ("is $\\boxed{(1,2)}$ and $\\boxed{(3,4)}$.", Reference("(1,2), (3,4)", "list")),
    ],
)
def test_references_and_their_kind(text, parsed):
    assert parse_reference(text) == parsed


@pytest.mark.parametrize(
    "text", [None, "", "  ", "\\boxed{}", "$$", "\\frac{1}{", "1\x00", "\ud83d", "x+" * 2000]
)
def test_unusable_references_are_none(text):
    assert parse_reference(text) is None


@pytest.mark.slow  # 16,292 references: some twenty seconds
def test_math_has_two_unusable_rows_and_gsm8k_none(shared_rows):
    math = [parse_reference(row["solution"]) for row in shared_rows("math/train.jsonl")]
    assert (len(math), math.count(None)) == (7500, 2)
    for split in ("train", "test"):
        rows = shared_rows(f"gsm8k/{split}.jsonl")
        assert {parse_reference(row["answer"]).kind for row in rows} == {"number"}


def test_only_what_needs_mathematics_is_left_open():
    assert judge("\\boxed{1}", "1", mode="strict").correct
    assert isinstance(judge("\\boxed{x+1}", "1+x", mode="strict"), Undecided)
    assert judge("x+1", "1+x", mode="strict").path == "none"
    assert isinstance(judge("x+1", "1+x", mode="lenient"), Undecided)
    assert judge("\\boxed{9^{9^9}}", "1+x", mode="strict").path == "guard"


def test_a_list_in_several_boxes_is_a_second_question():
    left = judge("\\boxed{x+1} and \\boxed{y}", "1+x", mode="strict")
    assert [request.answer for request in left.requests] == ["y", "x+1, y"]
    assert [reading.strict for reading in left.readings] == [True, True]


def test_a_tolerance_is_for_measurements_only():
    exact = judge("\\boxed{6.7e-11}", "6.674e-11", mode="strict")
    loose = judge("\\boxed{6.7e-11}", "6.674e-11", mode="strict", relative_tolerance=0.01)
    assert not exact.correct
    assert loose.correct


_THINKING = [
    "5 + 2 is 7. ",
    "So the answer is 7. ",
    "Thus $x = \\boxed{7}$. ",
    "so \\boxed 7 then",
    "we get <answer>7</answer>",
    "#### 7\n",
]
_OPENINGS = ["\n</think>\n<answer>\n", "\n\n**Final Answer**\n\\boxed{"]
_SENTENCES = ["{}", "The answer is {}", "The final answer is ${}", "#### {}", "\\boxed {}"]


@pytest.mark.parametrize("mode", ["strict", "lenient"])
@pytest.mark.parametrize("thinking", _THINKING)
@pytest.mark.parametrize("opening", _OPENINGS)
@pytest.mark.parametrize("sentence", _SENTENCES)
def test_a_truncated_answer_is_not_an_answer(mode, thinking, opening, sentence):
    """The first digits of an answer whose tag or box is never closed."""
    for digits in ("1", "12", "12,", "1.2", "12\\"):
        text = thinking + opening + sentence.format(digits)
        for reference in ("1", "12", "1.2"):
            verdict = judge(text, reference, mode=mode)
            assert not isinstance(verdict, Undecided) and not verdict.correct, (text, reference)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("so \\boxed 12", "strict"),
        ("<answer>\\boxed 12</answer>", "strict"),
        ("put it in \\boxed{}: \\boxed 12", "strict"),
        ("\\boxed{7}. The final answer is 12", "lenient"),
        ("<answer>7</answer> The final answer is 12", "lenient"),
    ],
)
def test_an_answer_at_the_end_of_a_text_counts_if_no_tag_is_open(text, mode):
    assert judge(text, "12", mode=mode).correct


@pytest.mark.parametrize("opened", ["The answer goes in <answer> tags. ", "Recall \\boxed{. "])
@pytest.mark.parametrize("end", ["</think>", "</think> Or not? </think>"])
@pytest.mark.parametrize(
    ("thinking", "answer"),
    [
        ("So 7. ", "\n\\boxed{7}. The final answer is $12$"),
        ("So 7. ", "<answer>7</answer> The final answer is 12"),
        ("So \\boxed{7}. ", "The final answer is 12"),
    ],
)
def test_a_tag_or_box_that_the_thinking_opens_hides_no_later_answer(opened, end, thinking, answer):
    """The thinking has ended, so what it opened is a mention and no truncated answer."""
    for text in (thinking + opened, opened + thinking):
        response = f"<think>{text}{end}{answer}"
        assert judge(response, "12", mode="lenient").correct
        truncated = f"{response}\n<answer>The final answer is 1"
        assert not judge(truncated, "1", mode="lenient").correct


_LATEX = st.text(
    alphabet=st.sampled_from(list("0123456789xy+-*/^_{}()[]\\,;:.!%$&=<> \n\x00\ud800é²")),
    max_size=60,
)


@settings(max_examples=150)
@given(_LATEX, _LATEX, st.sampled_from(["strict", "lenient"]))
def test_no_text_makes_our_own_rules_fail(pred, reference, mode):
    for text in (pred, f"\\boxed{{{pred}}}", f"<answer>{pred}</answer>"):
        judge(text, reference, mode=mode)


@pytest.mark.parametrize("mode", ["strict", "lenient"])
@pytest.mark.parametrize("answer", ["101", "99.5", "\\frac{405}{4}", "1.01 \\cdot 10^2"])
def test_a_tolerance_holds_for_a_number_however_it_is_written(answer, mode):
    right = lambda tolerance: (
        judge(f"\\boxed{{{answer}}}", "100", mode=mode, relative_tolerance=tolerance).correct
    )
    assert right(0.05) and not right(0.001)
