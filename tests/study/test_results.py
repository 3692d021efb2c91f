"""results.json, tables, figures and the page hold the numbers of the cells."""

import csv
import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

from bacr_jax.report import plots
from bacr_jax.report.table import Shown
from bacr_study import figures
from bacr_study.cells import ids_digest, read_cells, write_cell
from bacr_study.configured import SHOWN, Configured, Problems
from bacr_study.effects import effect_weights
from bacr_study.results import as_text, build_results, page, without_times, write_results
from bacr_study.spec import Arm, Sweep, Variant
from bacr_study.statistics import holm
from bacr_study.tables import tables_of
from cells_world import (
    BUDGETS,
    ablation_study,
    made_task,
    main_study,
    make_cell,
    scale_study,
    sweep_study,
    write_cells,
)

SMALL = main_study(
    tasks=(made_task("ledger", "Ledger & more"),),
    arms=(
        Arm("cot", "Standard CoT"),
        Arm("anytime", "AnytimeReasoner"),
        Arm("bacr_paper", "BACR_paper"),
    ),
    seeds=(0, 1, 2),
    reference=("anytime",),
)


def built(folder, study, **kwargs):
    write_cells(folder, study, **{"problems": 12, "steps": 10, **kwargs})
    return build_results(read_cells(folder, study), study)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_cells(folder, SMALL, problems=12, steps=10)
    return folder, write_results(folder, SMALL)


@pytest.fixture(scope="module")
def results(small):
    return build_results(read_cells(small[0], SMALL), SMALL)


@pytest.fixture(scope="module")
def ablation(tmp_path_factory):
    study = dataclasses.replace(ablation_study(), seeds=(0, 1))
    folder = tmp_path_factory.mktemp("ablation")
    return study, folder, built(folder, study)


def table(results, name, study=SMALL):
    return next(one for one in tables_of(results, study) if one.name == name)


def test_contrasts_are_differences_of_the_named_pairs_corrected_for_these_alone(tmp_path):
    pairs = {"paper": ["bacr_paper", "anytime"], "back": ["anytime", "bacr_paper"]}
    study = dataclasses.replace(SMALL, views=("contrasts",), contrasts=pairs, focus=(16,))
    found = built(tmp_path, study)
    of, less = (np.mean(accuracies(study, Variant(arm), 16)) for arm in pairs["paper"])
    first, second, *means = found["contrasts"]
    assert first["difference"] == pytest.approx(of - less, rel=1e-5) and first["of"] == "bacr_paper"
    assert second["difference"] == -first["difference"]
    assert [e["budget"] for e in means] == ["mean", "mean"] and first["tests"] == 4
    assert first["p_holm"] == pytest.approx(min(1, 4 * first["p"])) or first["p"] > means[0]["p"]
    assert [row[0] for row in table(found, "contrasts", study).rows] == ["paper", "back"]
    assert [drawn.name for drawn, *_ in figures.draw_figures(tmp_path, found, study)] == [
        "contrasts_ledger"
    ]


@pytest.mark.parametrize(
    ("low", "verdict"),
    [
        (0.001, "and leads Anytime by +20.0 [+0.1, +39.9] points"),
        (-0.001, "but no lead over Anytime is shown: +20.0 [−0.1, +40.1] points"),
    ],
)
def test_a_lead_is_claimed_where_the_simultaneous_interval_leaves_out_zero(low, verdict):
    """Holm's p is below .05 in both cases, and the interval of the one difference is narrow."""
    arms = tuple(
        dataclasses.replace(SMALL.arm(name), label=label)
        for name, label in (("anytime", "Anytime"), ("bacr_paper", "BACR"))
    )
    study = dataclasses.replace(SMALL, arms=arms)
    results = _results_of_a_difference(study, low)
    text = page(results, study, [], [])
    sentence = f"BACR has the highest accuracy, 62.0 %, {verdict}"
    assert f"{sentence} (95 % interval that holds for 9 differences at once)" in text


