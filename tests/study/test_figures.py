"""Figures of a study can be read: curves look different, and every figure has its own files."""

import dataclasses
import itertools

import pytest

from bacr_jax.report.curve_styles import STAR
from bacr_jax.report.vega import colour_name
from bacr_study import figure_parts
from bacr_study.cells import read_cells, write_cell
from bacr_study.configured import Configured
from bacr_study.figure_parts import (
    budget_axis,
    budget_positions,
    panel_groups,
    star_sentence,
    styles_of,
)
from bacr_study.figures import (
    accuracy_figures,
    convergence_figures,
    curriculum_figures,
    difficulty_figures,
    draw_figures,
    efficiency_figures,
    pareto_front,
)
from bacr_study.items import distinct_names
from bacr_study.results import build_results
from bacr_study.spec import Arm, Sweep
from bacr_study.tables import tables_of
from cells_world import BUDGETS, made_task, main_study, make_cell, write_cells

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
    arm = Arm("bacr-bounded", "BACR", sweep=Sweep("optimizer.learning_rate", (0.1, 0.2), "rate"))
    study = main_study(arms=(*ARMS, arm))
    stars = {key for key, style in styles_of(study).items() if style.marker == STAR}
    # Figures with one curve per arm show it with its star.
    assert stars == {"bacr-bounded"} and star_sentence(study) == ""


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


@pytest.mark.parametrize(
    ("names", "distinct"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "b", "a", "a"], ["a", "b", "a_2", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_3", "a_2"]),
        (["a_2", "a_2", "a", "a"], ["a_2", "a_2_2", "a", "a_3"]),
    ],
)
def test_only_names_that_are_repeated_change(names, distinct):
    assert distinct_names(names) == distinct


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


class TestFigures:
    def test_the_front_holds_what_no_other_point_beats(self):
        points = [(4, 30), (8, 50), (8, 55), (16, 40), (16, 60), (32, 60)]
        assert pareto_front(points) == [(4, 30), (8, 55), (16, 60)]

    def test_no_two_arms_look_alike(self):
        study = main_study()
        styles = styles_of(study)
        assert len({(style.colour, style.marker) for style in styles.values()}) == len(study.arms)
        assert [name for name, style in styles.items() if style.marker == "*"] == ["bacr_robust"]

    def test_of_many_arms_each_panel_has_the_reference_and_as_many_curves(self):
        few = main_study()
        assert panel_groups(few, styles_of(few)) == [list(few.variants())]
        more = [dataclasses.replace(few.arms[0], id=f"more-{i}") for i in range(12)]
        study = dataclasses.replace(few, arms=(*few.arms, *more))
        styles = styles_of(study)
        panels = panel_groups(study, styles)
        assert len(panels) == 2 and {v for row in panels for v in row} == set(study.variants())
        assert all("anytime" in {variant.arm for variant in panel} for panel in panels)
        assert abs(len(panels[0]) - len(panels[1])) <= 1
        # Curves of one colour are spread over the panels.
        for colour in {style.colour for style in styles.values()}:
            counts = [sum(styles[v.key].colour == colour for v in panel) for panel in panels]
            assert max(counts) - min(counts) <= 1

    @pytest.mark.parametrize(
        ("arm", "has_star"), [("bacr-bounded", True), ("bacr-robust", True), ("bacr_paper", False)]
    )
    def test_a_caption_explains_the_star_where_one_is(self, arm, has_star):
        study = main_study(arms=(Arm("anytime", "A"), Arm(arm, "B")))
        assert ("star" in star_sentence(study)) == has_star
        stars = [key for key, style in styles_of(study).items() if style.marker == STAR]
        assert bool(stars) == has_star


TRAINED = main_study(
    tasks=(made_task("ledger", "Ledger", hard=""),),
    arms=(Arm("cot", "CoT"), Arm("anytime", "AnytimeReasoner"), Arm("bacr_paper", "BACR")),
    seeds=(0, 1, 2),
    reference=("anytime",),
    views=("accuracy", "convergence"),
)


