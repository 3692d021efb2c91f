"""The parent's own work on a text grows with its length, not with the square of it."""

import time

import pytest

from bacr_grading import parse_reference
from bacr_grading.judge import MAX_CHARS, judge

# What is repeated, and what stands before and behind it.
FILLS = (
    *(" ", "\n", "~", ",", "1 ", "1,", "and ", "\\, "),
    *("\\frac ", "\\text{", "(", "{", "$", "\\\\", "1=", ". "),
)
ENDS = (("1", "x and"), ("final answer is", "\n"), ("5 ", ""))
LENGTHS = (15_000, 30_000, 60_000)
# Lists whose members have to be compared each with each.
LISTS = [("1,", "2,"), ("x,", "y,"), ("(1,2),", "(1,3),"), ("(1,(2,(3,4))),", "(1,(2,(3,5))),")]


def seconds(*texts: str) -> float:
    start = time.process_time()
    for text in texts:
        judge(f"\\boxed{{{text}}}", "5", mode="strict")
        judge(f"<answer>{text}</answer>", "1,2", mode="lenient")
        judge("\\boxed{5}", text, mode="strict")
        judge(text, "5", mode="lenient")
        parse_reference(text)
    return time.process_time() - start


@pytest.mark.parametrize(
    ("head", "tail"), [ENDS[0], *(pytest.param(*ends, marks=pytest.mark.slow) for ends in ENDS[1:])]
)
def test_time_grows_with_the_length(head, tail):
    grown = [
        seconds(*(head + fill * (length // len(fill)) + tail for fill in FILLS))
        for length in LENGTHS
    ]
    # Linear is twice; quadratic would be four times, and minutes.
    assert grown[-1] < 3 * grown[-2] + 0.1, grown
    assert grown[-1] < 5.0, grown


@pytest.mark.slow  # each fill at two lengths: half a minute
@pytest.mark.parametrize("length", [1900, 60_000])
@pytest.mark.parametrize("fill", FILLS)
def test_an_answer_at_the_cap_and_beyond_is_read_at_once(fill, length):
    assert seconds(f"1{fill * (length // len(fill))}x and") < 2.0


@pytest.mark.parametrize(("mine", "theirs"), LISTS)
@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_long_lists_are_compared_by_their_spelling(mine, theirs, mode):
    pred, reference = (text * (1900 // len(text)) + "7" for text in (mine, theirs))
    start = time.process_time()
    assert not judge(f"\\boxed{{{pred}}}", reference, mode=mode).correct
    assert judge(f"\\boxed{{{pred}}}", pred, mode=mode).correct
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("box", ["\\boxed{1}, ", "\\fbox{1}"])
def test_a_box_that_is_repeated_to_the_end_of_a_long_text_is_read_at_once(box):
    text = box * (MAX_CHARS // len(box))
    start = time.process_time()
    assert not judge(text, "5", mode="strict").correct
    assert parse_reference(text).text == "1"
    assert time.process_time() - start < 2.0


def test_a_reference_beyond_the_cap_is_none():
    assert parse_reference("1" + " " * 20_000 + "x and") is None
    assert not judge("\\boxed{1}", "1" + "0" * 5000, mode="strict").correct
