"""Shared parts of a study's figures: styles of arms, intervals, axes and panels."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bacr_jax.report import evaluation_charts, pictures
from bacr_jax.report.charts import COLOURS, MARKERS, Axis, Chart, Series
from bacr_jax.report.curve_styles import GREY, STAR, starred
from bacr_jax.report.curve_styles import styles_of as method_styles
from bacr_jax.report.vega import Theme
from bacr_study.items import budget_phrase, variant_name
from bacr_study.spec import Study, Task, Variant

# Maximum number of curves per panel.
_CURVES_IN_A_PANEL = 12

# Files of a figure: name and theme.
_FILES: Sequence[tuple[str, Theme]] = (
    ("{}.png", "light"),
    ("{}.pdf", "light"),
    ("{}.svg", "light"),
    ("{}-dark.png", "dark"),
)

# An estimate from results.json, with the fields `mean`, `low` and `high`.
EstimateRecord = Mapping[str, Any]


@dataclass(frozen=True)
class StudyFigure:
    """A figure of a study.

    Attributes:
      name: name of the figure's files, without extension.
      title: heading of the figure.
      caption: explanation of the figure.
      rows: the charts in each row of the figure.
      legend: number of columns in the legend.
      size: width and minimum height of a chart, in pixels.
    """

    name: str
    title: str
    caption: str
    rows: Sequence[Sequence[Chart]]
    legend: int = 3
    size: tuple[int, int] = pictures.SIZE


def saved(figure: StudyFigure, folder: Path) -> list[Path]:
    """Saves a figure as PNG, SVG and PDF for light pages and as PNG for dark pages.

    Returns:
      The paths of the files. The last one is the file for dark pages.
    """
    files = []
    for name, theme in _FILES:
        spec = pictures.picture(
            figure.title,
            figure.rows,
            theme,
            legend=figure.legend,
            caption=figure.caption,
            size=figure.size,
        )
        path = folder / name.format(figure.name)
        pictures.save(spec, path)
        files.append(path)
    return files


def styles_of(study: Study) -> dict[str, Series]:
    """Assigns a style to every arm (method) and variant, so that it is the same in all figures.

    An arm with the name of a method has the colour of this method. Variants of an arm, which differ
    in a swept value, have its colour and different markers. If all markers of a colour are used, a
    variant gets another colour. None of them has a star, which marks a single curve.

    Returns:
      Series without points. The keys are the keys of the variants, and the ids of the arms for
      figures with one curve per arm.
    """
    arm_styles = method_styles([arm.id for arm in study.arms])
    used = {(style.colour, style.marker) for style in arm_styles}
    styles = {}
    for arm, arm_style in zip(study.arms, arm_styles):
        styles[arm.id] = replace(arm_style, label=variant_name(study, Variant(arm.id)))
        style = arm_style
        for index, variant in enumerate(study.variants_of(arm)):
            is_swept = variant.value is not None
            if index or (is_swept and style.marker == STAR):
                style = _unused(arm_style, used)
                used.add((style.colour, style.marker))
            styles[variant.key] = replace(style, label=variant_name(study, variant))
    return styles


def _unused(style: Series, used: Collection[tuple[str | float, str]]) -> Series:
    """Returns a style with a pair of colour and marker that is not in `used`.

    Legends show only colours and markers. The colour of `style` is kept if it has an unused marker.
    Returns `style` itself if all pairs are used.
    """
    other_colours = [name for name in COLOURS if name != GREY]
    for colour, marker in itertools.product((style.colour, *other_colours), MARKERS):
        if (colour, marker) not in used:
            return replace(style, colour=colour, marker=marker)
    return style


def ends_of(estimate: EstimateRecord) -> tuple[float, float]:
    """Returns the lower and upper end of an estimate's interval, or twice its mean if unknown."""
    mean = estimate["mean"]
    low = mean if estimate["low"] is None else estimate["low"]
    high = mean if estimate["high"] is None else estimate["high"]
    return low, high


