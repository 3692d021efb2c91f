"""The rules that hold a budget in transformers: read, cut, forced, answered."""

import json
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
pytest.importorskip("transformers")

from bacr_client.fingerprint import write_manifest  # noqa: E402
from bacr_jax.export import budget_generation  # noqa: E402

# Tokens: 1 a word, 2 `</`, 3 `think>`, 4 `answer>`, 5 ends the turn, 6 holds a line break, 7 `<a>`.
THINKING = {
    "closing_ids": [2, 3, 7],
    "answer_ids": [7],
    "end_ids": [5],
    "never_sampled": "0 8-9",
    "think_close": {"string": "", "states": 3, "jumps": [[None, 1, "2"], [1, 2, "3"]]},
    "answer_close": {"string": "", "states": 3, "jumps": [[None, 1, "2"], [1, 2, "4"]]},
    "answer_tokens": 3,
    "grace": 0,
}


def written(drawn, limit, **changes):
    """What a row writes where these tokens are drawn for it, one a step, until it ends."""
    rules = budget_generation.Rules({**THINKING, **changes}, 10, "cpu")
    rows, found = budget_generation.Rows(rules, torch.tensor([limit])), []
    for token in drawn:
        found.append(int(rows.take(torch.tensor([token]), 0)))
        if rows.done:
            return found
    raise AssertionError("never ended")


WORDS = [1] * 20


def test_the_largest_budget_leaves_room_for_the_closing_text_and_the_answer():
    # 10 tokens of the prompt, 8 of thinking, 3 of closing text, and 3 of the answer.
    exact = types.SimpleNamespace(max_position_embeddings=24)
    assert budget_generation._limits([8], THINKING, exact, 10) == [8]
    with pytest.raises(ValueError, match="23 positions leave room for only 7"):
        short = types.SimpleNamespace(max_position_embeddings=23)
        budget_generation._limits([8], THINKING, short, 10)


class TestRows:
    def test_thinking_is_cut_at_the_budget_and_answered(self):
        assert written(WORDS, 2) == [1, 1, 2, 3, 7, 1, 1, 1]

    def test_a_budget_of_zero_begins_with_the_closing_text(self):
        assert written(WORDS, 0) == [2, 3, 7, 1, 1, 1]

    def test_thinking_that_closes_itself_keeps_its_tag(self):
        assert written([1, 2, 3, *WORDS], 9) == [1, 2, 3, 7, 1, 1, 1]
        # The tag may end with the last token of the budget.
        assert written([1, 2, 3, *WORDS], 3) == [1, 2, 3, 7, 1, 1, 1]

    def test_a_cut_inside_the_tag_closes_the_thinking_again(self):
        assert written([1, 2, 3, *WORDS], 2) == [1, 2, 2, 3, 7, 1, 1, 1]

    def test_the_end_of_the_turn_is_not_kept_in_thinking(self):
        assert written([1, 5, *WORDS], 9) == [1, 2, 3, 7, 1, 1, 1]

    def test_an_answer_ends_by_its_tag_by_the_turn_or_at_its_limit(self):
        assert written([9, 9, 9, 2, 4], 0) == [2, 3, 7, 2, 4]
        assert written([9, 9, 9, 1, 5], 0) == [2, 3, 7, 1, 5]
        # A tag begun in the thinking is none of the answer's.
        assert written([2, 9, 9, 9, 4, 1, 1], 1) == [2, 2, 3, 7, 4, 1, 1]

    def test_a_grace_window_ends_at_a_line_break_or_with_the_window(self):
        grace = {"grace": 2, "line_breaks": "6"}
        assert written([1, 6, *WORDS], 1, **grace)[:3] == [1, 6, 2]
        assert written([6, *WORDS], 1, **grace)[:2] == [6, 2]
        assert written([6, 1, *WORDS], 2, **grace)[:5] == [6, 1, 1, 1, 2]
        assert written(WORDS, 0, **grace)[:1] == [2]

    def test_rows_of_a_batch_go_their_own_ways(self):
        rules = budget_generation.Rules(THINKING, 10, "cpu")
        rows, steps = budget_generation.Rows(rules, torch.tensor([0, 2])), []
        while not rows.done:
            steps.append(rows.take(torch.tensor([1, 1]), 0))
        found = torch.stack(steps, 1).tolist()
        assert found == [[2, 3, 7, 1, 1, 1, 0, 0], [1, 1, 2, 3, 7, 1, 1, 1]]


@pytest.mark.parametrize(
    ("budget", "found"),
    [
        (8, [8, 8]),
        (0, [0, 0]),
        (None, [-1, -1]),
        ("none", [-1, -1]),
        ("low", [16, 16]),
        ([8, None], [8, -1]),
        (("low", np.int64(3)), [16, 3]),
        (torch.tensor(8), [8, 8]),
        (torch.tensor([8, 9]), [8, 9]),
        (np.array([8, 9]), [8, 9]),
    ],
)
def test_budgets_of_a_batch(budget, found):
    assert budget_generation.read_budgets(budget, 2, {"low": 16}) == found


@pytest.mark.parametrize(
    "budget",
    [-1, 8.5, 8.0, True, "8", "high", 2**31, [8, -2], [8, 8, 8], [8], torch.tensor([1.0, 2.0])]
    + [float("nan"), {"b": 1}, np.array([8])],
)
def test_what_is_no_budget_is_a_value_error_that_names_it(budget):
    with pytest.raises(ValueError, match="^budget: .*found "):
        budget_generation.read_budgets(budget, 2, {"low": 16})


def test_numbers_in_text():
    assert budget_generation.numbers_in("3 7-9") == [3, 7, 8, 9]
    assert budget_generation.numbers_in("") == []
    assert json.loads(json.dumps(THINKING)) == THINKING


def test_a_plain_folder_that_was_edited_does_not_generate(tmp_path):
    (tmp_path / "generation_config.json").write_text("{}")
    write_manifest(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"stop_strings": "5"}')
    model = types.SimpleNamespace(name_or_path=str(tmp_path))
    with pytest.raises(
        ValueError, match="generation_config.json is not the file that was exported"
    ):
        budget_generation.generate(model=model)
    # A model of the hub has no folder to look at.
    budget_generation.check_files("org/model")
