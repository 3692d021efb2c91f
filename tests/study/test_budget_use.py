"""A study tests whether arms use their budget, and measures them against the free curve."""

import csv
import dataclasses

import numpy as np
import pytest

from bacr_study.budget_tables import free_tables
from bacr_study.budget_use import curve_weights, free_curves, free_distances, swaps
from bacr_study.cells import Grid, correct_digits
from bacr_study.results import build_results, write_results
from bacr_study.spec import MEAN, Arm, Variant
from bacr_study.statistics import crossed_test
from cells_world import made_task, main_study, make_cell

STUDY = main_study(
    tasks=(made_task("ledger", "Ledger"),),
    arms=(Arm("cot", "Standard CoT"), Arm("bacr", "BACR")),
    seeds=(0, 1, 2),
    reference=("cot",),
    before="cot",
    views=("accuracy", "efficiency"),
)
PROBLEMS = 12
SAMPLES = 4


def entry(correct, tokens):
    correct = np.asarray(correct)
    return {
        "accuracy": float(correct.mean() / SAMPLES),
        "mean_thinking_tokens": float(tokens) - 6.0,
        "mean_total_tokens": float(tokens),
        "forced_share": 0.0,
        "no_answer_share": 0.0,
        "correct": correct_digits(correct),
    }


def same(count):
    return np.full(PROBLEMS, count)


def grid(truncated=None, before=None, by_budget=None):
    """Cells of both arms; every problem of an entry has the same number of right samples."""
    cells = {}
    for arm in ("cot", "bacr"):
        for seed in STUDY.seeds:
            cell = make_cell(STUDY, "ledger", Variant(arm), seed, problems=PROBLEMS)
            points = before if arm == "cot" else by_budget
            if points is not None:
                sets = {"test": {"sampled": points, "greedy": points}}
                cell = dataclasses.replace(cell, sets=sets)
            if truncated and arm in truncated:
                cell = dataclasses.replace(cell, truncated={"test": truncated[arm]})
            cells[cell.id] = cell
    return Grid(STUDY, cells)


# 0, 2 and 4 of 4 samples are right with 10, 20 and 40 tokens.
CURVE = {
    "8": entry(same(0), 10),
    "16": entry(same(2), 20),
    "32": entry(same(4), 40),
    "64": entry(same(4), 40),
    "96": entry(same(4), 40),
}
# Three of four are right at every budget, with 20 tokens.
TRAINED = {budget: entry(same(3), 20) for budget in CURVE}


@pytest.mark.parametrize(
    ("tokens", "weights"),
    [(15, [0.5, 0.5, 0]), (20, [0, 1, 0]), (35, [0, 0.25, 0.75]), (5, [1, 0, 0]), (99, [0, 0, 1])],
)
def test_weights_interpolate_between_neighbours(tokens, weights):
    np.testing.assert_allclose(curve_weights(tokens, np.array([10.0, 20.0, 40.0])), weights)


def test_distance_from_the_budgets_of_the_policy_before_training():
    records = free_distances(grid(before=CURVE, by_budget=TRAINED))
    assert [record["budget"] for record in records] == [*CURVE, MEAN]
    assert {record["variant"] for record in records} == {"bacr"}
    for record in records:
        # At 20 tokens the curve has two of four.
        assert record["accuracy"] == pytest.approx(0.75)
        assert record["free_accuracy"] == pytest.approx(0.5)
        assert record["difference"] == pytest.approx(0.25)
        assert record["tokens"] == pytest.approx(20) and record["inside"]
        assert record["low"] < record["difference"] < record["high"]
        # All three seeds gain: 2 of 8 combinations of signs are as far from 0.
        assert record["sign_flip"] == pytest.approx(2 / 8)