def accuracies(style: Series, x: Iterable[float], estimates: Collection[EstimateRecord]) -> Series:
    """Creates a series of accuracies in percent. The ends of intervals are clipped to [0, 100].

    Args:
      style: the style of the series.
      x: the x coordinate of each estimate.
      estimates: accuracies in [0, 1].
    """
    ends = []
    for estimate in estimates:
        low, high = ends_of(estimate)
        ends.append((_percent(low), _percent(high)))
    y = [100 * estimate["mean"] for estimate in estimates]
    return replace(style, x=list(x), y=y, ends=ends)


def _percent(share: float) -> float:
    """Converts a fraction to percent, clipped to [0, 100]."""
    return 100 * min(max(share, 0.0), 1.0)


def band(curve: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Converts a curve from results.json to fields of a `Series` with a shaded interval.

    Args:
      curve: lists `x`, `mean`, `low` and `high`.
      scale: factor that the means and the intervals are multiplied by.
    """
    ends = None
    if curve["low"] and curve["low"][0] is not None:
        ends = []
        for low, high in zip(curve["low"], curve["high"]):
            ends.append((scale * low, scale * high))
    return {
        "x": curve["x"],
        "y": [scale * value for value in curve["mean"]],
        "ends": ends,
        "kind": "band",
    }


def alike(charts: Sequence[Chart], name: str = "y") -> list[Chart]:
    """Gives all charts the same limits on one axis, so that they can be compared.

    Args:
      charts: the charts.
      name: the axis, "x" or "y".
    """
    index = "xy".index(name)
    scales = [chart.scales()[index] for chart in charts if chart.drawn]
    low = min((scale.low for scale in scales), default=None)
    high = max((scale.high for scale in scales), default=None)
    result = []
    for chart in charts:
        axis = replace(getattr(chart, name), low=low, high=high)
        result.append(replace(chart, **{name: axis}))
    return result


def panel_groups(study: Study, styles: Mapping[str, Series]) -> list[list[Variant]]:
    """Distributes the curves of a figure over panels with up to 12 curves.

    Each curve is a variant: an arm (a method with its settings) at one of its swept values. The
    first reference arm, which the others are compared with, appears in every panel. Variants of one
    colour are spread over the panels, so that few curves of a panel differ only in their markers.
    """
    variants = study.variants()
    if len(variants) <= _CURVES_IN_A_PANEL:
        return [variants]
    references = [variant for variant in variants if variant.arm in study.references[:1]]
    others = [variant for variant in variants if variant not in references]
    num_panels = math.ceil(len(others) / (_CURVES_IN_A_PANEL - len(references)))
    by_colour = sorted(others, key=lambda variant: str(styles[variant.key].colour))
    groups = []
    for panel in range(num_panels):
        members = [*references, *by_colour[panel::num_panels]]
        groups.append(sorted(members, key=variants.index))
    return groups


def budget_positions(budgets: Sequence[int]) -> dict[int, float]:
    """Returns the position of each budget in tokens on a logarithmic axis.

    The positions are those of a run's charts (`evaluation_charts.budget_positions`).
    """
    positions = evaluation_charts.budget_positions([str(budget) for budget in budgets])
    return {budget: positions[str(budget)] for budget in budgets}


def budget_axis(budgets: Sequence[int], label: str = "thinking budget (tokens)") -> Axis:
    """Returns a logarithmic axis (base 2) with a tick at each budget."""
    positions = budget_positions(budgets)
    ticks = [(position, f"{budget:,}") for budget, position in positions.items()]
    return Axis(
        label,
        log2=True,
        low=0.87 * min(positions.values()),
        high=1.15 * max(positions.values()),
        ticks=ticks,
    )


def star_sentence(study: Study) -> str:
    """Returns the sentence of a caption that explains the star in the legend.

    The sentence starts with a space. It is empty if the study lacks the recommended method, or
    varies one of its settings (see `styles_of`).
    """
    recommended = starred([arm.id for arm in study.arms])
    if recommended is None or Variant(recommended) not in study.variants():
        return ""
    return f" The star is {recommended}."


def basis(study: Study) -> str:
    """Returns over what a figure's intervals are computed: `5 seeds` or `problems, one seed`."""
    if len(study.seeds) > 1:
        return f"{len(study.seeds)} seeds"
    return "problems, one seed"


def panel_title(task: Task, budget: str) -> str:
    """Returns the title of a panel, which names the task and the budget."""
    return f"{task.label}, {budget_phrase(budget)}"
