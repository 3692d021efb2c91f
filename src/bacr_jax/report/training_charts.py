"""Builds charts of training metrics, of the time per phase, and of the value head's calibration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    ordered_style,
    smoothed,
    stepped,
)
from bacr_jax.report.run_data import RunData
from bacr_jax.runs.metrics import NOT_IN_DURATION


def _share_axis(label: str) -> Axis:
    return Axis(label, low=0.0, high=1.0)


_STEP = Axis("step", whole=True)
_NATS = Axis("nats a token", low=0.0)
_TOKENS = Axis("tokens", low=0.0)
# Minimum number of points per bin of the calibration curve, and maximum number of bins.
_LEAST_POINTS = 8
_MOST_BINS = 8
# Title, metric and vertical axis of each chart that compares runs.
_COMPARED = (
    ("Share correct at the budget", "reward/cut", _share_axis("share")),
    ("Reward", "reward/mean", Axis("mean reward")),
    ("Thinking tokens", "rollout/thinking_mean", _TOKENS),
    ("Budget", "budget/mean", _TOKENS),
    ("Completion in training", "rollout/completion_rate", _share_axis("share")),
    ("Entropy", "policy/entropy", _NATS),
    ("Gradient norm", "policy/grad_norm", Axis("norm", low=0.0)),
    ("Loss of the value head", "value/loss", Axis("loss", low=0.0)),
)
# Phases of a training iteration, in their order. Other phases are appended in the order of their
# first record.
_PHASES = ("plan", "rollout", "verify", "learn", "adapt")


class Curves:
    """Metrics over training steps.

    Attributes:
      steps: step of each record, with shape [records].
      names: names of all metrics, in the order of their first record.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]):
        self.steps = np.array([float(record["step"]) for record in records])
        self.names = list(dict.fromkeys(name for record in records for name in record))
        self._records = records

    def numbered(self, prefix: str) -> list[tuple[str, str, Series]]:
        """Returns the metrics whose names consist of `prefix` and a number, ordered by number.

        Returns:
          A (name, number, style) tuple for each metric. The style is a curve without points.
        """
        ends = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]
        numbers = sorted(filter(str.isdigit, ends), key=int)
        return [
            (f"{prefix}{number}", number, ordered_style(index, len(numbers)))
            for index, number in enumerate(numbers)
        ]

    def values(self, name: str) -> np.ndarray:
        """Returns a metric at every step. Missing values are NaN."""
        # metrics.jsonl contains infinities and NaN as text, which float() parses.
        values = np.array([float(record.get(name, math.nan)) for record in self._records])
        return np.where(np.isfinite(values), values, math.nan)


def _series(curves: Curves, name: str, label: str, style: Series | str) -> list[Series]:
    """Returns the curve of a metric, or no curve if the metric was never recorded.

    A curve with many steps is smoothed, and a second, faint curve shows the raw values.

    Args:
      style: a curve without points that has the style, or the name of a colour.
    """
    if name not in curves.names:
        return []
    if isinstance(style, str):
        style = Series("", [], [], style)
    values = curves.values(name)
    steps = curves.steps.tolist()
    if len(values) < SMOOTH_FROM:
        return [replace(style, label=label, x=steps, y=values.tolist())]
    raw = Series("", steps, values.tolist(), style.colour, kind="faint")
    values = smoothed(values)
    smooth = replace(style, label=label, x=steps, y=values.tolist(), has_few_markers=True)
    return [raw, smooth]


def training_charts(records: Sequence[Mapping[str, Any]], prior: str) -> list[Chart]:
    """Builds the charts of a run's training metrics.

    They show accuracy by truncation point, reward, lengths, entropy, curriculum and pass rate. A
    chart is omitted if its metrics were not recorded, if another chart shows the same values, or if
    the method does not use them.

    Args:
      records: lines of metrics.jsonl.
      prior: `budget.prior` of the run.
    """
    curves = Curves(records)
    lengths = _series(curves, "budget/mean", "budget", Series("", [], [], "s0", line="--"))
    lengths += _series(curves, "rollout/thinking_mean", "thinking", "s1")
    lengths += _series(curves, "rollout/thinking_right", "if right", "s2")
    lengths += _series(curves, "rollout/thinking_wrong", "if wrong", "s3")
    entropy = _series(curves, "policy/entropy", "", "s3")
    hard = "group 0 is the easiest"
    charts = [Chart("Share correct by cut", _cut_curves(curves), _STEP, _share_axis("share"))]
    if not _reward_is_share_correct(curves):
        charts.append(Chart("Reward", _reward_curves(curves), _STEP, Axis("mean reward")))
    charts.append(Chart("Budget and thinking", lengths, _STEP, _TOKENS))
    charts.append(Chart("Entropy", entropy, _STEP, _NATS))
    if prior == "curriculum":
        location = _group_curves(curves, "curriculum/mu_")
        title = "Scheduled location of budgets"
        charts.append(Chart(title, location, _STEP, _TOKENS, note=hard))
    pass_rates = _group_curves(curves, "curriculum/pass_rate_")
    charts.append(Chart("Pass rate", pass_rates, _STEP, _share_axis("rate"), note=hard))
    return [chart for chart in charts if chart.drawn]


