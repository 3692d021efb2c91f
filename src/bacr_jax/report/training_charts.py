"""Charts of metrics over the steps of one run or of several, time by phase, value calibration."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from bacr_jax.report.charts import (
    Axis,
    Series,
    chart,
    colour,
    empty,
    shade,
    smoothed,
    stacked_bars,
)
from bacr_jax.report.figures import SMOOTH_FROM, Curves
from bacr_jax.report.run_data import RunData

_STEP = Axis("step")


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
    ("Entropy", "policy/entropy", Axis("nats a token", low=0.0)),
    ("Gradient norm", "policy/grad_norm", Axis("norm", low=0.0)),
    ("Loss of the value head", "value/loss", Axis("loss", low=0.0)),
)


def _series(
    curves: Curves, name: str, label: str, style: str, *, dashed: bool = False
) -> list[Series]:
    """One metric, over its own noise where it is long; nothing if it was never recorded."""
    if name not in curves.names:
        return []
    values, steps = curves.values(name), [float(step) for step in curves.steps]
    if len(values) >= SMOOTH_FROM:
        raw = Series("", steps, values.tolist(), style, faint=True)
        return [raw, Series(label, steps, smoothed(values).tolist(), style, dashed=dashed)]
    return [Series(label, steps, values.tolist(), style, dashed=dashed)]


def _schedule(curves: Curves, name: str, label: str, style: str) -> list[Series]:
    """A metric that stays where it is between its updates."""
    steps, values = curves.steps.astype(float), curves.values(name)
    return [
        Series(label, np.repeat(steps, 2)[1:].tolist(), np.repeat(values, 2)[:-1].tolist(), style)
    ]


def _numbered(curves: Curves, prefix: str) -> list[tuple[str, str, str]]:
    """Metric, number and class of each of a numbered family."""
    names = curves.numbered(prefix)
    return [
        (name, name[len(prefix) :], shade(place, len(names))) for place, name in enumerate(names)
    ]


def training_charts(run: RunData) -> list[str]:
    """Reward, accuracy by cut, lengths, entropy, schedule and budgets of one run."""
    curves = Curves(run.metrics)
    cuts = _numbered(curves, "reward/cut_")
    last = cuts[-1][1] if cuts else ""
    by_cut = [
        one
        for name, number, style in cuts
        for one in _series(
            curves, name, f"cut {number}{' (the budget)' if number == last else ''}", style
        )
    ]
    groups = lambda prefix: [
        one
        for name, number, style in _numbered(curves, prefix)
        for one in _schedule(curves, name, f"group {number}", style)
    ]
    lengths = _series(curves, "budget/mean", "budget", "s0", dashed=True)
    lengths += _series(curves, "rollout/thinking_mean", "thinking", "s1")
    tokens = Axis("tokens", low=0.0)
    hard = "group 0 is the easiest"
    return [
        chart("Reward", _series(curves, "reward/mean", "", "s1"), _STEP, Axis("mean reward")),
        chart("Share correct by cut", by_cut, _STEP, _of_shares("share")),
        chart("Budget and thinking", lengths, _STEP, tokens),
        chart(
            "Entropy",
            _series(curves, "policy/entropy", "", "s3"),
            _STEP,
            Axis("nats a token", low=0.0),
        ),
        chart("Scheduled mean budget", groups("curriculum/mu_"), _STEP, tokens, note=hard),
        chart("Pass rate", groups("curriculum/pass_rate_"), _STEP, _of_shares("rate"), note=hard),
        *_budgets(curves),
    ]


def _budgets(curves: Curves) -> list[str]:
    """Sampled budgets of each difficulty group: median and the middle 80 %."""
    groups = [name.rpartition("_")[2] for name in curves.numbered("budget/median_")]
    quantiles = {
        group: [curves.values(f"budget/{q}_{group}") for q in ("p10", "median", "p90")]
        for group in groups
    }
    top = max((np.nanmax(values[2]) for values in quantiles.values()), default=1.0)
    made = []
    for place, (group, values) in enumerate(quantiles.items()):
        # A step without questions of the group is no gap in its distribution.
        there = np.isfinite(values[1])
        steps = [float(step) for step in curves.steps[there]]
        low, middle, high = (one[there] for one in values)
        if len(steps) >= SMOOTH_FROM:
            low, middle, high = smoothed(low), smoothed(middle), smoothed(high)
        ends = list(zip(low.tolist(), high.tolist()))
        series = [Series("", steps, middle.tolist(), colour(place + 1), ends, band=True)]
        axis = Axis("tokens", low=0.0, high=float(top))
        title = f"Sampled budgets, difficulty group {group}"
        made.append(chart(title, series, _STEP, axis, note="median and the middle 80 %"))
    return made


def compared_charts(runs: Sequence[RunData]) -> list[str]:
    """The same metric of several runs, a chart per metric that one of them has."""
    curves = {run.label: Curves(run.metrics) for run in runs}
    made = []
    for title, metric, axis in _COMPARED:
        series = []
        for place, (label, of_run) in enumerate(curves.items()):
            name = metric
            if metric == "reward/cut":
                name = (of_run.numbered("reward/cut_") or [metric])[-1]
            series += _series(of_run, name, label, colour(place + 1))
        if series:
            made.append(chart(title, series, _STEP, axis))
    return made


def machinery_charts(runs: Sequence[RunData], traces: Mapping[str, Sequence[Any]]) -> list[str]:
    """Sampler against learner, values against rewards, and where the time goes.

    Args:
      runs: one or several.
      traces: of each run by its label, for the calibration of its value head.
    """
    mismatch, pace = list[Series](), list[Series]()
    for place, run in enumerate(runs):
        if run.metrics:
            label = run.label if len(runs) > 1 else ""
            curves = Curves(run.metrics)
            mismatch += _series(curves, "mismatch/k3", label, colour(place + 1))
            pace += _series(curves, "time/tokens_per_s", label, colour(place + 1))
    return [
        chart(
            "Sampler and learner",
            mismatch,
            _STEP,
            Axis("KL (nats a token)", low=0.0),
            note="how far the log-probabilities of the sampler lie from the learner's; "
            "above .05 a run warns",
        ),
        calibration(traces),
        _time_by_phase(runs),
        chart("Pace", pace, _STEP, Axis("generated tokens a second", low=0.0)),
    ]


def _time_by_phase(runs: Sequence[RunData]) -> str:
    rows = []
    for run in runs:
        names = dict.fromkeys(n for r in run.metrics for n in r if n.startswith("time/"))
        seconds = {
            name.removeprefix("time/"): median(
                float(record[name]) for record in run.metrics if name in record
            )
            for name in names
            if name != "time/tokens_per_s"
        }
        # In the order of an iteration.
        order = ("plan", "rollout", "verify", "learn", "adapt")
        parts = sorted(seconds.items(), key=lambda part: (*order, part[0]).index(part[0]))
        if parts:
            rows.append((run.label, parts))
    note = "medians over the steps, so that what is compiled in the first does not count"
    return stacked_bars("Time of a step by phase", rows, "s", note=note)


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


def calibration(traces: Mapping[str, Sequence[Any]]) -> str:
    """Rewards against the values that were predicted for them, from the later half of the traces.

    Args:
      traces: of each run by its label, in the order of their steps.
    """
    title, series = "Value calibration", list[Series]()
    for place, (label, rows) in enumerate(traces.items()):
        # A head that has just begun says little of the one that the run ended with.
        found = calibrated(value_points(rows[len(rows) // 2 :]))
        series.append(
            Series(
                label if len(traces) > 1 else "",
                [value for value, _, _ in found],
                [reward for _, reward, _ in found],
                colour(place + 1),
                [(reward - 1.96 * error, reward + 1.96 * error) for _, reward, error in found],
                points=True,
            )
        )
    if not any(one.x for one in series):
        return empty(title, "no value head, or too few traces (output.rollouts)")
    return chart(
        title,
        series,
        Axis("value predicted"),
        Axis("mean reward"),
        diagonal=True,
        note="cuts of the logged traces of the later half, in bins of equally many, with 95 % "
        "intervals; on the dashed line the head is right on average",
    )
