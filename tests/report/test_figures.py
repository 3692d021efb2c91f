"""Pictures show the numbers they are given."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from bacr_jax.errors import UserError
from bacr_jax.report import figures, png, svg
from bacr_jax.report.charts import Axis, Chart, Series, smoothed
from bacr_jax.report.training_charts import training_charts
from files_world import full_disk


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


@pytest.mark.parametrize("name", ["a.png", "a.pdf"])
def test_a_picture_that_can_not_be_written_leaves_the_old_one(tmp_path, monkeypatch, name):
    path = tmp_path / name
    png.save(Figure((1, 1)), path)
    before = path.read_bytes()
    full_disk(monkeypatch)
    with pytest.raises(UserError, match=f"{name}: can't be written .No space left on device"):
        png.save(Figure((2, 1)), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were drawn, instead of files."""
    made = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: made.append(figure))
    return made


def lines(axis):
    """Labelled curves as (x, y)."""
    found = {}
    for handle, label in zip(*axis.get_legend_handles_labels()):
        line = handle if hasattr(handle, "get_xdata") else handle.lines[0]
        found[label] = (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
    return found


def training(path, metrics):
    charts = training_charts(metrics)
    return png.attempt(path, "BACR", lambda: [charts[:3], charts[3:]])


class TestAccuracies:
    def test_the_file_is_a_png_and_the_same_each_time(self, tmp_path):
        for name in ("one.png", "two.png"):
            assert figures.accuracy_picture(tmp_path / name, POLICIES, "ledger")
        content = (tmp_path / "one.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n") and len(content) > 10_000
        assert content == (tmp_path / "two.png").read_bytes()

    def test_each_decoding_has_a_panel_with_a_curve_per_policy(self, drawn, tmp_path):
        figures.accuracy_picture(tmp_path / "x.png", POLICIES, "ledger")
        (figure,) = drawn
        greedy, sampled, used, _ = figure.axes
        found = lines(greedy)
        assert list(found) == ["before", "BACR"]
        assert found["before"][1] == pytest.approx([30.0, 35.0])
        assert found["before"][0] == pytest.approx([8, 16], rel=0.03)
        assert found["before"][0][0] < found["BACR"][0][0]
        assert lines(sampled)["BACR"][1] == pytest.approx([36.0, 53.0])
        assert greedy.get_xscale() == "log"
        assert [t.get_text() for t in greedy.get_xticklabels()] == ["8", "16"]
        assert greedy.get_ylim() == sampled.get_ylim() == used.get_ylim()
        # The curves are named once.
        assert [axis.get_legend() is None for axis in figure.axes] == [False, True, True, True]

    def test_below_are_the_tokens_used_even_where_budgets_use_the_same(self, drawn, tmp_path):
        figures.accuracy_picture(tmp_path / "x.png", POLICIES, "ledger")
        x, y = lines(drawn[0].axes[2])["BACR"]
        assert x == pytest.approx([7.8, 7.8]) and y == pytest.approx([39.0, 56.0])

    def test_intervals_reach_from_end_to_end(self, drawn, tmp_path):
        figures.accuracy_picture(tmp_path / "x.png", POLICIES, "ledger")
        container = drawn[0].axes[0].containers[1]
        segments = container.lines[2][0].get_segments()
        assert [[y for _, y in s] for s in segments] == [
            pytest.approx([35.0, 43.0]),
            pytest.approx([52.0, 60.0]),
        ]

    def test_a_policy_that_was_not_sampled_is_left_out_of_that_panel(self, drawn, tmp_path):
        policies = {**POLICIES, "other": {"greedy": AFTER["greedy"]}}
        figures.accuracy_picture(tmp_path / "x.png", policies, "ledger")
        assert "other" not in lines(drawn[0].axes[1])

    def test_more_policies_than_colours_are_still_drawn(self, tmp_path):
        policies = {f"policy {i}": BEFORE for i in range(9)}
        assert figures.accuracy_picture(tmp_path / "x.png", policies, "many")


class TestTrainingCurves:
    @pytest.mark.parametrize("steps", [1, 2, 29, 30, 200])
    def test_any_number_of_steps_makes_a_picture(self, tmp_path, steps):
        assert training(tmp_path / "x.png", records(steps))
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")

    def test_every_metric_is_in_its_panel(self, drawn, tmp_path):
        training(tmp_path / "x.png", records(5))
        reward, cuts, length, entropy, schedule, rates = drawn[0].axes
        (curve,) = reward.get_lines()
        assert curve.get_ydata() == pytest.approx([0.31, 0.32, 0.33, 0.34, 0.35])
        # Cut 10 comes after cut 9, not after cut 1.
        assert list(lines(cuts))[-3:] == ["cut 9", "cut 10", "cut 11 (the budget)"]
        assert lines(length)["thinking"][1][0] == pytest.approx(26.9)
        assert entropy.get_lines()[0].get_ydata() == pytest.approx([0.4] * 5)
        assert set(lines(schedule)["group 1"][1]) == {40.0}
        assert set(lines(rates)["group 0"][1]) == {0.8}

    def test_numbers_that_are_none_leave_a_gap(self, drawn, tmp_path):
        broken = records(4)
        broken[1]["reward/mean"], broken[2]["reward/mean"] = "nan", "inf"
        del broken[3]["reward/mean"]
        training(tmp_path / "x.png", broken)
        y = drawn[0].axes[0].get_lines()[0].get_ydata()
        assert y[0] == pytest.approx(0.31)
        assert np.isnan(y[1:]).all()

    def test_what_was_not_recorded_is_said(self, drawn, tmp_path):
        training(tmp_path / "x.png", [{"step": 1, "reward/mean": 0.5}])
        texts = [[t.get_text() for t in axis.texts] for axis in drawn[0].axes]
        assert texts == [[]] + [["not recorded"]] * 5


def test_pages_and_files_have_the_same_curves():
    charts = training_charts(records(40))
    for chart in charts:
        page = svg.figure(chart)
        assert page.count('class="curve') == len([one for one in chart.drawn if len(one.x) > 1])
        axis = png.figure("t", [[chart]]).axes[0]
        assert len(axis.get_lines()) == len(chart.drawn)


def test_points_without_a_line_are_all_drawn(drawn, tmp_path):
    places = list(range(40))
    chart = Chart("t", [Series("a", places, places, "s1", line="", marker="o")], Axis(""), Axis(""))
    (line,) = png.figure("t", [[chart]]).axes[0].get_lines()
    assert line.get_markevery() == 1 and line.get_linestyle() == "None"


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


def test_a_legend_stays_within_a_picture_of_one_panel():
    names = [f"a name of thirty letters or so, {i}" for i in range(4)]
    series = [Series(name, [1.0, 2.0], [0.0, 1.0], "s1") for name in names]
    made = png.figure("t", [[Chart("c", series, Axis("x"), Axis("y"))]], legend=3)
    made.draw_without_rendering()
    assert [legend.get_window_extent().x1 <= made.bbox.x1 for legend in made.legends] == [True]


def test_what_lies_beyond_an_axis_has_an_open_arrow_and_a_word_about_it():
    ends = [(-3.0, 2.0), (0.5, 1.5), (0.0, 9.0)]
    series = Series("a", [1.0, 2.0, 3.0], [1.0, 1.0, 1.0], "s1", ends)
    bounded = Chart("c", [series], Axis("x"), Axis("y", low=0.0, high=5.0))
    axis = png.figure("t", [[bounded]]).axes[0]
    arrows = {one.get_marker(): one.get_xydata().tolist() for one in axis.get_lines()[1:]}
    assert {"v": [[1.0, 0.0]], "^": [[3.0, 5.0]]}.items() <= arrows.items()
    assert axis.get_xlabel().startswith("x\nopen arrows: ")
    whole = Chart("c", [series], Axis("x"), Axis("y"))
    assert png.figure("t", [[whole]]).axes[0].get_xlabel() == "x"
