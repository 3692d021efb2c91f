"""Tables of differences name what their numbers are of."""

import csv
import itertools

import pytest

from bacr_study.difference_tables import contrast_tables
from bacr_study.results import build_results
from bacr_study.spec import Arm
from cells_world import main_study, make_cell

STUDY = main_study(
    arms=(Arm("anytime", "AnytimeReasoner"), Arm("grpo", "GRPO")),
    seeds=(0, 1),
    views=("contrasts",),
    contrasts={"pair": ["anytime", "grpo"]},
    focus=(8, 32),
)


def test_every_column_of_the_contrasts_has_the_name_of_its_task_and_budget():
    cells = {}
    for task, variant, seed in itertools.product(STUDY.tasks, STUDY.variants(), STUDY.seeds):
        cell = make_cell(STUDY, task.id, variant, seed, problems=12)
        cells[cell.id] = cell
    results = build_results(cells, STUDY)
    (table,) = contrast_tables(results, STUDY)
    (row,) = csv.DictReader(table.csv().splitlines())
    entries = {(entry["task"], entry["budget"]): entry for entry in results["contrasts"]}
    # Two columns have an interval, which CSV writes as a low and a high end.
    assert len(row) == 3 + 7 * len(entries)
    phrases = {"8": "budget 8", "32": "budget 32", "mean": "mean over budgets"}
    for task, (budget, phrase) in itertools.product(STUDY.tasks, phrases.items()):
        name = f"{task.label}, {phrase}"
        entry = entries[task.id, budget]
        points = float(row[f"{name} points"])
        assert points == pytest.approx(100 * entry["difference"], rel=1e-5)
        assert float(row[f"{name} Holm p"]) == entry["p_holm"]
        for text in (table.markdown(), table.latex(), str(table.html())):
            assert name in text
