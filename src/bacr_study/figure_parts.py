"""Draws what the figures of a study have in common: looks of arms, intervals, axes, panels."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bacr_jax.report.charts import COLOURS, Axis, Chart, Series, marker
from bacr_study.items import budget_phrase, variant_name
from bacr_study.spec import Study, Task, Variant

# Line styles of arms. Arms have different colours first; the styles repeat the colours.
_ARM_LINES = ("-", "--", ":")
# Most curves of one panel; more are spread over a panel for each line style.
_CURVES_IN_A_PANEL = 12

# An estimate in results.json: mean, low, high.
EstimateRecord = Mapping[str, Any]


def looks_of(study: Study) -> dict[str, Series]:
    """Returns the look of every arm and variant by key, as a series without points.

    The look is the same in all figures. Up to 27 arms are different; the first reference is grey.
    Arms of one colour have different line styles and fillings of markers.
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
    """Returns the ends of an interval; both are the mean if the interval is unknown."""
    mean = estimate["mean"]
    low = mean if estimate["low"] is None else estimate["low"]
    high = mean if estimate["high"] is None else estimate["high"]
    return low, high


def accuracies(look: Series, x: Iterable[float], estimates: Collection[EstimateRecord]) -> Series:
    """Returns accuracies in % with their intervals as a series; ends are cut at 0 and 100."""
    ends = []
    for estimate in estimates:
        low, high = ends_of(estimate)
        ends.append((_percent(low), _percent(high)))
    y = [100 * estimate["mean"] for estimate in estimates]
    return replace(look, x=list(x), y=y, ends=ends)


def _percent(share: float) -> float:
    """Returns a share in percent, at least 0 and at most 100."""
    return 100 * min(max(share, 0.0), 1.0)


def band(curve: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Returns the fields of a series for a curve of results.json; its interval is a shade.

    Args:
      scale: factor of the numbers.
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
    """Returns the charts with one scale of an axis, so that they can be compared.

    Args:
      name: the axis, x or y.
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


def told_apart(study: Study, looks: Mapping[str, Series]) -> list[list[Variant]]:
    """Groups the variants into panels so that the curves of a panel can be distinguished.

    Up to 12 variants share a panel. More are grouped by line style, and every group has the first
    reference.
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
    """Returns the basis of a figure's intervals: `5 seeds`, or `problems, one seed`."""
    if len(study.seeds) > 1:
        return f"{len(study.seeds)} seeds"
    return "problems, one seed"


def panel_title(task: Task, budget: str) -> str:
    """Returns the title of a panel: the task and the budget."""
    return f"{task.label}, {budget_phrase(budget)}"
