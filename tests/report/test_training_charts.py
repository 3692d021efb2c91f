"""The value head's calibration and the time by phase say what was measured."""

import dataclasses

import pytest

from bacr_jax.report import vega
from bacr_jax.report.charts import SMOOTH_FROM, Series
from bacr_jax.report.curve_styles import styles_of
from bacr_jax.report.run_data import read_run
from bacr_jax.report.training_charts import (
    calibrated,
    calibration,
    compared_charts,
    machinery_charts,
    training_charts,
    value_points,
)
from config_world import changed
from report_world import TRACE, make_whole_run

LOOKS = {"a": Series("", [], [], "s1")}


def test_points_are_the_cuts_whose_value_was_predicted():
    trace = {"values": [0.25, "nan", 0.5], "rewards": [0.0, 1.0, 1.3]}
    assert value_points([trace, {"values": None, "rewards": [1.0]}]) == [
        (0.25, 0.0),
        (0.5, 1.3),
    ]


def test_bins_hold_equally_many_points():
    # Two bins: values around .2 that came out as 0 or 1 in turn, and around .8, all 1.
    points = [(0.2, float(i % 2)) for i in range(8)] + [(0.8, 1.0)] * 8
    (low, half, error), (high, one, none) = calibrated(points)
    assert (low, half) == pytest.approx((0.2, 0.5)) and (high, one, none) == pytest.approx(
        (0.8, 1.0, 0.0)
    )
    # Standard error of eight draws of 0 and 1 in turn: sqrt(2/7) / sqrt(8).
    assert error == pytest.approx((2 / 7) ** 0.5 / 8**0.5)
    assert calibrated(points[:7]) == []


def test_traces_without_values_are_no_calibration():
    assert calibration({"a": [TRACE | {"values": None}] * 50}, LOOKS).drawn == []


def test_a_policy_without_values_shows_no_calibration(tmp_path):
    run = read_run(make_whole_run(tmp_path / "a"))
    titles = lambda traces: [chart.title for chart in machinery_charts([run], {"a": traces}, LOOKS)]
    valued = {"values": [0.25, 0.5], "rewards": [0.0, 1.0]}
    assert "Value calibration" in titles([valued] * 50)
    assert titles([TRACE | {"values": None}] * 50) == [
        "Sampler and learner",
        "Time of a step by phase",
        "Pace",
    ]


def test_each_of_several_rewards_is_a_line_beside_their_mean():
    step = {"reward/mean": 0.5, "rewards/correct": 0.25, "rewards/brief": 1.0}
    (reward, *_) = training_charts([{"step": n, **step} for n in (1, 2, 3)], "curriculum")
    last = {one.label: one.y[-1] for one in reward.drawn if one.label}
    assert last == {"mean": 0.5, "correct": 0.25, "brief": 1.0}
    (alone, *_) = training_charts(
        [{"step": n, "reward/mean": 0.5} for n in (1, 2, 3)], "curriculum"
    )
    assert {one.label for one in alone.drawn} == {""}


def looks_of(chart):
    """Returns what a legend shows of each labelled curve: its colour and its marker."""
    return [(vega.colour_name(one), one.marker) for one in chart.drawn if one.label]


@pytest.mark.parametrize("steps", [4, 3 * SMOOTH_FROM])
@pytest.mark.parametrize("curves", [2, 6, 7, 8, 16])
@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("reward/cut_", "Share correct by cut"),
        ("curriculum/mu_", "Scheduled location of budgets"),
        ("curriculum/pass_rate_", "Pass rate"),
        ("rewards/mine_", "Reward"),
    ],
)
def test_curves_of_many_cuts_groups_and_rewards_look_different(metric, title, curves, steps):
    numbers = {f"{metric}{index}": 0.1 + index / 100 for index in range(1, curves + 1)}
    records = [{"step": step, "reward/mean": 0.5, **numbers} for step in range(1, steps + 1)]
    charts = {chart.title: chart for chart in training_charts(records, "curriculum")}
    chart = charts[title]
    looks = looks_of(chart)
    assert len(set(looks)) == len(looks) == curves + (title == "Reward")
    ordered = [one for one in chart.drawn if one.label and not isinstance(one.colour, str)]
    # Lines of one shade differ also between their markers.
    assert len({(vega.colour_name(one), one.line) for one in ordered}) == curves
    # Six shades suffice for six curves.
    assert {bool(one.marker) for one in ordered} == {curves > 6}
    spec = vega.chart_spec(chart, "light")
    points = [layer for layer in spec["layer"] if layer["mark"]["type"] == "point"]
    count = sum(len(layer["data"]["values"]) for layer in points)
    assert count <= (20 * curves if curves > 6 else 0)


@pytest.mark.parametrize(
    ("methods", "has_markers"), [(("bacr-paper", "bacr-full"), True), (("bacr", "grpo"), False)]
)
def test_compared_runs_with_the_colour_of_one_family_have_their_markers(
    tmp_path, methods, has_markers
):
    runs = [read_run(make_whole_run(tmp_path / name), name) for name in methods]
    styles = dict(zip(methods, styles_of(methods)))
    traces = dict.fromkeys(methods, [{"values": [0.25, 0.5], "rewards": [0.0, 1.0]}] * 50)
    charts = {chart.title: chart for chart in compared_charts(runs, styles)}
    assert len(charts) > 3
    for chart in machinery_charts(runs, traces, styles):
        charts[chart.title] = chart
    del charts["Time of a step by phase"]
    for title, chart in charts.items():
        looks = looks_of(chart)
        assert len(set(looks)) == len(looks) == 2
        markers = [styles[name].marker if has_markers else "" for name in methods]
        if title == "Value calibration":
            markers = [marker or "o" for marker in markers]
        assert [marker for _, marker in looks] == markers


def by_phase(run):
    charts = {chart.title: chart for chart in machinery_charts([run], {"a": []}, LOOKS)}
    return charts["Time of a step by phase"]


def test_time_is_the_median_so_that_compiling_does_not_count(tmp_path):
    run = read_run(make_whole_run(tmp_path / "a"))
    # 30 seconds of rollout in the first step
    seconds = {"plan": 0.1, "rollout": 2.0, "verify": 0.5, "learn": 3.0, "adapt": 0.2}
    assert [(name, dict(parts)) for name, parts in by_phase(run).rows] == [("a", seconds)]
    # What a batch ahead took meanwhile has a bar of its own.
    beside = [record | {"time/overlap": 1.5} for record in run.metrics]
    ahead = dataclasses.replace(run, metrics=beside)
    assert by_phase(ahead).rows[1] == ("a, meanwhile", [("rollout", 1.5)])


def titles(records, **sections):
    return [chart.title for chart in training_charts(records, changed(**sections).budget.prior)]


def test_share_correct_is_first_and_a_reward_that_equals_it_is_left_out():
    step = {"reward/cut_1": 0.5, "policy/entropy": 0.25}
    same = [{"step": n, "reward/mean": 0.5, **step} for n in (1, 2)]
    assert titles(same) == ["Share correct by cut", "Entropy"]
    other = [{"step": n, "reward/mean": 0.75, **step} for n in (1, 2)]
    assert titles(other) == ["Share correct by cut", "Reward", "Entropy"]


def test_the_schedule_is_left_out_if_budgets_do_not_follow_it():
    records = [{"step": n, "curriculum/mu_0": 8.0, "curriculum/pass_rate_0": 0.5} for n in (1, 2)]
    assert titles(records, budget={"prior": "choices"}) == ["Pass rate"]
    assert titles(records, budget={"prior": "curriculum"}) == [
        "Scheduled location of budgets",
        "Pass rate",
    ]