def test_the_lead_of_a_reference_is_that_over_the_second_best():
    arms = (Arm("bacr_paper", "BACR"), Arm("cot", "CoT"), Arm("anytime", "Anytime"))
    study = dataclasses.replace(SMALL, arms=arms, reference=("cot", "bacr_paper"))
    results = _results_of_a_difference(study, 0.001)
    results["means"]["ledger"]["test"]["sampled"]["cot"] = {"8": {"accuracy": {"mean": 0.1}}}
    (with_anytime,) = results["comparisons"]
    over_cot = {**with_anytime, "reference": "cot"}
    second = {"variant": "anytime", "reference": "bacr_paper", "difference": -0.2}
    ends = {"simultaneous_low": -0.39, "simultaneous_high": -0.01}
    results["comparisons"] = [over_cot, {**with_anytime, **second, **ends}]
    text = page(results, study, [], [])
    assert "BACR has the highest accuracy, 62.0 %, and leads Anytime by +20.0 [+1.0, +39.0]" in text


def _results_of_a_difference(study, simultaneous_low):
    """The part of results.json that a verdict is made of: 42 % and 62 % at budget 8."""
    means = {
        arm: {"8": {"accuracy": {"mean": mean}}}
        for arm, mean in (("anytime", 0.42), ("bacr_paper", 0.62))
    }
    entry = {
        "task": "ledger",
        "set": "test",
        "budget": "8",
        "variant": "bacr_paper",
        "reference": "anytime",
        "difference": 0.2,
        "low": 0.15,
        "high": 0.25,
        "p_holm": 0.04,
        "tests": 9,
        "simultaneous_low": simultaneous_low,
        "simultaneous_high": 0.4 - simultaneous_low,
    }
    return {
        "means": {"ledger": {"test": {"sampled": means}}},
        "comparisons": [entry],
        "cells": {},
        "missing": [],
        "problems": {},
        "provenance": {},
        "warnings": [],
    }


def accuracies(study, variant, budget, mode="sampled", name="test"):
    cells = [make_cell(study, "ledger", variant, s, problems=12, steps=10) for s in study.seeds]
    return [cell.sets[name][mode][str(budget)]["accuracy"] for cell in cells]


