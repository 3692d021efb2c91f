"""Charts of metrics over the steps of one run or of several, time by phase, value calibration."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from bacr_jax.report.charts import (
    SMOOTH_FROM,
    Axis,
    Bars,
    Chart,
    Series,
    colour,
    shade,
    smoothed,
    stepped,
)
from bacr_jax.report.run_data import RunData

_STEP, _NATS = Axis("step", whole=True), Axis("nats a token", low=0.0)


def _of_shares(label: str) -> Axis:
    return Axis(label, low=0.0, high=1.0)


# Points of each place of a calibration curve, and most places.
_LEAST_POINTS, _MOST_BINS = 8, 8
# What the runs of a comparison are compared in: title, metric, axis.
_COMPARED = (
    ("Reward", "reward/mean", Axis("mean reward")),
    ("Share correct at the budget", "reward/cut", _of_shares("share")),
    ("Thinking tokens", "rollout/thinking_mean", Axis("tokens", low=0.0)),
    ("Budget", "budget/mean", Axis("tokens", low=0.0)),
    ("Completion in training", "rollout/completion_rate", _of_shares("share")),
    ("Entropy", "policy/entropy", _NATS),
    ("Gradient norm", "policy/grad_norm", Axis("norm", low=0.0)),
    ("Loss of the value head", "value/loss", Axis("loss", low=0.0)),
)


class Curves:
    """Metrics over steps, ready to be drawn."""

    def __init__(self, records: Sequence[Mapping[str, Any]]):
        self.steps = np.array([float(record["step"]) for record in records])
        self.names = list(dict.fromkeys(name for record in records for name in record))
        self._records = records

    def numbered(self, prefix: str) -> list[tuple[str, str, float]]:
        """Name, number and colour of each that is the prefix and a number; numbers rise."""
        ends = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]
        numbers = sorted(filter(str.isdigit, ends), key=int)
        shades = [shade(place, len(numbers)) for place in range(len(numbers))]
        return [(f"{prefix}{number}", number, of) for number, of in zip(numbers, shades)]

    def values(self, name: str) -> np.ndarray:
        """A metric at every step, NaN where it is not a number."""
        # Infinities and NaN are text in the file, and float reads them.
        values = np.array([float(record.get(name, math.nan)) for record in self._records])
        return np.where(np.isfinite(values), values, math.nan)


def _series(
    curves: Curves, name: str, label: str, shown: str | float, *, line: str = "-"
) -> list[Series]:
    """One metric, over its own noise where it is long; nothing if it was never recorded."""
    if name not in curves.names:
        return []
    values, steps = curves.values(name), curves.steps.tolist()
    if len(values) >= SMOOTH_FROM:
        raw = Series("", steps, values.tolist(), shown, kind="faint")
        return [raw, Series(label, steps, smoothed(values).tolist(), shown, line=line)]
    return [Series(label, steps, values.tolist(), shown, line=line)]


def training_charts(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Reward, accuracy by cut, lengths, entropy, and the schedule, from lines of metrics.jsonl."""
    curves = Curves(records)
    cuts, by_cut = curves.numbered("reward/cut_"), list[Series]()
    for name, number, shown in cuts:
        budget = " (the budget)" if name == cuts[-1][0] else ""
        by_cut += _series(curves, name, f"cut {number}{budget}", shown)

    def groups(prefix: str) -> list[Series]:
        series = []
        for name, number, group_colour in curves.numbered(prefix):
            # Step curves, because the values are constant between their updates.
            x, y = stepped(curves.steps.tolist(), curves.values(name).tolist())
            series.append(Series(f"group {number}", x, y, group_colour))
        return series

    lengths = _series(curves, "budget/mean", "budget", "s0", line="--")
    lengths += _series(curves, "rollout/thinking_mean", "thinking", "s1")
    tokens = Axis("tokens", low=0.0)
    mixed = [name for name in curves.names if name.startswith("rewards/")]
    reward = _series(curves, "reward/mean", "mean" if mixed else "", "s1")
    for place, name in enumerate(mixed):
        reward += _series(curves, name, name.partition("/")[2], shade(place, len(mixed)))
    hard = "group 0 is the easiest"
    drawn = f"{hard}; budgets are drawn from it where budget.prior is curriculum"
    return [
        Chart("Reward", reward, _STEP, Axis("mean reward")),
        Chart("Share correct by cut", by_cut, _STEP, _of_shares("share")),
        Chart("Budget and thinking", lengths, _STEP, tokens),
        Chart("Entropy", _series(curves, "policy/entropy", "", "s3"), _STEP, _NATS),
        Chart("Scheduled location of budgets", groups("curriculum/mu_"), _STEP, tokens, note=drawn),
        Chart("Pass rate", groups("curriculum/pass_rate_"), _STEP, _of_shares("rate"), note=hard),
    ]


