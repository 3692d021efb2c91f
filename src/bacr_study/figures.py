"""Draws the figures of a study from its results.json."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.report.charts import Axis, Chart, Mark, Series, ordered_style, stepped
from bacr_study import items
from bacr_study.budget_figures import free_series, swap_figures
from bacr_study.figure_parts import (
    EstimateRecord,
    StudyFigure,
    accuracies,
    alike,
    band,
    basis,
    budget_axis,
    budget_positions,
    ends_of,
    panel_groups,
    panel_title,
    saved,
    star_sentence,
    styles_of,
)
from bacr_study.items import Results, distinct_names, estimate_of, is_shown, variant_name
from bacr_study.spec import PARTS, Study, Sweep, Task, Variant

# Line styles of the difficulty groups, easiest first.
_GROUP_LINES = ("-", "--", "-.", ":")
# A pair of a cost (tokens) and the gain (accuracy) at this cost.
Point = tuple[float | int, float | int]

# Maximum number of curves in the accuracy figure. The table shows all arms in any case.
MOST_CURVES = 16
# Number of panels per row.
_PANELS_IN_A_ROW = 3
_AXIS_NAMES = {
    "step": "steps",
    "tokens": "generated tokens",
}
# Training curves: key in results.json, axis label, and factor that the values are multiplied by.
_CURVES = (
    ("reward", "mean reward", 1.0),
    ("accuracy", "held-out accuracy (%)", 100.0),
)
# Curriculum curves: key in results.json, title, unit, and factor that the values are multiplied by.
_SCHEDULE = (
    ("mean_budget", "median sampled budget", "tokens", 1.0),
    ("weight", "share of sampled questions", "%", 100.0),
    ("mu", "scheduled location of budgets", "tokens", 1.0),
    ("pass_rate", "pass rate", "%", 100.0),
)
_ACCURACY = Axis(f"accuracy (%, {SAMPLED} decoding)")
_TOKENS = Axis("mean tokens used: thinking, forced, answer", log2=True)
_THINKING = Axis("mean thinking tokens used", log2=True)
# Title of the table and the figures that show the study's named contrasts.
CONTRASTS = "Pairs that the study asks about"
_SIGNIFICANT_COLOUR = "s1"


def draw_figures(
    folder: Path, results: Results, study: Study
) -> list[tuple[StudyFigure, list[Path]]]:
    """Draws the figures for each kind of result that the study shows (its views) into a folder.

    Returns:
      Each figure with the paths of its files, in the order of the study's views.
    """
    figures_of_view: Mapping[str, Callable[[Results, Study], Iterator[StudyFigure]]] = {
        "accuracy": accuracy_figures,
        "hard": functools.partial(accuracy_figures, hard=True),
        "ablation": effect_figures,
        "scale": sweep_figures,
        "efficiency": efficiency_figures,
        "curriculum": curriculum_figures,
        "convergence": convergence_figures,
        "difficulty": difficulty_figures,
        "sensitivity": sweep_figures,
        "contrasts": contrast_figures,
    }
    # Two views may share a function, which must only be called once.
    makers = dict.fromkeys([*(figures_of_view[view] for view in study.views), swap_figures])
    figures = [figure for make in makers for figure in make(results, study)]
    names = distinct_names([figure.name for figure in figures])
    figures = [replace(figure, name=name) for figure, name in zip(figures, names)]
    return [(figure, saved(figure, folder)) for figure in figures]


# Accuracy -----------------------------------------------------------------------------------------


def _by_budget(
    results: Results, task: Task, name: str, variants: Sequence[Variant], key: str = "accuracy"
) -> Iterator[dict[float, EstimateRecord]]:
    """Yields, for each method in a chart, the estimates of one measure by the budget's position.

    Args:
      results: the contents of results.json.
      task: the task.
      name: the evaluation set.
      variants: the methods of a chart, each with a value of the setting that the study sweeps.
      key: the measure, one of `cells.NUMBERS`.
    """
    positions = budget_positions(task.budgets)
    for variant in variants:
        points = {}
        for budget, position in positions.items():
            estimate = estimate_of(results, task, name, variant, str(budget), key)
            if estimate is not None:
                points[position] = estimate
        yield points


def accuracy_figures(
    results: Results, study: Study, *, hard: bool = False
) -> Iterator[StudyFigure]:
    """Yields the figure that plots the accuracy of each method against the budget.

    Yields nothing if the study has more than `MOST_CURVES` curves.

    Args:
      results: the contents of results.json.
      study: the study.
      hard: if True, plots the accuracy on the harder problems (`Task.hard`).
    """
    if len(study.variants()) > MOST_CURVES:
        return
    styles = styles_of(study)
    groups = panel_groups(study, styles)
    columns = []
    for task in study.tasks:
        name = task.hard if hard else task.main
        charts = [_accuracy_chart(results, task, name, group, styles) for group in groups]
        columns.append(alike(charts))
    rows = []
    for row in zip(*columns):
        for start in range(0, len(row), _PANELS_IN_A_ROW):
            rows.append(row[start : start + _PANELS_IN_A_ROW])
    yield StudyFigure(
        name="hard" if hard else "accuracy",
        title="Accuracy on harder problems" if hard else "Accuracy by budget",
        caption=f"Mean accuracy with 95 % intervals over {basis(study)}.{star_sentence(study)}",
        rows=rows,
    )


def _accuracy_chart(
    results: Results,
    task: Task,
    name: str,
    variants: Sequence[Variant],
    styles: Mapping[str, Series],
) -> Chart:
    """Plots accuracy on an evaluation set by budget, with a curve per arm and swept value."""
    series = []
    for variant, points in zip(variants, _by_budget(results, task, name, variants)):
        series.append(accuracies(styles[variant.key], points, points.values()))
    return Chart(task.label, series, budget_axis(task.budgets), _ACCURACY)


# Efficiency ---------------------------------------------------------------------------------------


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Returns the Pareto front of points (cost, gain), sorted by increasing cost.

    A point is on the front if no other point has both a cost at most as high and a gain at least as
    high.
    """
    front: list[Point] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def efficiency_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields Fig. 1a of the paper: accuracy against tokens used, and tokens used per budget."""
    styles = styles_of(study)
    rows = [_efficiency_charts(results, study, task, styles) for task in study.tasks]
    yield StudyFigure(
        name="efficiency",
        title="Accuracy against tokens really used",
        caption=f"Left: a point per budget, 95 % intervals over {basis(study)}; the shaded steps "
        "are the Pareto front of the means. Right: thinking tokens used by budget."
        f"{star_sentence(study)}",
        rows=rows,
    )


def _efficiency_charts(
    results: Results, study: Study, task: Task, styles: Mapping[str, Series]
) -> list[Chart]:
    """Plots accuracy against tokens used, and thinking tokens used against the budget."""
    variants = study.variants()
    accuracy_series: list[Series] = []
    thinking_series: list[Series] = []
    # A budget of 0 allows no thinking tokens, so the chart of them has no point for it.
    thinking_budgets = [budget for budget in task.budgets if budget] or task.budgets
    # A logarithmic axis needs a positive lower limit for the thinking tokens.
    floor = min(budget_positions(thinking_budgets).values()) / 4
    columns = zip(
        variants,
        _by_budget(results, task, task.main, variants, "accuracy"),
        _by_budget(results, task, task.main, variants, "mean_total_tokens"),
        _by_budget(results, task, task.main, variants, "mean_thinking_tokens"),
    )
    for variant, gains, total_tokens, thinking_tokens in columns:
        if not gains:
            continue
        style = styles[variant.key]
        costs = [estimate["mean"] for estimate in total_tokens.values()]
        free_points = results["free_curves"].get(task.id)
        if free_points and variant.arm == study.before:
            accuracy_series.append(free_series(style, free_points))
        else:
            accuracy_series.append(accuracies(style, costs, gains.values()))
        thinking_series.append(_thinking_series(style, thinking_tokens, floor))
    if accuracy_series:
        points = [point for series in accuracy_series for point in zip(series.x, series.y)]
        x, y = stepped(*zip(*pareto_front(points)))
        accuracy_series.insert(
            0,
            # This curve has no label, because the caption explains it. Its colour is neutral,
            # because the other colours belong to the methods.
            Series(
                "",
                x,
                y,
                "soft",
                kind="broad",
            ),
        )
    # Without this lower limit, a policy that uses almost no thinking tokens would compress all
    # other curves.
    low_ends = [low for series in thinking_series for low, _ in series.ends or ()]
    least = max(floor, min(low_ends, default=floor))
    return [
        Chart(task.label, accuracy_series, _TOKENS, _ACCURACY),
        Chart(
            f"{task.label}; the line: all that is asked for",
            thinking_series,
            budget_axis(thinking_budgets, "budget asked for (tokens)"),
            replace(_THINKING, low=least),
            diagonal=True,
        ),
    ]


def _thinking_series(
    style: Series, by_budget: Mapping[float, EstimateRecord], floor: float
) -> Series:
    """Creates the series of thinking tokens used per budget. Means of 0 are left out.

    Args:
      style: the style of the series.
      by_budget: estimates of the thinking tokens, by x coordinate.
      floor: the lower ends of intervals are clipped to half of this value, because a logarithmic
        axis cannot show 0.
    """
    x = []
    y = []
    ends = []
    for budget, estimate in by_budget.items():
        if estimate["mean"] <= 0:
            continue
        low, high = ends_of(estimate)
        x.append(budget)
        y.append(estimate["mean"])
        ends.append((max(low, floor / 2), high))
    return replace(style, x=x, y=y, ends=ends)


# Differences --------------------------------------------------------------------------------------


def difficulty_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields Fig. 3b of the paper: differences in accuracy from the reference arm by difficulty."""
    if not study.references:
        return
    styles = styles_of(study)
    groups = panel_groups(study, styles)
    rows: list[Sequence[Chart]] = []
    for task in study.tasks:
        columns = []
        for budget in study.focus_budgets(task):
            by_variant = results["difficulty"].get(task.id, {}).get(budget, {})
            title = panel_title(task, budget)
            charts = [_level_chart(title, by_variant, group, styles) for group in groups]
            columns.append(alike(charts))
        rows += zip(*columns)
    reference = study.arm(study.references[0]).name
    yield StudyFigure(
        name="difficulty",
        title=f"Accuracy by level, difference from {reference}",
        caption=f"Percentage points from {reference}, paired by seed and problem, 95 % intervals.",
        rows=rows,
        legend=4,
    )