def test_files_mark_tokens_beyond_the_ends_of_the_curve():
    beyond = {**TRAINED, "8": entry(same(3), 5), "16": entry(same(3), 99)}
    results = build_results(grid(before=CURVE, by_budget=beyond).cells, STUDY)
    assert [record["inside"] for record in results["free"][:3]] == [False, False, True]
    (table,) = free_tables(results, STUDY)
    stars = [row["tokens marks"] for row in csv.DictReader(table.csv().splitlines())]
    assert stars[:3] == ["*", "*", ""]
    assert "| 8 | 5.0* | 75.0 |" in table.markdown() and "& 8 & 5.0* & 75.0 &" in table.latex()
    assert "| 32 | 20.0 | 75.0 |" in table.markdown()


def test_a_dense_curve_replaces_the_budgets():
    dense = {"96": {"4": entry(same(1), 10), "96": entry(same(3), 30)}}
    world = grid({"cot": {"sampled": dense}}, before=CURVE, by_budget=TRAINED)
    # Half way between one and three of four.
    assert free_distances(world)[0]["free_accuracy"] == pytest.approx(0.5)
    (points,) = free_curves(world).values()
    assert [(point["cut"], point["tokens"], point["mean"]) for point in points] == [
        (4, 10.0, 0.25),
        (96, 30.0, 0.75),
    ]
    assert free_curves(grid(before=CURVE)) == {}


def test_a_study_without_the_policy_before_training_has_no_distance():
    world = grid(before=CURVE, by_budget=TRAINED)
    study = dataclasses.replace(STUDY, before="")
    assert free_distances(Grid(study, world.cells)) == []
    assert free_curves(Grid(study, world.cells)) == {}


# With input 8: three of four right at both truncations, 7 tokens of thinking at the largest.
# With input 16: one at 8, four at 16, 15 tokens.
SWAP = {
    "8": {"8": entry(same(3), 13), "16": entry(same(3), 13)},
    "16": {"8": entry(same(1), 14), "16": entry(same(4), 21)},
}


def test_gains_and_lengths_of_a_swap_table_by_hand():
    (record,) = swaps(grid({"bacr": {"sampled": SWAP}}))
    assert (record["variant"], record["mode"], record["budgets"]) == ("bacr", "sampled", [8, 16])
    assert record["accuracy"] == {"8": {"8": 0.75, "16": 0.75}, "16": {"8": 0.25, "16": 1.0}}
    gains = {cut: test["difference"] for cut, test in record["gains"].items()}
    assert gains == pytest.approx({"8": 0.5, "16": 0.25, MEAN: 0.375})
    expected = crossed_test(np.full((3, PROBLEMS), 0.375))
    assert record["gains"][MEAN]["low"] == pytest.approx(expected.low)
    (length,) = record["lengths"]
    assert (length["budget"], length["less"], length["mean"]) == (16, 8, 8.0)


def test_an_arm_with_a_seed_without_swap_table_is_left_out():
    world = grid({"bacr": {"sampled": SWAP}})
    cells = dict(world.cells)
    cells["ledger.bacr.1"] = dataclasses.replace(cells["ledger.bacr.1"], truncated={})
    assert swaps(Grid(STUDY, cells)) == []


def test_tables_and_figures_have_the_free_curve_and_the_swap_table(tmp_path):
    world = grid({"bacr": {"sampled": SWAP}}, before=CURVE, by_budget=TRAINED)
    results = build_results(world.cells, STUDY)
    assert results["free"][0]["difference"] == 0.25 and len(results["swap"]) == 1
    from bacr_study.cells import write_cell

    for cell in world.cells.values():
        write_cell(tmp_path, cell)
    names = {path.name for path in write_results(tmp_path, STUDY)}
    assert {"free.md", "swap.md", "swap_ledger_bacr_sampled.md", "swap.png"} <= names
    free = (tmp_path / "tables" / "free.md").read_text()
    assert "| BACR | Ledger | 8 | 20.0 | 75.0 | 50.0 | +25.0 [" in free
    swap = (tmp_path / "tables" / "swap_ledger_bacr_sampled.md").read_text()
    assert "| 8 | *75.0 | 75.0 | 7.0 |" in swap and "| 16 | 25.0 | *100.0 | 15.0 |" in swap
    accuracy = (tmp_path / "tables" / "accuracy.md").read_text()
    assert "failed" in accuracy and "worst budget" in accuracy