class TestResults:
    def test_means_and_intervals_are_those_over_seeds(self, results):
        values = accuracies(SMALL, Variant("anytime"), 16)
        found = results["means"]["ledger"]["test"]["sampled"]["anytime"]["16"]["accuracy"]
        ends = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
        assert found["mean"] == pytest.approx(np.mean(values), rel=1e-5)
        assert (found["low"], found["high"]) == pytest.approx(ends, rel=1e-4)

    def test_the_mean_over_budgets_is_the_mean_over_budgets(self, results):
        values = [accuracies(SMALL, Variant("anytime"), budget) for budget in BUDGETS]
        found = results["means"]["ledger"]["test"]["sampled"]["anytime"]["mean"]
        assert found["accuracy"]["mean"] == pytest.approx(np.mean(values), rel=1e-5)

    def test_families_are_corrected_each_for_itself(self, results):
        for view, tests in (("accuracy", 10), ("anytime", 2), ("hard", 10)):
            family = [e for e in results["comparisons"] if e["view"] == view]
            assert len(family) == tests
            expected = holm([entry["p"] for entry in family])
            assert [e["p_holm"] for e in family] == pytest.approx(expected, rel=1e-4)

    def test_a_difference_is_that_of_the_means(self, results):
        entry = next(
            e
            for e in results["comparisons"]
            if (e["view"], e["variant"], e["budget"]) == ("accuracy", "bacr_paper", "8")
        )
        one = accuracies(SMALL, Variant("bacr_paper"), 8)
        other = accuracies(SMALL, Variant("anytime"), 8)
        assert entry["difference"] == pytest.approx(np.mean(one) - np.mean(other), rel=1e-5)
        assert (entry["seeds"], entry["problems"]) == (3, 12)

    def test_levels_split_the_difference(self, results):
        levels = results["difficulty"]["ledger"]["16"]["bacr_paper"]
        whole = next(
            e["difference"]
            for e in results["comparisons"]
            if (e["view"], e["variant"], e["budget"]) == ("accuracy", "bacr_paper", "16")
        )
        parts = [e["problems"] / 12 * e["difference"]["difference"] for e in levels.values()]
        assert sum(e["problems"] for e in levels.values()) == 12
        assert sum(parts) == pytest.approx(whole, abs=1e-4)

    def test_verdicts_stay_in_the_cells(self, results):
        assert '"correct"' not in json.dumps(results)
        assert len(results["cells"]) == 9

    def test_the_same_cells_give_the_same_bytes(self, tmp_path):
        study = dataclasses.replace(SMALL, views=("accuracy",))
        files = []
        for name in ("one", "other"):
            write_cells(tmp_path / name, study, problems=6, steps=1)
            files.append(write_results(tmp_path / name, study))
        assert len(files[0]) == len(files[1]) == 15
        assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files))

    def test_the_text_is_the_object(self, results):
        assert json.loads(as_text(results)) == results

    def test_several_commits_are_a_warning(self, tmp_path):
        study = dataclasses.replace(SMALL, views=("accuracy",), seeds=(0, 1))
        write_cells(tmp_path, study, problems=6, steps=1)
        cell = make_cell(study, "ledger", Variant("cot"), 0, problems=6, steps=1)
        provenance = {**cell.provenance, "commit": "ffff"}
        write_cell(tmp_path, dataclasses.replace(cell, provenance=provenance))
        found = build_results(read_cells(tmp_path, study), study)
        assert found["warnings"] == [
            "two seeds: intervals are wide, and their level of 95 % is only approximate",
            "the runs are from 2 commits: ffff (1 runs); 0123abcd (5 runs)",
        ]

    def test_one_seed_falls_back_to_problems_and_says_so(self, tmp_path):
        found = built(tmp_path, dataclasses.replace(SMALL, views=("accuracy",), seeds=(0,)))
        assert {e["basis"] for e in found["comparisons"]} == {"problems"}
        entry = found["means"]["ledger"]["test"]["sampled"]["cot"]["8"]["accuracy"]
        assert entry["basis"] == "problems"
        assert any(line.startswith("one seed: intervals") for line in found["warnings"])

    def test_arms_without_verdicts_are_compared_over_seeds(self, tmp_path):
        study = dataclasses.replace(SMALL, views=("accuracy",))
        write_cells(tmp_path, study, problems=12, steps=1)
        for seed in study.seeds:
            cell = make_cell(study, "ledger", Variant("cot"), seed, problems=12, steps=1)
            for budget in BUDGETS:
                del cell.sets["test"]["sampled"][str(budget)]["correct"]
            write_cell(tmp_path, cell)
        found = build_results(read_cells(tmp_path, study), study)["comparisons"]
        assert {e["basis"] for e in found if e["variant"] == "cot"} == {"seeds"}
        assert {e["problems"] for e in found if e["variant"] == "bacr_paper"} == {12}


class TestVotes:
    """A majority vote has results but no run."""

    STUDY = dataclasses.replace(
        SMALL,
        arms=(Arm("cot", "CoT"), Arm("sc", "SC", of="cot", votes=2), Arm("anytime", "Anytime")),
        views=("accuracy",),
    )

    def test_only_runs_are_counted(self, tmp_path):
        results = built(tmp_path, self.STUDY)
        assert len(results["cells"]) == 9 and results["warnings"] == []
        assert results["provenance"]["commit"] == ["0123abcd (6 runs)"]
        assert results["provenance"]["machine"] == ["2-core CPU (6 runs)"]
        assert "size cpu; 6 runs; 3 methods" in page(results, self.STUDY, [], [])

    @pytest.mark.parametrize(
        ("missing", "text"),
        [
            (["cot.0", "sc.0"], "1 of 6 runs"),
            (["anytime.0", "sc.1", "anytime.1"], "2 of 6 runs"),
            (["sc.0", "sc.2"], "2 majority votes"),
        ],
    )
    def test_only_missing_runs_are_counted(self, tmp_path, missing, text):
        skip = [f"ledger.{id_}" for id_ in missing]
        results = built(tmp_path, self.STUDY, skip=skip)
        assert sorted(results["missing"]) == sorted(skip)
        assert results["warnings"] == [
            f"the results of {text} are missing, so the means of different methods may be over "
            "different seeds"
        ]


