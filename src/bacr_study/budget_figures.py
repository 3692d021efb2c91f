"""Draws the figures that show whether trained policies use their thinking budget.

`budget_use` computes the numbers, and defines the swap table and the free curve drawn here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.report.charts import Axis, Chart, Series, marker, shade
from bacr_study.figure_parts import StudyFigure, accuracies, alike, budget_axis
from bacr_study.items import Results, row_names, signed
from bacr_study.spec import MEAN, Study

_ACCURACY = Axis("accuracy (%)", low=0.0)


def free_series(style: Series, points: Sequence[Mapping[str, Any]]) -> Series:
    """Creates the curve of accuracy against tokens used, for the policy before training.

    The number of tokens varies because the thinking is truncated at several points.

    Args:
      style: the style of the policy before training.
      points: a task's entry in `free_curves` of results.json.
    """
    tokens = [point["tokens"] for point in points]
    series = accuracies(style, tokens, points)
    return replace(series, label=f"{style.label}, truncated early")


def swap_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields the figure of the swap tables, if the study measured them.

    A swap table contains the accuracy for every pair of a budget that the policy receives as input
    and a number of thinking tokens after which the thinking is truncated.
    """
    rows = swap_charts(results, study)
    if rows:
        yield StudyFigure(
            name="swap",
            title="Does the policy use its budget?",
            caption="Mean sampled accuracy over seeds by truncation, a curve per budget as input.",
            rows=rows,
        )


def swap_charts(results: Results, study: Study) -> list[list[Chart]]:
    """Returns the charts of the swap tables: one row per task, one chart per arm (method).

    A chart shows the accuracy of sampled answers by the number of thinking tokens after which the
    thinking is truncated. Each curve belongs to one budget that the policy receives as input. Tasks
    without a swap table have no row.
    """
    names = row_names(study)
    rows = []
    for task in study.tasks:
        entries = [
            entry
            for entry in results["swap"]
            if entry["task"] == task.id and entry["mode"] == SAMPLED
        ]
        charts = [_swap_chart(f"{task.label}, {names[e['variant']]}", e) for e in entries]
        if charts:
            rows.append(alike(charts))
    return rows


def _swap_chart(title: str, entry: Mapping[str, Any]) -> Chart:
    """Plots an arm's accuracy by the truncation point, with a curve for each input budget.

    Args:
      title: title of the chart.
      entry: the swap table of one arm (method), an entry of `swap` in results.json.
    """
    budgets = entry["budgets"]
    series = list(_swap_series(entry))
    gain = entry["gains"].get(MEAN)
    note = "filled: input = truncation"
    if gain:
        points = signed(100 * gain["difference"])
        low = signed(100 * gain["low"])
        high = signed(100 * gain["high"])
        note += f"; gain {points} points [{low}, {high}]"
    return Chart(title, series, budget_axis(budgets, "truncation (tokens)"), _ACCURACY, note=note)


def _swap_series(entry: Mapping[str, Any]) -> Iterator[Series]:
    """Yields the curve of each input budget, followed by a filled marker on this curve.

    The marker is at the truncation point that equals the input budget.
    """
    budgets = entry["budgets"]
    for index, budget in enumerate(budgets):
        by_cut = entry["accuracy"][str(budget)]
        style = Series(
            f"input {budget:,}",
            [float(cut) for cut in budgets],
            [100 * by_cut[str(cut)] for cut in budgets],
            shade(index, len(budgets)),
            marker=marker(index),
            hollow=True,
        )
        yield style
        matched = 100 * by_cut[str(budget)]
        # The filled marker is drawn over the curve's hollow one. Its interval has width 0, so no
        # error bar is visible.
        yield replace(
            style,
            label="",
            x=[float(budget)],
            y=[matched],
            ends=[(matched, matched)],
            line="",
            hollow=False,
        )