def _level_chart(
    title: str,
    by_variant: Mapping[str, Any],
    variants: Sequence[Variant],
    styles: Mapping[str, Series],
) -> Chart:
    """Plots differences in accuracy from the reference arm by difficulty level.

    Each curve is a variant: an arm (a method with its settings) at one of its swept values. The
    reference arm is the one that the others are compared with.

    Args:
      title: title of the chart.
      by_variant: results of `effects.difficulty`, by variant key and by level.
      variants: the variants to plot.
      styles: style of each variant, by its key.
    """
    levels = sorted({int(level) for by_level in by_variant.values() for level in by_level})
    differences: dict[str, dict[int, Any]] = {}
    for variant in variants:
        by_level = {
            int(level): entry["difference"]
            for level, entry in by_variant.get(variant.key, {}).items()
            if entry["difference"]
        }
        if by_level:
            differences[variant.key] = by_level
    series = []
    for index, (key, by_level) in enumerate(differences.items()):
        # The points of a level are drawn side by side so that they do not overlap.
        position = index - (len(differences) - 1) / 2
        shift = 0.8 * position / max(len(differences), 4)
        x = [level + shift for level in by_level]
        y, ends = _points(by_level.values())
        series.append(
            replace(
                styles[key],
                x=x,
                y=y,
                ends=ends,
                line="",
            )
        )
    low = min(levels) - 0.5 if levels else 0.0
    high = max(levels) + 0.5 if levels else 1.0
    ticks = [(float(level), str(level)) for level in levels]
    separators = [Mark("x", level - 0.5, "grid") for level in levels[1:]]
    return Chart(
        title,
        series,
        Axis("level, the hardest last", low=low, high=high, ticks=ticks),
        Axis("difference (percentage points)"),
        marks=[Mark("y", 0.0), *separators],
    )