def repeated(study):
    """Twelve rows of four problems, as the cells have them; level 1 is one problem."""
    cell = make_cell(study, "ledger", Variant("cot"), 0, problems=12, steps=1)
    levels = cell.levels("test")
    ones = {"rows": int((levels == 1).sum()), "distinct_problems": 1}
    counts = {"rows": 12, "distinct_problems": 4, "levels": {"1": ones}}
    return Problems(levels, cell.problems_digest["test"], counts)


class TestConfigured:
    STUDY = dataclasses.replace(SMALL, views=("accuracy",))

    def built(self, folder, known):
        write_cells(folder, self.STUDY, problems=12, steps=10)
        return build_results(read_cells(folder, self.STUDY), self.STUDY, known)

    def test_rows_and_distinct_problems_are_counted_and_said(self, tmp_path):
        problems = repeated(self.STUDY)
        found = self.built(tmp_path, Configured(problems={("ledger", "test"): problems}))
        assert found["problems"]["ledger"]["test"] == problems.counts
        said = "the 12 rows of test contain only 4 distinct problems, but the tests treat "
        assert any(said in line for line in found["warnings"])
        assert "test: 4 distinct in 12 rows" in page(found, self.STUDY, [], [])

    def test_problems_that_are_not_the_cells_are_not_counted(self, tmp_path):
        other = dataclasses.replace(repeated(self.STUDY), digest=ids_digest(["another"]))
        found = self.built(tmp_path, Configured(problems={("ledger", "test"): other}))
        assert found["problems"] == {} and found["warnings"] == []

    def test_arms_are_shown_with_what_they_were_trained_with(self, tmp_path):
        settings = dict(zip(SHOWN, (2, 0.02, 5e-4)))
        known = Configured({("ledger", arm.id): settings for arm in self.STUDY.arms})
        found = self.built(tmp_path, known)
        names = [one.name for one in tables_of(found, self.STUDY)]
        assert names[:2] == ["accuracy", "arms"]
        shown = table(found, "arms", self.STUDY).rows
        # Ten steps of two minibatches; the first arm is not trained.
        assert [item.text for item in shown[1][1:]] == ["20", "0.02", "0.0005", "200,000"]
        assert list(shown[0][1:]) == ["-"] * 4

    def test_without_configs_there_is_no_such_table(self, results):
        assert "arms" not in {one.name for one in tables_of(results, SMALL)}


class TestDecoding:
    def test_both_forms_and_their_difference_are_those_of_the_means(self, results):
        entry = next(
            e
            for e in results["decoding"]
            if (e["variant"], e["budget"], e["reference"]) == ("bacr_paper", "16", "anytime")
        )
        gaps = {
            mode: np.mean(accuracies(SMALL, Variant("bacr_paper"), 16, mode))
            - np.mean(accuracies(SMALL, Variant("anytime"), 16, mode))
            for mode in ("sampled", "greedy")
        }
        assert entry["sampled"]["difference"] == pytest.approx(gaps["sampled"], abs=1e-5)
        assert entry["greedy"]["difference"] == pytest.approx(gaps["greedy"], abs=1e-5)
        change = entry["change"]["difference"]
        assert change == pytest.approx(gaps["greedy"] - gaps["sampled"], abs=1e-5)

    def test_the_table_holds_those_that_differ_and_no_others(self, results):
        entries = [e["change"] for e in results["decoding"]]
        apart = [e for e in entries if e["low"] > 0 or e["high"] < 0]
        changed = json.loads(json.dumps(results))
        first = changed["decoding"][0]
        first["change"].update(low=-0.1, high=0.1)
        first["sampled"].update(difference=0.2, low=0.1, high=0.3)
        first["greedy"].update(difference=-0.2, low=-0.3, high=-0.1)
        of = lambda found: [one for one in tables_of(found, SMALL) if one.name == "decoding"]
        assert sum(len(one.rows) for one in of(results)) == len(apart)
        rows = of(changed)[0].rows
        assert rows[0][4].text == "+20.0 [+10.0, +30.0]"


