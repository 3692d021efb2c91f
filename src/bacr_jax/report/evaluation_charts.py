"""Builds charts of evaluations: accuracy, completion and token counts by budget."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report.charts import Axis, Chart, Series, marker, shade
from bacr_jax.report.table import budget_name, by_size

_PERCENT = Axis("accuracy (%)", low=0.0, high=100.0)
_TRACES_PERCENT = Axis("traces (%)", low=0.0, high=100.0)
_STEP = Axis("step", whole=True)
# The upper end of an accuracy axis is a multiple of this percentage.
_PERCENT_STEP = 20
# Maximum number of budgets on an axis, because the labels of more would overlap.
_MOST_TICKS = 8
# Factors that leave space beyond both ends of a logarithmic axis. Without the space, a curve would
# seem to continue beyond the axis.
_BELOW = 0.93
_ABOVE = 1.07
CUT_EARLY = "before, cut at smaller budgets"
_CUT_EARLY_STYLE = Series("", [], [], "s0", line=":", marker="o", hollow=True)
# A curve with the style of each policy, by the policy's name.
StylesByName = Mapping[str, Series]
# x, y, and both ends of the interval of y.
_Point = tuple[float, float, tuple[float, float]]


def budget_positions(budgets: Collection[str]) -> dict[str, float]:
    """Returns the position of each budget on a logarithmic axis.

    A budget of 0 and an unlimited budget have no logarithm. They are placed at half the smallest
    and at twice the largest of the other budgets.
    """
    sizes = [int(budget) for budget in budgets if budget != UNLIMITED and int(budget)]
    positions = {budget: float(budget) for budget in budgets if budget != UNLIMITED}
    if "0" in budgets:
        positions["0"] = min(sizes, default=2) / 2
    if UNLIMITED in budgets:
        positions[UNLIMITED] = 2.0 * max(sizes, default=1)
    return positions


def _percent(value: float | None) -> float:
    """Converts a rate to percent. Returns NaN if the rate is None."""
    return math.nan if value is None else 100.0 * value


def _percent_ends(entry: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Returns both ends of an interval in percent, or NaN if the entry has no such interval."""
    low, high = entry.get(name) or (None, None)
    return _percent(low), _percent(high)


def _accuracy_axis(summaries: Iterable[Summary]) -> Axis:
    """Returns an axis from 0 to a multiple of 20 % that contains all intervals of accuracy.

    All charts of a set share this axis. A set with low accuracies has a shorter axis, so that its
    curves do not look flat.
    """
    highest = -math.inf
    for summary in summaries:
        for budgets in summary.values():
            for entry in budgets.values():
                _, upper = _percent_ends(entry, "ci95")
                highest = max(highest, upper)
    if highest == -math.inf:
        return _PERCENT
    # Subtract a small number, so that rounding errors do not extend the axis by a step.
    top = _PERCENT_STEP * math.ceil(highest / _PERCENT_STEP - 1e-9)
    return Axis("accuracy (%)", low=0.0, high=float(min(max(top, _PERCENT_STEP), 100)))


def _modes(summaries: Iterable[Summary]) -> list[str]:
    """Returns the decoding modes that occur in any of the summaries."""
    return list(dict.fromkeys(mode for summary in summaries for mode in summary))


def accuracy_charts(
    policies: Mapping[str, Summary], styles: StylesByName, cut_early: Summary | None = None
) -> list[Chart]:
    """Builds a chart of accuracy by budget for each decoding mode, then charts by tokens used.

    Args:
      policies: summaries by name. The first policy is the reference.
      styles: a curve with the style of each policy, by name.
      cut_early: results of the policy before training if its thinking is truncated early, by
        decoding mode and truncation point. Training saved tokens only if a policy lies above this
        curve.
    """
    axis = _accuracy_axis(policies.values())
    modes = _modes(policies.values())
    by_budget = [
        _by_budget(
            policies,
            mode,
            f"Accuracy by budget, {mode}",
            "accuracy",
            "ci95",
            axis,
            styles,
        )
        for mode in modes
    ]
    by_tokens = [_by_tokens(policies, mode, axis, styles) for mode in modes]
    if cut_early:
        by_tokens = [
            _with_cut_early(chart, cut_early.get(mode, {})) for chart, mode in zip(by_tokens, modes)
        ]
    return by_budget + by_tokens


