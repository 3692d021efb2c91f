"""The rewards of examples/rewards.py by hand."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "examples" / "rewards.py"
spec = importlib.util.spec_from_file_location("rewards_example", FILE)
rewards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rewards)


def test_a_response_is_paid_for_being_brief_and_for_words_that_it_says_once():
    assert [rewards.brief("", "x" * n, "") for n in (0, 400, 1200)] == [1.0, 0.5, 0.25]
    said = ["so so so so", "one two one three", "", "<think>a</think>"]
    assert [rewards.plain("", response, "") for response in said] == [0.25, 0.75, 0.0, 1.0]
