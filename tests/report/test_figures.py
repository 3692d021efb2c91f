"""Pictures show the numbers they are given."""

import math

import numpy as np
import pytest

from bacr_jax.config import Config
from bacr_jax.report import figures, pictures
from bacr_jax.report.charts import Series, smoothed
from bacr_jax.report.evaluation_charts import CUT_EARLY, accuracy_charts, mean_over_steps
from bacr_jax.report.run_data import RunData


def entry(accuracy, half, tokens):
    return {
        "accuracy": accuracy,
        "ci95": [max(accuracy - half, 0.0), min(accuracy + half, 1.0)],
        "mean_thinking_tokens": tokens,
        "mean_total_tokens": tokens,
    }


BEFORE = {
    "greedy": {"16": entry(0.35, 0.04, 14.8), "8": entry(0.3, 0.04, 7.9)},
    "sampled": {"8": entry(0.27, 0.04, 8.1), "16": entry(0.32, 0.04, 15.1)},
}
AFTER = {
    "greedy": {"8": entry(0.39, 0.04, 7.8), "16": entry(0.56, 0.04, 7.8)},
    "sampled": {"8": entry(0.36, 0.04, 8.0), "16": entry(0.53, 0.04, 13.5)},
}
POLICIES = {"before": BEFORE, "BACR": AFTER}


def records(steps):
    rng = np.random.default_rng(0)
    return [
        {
            "step": step,
            "reward/mean": 0.3 + step / 100,
            **{f"reward/cut_{j}": 0.05 * j + rng.normal() / 50 for j in range(1, 12)},
            "rollout/thinking_mean": 27.0 - step / 10,
            "budget/mean": 30.0,
            "policy/entropy": 0.4,
            "curriculum/mu_0": 20.0,
            "curriculum/mu_1": 40.0,
            "curriculum/pass_rate_0": 0.8,
            "curriculum/pass_rate_1": 0.4,
            "time/learn": 1.0,
        }
        for step in range(1, steps + 1)
    ]


@pytest.fixture
def drawn(monkeypatch):
    """Rows of charts that were drawn, instead of files."""
    made = []
    monkeypatch.setattr(pictures, "save_both", lambda path, title, rows: made.append(rows))
    return made


def curves(chart):
    return {series.label: series for series in chart.drawn if series.label}


def training(path, metrics):
    run = RunData("a", None, Config(), {}, "BACR", metrics, [])
    return pictures.attempt(path, "BACR", figures._training_rows, run)


class TestAccuracies:
    def test_each_decoding_has_a_panel_with_a_curve_per_policy(self, drawn, tmp_path):
        figures.accuracy_picture(tmp_path / "x.png", POLICIES, "ledger")
        ((by_budget, by_tokens),) = drawn
        greedy, sampled = by_budget
        found = curves(greedy)
        assert list(found) == ["before", "BACR"]
        assert found["before"].y == pytest.approx([30.0, 35.0])
        # Points are at their budgets.
        assert found["before"].x == found["BACR"].x == [8, 16]
        assert found["BACR"].ends == [pytest.approx((35.0, 43.0)), pytest.approx((52.0, 60.0))]
        assert curves(sampled)["BACR"].y == pytest.approx([36.0, 53.0])
        assert greedy.x.log2 and [name for _, name in greedy.x.ticks] == ["8", "16"]
        assert greedy.y == sampled.y == by_tokens[0].y

    def test_below_are_the_tokens_used_even_where_budgets_use_the_same(self, drawn, tmp_path):
        figures.accuracy_picture(tmp_path / "x.png", POLICIES, "ledger")
        used = curves(drawn[0][1][0])["BACR"]
        assert used.x == pytest.approx([7.8, 7.8]) and used.y == pytest.approx([39.0, 56.0])

    def test_a_policy_that_was_not_sampled_is_left_out_of_that_panel(self, drawn, tmp_path):
        policies = {**POLICIES, "other": {"greedy": AFTER["greedy"]}}
        figures.accuracy_picture(tmp_path / "x.png", policies, "ledger")
        assert "other" not in curves(drawn[0][0][1])

    def test_more_policies_than_colours_are_still_drawn(self, tmp_path):
        policies = {f"policy {i}": BEFORE for i in range(9)}
        assert figures.accuracy_picture(tmp_path / "x.png", policies, "many")
        for name in ("x.png", "x-dark.png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n")


class TestTrainingCurves:
    @pytest.mark.parametrize("steps", [1, 30])
    def test_any_number_of_steps_makes_a_picture(self, tmp_path, steps):
        assert training(tmp_path / "x.png", records(steps))
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")

    def test_every_metric_is_in_its_panel(self, drawn, tmp_path):
        training(tmp_path / "x.png", records(5))
        charts = {chart.title: chart for row in drawn[0] for chart in row}
        assert list(charts)[:2] == ["Share correct by cut", "Reward"]
        (curve,) = charts["Reward"].drawn
        assert curve.y == pytest.approx([0.31, 0.32, 0.33, 0.34, 0.35])
        # Cut 10 comes after cut 9, not after cut 1.
        cuts = list(curves(charts["Share correct by cut"]))
        assert cuts[-3:] == ["cut 9", "cut 10", "cut 11 (the budget)"]
        assert curves(charts["Budget and thinking"])["thinking"].y[0] == pytest.approx(26.9)
        assert charts["Entropy"].drawn[0].y == pytest.approx([0.4] * 5)
        assert set(curves(charts["Pass rate"])["group 0"].y) == {0.8}

    def test_numbers_that_are_none_leave_a_gap(self, drawn, tmp_path):
        broken = records(4)
        broken[1]["reward/mean"], broken[2]["reward/mean"] = "nan", "inf"
        del broken[3]["reward/mean"]
        training(tmp_path / "x.png", broken)
        (reward,) = [chart for row in drawn[0] for chart in row if chart.title == "Reward"]
        y = reward.drawn[0].y
        assert y[0] == pytest.approx(0.31)
        assert np.isnan(y[1:]).all()

    def test_metrics_that_were_not_recorded_have_no_panel(self, drawn, tmp_path):
        training(tmp_path / "x.png", [{"step": 1, "reward/mean": 0.5}])
        assert [[chart.title for chart in row] for row in drawn[0]] == [["Reward"]]