class TestHeldOutBudgets:
    """Held-out accuracy during training can be measured at other budgets than the task's."""

    def texts(self, folder, by_arm):
        """Returns the captions of the table and the figure of convergence, and the warnings."""
        write_cells(folder, TRAINED, problems=12, steps=10)
        held_out = {("ledger", arm): budgets for arm, budgets in by_arm.items()}
        cells = read_cells(folder, TRAINED)
        results = build_results(cells, TRAINED, Configured(held_out=held_out))
        (figure,) = convergence_figures(results, TRAINED)
        shown = next(one for one in tables_of(results, TRAINED) if one.name == "convergence_ledger")
        return shown.caption, figure.caption, results["warnings"]

    def test_are_named_in_the_captions(self, tmp_path):
        both = {"anytime": [8, 16], "bacr_paper": [8, 16]}
        of_table, of_figure, warnings = self.texts(tmp_path, both)
        assert "held-out accuracy (greedy, mean over budgets 8, 16). Time:" in of_table
        assert of_figure.endswith("held-out problems, mean over budgets 8, 16.")
        (warning,) = warnings
        assert warning.startswith("Ledger: held-out accuracy") and " 8, 16 (" in warning

    def test_of_the_task_are_no_warning(self, tmp_path):
        equal = list(BUDGETS)
        of_table, _, warnings = self.texts(tmp_path, {"anytime": equal, "bacr_paper": equal})
        assert "mean over budgets 8, 16, 32, 64, 96" in of_table and warnings == []

    def test_of_arms_without_curves_do_not_count(self, tmp_path):
        of_table, _, _ = self.texts(tmp_path, {"cot": [8], "anytime": [8, 16]})
        assert "mean over budgets 8, 16)" in of_table

    def test_that_differ_between_arms_are_all_named_in_the_warning(self, tmp_path):
        of_table, _, warnings = self.texts(tmp_path, {"anytime": [8], "bacr_paper": [16]})
        assert "mean over the budgets of each method's eval.budgets" in of_table
        assert " 8 or 16 (eval.budgets)" in warnings[0]


def test_a_figure_says_why_there_are_no_times_to_an_accuracy(tmp_path):
    write_cells(tmp_path, TRAINED, problems=12, steps=10)
    reason = "There are no times to a held-out accuracy, because AnytimeReasoner gains none."
    for falls in (False, True):
        for cell in read_cells(tmp_path, TRAINED).values():
            if cell.arm == "anytime" and falls:
                curve = [{**point, "accuracy": 0.5 - point["step"] / 99} for point in cell.curve]
                write_cell(tmp_path, dataclasses.replace(cell, curve=curve))
        results = build_results(read_cells(tmp_path, TRAINED), TRAINED)
        (figure,) = convergence_figures(results, TRAINED)
        assert figure.caption.endswith(f" {reason}") == falls
        names = {one.name for one in tables_of(results, TRAINED)}
        assert ("convergence_ledger" in names) != falls


@pytest.mark.parametrize("count", [4, 6, 7, 12])
def test_difficulty_groups_of_a_curriculum_look_different(count):
    cells = cells_of(TRAINED)
    for id_, cell in cells.items():
        schedule = []
        for record in cell.schedule:
            groups = [{**record["groups"][0], "mu": 8.0 + group} for group in range(count)]
            schedule.append({**record, "groups": groups})
        cells[id_] = dataclasses.replace(cell, schedule=schedule)
    study = dataclasses.replace(TRAINED, views=("curriculum",))
    charts = charts_of(curriculum_figures(build_results(cells, study), study))
    assert len(charts) == 4
    for chart in charts:
        # A legend shows colours and markers, but no lines.
        looks = {(colour_name(series), series.marker) for series in chart.series}
        assert len(looks) == len(chart.series) == count
        assert {bool(series.marker) for series in chart.series} == {count > 6}