def _reward_is_share_correct(curves: Curves) -> bool:
    """True if the mean reward equals the fraction of correct answers at every step."""
    cuts = curves.numbered("reward/cut_")
    if len(cuts) != 1:
        return False
    share = curves.values(cuts[0][0])
    return bool(np.allclose(curves.values("reward/mean"), share, atol=1e-6, equal_nan=True))


def _reward_curves(curves: Curves) -> list[Series]:
    """Returns the curves of the mean reward, and of its components if there are several rewards."""
    components = [name for name in curves.names if name.startswith("rewards/")]
    label = "mean" if components else ""
    reward_curves = _series(curves, "reward/mean", label, "s1")
    for index, name in enumerate(components):
        component = name.removeprefix("rewards/")
        style = ordered_style(index, len(components))
        reward_curves += _series(curves, name, component, style)
    return reward_curves


def _cut_curves(curves: Curves) -> list[Series]:
    """Returns one curve per cut: the fraction of correct answers if thinking is truncated there.

    The last cut is at the budget.
    """
    cuts = curves.numbered("reward/cut_")
    cut_curves = list[Series]()
    for index, (name, number, style) in enumerate(cuts, 1):
        label = f"cut {number}"
        if index == len(cuts):
            label += " (the budget)"
        cut_curves += _series(curves, name, label, style)
    return cut_curves


def _group_curves(curves: Curves, prefix: str) -> list[Series]:
    """Returns a curve for each difficulty group, from the metrics named `prefix` and the group."""
    steps = curves.steps.tolist()
    group_curves = []
    for name, number, style in curves.numbered(prefix):
        # Step curves, because the values are constant between their updates.
        x, y = stepped(steps, curves.values(name).tolist())
        curve = replace(style, label=f"group {number}", x=x, y=y, has_few_markers=True)
        group_curves.append(curve)
    return group_curves