class TestAblation:
    def test_weights_of_every_effect_sum_to_zero(self):
        effects = list(effect_weights(("A", "B", "C", "D")))
        assert all(sum(weights.values()) == pytest.approx(0.0) for _, _, weights in effects)
        assert [kind for kind, _, _ in effects].count("main effect") == 4
        surplus = {kind: weights for kind, _, weights in effects}["surplus"]
        assert surplus[frozenset()] == 3.0

    def test_the_surplus_is_the_joint_gain_less_the_single_ones(self, ablation):
        study, _, results = ablation
        found = results["ablation"]["tradeoff"]["16"]["effects"]
        for top in ("", " on top of BUP"):
            of = lambda kind, top=top: [e["difference"] for e in found if e["kind"] == kind + top]
            assert of("surplus")[0] == pytest.approx(of("joint")[0] - sum(of("alone")), abs=1e-5)

    def test_a_main_effect_is_the_mean_over_the_other_parts(self, ablation):
        study, _, results = ablation
        means = results["means"]["tradeoff"]["test"]["sampled"]
        mean = lambda has: np.mean(
            [means[a.id]["16"]["accuracy"]["mean"] for a in study.arms if ("TDR" in a.parts) == has]
        )
        effects = results["ablation"]["tradeoff"]["16"]["effects"]
        found = next(e for e in effects if (e["kind"], e["part"]) == ("main effect", "TDR"))
        assert found["difference"] == pytest.approx(mean(True) - mean(False), abs=1e-5)

    def test_the_table_has_a_row_for_every_combination(self, ablation):
        study, _, results = ablation
        shown = table(results, "ablation_tradeoff", study)
        assert len(shown.rows) == 16
        assert [list(row[:5]) for row in shown.rows[:3]] == [
            ["", "", "", "", "paper's row"],
            ["✓", "", "", "", "paper's row"],
            ["", "✓", "", "", ""],
        ]
        assert sum(row[4] == "paper's row" for row in shown.rows) == 8
        assert shown.rows[0][6] == "-"

    def test_an_effect_that_lacks_an_arm_is_left_out(self, tmp_path):
        study = dataclasses.replace(ablation_study(), seeds=(0, 1))
        arms = tuple(arm for arm in study.arms if len(arm.parts) in (0, 1, 4))
        found = built(tmp_path, dataclasses.replace(study, arms=arms))
        kinds = {e["kind"] for e in found["ablation"]["tradeoff"]["16"]["effects"]}
        assert kinds == {"alone", "joint", "surplus", "joint on top of BUP"}


