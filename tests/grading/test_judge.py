"""References are read when the data is loaded."""

import pytest

from bacr_jax.grading import ParsedGold, parse_gold


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("18", ParsedGold("18", "number")),
        ("$\\frac{1}{2}$", ParsedGold("\\frac{1}{2}", "number")),
        ("Adding gives $\\boxed{x^2}$.", ParsedGold("x^2", "expression")),
        ("6 * 3 = 18\n#### 1,800", ParsedGold("1,800", "number")),
        ("\\text{(C)}", ParsedGold("\\text{(C)}", "text")),
        ("(1, 2)", ParsedGold("(1, 2)", "list")),
        ("204_5", ParsedGold("204_5", "number")),
        ("is $\\boxed{(1,2)}$ and $\\boxed{(3,4)}$.", ParsedGold("(1,2), (3,4)", "list")),
    ],
)
def test_references_and_their_kind(text, parsed):
    assert parse_gold(text) == parsed


@pytest.mark.parametrize(
    "text", [None, "", "  ", "\\boxed{}", "$$", "\\frac{1}{", "1\x00", "\ud83d", "x+" * 2000]
)
def test_unusable_references_are_none(text):
    assert parse_gold(text) is None


def test_math_has_two_unusable_rows_and_gsm8k_none(shared_rows):
    math = [parse_gold(row["solution"]) for row in shared_rows("math/train.jsonl")]
    assert (len(math), math.count(None)) == (7500, 2)
    for split in ("train", "test"):
        golds = [parse_gold(row["answer"]) for row in shared_rows(f"gsm8k/{split}.jsonl")]
        assert {gold.kind for gold in golds} == {"number"}
