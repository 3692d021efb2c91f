"""Draws the figures of a study about the use of budgets: swap table and free curve."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.report.charts import Axis, Chart, Series, marker, shade
from bacr_study.figure_parts import StudyFigure, accuracies, alike, budget_axis
from bacr_study.items import Results, row_names, signed
from bacr_study.spec import MEAN, Study

_ACCURACY = Axis("accuracy (%)", low=0.0)


def free_series(look: Series, points: Sequence[Mapping[str, Any]]) -> Series:
    """Creates the curve of the policy before training by tokens used.

    Args:
      look: the style of the policy before training.
      points: a task's entry in `free_curves` of results.json.
    """
    tokens = [point["tokens"] for point in points]
    series = accuracies(look, tokens, points)
    return replace(series, label=f"{look.label}, truncated early")


def swap_figures(results: Results, study: Study) -> Iterator[StudyFigure]:
    """Yields the figure of accuracy by budget as input and by truncation, if it was measured."""
    rows = swap_charts(results, study)
    if rows:
        yield StudyFigure(
            name="swap",
            title="Does the policy use its budget?",
            caption="Mean sampled accuracy over seeds by truncation, a curve per budget as input.",
            rows=rows,
        )


def swap_charts(results: Results, study: Study) -> list[list[Chart]]:
    """Returns a row of charts for each task with swap tables, with a chart for each arm.

    A chart contains accuracy by truncation, with a curve for each budget as input. Answers are
    sampled.
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
    """Plots the accuracy of an arm against the truncation, with a curve for each input budget."""
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
    """Yields the curve of each input budget, and its point at the same truncation."""
    budgets = entry["budgets"]
    for index, budget in enumerate(budgets):
        by_cut = entry["accuracy"][str(budget)]
        look = Series(
            f"input {budget:,}",
            [float(cut) for cut in budgets],
            [100 * by_cut[str(cut)] for cut in budgets],
            shade(index, len(budgets)),
            marker=marker(index),
            hollow=True,
        )
        yield look
        matched = 100 * by_cut[str(budget)]
        # The interval of width 0 places the point in front of the curve.
        yield replace(
            look,
            label="",
            x=[float(budget)],
            y=[matched],
            ends=[(matched, matched)],
            line="",
            hollow=False,
        )
