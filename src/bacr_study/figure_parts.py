"""Shared parts of a study's figures: styles of arms, intervals, axes and panels."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bacr_jax.report.charts import COLOURS, Axis, Chart, Series, marker
from bacr_study.items import budget_phrase, variant_name
from bacr_study.spec import Study, Task, Variant

# Line styles of arms. The line style changes once all colours have been used.
_ARM_LINES = ("-", "--", ":")
# Maximum number of curves per panel. If there are more, each line style gets a separate panel.
_CURVES_IN_A_PANEL = 12

# An estimate from results.json, with the fields `mean`, `low` and `high`.
EstimateRecord = Mapping[str, Any]


@dataclass(frozen=True)
class StudyFigure:
    """A figure of a study.

    Attributes:
      name: name of the figure's files, without extension.
      title: title of the figure.
      caption: caption of the figure.
      rows: the charts, row by row.
      legend: number of columns in the legend.
    """

    name: str
    title: str
    caption: str
    rows: Sequence[Sequence[Chart]]
    legend: int = 3


def looks_of(study: Study) -> dict[str, Series]:
    """Assigns a style to every arm and variant, so that it looks the same in all figures.

    Up to 27 arms get distinct styles. The first reference arm is grey. Arms of the same colour
    differ in line style and in the fill of their markers.

    Returns:
      Series without points, by variant key.
    """
    looks = {}
    first_reference = study.references[:1]
    arms = sorted(study.arms, key=lambda arm: arm.id not in first_reference)
    for index, arm in enumerate(arms):
        line = _ARM_LINES[index // len(COLOURS) % len(_ARM_LINES)]
        for variant in (Variant(arm.id), *study.variants_of(arm)):
            looks[variant.key] = Series(
                variant_name(study, variant),
                [],
                [],
                f"s{index % len(COLOURS)}",
                line=line,
                marker=marker(index),
                hollow=line != "-",
            )
    return looks


def ends_of(estimate: EstimateRecord) -> tuple[float, float]:
    """Returns the ends of an interval; both equal the mean if the interval is unknown."""
    mean = estimate["mean"]
    low = mean if estimate["low"] is None else estimate["low"]
    high = mean if estimate["high"] is None else estimate["high"]
    return low, high


def accuracies(look: Series, x: Iterable[float], estimates: Collection[EstimateRecord]) -> Series:
    """Creates a series of accuracies in percent with their intervals, clipped to [0, 100].

    Args:
      look: the style of the series.
      x: the x coordinate of each estimate.
      estimates: accuracies in [0, 1].
    """
    ends = []
    for estimate in estimates:
        low, high = ends_of(estimate)
        ends.append((_percent(low), _percent(high)))
    y = [100 * estimate["mean"] for estimate in estimates]
    return replace(look, x=list(x), y=y, ends=ends)


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


def distinguishable_groups(study: Study, looks: Mapping[str, Series]) -> list[list[Variant]]:
    """Distributes the variants over panels so that the curves in each panel are distinguishable.

    Up to 12 variants share one panel. Otherwise the variants are grouped by line style, and the
    first reference arm appears in every group.
    """
    variants = study.variants()
    if len(variants) <= _CURVES_IN_A_PANEL:
        return [variants]
    first_reference = study.references[:1]
    lines = dict.fromkeys(looks[variant.key].line for variant in variants)
    groups = []
    for line in lines:
        group = [
            variant
            for variant in variants
            if looks[variant.key].line == line or variant.arm in first_reference
        ]
        groups.append(group)
    return groups


def budget_axis(budgets: Sequence[int], label: str = "thinking budget (tokens)") -> Axis:
    """Returns a logarithmic axis (base 2) with a tick at each budget."""
    ticks = [(float(budget), f"{budget:,}") for budget in budgets]
    return Axis(
        label,
        log2=True,
        low=0.87 * min(budgets),
        high=1.15 * max(budgets),
        ticks=ticks,
    )


def basis(study: Study) -> str:
    """Describes the basis of a figure's intervals: `5 seeds`, or `problems, one seed`."""
    if len(study.seeds) > 1:
        return f"{len(study.seeds)} seeds"
    return "problems, one seed"


def panel_title(task: Task, budget: str) -> str:
    """Returns the title of a panel, which names the task and the budget."""
    return f"{task.label}, {budget_phrase(budget)}"