def _points(
    differences: Iterable[Mapping[str, Any]],
) -> tuple[list[float], list[tuple[float, float]]]:
    """Converts differences and the ends of their intervals to percentage points."""
    values = []
    ends = []
    for entry in differences:
        values.append(100 * entry["difference"])
        ends.append((100 * entry["low"], 100 * entry["high"]))
    return values, ends


def effect_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields a figure of the effects of an ablation, the numbers behind Table 3 of the paper."""
    rows = []
    for task in study.tasks:
        charts = []
        for budget in study.focus_budgets(task):
            effects = {}
            for entry in results["ablation"][task.id][budget]["effects"]:
                name = entry["kind"]
                if entry["part"]:
                    name += f": {entry['part']}"
                effects[name] = entry
            charts.append(_forest(panel_title(task, budget), effects))
        rows.append(alike(charts, "x"))
    yield StudyFigure(
        name="effects",
        title="What each part adds",
        caption="Percentage points, 95 % intervals over seeds and problems. Main effect: mean gain "
        "over all combinations of the others. Alone: its gain over none. Joint: that of all. "
        f"Surplus: joint less the sum of each alone. On top of {PARTS[0]}: all with {PARTS[0]}.",
        rows=rows,
    )


def contrast_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields a figure of the study's named contrasts for each task.

    The figure has a panel for each budget in focus, with a row for each contrast.
    """
    entries = {}
    for entry in results["contrasts"]:
        entries[entry["name"], entry["task"], entry["budget"]] = entry
    for task in study.tasks:
        charts = []
        for budget in study.focus_budgets(task):
            pairs = {name: entries.get((name, task.id, budget)) for name in study.contrasts}
            shown = [name for name, entry in pairs.items() if entry and is_shown(entry)]
            charts.append(_forest(panel_title(task, budget), pairs, highlighted=shown))
        yield StudyFigure(
            name=f"contrasts_{task.id}",
            title=CONTRASTS,
            caption="Percentage points, 95 % intervals over seeds and problems. Blue: the interval "
            f"that holds for all {len(entries)} differences at once (Bonferroni) excludes 0.",
            rows=[alike(charts, "x")],
        )