class TestTables:
    def test_a_cell_is_mean_and_half_width(self, results):
        values = np.array(accuracies(SMALL, Variant("anytime"), 16)) * 100
        half = stats.t.ppf(0.975, 2) * stats.sem(values)
        row = table(results, "accuracy").rows[1]
        assert row[2].text == f"{values.mean():.1f} ± {half:.1f}"

    def test_best_and_second_are_marked_in_every_column(self, results):
        shown = table(results, "accuracy")
        for column in range(1, 7):
            items = [row[column] for row in shown.rows]
            order = sorted(items, key=lambda item: -item.numbers[0])
            assert [item.rank for item in order] == ["best", "second", ""]

    def test_latex_has_as_many_cells_as_columns_and_escapes_words(self, results):
        for shown in tables_of(results, SMALL):
            text = shown.latex()
            body = [line for line in text.splitlines() if line.endswith(r"\\")]
            spans = r"\multicolumn{"
            width = lambda line: line.replace(r"\&", "").count(" & ") + 1
            assert {width(line) for line in body if spans not in line} == {len(shown.header)}
            assert text.count("{") == text.count("}")
            assert text.isascii() or all(c.isascii() for line in body for c in line)
        assert r"Ledger \& more" in table(results, "accuracy").latex()
        assert r"BACR\_paper" in table(results, "accuracy").latex()

    def test_csv_holds_the_numbers_of_the_results(self, results):
        rows = list(csv.DictReader(table(results, "accuracy").csv().splitlines()))
        entry = results["means"]["ledger"]["test"]["sampled"]["anytime"]["16"]["accuracy"]
        found = [rows[1][f"Ledger & more 16{end}"] for end in ("", " low", " high")]
        expected = [100 * entry[key] for key in ("mean", "low", "high")]
        assert [float(value) for value in found] == pytest.approx(expected, rel=1e-5)

    def test_csv_holds_every_text_and_mark(self, results, tmp_path):
        # Columns of accuracies by swept value contain the largest loss of a run as text.
        swept = sweep_study()
        arms = (Arm("cot", "CoT"), dataclasses.replace(swept.arms[0], sweep=swept.sweep))
        swept = dataclasses.replace(SMALL, arms=arms, views=swept.views, before="cot")
        tables = [*tables_of(results, SMALL), *tables_of(built(tmp_path, swept), swept)]
        assert any("worst budget" in str(row[1]) for shown in tables for row in shown.rows)
        for shown in tables:
            lines = list(csv.reader(shown.csv().splitlines()))[1:]
            for line, row in zip(lines, shown.rows, strict=True):
                items = [item if isinstance(item, Shown) else Shown(item) for item in row]
                texts = {item.text for item in items if not item.numbers} - {"-"}
                texts |= {item.marks for item in items} - {""}
                assert texts <= set(line), shown.name

    def test_hard_shows_tokens_at_the_largest_budget(self, results):
        entry = results["means"]["ledger"]["hard"]["sampled"]["cot"]["96"]
        found = table(results, "hard").rows[0][-2:]
        expected = [
            f"{entry[f'mean_{kind}_tokens']['mean']:,.1f}" for kind in ("thinking", "total")
        ]
        assert [item.text for item in found] == expected

    def test_differences_by_model_size_are_at_the_same_size(self, tmp_path):
        study = dataclasses.replace(scale_study(), tasks=SMALL.tasks, seeds=(0, 1))
        results = built(tmp_path, study)
        shown = table(results, "sweep_ledger_model", study)
        assert shown.header == ["budget", "method", "30k", "130k", "500k"]
        names = [row[1] for row in shown.rows]
        assert names[:5] == [
            "GRPO",
            "AnytimeReasoner",
            "BACR robust",
            "Δ GRPO − AnytimeReasoner",
            "Δ BACR robust − AnytimeReasoner",
        ]
        gap = shown.rows[2][2].numbers[0] - shown.rows[1][2].numbers[0]
        assert shown.rows[4][2].numbers[0] == pytest.approx(gap, abs=1e-3)

    def test_swept_values_are_compared_with_the_default(self, tmp_path):
        study = dataclasses.replace(sweep_study(), tasks=SMALL.tasks, seeds=(0, 1))
        results = built(tmp_path, study)
        pairs = {(e["variant"], e["reference"]) for e in results["comparisons"]}
        assert len(pairs) == 5
        assert {other for _, other in pairs} == {"bacr_paper.0.6"}

    def test_tables_of_two_sweeps_of_one_key_have_different_files(self, tmp_path):
        key = "optimizer.learning_rate"
        arms = tuple(
            Arm(f"arm{i}", f"Arm {i}", sweep=Sweep(key, values, key))
            for i, values in enumerate(((0.1, 0.2), (0.3, 0.4)))
        )
        study = dataclasses.replace(SMALL, arms=arms, views=("sensitivity",), reference=())
        tables = tables_of(built(tmp_path, study), study)
        names = [one.name for one in tables]
        assert len(set(names)) == len(names)
        name = "sweep_ledger_optimizer_learning_rate"
        for name_of_arm, arm in ((name, arms[0]), (f"{name}_2", arms[1])):
            (shown,) = [one for one in tables if one.name == name_of_arm]
            assert shown.rows[0][1] == arm.label