class TestSmoothing:
    def test_keeps_constants_and_straight_lines(self):
        values = np.full(60, 3.0)
        assert smoothed(values) == pytest.approx(values)
        ramp = np.arange(60.0)
        assert smoothed(ramp)[2:-2] == pytest.approx(ramp[2:-2])

    def test_a_gap_is_bridged_by_its_neighbours_only(self):
        found = smoothed(np.array([1.0, math.nan, *[3.0] * 28]))
        assert found[:4] == pytest.approx([1.0, 2.0, 3.0, 3.0])


def test_names_of_sets_for_files_are_plain_and_unique():
    found = figures.short_names(dict.fromkeys(["gsm8k:a.jsonl", "gsm8k:b.jsonl", "my set"]))
    assert list(found.values()) == ["gsm8k", "gsm8k_2", "my_set"]


def test_the_policy_before_training_cut_early_is_a_curve_by_tokens():
    cut = {"greedy": {"8": entry(0.2, 0.04, 6.0), "4": entry(0.1, 0.04, 3.0)}}
    styles = figures.policy_styles(list(POLICIES))
    by_budget, _, by_tokens, sampled = accuracy_charts(POLICIES, styles, cut)
    assert CUT_EARLY not in curves(by_budget)
    curve = curves(by_tokens)[CUT_EARLY]
    assert curve.x == [3.0, 6.0] and curve.y == pytest.approx([10.0, 20.0])
    # No cuts were measured with sampling.
    assert CUT_EARLY not in curves(sampled)


class TestMeanOverSteps:
    def charts_of(self, runs):
        """Returns the charts of runs, whose evaluations are mappings of budgets to accuracies."""
        evaluations = {
            label: [
                (
                    step,
                    {"greedy": {key: entry(value, 0.0, 1.0) for key, value in by_budget.items()}},
                )
                for step, by_budget in enumerate(of_run)
            ]
            for label, of_run in runs.items()
        }
        (chart,) = mean_over_steps(evaluations, dict.fromkeys(runs, Series("", [], [], "s1")))
        return chart

    def test_means_are_over_the_positive_budgets_that_all_runs_share(self):
        one = {"0": 0.0, "8": 0.2, "64": 0.4, "1024": 0.6, "none": 1.0}
        other = {"0": 0.0, "64": 0.5, "1024": 0.7, "none": 1.0}
        chart = self.charts_of({"one": [one, one], "other": [other]})
        found = curves(chart)
        assert found["one"].x == [0.0, 1.0] and found["one"].y == pytest.approx([50.0, 50.0])
        assert found["other"].y == pytest.approx([60.0])
        assert chart.note == "budgets: 64, 1,024"

    def test_a_run_that_was_resumed_with_other_budgets_has_the_shared_ones(self):
        runs = {"one": [{"8": 0.2, "16": 0.4}, {"16": 0.5, "32": 0.9}], "other": [{"16": 0.1}]}
        chart = self.charts_of(runs)
        assert curves(chart)["one"].y == pytest.approx([40.0, 50.0])
        assert chart.note == "budgets: 16"

    def test_runs_without_a_shared_budget_have_no_curve(self):
        chart = self.charts_of({"one": [{"0": 0.1, "8": 0.2}], "other": [{"0": 0.2, "16": 0.3}]})
        assert chart.drawn == []
        assert chart.title.endswith("(the runs have no positive budget in common)")

    def test_a_run_without_a_decoding_does_not_restrict_its_budgets(self):
        sampled = {"sampled": {"8": entry(0.5, 0.0, 1.0)}}
        evaluations = {"one": [(0, sampled)], "other": [(0, {"greedy": {}} | BEFORE)], "none": []}
        styles = dict.fromkeys(evaluations, Series("", [], [], "s1"))
        charts = {
            chart.title.split(", ")[1]: chart for chart in mean_over_steps(evaluations, styles)
        }
        assert curves(charts["sampled"])["other"].y == pytest.approx([27.0])
        assert charts["greedy"].note == "budgets: 8, 16"
        assert set(curves(charts["greedy"])) == {"other"}


@pytest.mark.parametrize(("groups", "rows"), [(1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4])])
def test_the_budgets_of_many_difficulty_groups_take_several_rows(groups, rows):
    record = {"step": 1}
    for group in range(groups):
        record |= {f"budget/{name}_{group}": 8.0 for name in ("p10", "median", "p90")}
    drawn = figures._budget_rows([record])
    assert [len(row) for row in drawn] == rows
    titles = [chart.title for row in drawn for chart in row]
    assert titles == [f"Sampled budgets, difficulty group {group}" for group in range(groups)]