def _forest(
    title: str,
    entries: Mapping[str, Mapping[str, Any] | None],
    *,
    highlighted: Collection[str] | None = None,
) -> Chart:
    """Draws a forest plot: one row per name with the difference and its interval.

    Args:
      title: title of the chart.
      entries: contrasts by name; the row of a name is empty if its entry is None.
      highlighted: names of the contrasts that are drawn in colour; None for all.
    """
    if highlighted is None:
        highlighted = entries.keys()
    row_of_name = {name: -float(row) for row, name in enumerate(entries)}
    series = []
    for colour, is_highlighted in (("s0", False), (_SIGNIFICANT_COLOUR, True)):
        by_row = {}
        for name, entry in entries.items():
            if entry and (name in highlighted) == is_highlighted:
                by_row[row_of_name[name]] = entry
        x, ends = _points(by_row.values())
        series.append(
            Series(
                "",
                x,
                list(by_row),
                colour,
                ends,
                across=True,
                line="",
                marker="o",
            )
        )
    ticks = [(row, name) for name, row in row_of_name.items()]
    return Chart(
        title,
        series,
        Axis("percentage points"),
        Axis("", low=0.5 - len(entries), high=0.5, ticks=ticks),
        marks=[Mark("x", 0.0)],
    )


# Sweeps -------------------------------------------------------------------------------------------


