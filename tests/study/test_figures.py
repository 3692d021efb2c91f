"""Figures of a study can be read: curves look different, and every figure has its own files."""

import dataclasses
import itertools

import pytest

from bacr_jax.report.curve_styles import RECOMMENDED, STAR
from bacr_study import figure_parts
from bacr_study.figure_parts import budget_axis, budget_positions, star_sentence, styles_of
from bacr_study.figures import (
    accuracy_figures,
    convergence_figures,
    difficulty_figures,
    draw_figures,
    efficiency_figures,
)
from bacr_study.results import build_results
from bacr_study.spec import Arm, Sweep
from cells_world import main_study, make_cell

MAKERS = {
    "accuracy": accuracy_figures,
    "efficiency": efficiency_figures,
    "difficulty": difficulty_figures,
    "convergence": convergence_figures,
}
ARMS = (Arm("anytime", "AnytimeReasoner"), Arm("grpo", "GRPO"))


def cells_of(study):
    cells = {}
    for task, variant, seed in itertools.product(study.tasks, study.variants(), study.seeds):
        cell = make_cell(study, task.id, variant, seed, problems=12, steps=10)
        cells[cell.id] = cell
    return cells


def charts_of(figures):
    """Charts of figures, in the order of their rows."""
    rows = itertools.chain.from_iterable(figure.rows for figure in figures)
    return list(itertools.chain.from_iterable(rows))


@pytest.fixture
def one_file(monkeypatch):
    """Saves figures as SVG only, whose text can be searched."""
    monkeypatch.setattr(figure_parts, "_FILES", (("{}.svg", "light"),))


@pytest.mark.parametrize("view", MAKERS)
@pytest.mark.parametrize("num_values", [2, 12])
def test_swept_values_of_an_arm_look_different(view, num_values):
    values = tuple(0.1 * (1 + value) for value in range(num_values))
    arms = (*ARMS, Arm("both", "more G", sweep=Sweep("rollout.group_size", values, "G")))
    study = main_study(arms=arms, seeds=(0, 1), views=(view,), reference=("grpo",))
    for chart in charts_of(MAKERS[view](build_results(cells_of(study), study), study)):
        labels = [series.label for series in chart.series if series.label]
        # A legend shows colours and markers, but no lines.
        looks = {(series.colour, series.marker) for series in chart.series if series.label}
        assert len(looks) == len(set(labels)) == len(labels)


def test_swept_values_have_the_colour_of_their_arm_and_arms_keep_their_style():
    sweep = Sweep("optimizer.learning_rate", (0.1, 0.2, 0.3), "rate")
    swept = tuple(dataclasses.replace(arm, sweep=sweep) for arm in ARMS)
    for arms in (ARMS, swept, (ARMS[0], swept[1])):
        styles = styles_of(main_study(arms=arms))
        for arm in ARMS:
            plain = styles_of(main_study(arms=ARMS))[arm.id]
            assert styles[arm.id] == plain
            of_arm = [style for key, style in styles.items() if key.startswith(f"{arm.id}.")]
            assert {style.colour for style in of_arm} <= {plain.colour}


def test_no_swept_value_of_the_recommended_method_has_its_star():
    arm = Arm(RECOMMENDED, "BACR", sweep=Sweep("optimizer.learning_rate", (0.1, 0.2), "rate"))
    study = main_study(arms=(*ARMS, arm))
    stars = {key for key, style in styles_of(study).items() if style.marker == STAR}
    # Figures with one curve per arm show it with its star.
    assert stars == {RECOMMENDED} and star_sentence(study) == ""


def test_figures_of_two_sweeps_of_one_key_have_different_files(tmp_path, one_file):
    key = "optimizer.learning_rate"
    sweeps = [Sweep(key, values, key) for values in ((0.1, 0.2), (0.3, 0.4))]
    # Another key whose name differs only in a character that names of files do not contain.
    sweeps.append(Sweep("optimizer_learning.rate", (0.5, 0.6), "another"))
    arms = tuple(Arm(f"arm{i}", f"Arm {i}", sweep=sweep) for i, sweep in enumerate(sweeps))
    study = main_study(arms=arms, seeds=(0, 1), views=("sensitivity",), reference=())
    drawn = draw_figures(tmp_path, build_results(cells_of(study), study), study)
    names = [figure.name for figure, _ in drawn]
    name = "sweep_optimizer_learning_rate"
    assert names == [name, f"{name}_2", f"{name}_3"]
    for (_, (path,)), arm in zip(drawn, arms):
        text = path.read_text()
        assert [other.label in text for other in arms] == [other is arm for other in arms]


def test_budget_0_has_a_place_on_the_axis():
    assert budget_positions((0, 16, 64)) == {0: 8.0, 16: 16.0, 64: 64.0}
    assert budget_positions((8, 16)) == {8: 8.0, 16: 16.0}
    axis = budget_axis((0, 16, 64))
    assert axis.ticks == [(8.0, "0"), (16.0, "16"), (64.0, "64")]
    assert 0 < axis.low < 8 and axis.high > 64
    # A study that answers at once only.
    assert budget_axis((0,)).low > 0


@pytest.mark.parametrize("view", ["accuracy", "hard", "efficiency"])
@pytest.mark.parametrize("budgets", [(0, 16, 32, 64, 96), (0,)])
def test_a_study_with_budget_0_is_drawn(tmp_path, one_file, view, budgets):
    study = main_study(arms=ARMS, seeds=(0, 1), views=(view,))
    cells = cells_of(study)
    for cell in cells.values():
        for by_mode in cell.sets.values():
            for by_budget in by_mode.values():
                at_once = {**by_budget.pop("8"), "mean_thinking_tokens": 0.0}
                by_budget["0"] = at_once
    tasks = tuple(dataclasses.replace(task, budgets=budgets) for task in study.tasks)
    study = dataclasses.replace(study, tasks=tasks)
    results = build_results(cells, study)
    drawn = draw_figures(tmp_path, results, study)
    assert drawn
    for figure, (path,) in drawn:
        text = path.read_text()
        assert "NaN" not in text and "Infinity" not in text
        for chart in charts_of([figure]):
            for scale, positions in zip(chart.scales(), ("x", "y")):
                assert 0 <= scale.low < scale.high
                values = [v for series in chart.series for v in getattr(series, positions)]
                assert all(v > 0 for v in values) or not scale.axis.log2
    if view == "efficiency":
        # Nothing is thought at budget 0, so only the other budgets have a tick and a point.
        thinking = charts_of([drawn[0][0]])[1]
        assert [name for _, name in thinking.x.ticks] == [str(b) for b in budgets if b] or ["0"]
