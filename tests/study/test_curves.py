"""Curves over training are averaged over seeds, and times to a level are found between points."""

import dataclasses

import pytest

from bacr_study.cells import Grid
from bacr_study.curves import convergence, schedules
from bacr_study.spec import Arm, Variant
from cells_world import made_task, main_study, make_cell

STUDY = main_study(
    tasks=(made_task("ledger", "Ledger", hard=""),),
    arms=(Arm("anytime", "AnytimeReasoner"), Arm("bacr_paper", "BACR paper")),
    seeds=(0, 1),
    reference=("anytime",),
)


def straight(cell, slope, steps=10):
    """The cell with an accuracy that rises by `slope` a step, and 100 tokens a step."""
    point = lambda t: {"step": t, "tokens": 100 * t, "seconds": 0.5 * t, "thinking": 9.0}
    curve = [
        {**point(t), "reward": None if t == 0 else slope * t, "accuracy": 0.2 + slope * t}
        for t in range(0, steps + 1, 2)
    ]
    return dataclasses.replace(cell, curve=curve)


def grid_of(slopes, schedule=()):
    cells = {}
    for (arm, seed), slope in slopes.items():
        cell = make_cell(STUDY, "ledger", Variant(arm), seed, problems=6, steps=10)
        cells[cell.id] = dataclasses.replace(straight(cell, slope), schedule=list(schedule))
    return Grid(STUDY, cells)


SLOPES = {
    ("anytime", 0): 0.02,
    ("anytime", 1): 0.04,
    ("bacr_paper", 0): 0.04,
    ("bacr_paper", 1): 0.08,
}


class TestConvergence:
    def test_accuracies_at_equal_steps_are_averaged_as_they_are(self):
        found = convergence(grid_of(SLOPES))["ledger"]["curves"]["anytime"]["accuracy"]["step"]
        assert found["x"] == [0, 2, 4, 6, 8, 10]
        assert found["mean"] == pytest.approx([0.2 + 0.03 * t for t in range(0, 11, 2)])
        assert found["low"][0] == found["high"][0] == pytest.approx(0.2)

    def test_times_and_ratios_to_the_reference_are_those_by_hand(self):
        # AnytimeReasoner gains .3 on average: half of it is reached at .15 / slope.
        records = convergence(grid_of(SLOPES))["ledger"]["thresholds"]
        by = {(r["variant"], r["share"], r["axis"]): r for r in records}
        one, other = by["anytime", 0.5, "tokens"], by["bacr_paper", 0.5, "tokens"]
        assert one["level"] == pytest.approx(0.35)
        assert one["time"]["mean"] == pytest.approx(100 * (7.5 + 3.75) / 2)
        assert other["ratio"]["mean"] == pytest.approx(0.5)
        assert one["ratio"] is None

    def test_a_level_that_a_seed_never_reaches_has_no_time(self):
        # 90 % of the gain is .27: the slower seed of the reference ends at .2.
        records = convergence(grid_of(SLOPES))["ledger"]["thresholds"]
        found = next(r for r in records if (r["variant"], r["share"]) == ("anytime", 0.9))
        assert (found["reached"], found["seeds"], found["time"]) == (1, 2, None)

    @pytest.mark.parametrize("gain", [0.0, -0.02])
    def test_a_reference_that_gains_nothing_has_no_times(self, gain):
        """The seeds of the reference gain `gain` on average, and the other arm gains more."""
        slopes = {**SLOPES, ("anytime", 0): 0.01 + gain, ("anytime", 1): -0.01 + gain}
        found = convergence(grid_of(slopes))["ledger"]
        assert found["thresholds"] == [] and "accuracy" in found["curves"]["anytime"]

    def test_a_ratio_needs_times_above_0(self):
        grid = grid_of(SLOPES)
        cell = grid.cells["ledger.bacr_paper.0"]
        # This run starts at 90 % and more of the gain of the reference.
        curve = [{**point, "accuracy": 0.9} for point in cell.curve]
        grid.cells[cell.id] = dataclasses.replace(cell, curve=curve)
        records = convergence(grid)["ledger"]["thresholds"]
        of_arm = [record for record in records if record["variant"] == "bacr_paper"]
        assert len(of_arm) == 6
        for record in of_arm:
            assert record["reached"] == 2 and record["time"]["mean"] > 0
            assert record["ratio"] is None

    def test_rewards_are_averaged_in_bins_up_to_the_shortest_run(self):
        found = convergence(grid_of(SLOPES))["ledger"]["curves"]["anytime"]["reward"]["step"]
        # Five rewards at steps 2 to 10, in five bins of two steps.
        assert found["x"] == pytest.approx([1, 3, 5, 7, 9])
        assert found["mean"] == pytest.approx([0.03 * t for t in (2, 4, 6, 8, 10)])


def test_schedules_are_averaged_over_seeds():
    group = lambda mu: {"pass_rate": 0.5, "mu": mu, "mean_budget": mu + 1, "weight": None}
    lines = [{"step": t, "tokens": t, "groups": [group(10.0 * t), group(1.0)]} for t in (1, 2)]
    found = schedules(grid_of(SLOPES, lines))["ledger"]["bacr_paper"]
    assert len(found) == 2
    assert found[0]["mu"]["x"] == [1, 2]
    assert found[0]["mean_budget"]["mean"] == [11.0, 21.0]
    assert found[0]["weight"]["x"] == []
