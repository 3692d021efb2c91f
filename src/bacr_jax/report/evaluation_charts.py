"""Charts of evaluations: accuracy and completion by budget, tokens requested and used."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report.charts import Axis, Chart, Series, colour, marker, shade
from bacr_jax.report.table import budget_name, by_size

_PERCENT = Axis("accuracy (%)", low=0.0, high=100.0)
_STEP = Axis("step", whole=True)
# An axis of accuracies ends at a multiple of this.
_PERCENT_STEP = 20
# More budgets than this, and their names no longer stand side by side.
_MOST_TICKS = 8
# Place, value, and the ends of its interval.
_Point = tuple[float, float, tuple[float, float]]


def places(budgets: Iterable[str]) -> dict[str, float]:
    """Returns x of each budget on a log2 axis: 0 below the smallest, none above the largest."""
    numbers = [int(budget) for budget in budgets if budget != UNLIMITED and int(budget)]
    ends = {"0": min(numbers, default=2) / 2, UNLIMITED: 2.0 * max(numbers, default=1)}
    return {budget: ends.get(budget) or float(budget) for budget in budgets}


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100.0 * value


def _ends(entry: Mapping[str, Any], name: str) -> tuple[float, float]:
    low, high = entry.get(name) or (None, None)
    return _percent(low), _percent(high)


def _accuracy_axis(summaries: Iterable[Summary]) -> Axis:
    """From 0 to a little above the best: the same for all charts of a set, and none is flat."""
    modes = (budgets for summary in summaries for budgets in summary.values())
    ends = [_ends(entry, "ci95")[1] for budgets in modes for entry in budgets.values()]
    top = _PERCENT_STEP * math.ceil(max(ends, default=100.0) / _PERCENT_STEP - 1e-9)
    return Axis("accuracy (%)", low=0.0, high=float(min(max(top, _PERCENT_STEP), 100)))


def _modes(summaries: Iterable[Summary]) -> list[str]:
    return list(dict.fromkeys(mode for summary in summaries for mode in summary))


def accuracy_charts(policies: Mapping[str, Summary], start: int) -> list[Chart]:
    """Accuracy by budget and by the tokens used, for each decoding.

    Args:
      policies: summaries by name, the one to compare with first.
      start: colour of the first: 0, grey, where the others are compared with it.
    """
    axis, modes = _accuracy_axis(policies.values()), _modes(policies.values())
    charts = [
        _by_budget(policies, mode, f"Accuracy by budget, {mode}", "accuracy", "ci95", axis, start)
        for mode in modes
    ]
    return charts + [_by_tokens(policies, mode, axis, start) for mode in modes]


def completion_charts(policies: Mapping[str, Summary], start: int) -> list[Chart]:
    """Completion, accuracy given completion, requested against used tokens, for each decoding."""
    charts = []
    for mode in _modes(policies.values()):
        share = Axis("traces (%)", low=0.0, high=100.0)
        charts += [
            _by_budget(policies, mode, f"Completion, {mode}", "completion_rate", "completion_ci95",
                       share, start, note="share of traces whose thinking ended by itself"),
            _by_budget(policies, mode, f"Accuracy given completion, {mode}",
                       "accuracy_if_complete", "if_complete_ci95", _PERCENT, start,
                       note="among traces whose thinking ended by itself"),
            _requested_and_used(policies, mode, start),
        ]  # fmt: skip
    return charts


def _curve(label: str, place: int, points: Sequence[_Point]) -> Series:
    """Returns the curve of a policy by its index; the reference, index 0, is dashed."""
    x, y = [place for place, _, _ in points], [value for _, value, _ in points]
    ends = [ends for _, _, ends in points]
    line = "--" if place == 0 else "-"
    return Series(label, x, y, colour(place), ends, line=line, marker=marker(place))


def _apart(place: int, count: int) -> float:
    """A factor, since the axis is logarithmic: policies stand 2.5 % of a doubling apart."""
    return float(2 ** (0.025 * (place - count / 2)))


def _by_budget(
    policies: Mapping[str, Summary],
    mode: str,
    title: str,
    name: str,
    interval: str,
    axis: Axis,
    start: int,
    *,
    note: str = "",
) -> Chart:
    asked = [set(summary[mode]) for summary in policies.values() if mode in summary]
    where = places(set().union(*asked))
    series = []
    for place, (label, summary) in enumerate(policies.items(), start):
        found, apart = summary.get(mode, {}), _apart(place, len(policies))
        points = [
            (where[budget] * apart, _percent(found[budget][name]), _ends(found[budget], interval))
            for budget in by_size(found)
        ]
        series.append(_curve(label, place, points))
    ticks = by_size(where)
    ticks = ticks[:: math.ceil(len(ticks) / _MOST_TICKS)]
    across = Axis(
        "thinking budget (tokens)" + "; policies side by side" * (len(policies) > 1),
        log2=True,
        low=min(where.values()) * 0.93,
        high=max(where.values()) * 1.07,
        ticks=[(where[budget], budget_name(budget)) for budget in ticks],
    )
    return Chart(title, series, across, axis, note=note)


def _by_tokens(policies: Mapping[str, Summary], mode: str, axis: Axis, start: int) -> Chart:
    """Accuracy against the tokens that were really spent, a point per budget."""
    name, series = "mean_total_tokens", list[Series]()
    for place, (label, summary) in enumerate(policies.items(), start):
        found = summary.get(mode, {})
        rows = [found[budget] for budget in by_size(found) if found[budget][name] > 0]
        rows = sorted(rows, key=lambda entry: entry[name])
        points = [(row[name], _percent(row["accuracy"]), _ends(row, "ci95")) for row in rows]
        series.append(_curve(label, place, points))
    note = "a point per budget; thinking, forced and answer tokens"
    across = Axis("mean tokens used, in all", log2=True)
    return Chart(f"Accuracy by tokens used, {mode}", series, across, axis, note=note)


def _requested_and_used(policies: Mapping[str, Summary], mode: str, start: int) -> Chart:
    series, seen, reached = [], list[float](), list[float]()
    for place, (label, summary) in enumerate(policies.items(), start):
        found, points = summary.get(mode, {}), list[_Point]()
        for budget in (b for b in by_size(found) if b != UNLIMITED and int(b)):
            used = found[budget]["adherence"]
            tokens = (used["used"], used["quantiles"]["p10"], used["quantiles"]["p90"])
            # A trace without a token of thinking has no place on a scale of doublings.
            mean, low, high = (max(number, 1.0) for number in tokens)
            points.append((int(budget) * _apart(place, len(policies)), mean, (low, high)))
            seen.append(int(budget))
            reached += [low, high]
        series.append(_curve(label, place, points))
    low, high = min(seen, default=1.0), max(seen, default=2.0)
    # With room beyond the ends, which would seem to go on otherwise.
    least, most = 0.93 * min(reached, default=1.0), 1.07 * max(reached, default=2.0)
    thinking = Axis("thinking used (tokens)", log2=True, low=least, high=most)
    return Chart(
        f"Requested and used, {mode}",
        series,
        Axis("budget requested (tokens)", log2=True, low=0.93 * low, high=1.07 * high),
        thinking,
        diagonal=True,
        note="mean, and 10 % to 90 % of the traces; on the dashed line all of the budget is used",
    )


def over_steps(evaluations: Sequence[tuple[int, Summary]]) -> list[Chart]:
    """Accuracy at each budget over the steps of one run, for each decoding."""
    charts = []
    for mode in _modes(summary for _, summary in evaluations):
        budgets = by_size({b for _, s in evaluations for b in s.get(mode, {})})
        series = []
        for place, budget in enumerate(budgets):
            rows = [(step, s[mode][budget]) for step, s in evaluations if budget in s.get(mode, {})]
            x, y = [float(step) for step, _ in rows], [_percent(e["accuracy"]) for _, e in rows]
            ends, shown = [_ends(entry, "ci95") for _, entry in rows], shade(place, len(budgets))
            label = f"{budget_name(budget)} tokens"
            series.append(Series(label, x, y, shown, ends, marker=marker(place)))
        axis = _accuracy_axis(summary for _, summary in evaluations)
        charts.append(Chart(f"Accuracy during training, {mode}", series, _STEP, axis))
    return charts


def mean_over_steps(runs: Mapping[str, Sequence[tuple[int, Summary]]]) -> list[Chart]:
    """Accuracy, averaged over the budgets, of several runs over their steps."""
    summaries = [summary for rows in runs.values() for _, summary in rows]
    charts = []
    for mode in _modes(summaries):
        series = []
        for place, (label, rows) in enumerate(runs.items(), 1):
            there = [(step, summary[mode]) for step, summary in rows if summary.get(mode)]
            means = [sum(e["accuracy"] for e in of.values()) / len(of) for _, of in there]
            x, y = [float(step) for step, _ in there], [100 * mean for mean in means]
            series.append(Series(label, x, y, colour(place), marker=marker(place)))
        title = f"Accuracy during training, {mode}, mean over budgets"
        charts.append(Chart(title, series, _STEP, _accuracy_axis(summaries)))
    return charts