def sweep_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields Fig. 4 and Table 4 of the paper: accuracy by the value of a setting that is varied."""
    for sweep in study.sweeps():
        columns = []
        for task in study.tasks:
            budgets = study.focus_budgets(task)
            columns.append([_sweep_chart(results, study, sweep, task, one) for one in budgets])
        remark = " The grey bar marks the default." if sweep.default is not None else ""
        yield StudyFigure(
            name=f"sweep_{sweep.file_name}",
            title=f"Accuracy by {sweep.label}",
            caption=f"Mean accuracy with 95 % intervals over {basis(study)}.{remark}",
            rows=list(map(list, zip(*columns))),
        )


def _sweep_chart(results: Results, study: Study, sweep: Sweep, task: Task, budget: str) -> Chart:
    """Plots accuracy at one budget against the value of the setting that a sweep varies.

    Numeric values are placed at their position on the axis. Otherwise the values are placed at
    equal distances.
    """
    are_numbers = all(isinstance(value, int | float) for value in sweep.values)
    x_of_value = {}
    for index, value in enumerate(sweep.values):
        x_of_value[value] = float(value) if are_numbers else float(index)
    styles = styles_of(study)
    series = []
    for arm in study.sweeps()[sweep]:
        points = {}
        for value, x in x_of_value.items():
            variant = Variant(arm.id, value)
            estimate = estimate_of(results, task, task.main, variant, budget)
            if estimate:
                points[x] = estimate
        series.append(accuracies(styles[arm.id], points, points.values()))
    marks = []
    if sweep.default is not None:
        marks.append(Mark("x", x_of_value[sweep.default], "broad"))
    ticks = [(x, str(value)) for value, x in x_of_value.items()]
    return Chart(
        panel_title(task, budget),
        series,
        Axis(sweep.label, ticks=ticks),
        _ACCURACY,
        marks=marks,
    )


# Training -----------------------------------------------------------------------------------------


def convergence_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields Fig. 3a of the paper for each task: reward and held-out accuracy during training."""
    styles = styles_of(study)
    for task in study.tasks:
        curves = results["convergence"][task.id]["curves"]
        if not curves:
            continue
        rows = []
        for kind, unit, scale in _CURVES:
            charts = []
            for axis, axis_label in _AXIS_NAMES.items():
                series = []
                for key, style in styles.items():
                    by_axis = curves.get(key, {}).get(kind, {})
                    if axis in by_axis:
                        series.append(replace(style, **band(by_axis[axis], scale)))
                charts.append(Chart("", series, Axis(axis_label), Axis(unit)))
            rows.append(charts)
        yield StudyFigure(
            name=f"convergence_{task.id}",
            title=f"Training: {task.label}",
            caption=f"Means over {len(study.seeds)} seeds, shades: 95 % intervals. Above: reward "
            "as each method defines it, averaged in thirtieths of the run; rewards of methods "
            "can't be compared. Below: greedy accuracy on held-out problems, "
            f"{items.held_out_phrase(results, task)}."
            f"{items.no_gain_sentence(results, study, task)}",
            rows=rows,
        )


def curriculum_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields Fig. 2 of the paper: budgets and weights of the difficulty groups during training."""
    for task, variant in itertools.product(study.tasks, study.variants()):
        groups = results["curriculum"].get(task.id, {}).get(variant.key)
        if not groups:
            continue
        charts = [_schedule_chart(groups, *row) for row in _SCHEDULE]
        yield StudyFigure(
            name=f"curriculum_{task.id}_{variant.key}",
            title=f"Curriculum: {variant_name(study, variant)}, {task.label}",
            caption=f"Means over {len(study.seeds)} seeds, shades: 95 % intervals.",
            rows=[charts[:2], charts[2:]],
            legend=4,
        )


def _schedule_chart(
    groups: Sequence[Mapping[str, Any]], key: str, heading: str, unit: str, scale: float
) -> Chart:
    """Plots one quantity of every difficulty group against the training step.

    Args:
      groups: the curves of each group, easiest group first.
      key, heading, unit, scale: a row of `_SCHEDULE`.
    """
    remarks = {
        0: " (easiest)",
        len(groups) - 1: " (hardest)",
    }
    series = []
    for number, group in enumerate(groups):
        series.append(
            replace(
                ordered_style(number, len(groups)),
                label=f"group {number}{remarks.get(number, '')}",
                line=_GROUP_LINES[number % 4],
                has_few_markers=True,
                **band(group[key], scale),
            )
        )
    return Chart(
        heading,
        series,
        Axis("step", whole=True),
        Axis(unit, low=0.0),
    )