def budget_charts(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Sampled budgets of each difficulty group: median and the middle 80 %."""
    curves = Curves(records)
    groups = [group for _, group, _ in curves.numbered("budget/median_")]
    quantiles = {
        group: [curves.values(f"budget/{q}_{group}") for q in ("p10", "median", "p90")]
        for group in groups
    }
    top = max((np.nanmax(values[2]) for values in quantiles.values()), default=1.0)
    charts = []
    for place, (group, values) in enumerate(quantiles.items()):
        # A step without questions of the group is no gap in its distribution.
        there = np.isfinite(values[1])
        steps = curves.steps[there].tolist()
        low, middle, high = (one[there] for one in values)
        if len(steps) >= SMOOTH_FROM:
            low, middle, high = smoothed(low), smoothed(middle), smoothed(high)
        ends = list(zip(low.tolist(), high.tolist()))
        series = [Series("", steps, middle.tolist(), colour(place + 1), ends, kind="band")]
        axis = Axis("tokens", low=0.0, high=float(top))
        title = f"Sampled budgets, difficulty group {group}"
        charts.append(Chart(title, series, _STEP, axis, note="median and the middle 80 %"))
    return charts


def compared_charts(runs: Sequence[RunData]) -> list[Chart]:
    """The same metric of several runs, a chart per metric that one of them has."""
    curves = {run.label: Curves(run.metrics) for run in runs}
    charts = []
    for title, metric, axis in _COMPARED:
        series = []
        for place, (label, of_run) in enumerate(curves.items()):
            name = metric
            if metric == "reward/cut" and (cuts := of_run.numbered("reward/cut_")):
                name = cuts[-1][0]
            series += _series(of_run, name, label, colour(place + 1))
        if series:
            charts.append(Chart(title, series, _STEP, axis))
    return charts


def machinery_charts(
    runs: Sequence[RunData], traces: Mapping[str, Sequence[Any]]
) -> list[Chart | Bars]:
    """Sampler against learner, values against rewards, and where the time goes."""
    mismatch = list[Series]()
    pace = list[Series]()
    for place, run in enumerate(runs):
        label = run.label if len(runs) > 1 else ""
        curves = Curves(run.metrics)
        mismatch += _series(curves, "mismatch/k3", label, colour(place + 1))
        pace += _series(curves, "time/tokens_per_s", label, colour(place + 1))
    calibrated_values = calibration(traces)
    return [
        Chart(
            "Sampler and learner",
            mismatch,
            _STEP,
            Axis("KL (nats a token)", low=0.0),
            note="how far the log-probabilities of the sampler lie from the learner's",
        ),
        # A policy without a value head has none.
        *([calibrated_values] if calibrated_values.drawn else []),
        _time_by_phase(runs),
        Chart("Pace", pace, _STEP, Axis("generated tokens a second", low=0.0)),
    ]


def _time_by_phase(runs: Sequence[RunData]) -> Bars:
    rows = []
    for run in runs:
        names = dict.fromkeys(n for r in run.metrics for n in r if n.startswith("time/"))
        seconds = {
            name.removeprefix("time/"): median(
                float(record[name]) for record in run.metrics if name in record
            )
            for name in names
            if name not in ("time/tokens_per_s", "time/overlap")
        }
        # In the order of an iteration.
        order = ("plan", "rollout", "verify", "learn", "adapt")
        parts = sorted(seconds.items(), key=lambda part: (*order, part[0]).index(part[0]))
        if parts:
            rows.append((run.label, parts))
        if beside := [r["time/overlap"] for r in run.metrics if "time/overlap" in r]:
            rows.append((f"{run.label}, meanwhile", [("rollout", median(map(float, beside)))]))
    note = "medians over the steps, so that what is compiled in the first does not count"
    return Bars("Time of a step by phase", rows, "s", note=note)


def value_points(traces: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(value, reward) of every cut of the traces, where a value head had predicted it."""
    found = []
    for trace in traces:
        values, rewards = trace.get("values"), trace.get("rewards")
        if isinstance(values, list) and isinstance(rewards, list):
            pairs = [(float(v), float(r)) for v, r in zip(values, rewards)]
            found += [pair for pair in pairs if all(map(math.isfinite, pair))]
    return found


def calibrated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Mean value, mean reward and its standard error, in bins of equally many points."""
    bins = min(len(points) // _LEAST_POINTS, _MOST_BINS)
    if not bins:
        return []
    ordered = np.array(sorted(points))
    return [
        (
            float(part[:, 0].mean()),
            float(part[:, 1].mean()),
            float(part[:, 1].std(ddof=1) / math.sqrt(len(part))),
        )
        for part in np.array_split(ordered, bins)
    ]


def calibration(traces: Mapping[str, Sequence[Any]]) -> Chart:
    """Rewards against the values predicted for them, from the later half of the traces."""
    series = list[Series]()
    for place, (label, rows) in enumerate(traces.items()):
        # A head that has just begun says little of the one that the run ended with.
        found = calibrated(value_points(rows[len(rows) // 2 :]))
        values, rewards = [value for value, _, _ in found], [reward for _, reward, _ in found]
        ends = [(reward - 1.96 * error, reward + 1.96 * error) for _, reward, error in found]
        name = label if len(traces) > 1 else ""
        series.append(Series(name, values, rewards, colour(place + 1), ends, marker="o"))
    return Chart(
        "Value calibration",
        series,
        Axis("value predicted"),
        Axis("mean reward"),
        diagonal=True,
        note="cuts of the logged traces of the later half, in bins of equally many, with 95 % "
        "intervals; on the dashed line the head is right on average",
    )
