"""Names of runs and of sets, and evaluations that no picture can be made of."""

from pathlib import Path

import pytest

from bacr_jax.errors import UserError
from bacr_jax.report.run_data import labels_of, read_run
from bacr_jax.report.table import set_title, set_titles
from report_world import evaluation, lines


def test_runs_are_called_as_their_folders_with_as_many_above_as_it_takes():
    assert labels_of([Path("/x/a"), Path("/y/b")], []) == ["a", "b"]
    assert labels_of([Path("/x/run/1"), Path("/y/run/1")], []) == ["x/run/1", "y/run/1"]
    assert labels_of([Path("/x/a"), Path("/y/a")], ["one", "two"]) == ["one", "two"]


def test_sets_have_the_names_of_their_publications():
    assert set_title("math500:data/math500/test.jsonl") == "MATH-500"
    assert set_title("aime24:hf://HuggingFaceH4/aime_2024") == "AIME 2024"
    assert set_title("ledger") == "Ledger"
    assert set_title("jsonl:mine/olympiad.jsonl") == "olympiad"
    assert set_title("train_holdout") == "train_holdout (validation, not a test set)"


def test_two_sets_of_one_name_are_told_apart():
    assert set_titles(["math500:a.jsonl", "math500:b.jsonl", "gsm8k:c"]) == {
        "math500:a.jsonl": "MATH-500 (math500:a.jsonl)",
        "math500:b.jsonl": "MATH-500 (math500:b.jsonl)",
        "gsm8k:c": "GSM8K",
    }


@pytest.mark.parametrize("found", [{}, {"greedy": {}}, {"greedy": {"8": {"accuracy": 0.5}}}])
def test_an_evaluation_without_decodings_or_budgets_or_intervals_is_refused(run, found):
    first = evaluation(0, "before", 0.2)
    lines(run / "eval.jsonl", [first, {**first, "sets": {"ledger": found}}])
    with pytest.raises(
        UserError, match=r"eval\.jsonl, line 2: this record of an evaluation has no"
    ):
        read_run(run)