def _with_cut_early(chart: Chart, entries: Mapping[str, Mapping[str, Any]]) -> Chart:
    """Adds the curve of the policy before training, truncated early, behind the other curves."""
    points = []
    for cut in by_size(entries):
        entry = entries[cut]
        point = (entry["mean_total_tokens"], _percent(entry["accuracy"]))
        points.append((*point, _percent_ends(entry, "ci95")))
    curve = _policy_curve(CUT_EARLY, _CUT_EARLY_STYLE, points)
    return replace(chart, series=[curve, *chart.series])


def completion_charts(policies: Mapping[str, Summary], styles: StylesByName) -> list[Chart]:
    """Builds charts of completion rate, accuracy given completion, and tokens, per decoding mode.

    Args:
      policies: summaries by name.
      styles: a curve with the style of each policy, by name.
    """
    charts = []
    for mode in _modes(policies.values()):
        completion = _by_budget(
            policies,
            mode,
            f"Completion, {mode}",
            "completion_rate",
            "completion_ci95",
            _TRACES_PERCENT,
            styles,
            note="share of traces whose thinking ended by itself",
        )
        accuracy_if_complete = _by_budget(
            policies,
            mode,
            f"Accuracy given completion, {mode}",
            "accuracy_if_complete",
            "if_complete_ci95",
            _PERCENT,
            styles,
            note="among traces whose thinking ended by itself",
        )
        tokens = _requested_and_used(policies, mode, styles)
        charts += [completion, accuracy_if_complete, tokens]
    return charts


def _policy_curve(label: str, style: Series, points: Sequence[_Point]) -> Series:
    """Returns the curve of a policy."""
    return replace(
        style,
        label=label,
        x=[x for x, _, _ in points],
        y=[y for _, y, _ in points],
        ends=[ends for _, _, ends in points],
    )


def _by_budget(
    policies: Mapping[str, Summary],
    mode: str,
    title: str,
    name: str,
    interval: str,
    axis: Axis,
    styles: StylesByName,
    *,
    note: str = "",
) -> Chart:
    """Builds a chart of a rate over the thinking budget, with a curve per policy.

    Args:
      name: field of the rate.
      interval: field of the interval of the rate.
      axis: vertical axis.
      styles: a curve with the style of each policy, by name.
    """
    budgets = set[str]()
    for summary in policies.values():
        budgets.update(summary.get(mode, ()))
    positions = budget_positions(budgets)
    series = []
    for label, summary in policies.items():
        entries = summary.get(mode, {})
        points = []
        for budget in by_size(entries):
            x = positions[budget]
            y = _percent(entries[budget][name])
            ends = _percent_ends(entries[budget], interval)
            points.append((x, y, ends))
        series.append(_policy_curve(label, styles[label], points))
    names = by_size(positions)
    every = math.ceil(len(names) / _MOST_TICKS)
    x_axis = Axis(
        "thinking budget (tokens)",
        log2=True,
        low=min(positions.values()) * _BELOW,
        high=max(positions.values()) * _ABOVE,
        ticks=[(positions[budget], budget_name(budget)) for budget in names[::every]],
    )
    return Chart(title, series, x_axis, axis, note=note)


def _by_tokens(
    policies: Mapping[str, Summary], mode: str, axis: Axis, styles: StylesByName
) -> Chart:
    """Builds a chart of accuracy over the mean number of tokens used, with a point per budget."""
    series = list[Series]()
    for label, summary in policies.items():
        points = []
        for _, entry in _sorted_entries(summary, mode):
            tokens = entry["mean_total_tokens"]
            if tokens > 0:
                accuracy = _percent(entry["accuracy"])
                points.append((tokens, accuracy, _percent_ends(entry, "ci95")))
        points.sort(key=lambda point: point[0])
        series.append(_policy_curve(label, styles[label], points))
    return Chart(
        f"Accuracy by tokens used, {mode}",
        series,
        Axis("mean tokens used, in all", log2=True),
        axis,
        note="a point per budget; thinking, forced and answer tokens",
    )


