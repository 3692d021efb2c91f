"""Tables of an evaluation hold its results."""

from bacr_grading import ExactGrader
from bacr_jax.evaluation.summary import summarise
from bacr_jax.report.evaluation import tables, thinking_by_verdict
from bacr_jax.report.table import NONE
from evaluation_world import near_problems, near_results
from report_world import entry


def test_a_table_splits_thinking_by_the_verdict():
    """A mean without answers is a dash."""
    summary = {"greedy": {"8": entry(0.5, 8), "16": entry(0.5, 16)}}
    summary["greedy"]["16"] |= {"thinking_if_right": None, "thinking_right_ci95": None}
    table = thinking_by_verdict("ours", summary)
    assert table.header == ["decoding", "budget", "accuracy", "right", "wrong"]
    assert [row[3:] for row in table.rows] == [["4.0 [3.2, 4.8]", NONE], [NONE, NONE]]


def test_tables_give_both_figures_and_the_count():
    result = summarise(
        near_results(), ExactGrader(), problems=near_problems([True, False, False, True])
    )
    results = {"name": "tiny", "sets": {"ours": {**result, "note": ""}}, "comparisons": {}}
    (table,) = [table for table in tables(results) if "without 2 near" in table.title]
    assert table.header[2:4] == ["all 4", "the other 2"]
    assert [row[:2] for row in table.rows] == [["greedy", "8"], ["greedy", "16"]]
    assert all(row[2].startswith("75.0 [") and row[3].startswith("50.0 [") for row in table.rows)
    assert "the other 2" in table.latex()
    first = tables(results)[0]
    assert "near-duplicates of training questions (train): 2" in first.caption