def budget_charts(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Builds a chart of the sampled budgets for each difficulty group: median and middle 80 %.

    Args:
      records: lines of metrics.jsonl.
    """
    curves = Curves(records)
    groups = [group for _, group, _ in curves.numbered("budget/median_")]
    upper_ends = [np.nanmax(curves.values(f"budget/p90_{group}")) for group in groups]
    axis = Axis("tokens", low=0.0, high=float(max(upper_ends, default=1.0)))
    charts = []
    for index, group in enumerate(groups, 1):
        low = curves.values(f"budget/p10_{group}")
        middle = curves.values(f"budget/median_{group}")
        high = curves.values(f"budget/p90_{group}")
        # Steps without questions of the group are left out, so that the curve has no gaps.
        has_questions = np.isfinite(middle)
        steps = curves.steps[has_questions].tolist()
        low = low[has_questions]
        middle = middle[has_questions]
        high = high[has_questions]
        if len(steps) >= SMOOTH_FROM:
            low = smoothed(low)
            middle = smoothed(middle)
            high = smoothed(high)
        ends = list(zip(low.tolist(), high.tolist()))
        band = Series("", steps, middle.tolist(), colour(index), ends, kind="band")
        title = f"Sampled budgets, difficulty group {group}"
        charts.append(Chart(title, [band], _STEP, axis, note="median and the middle 80 %"))
    return charts


def _distinct(styles: Mapping[str, Series]) -> dict[str, Series]:
    """Returns the styles of runs without markers and dashes if their colours differ.

    Args:
      styles: a curve with the style of each run, by label.
    """
    colours = {style.colour for style in styles.values()}
    if len(colours) < len(styles):
        return dict(styles)
    return {label: Series("", [], [], style.colour) for label, style in styles.items()}


def compared_charts(runs: Sequence[RunData], styles: Mapping[str, Series]) -> list[Chart]:
    """Builds a chart with a curve per run for each metric that any run recorded.

    Args:
      styles: a curve with the style of each run, by label.
    """
    curves_of_runs = {run.label: Curves(run.metrics) for run in runs}
    styles = _distinct(styles)
    charts = []
    for title, metric, axis in _COMPARED:
        series = []
        for label, curves in curves_of_runs.items():
            name = metric
            if metric == "reward/cut":
                # Runs can differ in their number of cuts. The last cut is at the budget.
                cuts = curves.numbered("reward/cut_")
                name = cuts[-1][0] if cuts else metric
            series += _series(curves, name, label, styles[label])
        if series:
            charts.append(Chart(title, series, _STEP, axis))
    return charts


def machinery_charts(
    runs: Sequence[RunData],
    traces: Mapping[str, Sequence[Any]],
    styles: Mapping[str, Series],
) -> list[Chart | Bars]:
    """Builds charts of sampler-learner mismatch, value calibration, time per phase and throughput.

    Args:
      traces: logged traces of each run, by the run's label.
      styles: a curve with the style of each run, by label.
    """
    mismatch = list[Series]()
    pace = list[Series]()
    styles_of_curves = _distinct(styles)
    for run in runs:
        label = run.label if len(runs) > 1 else ""
        curves = Curves(run.metrics)
        style = styles_of_curves[run.label]
        mismatch += _series(curves, "mismatch/k3", label, style)
        pace += _series(curves, "time/tokens_per_s", label, style)
    mismatch_chart = Chart(
        "Sampler and learner",
        mismatch,
        _STEP,
        Axis("KL (nats a token)", low=0.0),
        note="how far the log-probabilities of the sampler lie from the learner's",
    )
    charts: list[Chart | Bars] = [mismatch_chart]
    calibration_chart = calibration(traces, styles)
    # The chart has no curves if no policy has a value head.
    if calibration_chart.drawn:
        charts.append(calibration_chart)
    charts.append(_time_by_phase(runs))
    charts.append(Chart("Pace", pace, _STEP, Axis("generated tokens a second", low=0.0)))
    return charts


def _time_by_phase(runs: Sequence[RunData]) -> Bars:
    """Builds stacked bars of the median time of each phase, with a row per run.

    A run that samples while the learner trains has a second row with the time of this sampling.
    """
    rows = []
    for run in runs:
        names = dict.fromkeys(name for record in run.metrics for name in record)
        seconds = {
            name.removeprefix("time/"): _median(run, name)
            for name in names
            if name.startswith("time/") and name not in NOT_IN_DURATION
        }
        ordered_phases = [phase for phase in _PHASES if phase in seconds]
        ordered_phases += [phase for phase in seconds if phase not in _PHASES]
        if seconds:
            rows.append((run.label, [(phase, seconds[phase]) for phase in ordered_phases]))
        if "time/overlap" in names:
            overlap = _median(run, "time/overlap")
            rows.append((f"{run.label}, meanwhile", [("rollout", overlap)]))
    return Bars(
        "Time of a step by phase",
        rows,
        "s",
        note="medians over the steps, so that what is compiled in the first does not count",
    )


def _median(run: RunData, name: str) -> float:
    return median(float(record[name]) for record in run.metrics if name in record)


def value_points(traces: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Returns the (predicted value, reward) pairs of all cuts for which the value head was used."""
    points = []
    for trace in traces:
        values = trace.get("values")
        rewards = trace.get("rewards")
        if not isinstance(values, list) or not isinstance(rewards, list):
            continue
        for value_field, reward_field in zip(values, rewards):
            value = float(value_field)
            reward = float(reward_field)
            if math.isfinite(value) and math.isfinite(reward):
                points.append((value, reward))
    return points


def calibrated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Divides (value, reward) points into bins with equal numbers of points, in the order of value.

    Returns:
      A (mean value, mean reward, standard error of the mean reward) tuple for each bin. Empty if
      there are too few points for a bin.
    """
    num_bins = min(len(points) // _LEAST_POINTS, _MOST_BINS)
    if not num_bins:
        return []
    bins = []
    for part in np.array_split(np.array(sorted(points)), num_bins):
        rewards = part[:, 1]
        mean_value = float(part[:, 0].mean())
        mean_reward = float(rewards.mean())
        error = float(rewards.std(ddof=1) / math.sqrt(len(part)))
        bins.append((mean_value, mean_reward, error))
    return bins


def calibration(traces: Mapping[str, Sequence[Any]], styles: Mapping[str, Series]) -> Chart:
    """Builds a calibration chart of the value head: mean reward over predicted value.

    Only the later half of the traces is used.

    Args:
      traces: traces of each run, by the run's label.
      styles: a curve with the style of each run, by label.
    """
    series = list[Series]()
    styles = _distinct(styles)
    for label, rows in traces.items():
        # Early predictions are left out, because the value head was still untrained.
        later_half = rows[len(rows) // 2 :]
        bins = calibrated(value_points(later_half))
        curve = replace(
            styles[label],
            label=label if len(traces) > 1 else "",
            x=[value for value, _, _ in bins],
            y=[reward for _, reward, _ in bins],
            ends=[(reward - 1.96 * error, reward + 1.96 * error) for _, reward, error in bins],
            marker=styles[label].marker or "o",
        )
        series.append(curve)
    return Chart(
        "Value calibration",
        series,
        Axis("value predicted"),
        Axis("mean reward"),
        diagonal=True,
        note="cuts of the logged traces of the later half, in bins of equally many, with 95 % "
        "intervals; on the dashed line the head is right on average",
    )
