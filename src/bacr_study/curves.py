"""Averages training curves over seeds.

The curves are rewards, held-out accuracies and curricula. This module also measures the time that
training takes to reach an accuracy.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax.evaluation.free_curve import first_crossing
from bacr_study.cells import OF_GROUP, Cell, Grid
from bacr_study.spec import Task, Variant
from bacr_study.statistics import mean_interval

AXES = ("step", "tokens", "seconds")
# Number of points per curve: enough to show its shape, few enough to keep results.json small.
_BINS = 30
_SCHEDULE_POINTS = 40
# Accuracy levels for which the time is measured, as fractions of the reference arm's gain.
SHARES = (0.5, 0.9)

# The x and y coordinates of a curve's points.
Points = tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]


def series(grid: Grid, task: Task, variant: Variant, axis: str, key: str) -> dict[int, Points]:
    """Returns the training curve of one metric for each seed. Untrained runs are skipped.

    Args:
      grid: the stored results of the study's runs.
      task: the task.
      variant: an arm (a method with its settings), at one of its swept values.
      axis: the field used as x, one of `AXES`.
      key: the field of the records in `Cell.curve` used as y. Steps where it is missing are
        skipped.

    Returns:
      The x and y coordinates of the curve, by seed.
    """
    by_seed = {}
    for cell in grid.of(task.id, variant):
        points = [
            (record[axis], record[key]) for record in cell.curve if record.get(key) is not None
        ]
        if not points or cell.steps == 0:
            continue
        x, y = np.array(points, np.float64).T
        by_seed[cell.seed] = (x, y)
    return by_seed


def _binned(points: Points, edges: Float[np.ndarray, "N"]) -> Float[np.ndarray, "K"]:
    """Returns the mean y of a curve's points in each of K bins along x, with NaN for empty bins.

    Args:
      points: the x and y coordinates of the curve.
      edges: the N = K + 1 bin edges, in increasing order. Points outside of them are ignored.
    """
    x, y = points
    bins = len(edges) - 1
    indices = np.searchsorted(edges, x, side="left") - 1
    indices = np.clip(indices, 0, bins - 1)
    inside = (x >= edges[0]) & (x <= edges[-1])
    count = np.bincount(indices[inside], minlength=bins)
    total = np.bincount(indices[inside], y[inside], minlength=bins)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _band(x: Iterable[float], by_seed: Sequence[Any]) -> dict[str, list[Any]]:
    """Computes the mean and its 95 % interval over seeds at each x.

    Args:
      x: the x coordinates.
      by_seed: the y values of each seed, one per x; NaN or None if missing.

    Returns:
      A dictionary with the lists `x`, `mean`, `low` and `high`, restricted to the x at which all
      seeds have a value.
    """
    rows: Float[np.ndarray, "seeds n"] = np.array(by_seed, np.float64)
    complete = np.isfinite(rows).all(0)
    estimates = [mean_interval(column.tolist()) for column in rows.T[complete]]
    return {
        "x": [float(value) for value, keep in zip(x, complete) if keep],
        "mean": [estimate.mean for estimate in estimates],
        "low": [estimate.low for estimate in estimates],
        "high": [estimate.high for estimate in estimates],
    }


def _rewards(runs: Sequence[Points]) -> dict[str, list[Any]]:
    """Averages the rewards of several seeds in equal bins along the x axis.

    The last bin ends where the shortest run ends, because the mean would only cover some of the
    seeds beyond this point. Returns the fields described in `_band`.
    """
    most_points = max(len(x) for x, _ in runs)
    end = min(x[-1] for x, _ in runs)
    bins = min(_BINS, most_points)
    edges = np.linspace(0.0, end, bins + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    return _band(middles, [_binned(run, edges) for run in runs])


def _accuracies(runs: Sequence[Points]) -> dict[str, list[Any]] | None:
    """Averages the held-out accuracies of several seeds over the range of x that all runs cover.

    Returns the fields described in `_band`, or None if the runs have no common range.
    """
    start = max(x[0] for x, _ in runs)
    stop = min(x[-1] for x, _ in runs)
    if stop < start:
        return None
    # All runs are evaluated at the same steps, but at different numbers of tokens and seconds.
    first_x, _ = runs[0]
    if all(np.array_equal(x, first_x) for x, _ in runs):
        x_of_band = first_x
    else:
        most_points = max(len(x) for x, _ in runs)
        x_of_band = np.linspace(start, stop, most_points)
    interpolated = [np.interp(x_of_band, x, y) for x, y in runs]
    return _band(x_of_band, interpolated)


# A function that averages the curves of several seeds. It returns None if they can't be averaged.
_Average = Callable[[Sequence[Points]], dict[str, list[Any]] | None]


def convergence(grid: Grid) -> dict[str, Any]:
    """Averages rewards and held-out accuracies over training, and measures convergence times.

    Returns:
      For each task, a dict with `curves` and `thresholds`. `curves[variant][name][axis]` is the
      curve averaged over seeds, where `name` is `reward` or `accuracy`, and `axis` is one of
      `AXES`. Runs without training have no curve. `thresholds` contains the time that each variant
      (method and swept value) takes to reach given accuracies.
    """
    by_task: dict[str, Any] = {}
    for task in grid.study.tasks:
        curves: dict[str, Any] = {}
        for variant in grid.variants(task.id):
            averages: tuple[tuple[str, _Average], ...] = (
                ("reward", _rewards),
                ("accuracy", _accuracies),
            )
            for name, average in averages:
                by_axis = _curves_by_axis(grid, task, variant, name, average)
                if by_axis:
                    curves.setdefault(variant.key, {})[name] = by_axis
        by_task[task.id] = {
            "curves": curves,
            "thresholds": _times(grid, task),
        }
    return by_task


def _curves_by_axis(
    grid: Grid, task: Task, variant: Variant, name: str, average: _Average
) -> dict[str, Any]:
    """Returns a variant's curve, averaged over seeds, for each of `AXES` that has points.

    A variant is a method at one swept value.
    """
    by_axis = {}
    for axis in AXES:
        runs = list(series(grid, task, variant, axis, name).values())
        curve = average(runs) if runs else None
        if curve and curve["x"]:
            by_axis[axis] = curve
    return by_axis


def _times(grid: Grid, task: Task) -> list[dict[str, Any]]:
    """Measures the steps, tokens and seconds until held-out accuracy reaches each of two levels.

    For each share in `SHARES`, the level is start + share (end - start). Here start and end are the
    first and last accuracy of the reference arm, averaged over seeds. The reference arm is the
    first method of the study with which the others are compared. Ratios to the reference arm are
    paired by seed: the ratio is exp of the mean log ratio, with its t interval.

    Returns:
      A list of records, which is empty if the reference arm does not gain accuracy (end <= start),
      because a share of its gain is then no accuracy that training reaches. The records have the
      fields
        variant: key of the variant.
        axis: one of `AXES`.
        share, level: the entry of `SHARES` and the accuracy that it corresponds to.
        seeds, reached: the number of seeds, and how many of them reach the level.
        time: an estimate over seeds; None unless all seeds reach the level.
        ratio: the time divided by the reference arm's time; None for the reference arm itself, or
          if a time is missing or 0.
    """
    study = grid.study
    if not study.references:
        return []
    reference = Variant(study.references[0])
    accuracies = series(grid, task, reference, "step", "accuracy")
    ends = [(y[0], y[-1]) for _, y in accuracies.values()]
    if not ends:
        return []
    start, stop = np.mean(ends, axis=0)
    if stop <= start:
        return []
    records = []
    for share, axis in itertools.product(SHARES, AXES):
        level = float(start + share * (stop - start))
        reference_times = _crossings(grid, task, reference, axis, level)
        for variant in grid.variants(task.id):
            times = _crossings(grid, task, variant, axis, level)
            if not times:
                continue
            reached = [time for time in times.values() if time is not None]
            time = None
            if len(reached) == len(times):
                time = asdict(mean_interval(reached))
            ratio = None
            if variant != reference:
                ratio = _ratio(times, reference_times)
            record = {
                "variant": variant.key,
                "axis": axis,
                "share": share,
                "level": level,
                "seeds": len(times),
                "reached": len(reached),
                "time": time,
                "ratio": ratio,
            }
            records.append(record)
    return records


def _crossings(
    grid: Grid, task: Task, variant: Variant, axis: str, level: float
) -> dict[int, float | None]:
    """Returns the x at which each seed first reaches a level of held-out accuracy."""
    by_seed = series(grid, task, variant, axis, "accuracy")
    return {seed: first_crossing(x, y, level) for seed, (x, y) in by_seed.items()}


def _ratio(
    times: Mapping[int, float | None], others: Mapping[int, float | None]
) -> dict[str, Any] | None:
    """Computes the geometric mean of the ratios times / others, paired by seed, with its interval.

    Seeds that `others` does not have are ignored.

    Args:
      times: the time of each seed; None if the seed never reaches the level.
      others: the times of the reference arm in the same form.

    Returns:
      The fields of an `Estimate` of the ratio. None if the arguments have no seed in common, or if
      either time of a common seed is None or 0. A time is 0 if the run starts at the level or above
      it, and has no logarithm.
    """
    pairs = [(time, others[seed]) for seed, time in times.items() if seed in others]
    log_ratios = [float(np.log(time / other)) for time, other in pairs if time and other]
    if not log_ratios or len(log_ratios) < len(pairs):
        return None
    estimate = asdict(mean_interval(log_ratios))
    return {
        key: float(np.exp(value)) if isinstance(value, float) else value
        for key, value in estimate.items()
    }


def schedules(grid: Grid) -> dict[str, Any]:
    """Averages the budgets, weights and pass rates of difficulty groups over seeds.

    Returns:
      For each task and each variant with a curriculum, a list of difficulty groups, easiest first.
      Each group has a curve over training steps for every key of `OF_GROUP`.
    """
    by_task: dict[str, Any] = {}
    for task in grid.study.tasks:
        for variant in grid.variants(task.id):
            cells = [cell for cell in grid.of(task.id, variant) if cell.schedule]
            groups = _schedule_of(cells)
            if groups is not None:
                by_task.setdefault(task.id, {})[variant.key] = groups
    return by_task


def _schedule_of(cells: Sequence[Cell]) -> list[dict[str, Any]] | None:
    """Averages the curriculum of the runs that differ only in their seed.

    Only steps that all runs have in common are used.

    Returns:
      One dictionary of curves per difficulty group; None if the cells have no step in common.
    """
    runs = []
    for cell in cells:
        groups_by_step = {int(record["step"]): record["groups"] for record in cell.schedule}
        runs.append(groups_by_step)
    if not runs:
        return None
    common_steps = sorted(set.intersection(*map(set, runs)))
    if not common_steps:
        return None
    points = min(_SCHEDULE_POINTS, len(common_steps))
    indices = np.linspace(0, len(common_steps) - 1, points)
    steps = [common_steps[index] for index in indices.round().astype(int)]
    group_counts = [len(run[step]) for run in runs for step in steps]
    groups = []
    for group in range(min(group_counts)):
        curves = {}
        for key in OF_GROUP:
            by_seed = [[run[step][group].get(key) for step in steps] for run in runs]
            curves[key] = _band(steps, by_seed)
        groups.append(curves)
    return groups
