"""Where the answer of a text is found."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_grading.extract import (
    STATED,
    answer_mark,
    closed_answer,
    is_prose,
    last_box,
    last_sentence,
    open_answer,
    reference_answer,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><answer>42</answer>", "42"),
        ("so \\boxed{42}.", "42"),
        ("\\boxed{\\frac{1}{2}} and more", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("<answer>It is \\boxed{7}</answer>", "7"),
        ("<answer>1</answer> no, \\boxed{2}", "2"),
        ("\\boxed{1} <answer>2</answer>", "2"),
        ("<answer>1</answer><answer> 2 </answer>", "2"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\fbox{3}", "3"),
        ("\\boxed {17}", "17"),
        ("thus $n = \\boxed 2$.", "2"),
    ],
)
def test_the_last_closed_box_or_tag_is_the_answer(text, answer):
    assert closed_answer(text).answer == answer


@pytest.mark.parametrize(
    "text",
    [
        "the answer is 42",
        "\\boxed{42",
        "<answer>42",
        "42</answer>",
        "\\boxed{\\frac{1}{}",
        "",
        "put it in \\boxed",
        "<think>maybe \\boxed{42}",
        "<think>\\boxed{42}</think>The ans",
    ],
)
def test_without_a_closed_box_or_tag_after_the_thinking_there_is_no_answer(text):
    assert closed_answer(text).source == "none"


def test_an_unclosed_last_box_falls_back_to_the_last_closed_one():
    assert closed_answer("\\boxed{1} \\boxed{2} \\boxed{3").answer == "2"


def test_an_escaped_brace_does_not_close_a_box():
    assert last_box(r"\boxed{a\}b} c").content == r"a\}b"


def test_boxes_that_a_word_joins_are_also_read_as_one_list():
    assert closed_answer(r"$\boxed{1}$ and $\boxed{2}$").run == "1, 2"
    assert closed_answer(r"\boxed{1} papers and \boxed{2} bins").run == "1, 2"
    assert closed_answer(r"\boxed{1} no no no \boxed{2}").run is None
    assert closed_answer(r"\boxed{1}\boxed{2}").run is None


def test_in_a_reference_adjacent_boxes_are_one_list():
    assert reference_answer(r"\boxed{1}\boxed{2}") == "1, 2"
    assert reference_answer("2 + 2 = <<2+2=4>>4\n#### 4") == "4"
    assert reference_answer(" \\frac{1}{2} ") == "\\frac{1}{2}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 2 = 4\n#### 4\n\n", "4"),
        ("2 + 2 = 4\r\n  ####4\r\n", "4"),
        ("2 + 2 = 4\n####\n4", "4"),
        ("2 + 2 = 4 #### 4", "4"),
        ("#### Step 1\nAdd.\n#### Answer\n#### 4", "4"),
    ],
)
def test_a_marked_last_line_is_the_answer_of_a_reference(text, answer):
    assert reference_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "#### Step 1\nAdd 2 and 2.\n\n#### Conclusion\nThe total is **4**.",
        "I restate it.\n\n#### Step 1\nIt is 4.",
        "Add 2 and 2.\n#### Four\nCheck: 4 - 2 = 2.",
        "Add 2 and 2.\n#### 4\nSo it is.\n#### Remarks\nThe answer is 4.\nEnd.",
        "In base ####, 4.",
        "The total is 4.####5 clips",
        "Add 2 and 2.\n##### Four",
    ],
)
def test_a_heading_marks_no_answer_of_a_reference(text):
    assert reference_answer(text) == text
    assert answer_mark(text) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # The form of MetaMathQA.
        ("5 * 22 = 110\n#### 110\nThe answer is: 110", "110"),
        ("Half of x.\n#### x/2\n\nThe answer is: x/2\n", "x/2"),
        ("Add 70 and 2.\n#### 72\n\nUnits: clips", "72"),
        ("Add 70 and 2.\r\n#### $1,072.50\r\n", "$1,072.50"),
        ("Add 70 and 2.\n#### 72\nSo there\nare 72.", "72"),
        # Line breaks were removed without a blank, or the mark is longer.
        ("The total is 72.#### 72", "72"),
        ("The total is 72.####72 ", "72"),
        ("Add 70 and 2.\n##### 72", "72"),
    ],
)
def test_a_marked_number_or_an_answer_that_is_repeated_is_the_answer(text, answer):
    assert reference_answer(text) == answer


def test_a_mark_is_found_in_linear_time():
    begin = time.monotonic()
    for text in ("####" * 200_000, "#### " * 200_000, (" " * 1000 + "\n") * 1000 + "####\nx\ny"):
        answer_mark(text)
    assert time.monotonic() - begin < 2


def test_reports_also_read_the_thinking_and_the_hash_line():
    assert open_answer("<think>maybe \\boxed{42}").answer == "42"
    assert open_answer("6 * 7 = 42\n#### 42").answer == "42"
    assert open_answer("\\boxed{4").unclosed


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        ("we get 5", True),
        ("so \\(x\\)", True),
        ("sin x + cos x", False),
        ("abc", False),
        ("\\text{the answer} + 1", False),
    ],
)
def test_running_text_is_told_from_an_answer(text, prose):
    assert is_prose(text) is prose


def test_the_last_sentence_that_states_an_answer_counts():
    assert last_sentence(STATED, "Answer: 3\nNo, the answer is **42**. Thanks.") == "42"
    assert last_sentence(STATED, "42") is None


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "{", "}", "\\boxed{1}", "\\", "\\boxed ", "<answer>"]
)
def test_finding_takes_linear_time(piece):
    """A megabyte of one piece: quadratic time would take hours."""
    text = piece * (1_000_000 // len(piece))
    start = time.perf_counter()
    closed_answer(text)
    open_answer(text)
    assert time.perf_counter() - start < 10


@given(st.text(alphabet="{}\\abox ed1<>/answer", max_size=200))
def test_any_text_gives_an_answer_that_is_in_it(text):
    found = open_answer(text)
    assert found.answer in text
    assert found.answer == found.answer.strip()


@given(st.text(alphabet="{}\\12", max_size=30), st.text(alphabet="ab {}", max_size=20))
def test_a_balanced_content_comes_back_from_its_box(inner, before):
    depth = 0
    escaped = False
    for char in inner:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            depth += (char == "{") - (char == "}")
            if depth < 0:
                return
    if depth or escaped:
        return
    assert last_box(f"{before}\\boxed{{{inner}}}").content == inner.strip()
