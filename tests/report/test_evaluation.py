"""Tables of an evaluation hold its results."""

from bacr_grading import ExactGrader
from bacr_jax.evaluation.summary import summarise
from bacr_jax.report.evaluation import tables
from evaluation_world import near_problems, near_results


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