def _sorted_entries(summary: Summary, mode: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the (budget, metrics) pairs of a decoding mode, ordered by budget, if any."""
    entries = summary.get(mode, {})
    return [(budget, entries[budget]) for budget in by_size(entries)]


def _requested_and_used(policies: Mapping[str, Summary], mode: str, styles: StylesByName) -> Chart:
    """Builds a chart of the used thinking tokens over the requested budget."""
    series = []
    requested = list[int]()
    used = list[float]()
    for label, summary in policies.items():
        points = list[_Point]()
        for budget, entry in _sorted_entries(summary, mode):
            if budget == UNLIMITED or int(budget) == 0:
                continue
            adherence = entry["adherence"]
            quantiles = adherence["quantiles"]
            # A trace can have no thinking tokens, and 0 has no position on a logarithmic axis.
            mean = max(adherence["used"], 1.0)
            low = max(quantiles["p10"], 1.0)
            high = max(quantiles["p90"], 1.0)
            points.append((int(budget), mean, (low, high)))
            requested.append(int(budget))
            used += [low, high]
        series.append(_policy_curve(label, styles[label], points))
    x_axis = Axis(
        "budget requested (tokens)",
        log2=True,
        low=_BELOW * min(requested, default=1.0),
        high=_ABOVE * max(requested, default=2.0),
    )
    y_axis = Axis(
        "thinking used (tokens)",
        log2=True,
        low=_BELOW * min(used, default=1.0),
        high=_ABOVE * max(used, default=2.0),
    )
    return Chart(
        f"Requested and used, {mode}",
        series,
        x_axis,
        y_axis,
        diagonal=True,
        note="mean, and 10 % to 90 % of the traces; on the dashed line all of the budget is used",
    )


def swap_charts(swap: Mapping[str, Any]) -> list[list[Chart]]:
    """Builds the charts of a swap table, with a row for each decoding mode.

    A swap table contains results for every pair of a budget that the policy receives as input and a
    number of tokens after which its thinking is truncated. The first chart of a row shows accuracy
    by truncation, with a curve for each input budget. The second chart shows the thinking tokens by
    input budget.

    Args:
      swap: entry `swap` of a set in results.json.
    """
    summaries = [table["pairs"] for table in swap.values()]
    axis = _accuracy_axis(summaries)
    return [
        [_swap_accuracies(mode, table, axis), _swap_lengths(mode, table)]
        for mode, table in swap.items()
    ]


def _swap_accuracies(mode: str, table: Mapping[str, Any], axis: Axis) -> Chart:
    """Builds the chart of accuracy by the number of tokens after which thinking is truncated.

    Each curve belongs to one budget that the policy receives as input. The point at which the input
    equals the truncation is filled.

    Args:
      mode: decoding mode, for the title.
      table: the swap table of the mode.
      axis: axis of the accuracy.
    """
    budgets = table["budgets"]
    count = len(budgets)
    series = []
    for index, budget in enumerate(budgets):
        entries = table["pairs"][str(budget)]
        curve = Series(
            f"input {budget:,}",
            [float(cut) for cut in budgets],
            [_percent(entries[str(cut)]["accuracy"]) for cut in budgets],
            shade(index, count),
            [_percent_ends(entries[str(cut)], "ci95") for cut in budgets],
            marker=marker(index),
            hollow=True,
        )
        matched_point = Series(
            "",
            [float(budget)],
            [_percent(entries[str(budget)]["accuracy"])],
            shade(index, count),
            [_percent_ends(entries[str(budget)], "ci95")],
            line="",
            marker=marker(index),
        )
        series += [curve, matched_point]
    x_axis = Axis(
        "truncation (thinking tokens)",
        log2=True,
        low=budgets[0] * _BELOW,
        high=budgets[-1] * _ABOVE,
        ticks=[(float(cut), budget_name(str(cut))) for cut in budgets],
    )
    gain = table["matched_gain"]
    low, high = gain["ci95"]
    note = (
        f"filled: input = truncation; less the other inputs {100 * gain['difference']:+.1f} points "
        f"[{100 * low:+.1f}, {100 * high:+.1f}], mean over truncations"
    )
    return Chart(f"Accuracy by truncation, {mode}", series, x_axis, axis, note=note)


def _swap_lengths(mode: str, table: Mapping[str, Any]) -> Chart:
    """Builds the chart of mean thinking tokens by input budget. All traces have the same limit."""
    budgets = table["budgets"]
    limit = budgets[-1]
    means = []
    ends = []
    for budget in budgets:
        entry = table["pairs"][str(budget)][str(limit)]
        low, high = entry["thinking_ci95"]
        means.append(entry["mean_thinking_tokens"])
        ends.append((low, high))
    x_axis = Axis(
        "budget as input (tokens)",
        log2=True,
        low=budgets[0] * _BELOW,
        high=limit * _ABOVE,
        ticks=[(float(budget), budget_name(str(budget))) for budget in budgets],
    )
    y_axis = Axis("thinking used (tokens)", low=0.0, high=float(limit))
    curve = Series("", [float(budget) for budget in budgets], means, "s1", ends, marker="o")
    return Chart(
        f"Thinking by budget as input, {mode}",
        [curve],
        x_axis,
        y_axis,
        note=f"mean, with the limit {limit:,} for all inputs; flat: the length does not depend "
        "on the input",
    )


def over_steps(evaluations: Sequence[tuple[int, Summary]]) -> list[Chart]:
    """Builds a chart of accuracy over the steps of a run for each decoding mode.

    Args:
      evaluations: step and summary of each evaluation. The chart has a curve for every budget.
    """
    axis = _accuracy_axis(summary for _, summary in evaluations)
    charts = []
    for mode in _modes(summary for _, summary in evaluations):
        # A dict removes duplicates, because a budget occurs in many evaluations.
        budgets = dict[str, None]()
        for _, summary in evaluations:
            budgets.update(dict.fromkeys(summary.get(mode, ())))
        series = []
        for index, budget in enumerate(by_size(budgets)):
            steps = []
            entries = []
            for step, summary in evaluations:
                if budget in summary.get(mode, {}):
                    steps.append(float(step))
                    entries.append(summary[mode][budget])
            curve = Series(
                f"{budget_name(budget)} tokens",
                steps,
                [_percent(entry["accuracy"]) for entry in entries],
                shade(index, len(budgets)),
                [_percent_ends(entry, "ci95") for entry in entries],
                marker=marker(index),
            )
            series.append(curve)
        charts.append(Chart(f"Accuracy during training, {mode}", series, _STEP, axis))
    return charts


def mean_over_steps(
    runs: Mapping[str, Sequence[tuple[int, Summary]]], styles: StylesByName
) -> list[Chart]:
    """Builds a chart of the mean accuracy over budgets by step, with a curve per run.

    The mean is over the positive budgets that all evaluations of all runs have in common, so that
    the runs can be compared. The note of a chart names these budgets.

    Args:
      runs: maps the label of each run to the step and summary of its evaluations.
      styles: a curve with the style of each run, by label.

    Returns:
      A chart for each decoding mode. If the runs have no positive budget in common, its curves have
      no points.
    """
    summaries = [summary for evaluations in runs.values() for _, summary in evaluations]
    axis = _accuracy_axis(summaries)
    charts = []
    for mode in _modes(summaries):
        budgets = _shared_budgets([summary[mode] for summary in summaries if summary.get(mode)])
        series = []
        for label, evaluations in runs.items():
            steps = []
            means = []
            for step, summary in evaluations:
                if budgets and summary.get(mode):
                    accuracies = [summary[mode][budget]["accuracy"] for budget in budgets]
                    steps.append(float(step))
                    means.append(100 * fmean(accuracies))
            series.append(replace(styles[label], label=label, x=steps, y=means))
        title = f"Accuracy during training, {mode}, mean over budgets"
        note = f"budgets: {', '.join(map(budget_name, budgets))}"
        if not budgets:
            title += " (the runs have no positive budget in common)"
            note = ""
        charts.append(Chart(title, series, _STEP, axis, note=note))
    return charts


def _shared_budgets(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the positive budgets that all evaluations have in common, in increasing order.

    Args:
      evaluations: results by budget of each evaluation.
    """
    shared = set[str]().union(*evaluations).intersection(*evaluations)
    return by_size(shared - {"0", UNLIMITED})