class TestWriting:
    def test_missing_cells_leave_gaps_and_are_named(self, tmp_path):
        study = dataclasses.replace(SMALL, seeds=(0, 1))
        missing = ["ledger.anytime.1", "ledger.cot.0", "ledger.cot.1"]
        results = built(tmp_path, study, skip=missing)
        assert sorted(results["missing"]) == missing
        assert table(results, "accuracy", study).rows[0][1:] == ("-",) * 6
        shown = page(results, study, [], [])
        assert "the results of 3 of 6 runs are missing, so" in shown
        assert "<li>ledger.cot.0</li>" in shown

    def test_captions_count_the_seeds_that_have_runs(self, tmp_path):
        study = dataclasses.replace(SMALL, views=("accuracy",), seeds=(0, 1, 2))
        built(tmp_path, study, skip=[id_ for id_ in study.cell_ids() if id_.endswith(".2")])
        write_results(tmp_path, study)
        assert " over 2 seeds." in (tmp_path / "tables" / "accuracy.md").read_text()

    def test_every_figure_is_a_picture_for_light_and_dark_pages_and_a_pdf(self, small):
        folder, files = small
        names = {path.name for path in files if path.parent.name == "figures"}
        endings = (".png", "-dark.png", ".pdf", ".svg")
        assert names == {
            f"{name}{ending}"
            for ending in endings
            for name in (
                "accuracy",
                "hard",
                "efficiency",
                "difficulty",
                "convergence_ledger",
                "curriculum_ledger_bacr_paper",
            )
        }
        heads = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<svg"}
        for path in files:
            if path.parent.name == "figures":
                assert path.read_bytes().startswith(heads[path.suffix])

    def test_the_page_is_whole_and_asks_for_nothing_else(self, small):
        text = (small[0] / "study.html").read_text()
        tags = _Tags()
        tags.feed(text)
        assert tags.open == []
        # The verdict and the figures first, tables folded below them.
        order = [text.index(f'id="{name}"') for name in ("verdict", "figures", "tables")]
        own = text.replace(plots.library(), "")
        assert order == sorted(order) and own.count("<table>") == own.count("<details><summary>")
        assert re.search(
            r"budget 8: .* has the highest accuracy, .* but no lead over .* is shown: ", text
        )
        links = [link for link in tags.links if not link.startswith(("data:", "#"))]
        # Links lead to the files of the study.
        assert {"results.json", "figures/accuracy.pdf", "tables/accuracy.tex"} <= set(links)
        assert all((small[0] / link).exists() for link in links)
        assert "url(" not in own and "@import" not in own
        assert own.count('<script type="application/json">') > 6
        assert "Ledger &amp; more" in text and "color-scheme: light dark" in text


class _Tags(HTMLParser):
    """Tags that are open, links, and how often each tag was seen."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.seen = [], [], {}

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_equal_runs_that_took_another_time_give_the_same_results_file(tmp_path):
    texts = []
    for factor in (1.0, 3.0):
        folder = tmp_path / str(factor)
        for cell in read_cells(tmp_path_with_cells(folder), SMALL).values():
            slower = [{**point, "seconds": factor * point["seconds"]} for point in cell.curve]
            changed = dataclasses.replace(
                cell, curve=slower, wall_seconds=factor * cell.wall_seconds
            )
            write_cell(folder, changed)
        results = build_results(read_cells(folder, SMALL), SMALL)
        texts.append((as_text(without_times(results)), as_text(results)))
    (one, whole), (other, other_whole) = texts
    assert one == other and whole != other_whole and "wall_seconds" not in one


def tmp_path_with_cells(folder):
    write_cells(folder, SMALL)
    return folder
