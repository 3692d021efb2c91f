"""Averages training curves over seeds: rewards, accuracies, times to a level, curricula."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_study.cells import OF_GROUP, Cell, Grid
from bacr_study.spec import Task, Variant
from bacr_study.statistics import mean_interval

AXES = ("step", "tokens", "seconds")
# Points of a curve: enough to see its shape, few enough for small files.
_BINS = 30
_SCHEDULE_POINTS = 40
# The levels to be reached, as shares of the reference arm's gain.
SHARES = (0.5, 0.9)

# The x and y of a curve's points.
Points = tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]


def series(grid: Grid, task: Task, variant: Variant, axis: str, key: str) -> dict[int, Points]:
    """Returns a column of the curves of trained runs, by seed.

    Args:
      axis: x, one of `AXES`.
      key: y, a field of `Cell.curve`. Steps without the field are left out.
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
    """Returns the mean y of the points in each bin; NaN for a bin without points."""
    x, y = points
    bins = len(edges) - 1
    indices = np.searchsorted(edges, x, side="left") - 1
    indices = np.clip(indices, 0, bins - 1)
    inside = (x >= edges[0]) & (x <= edges[-1])
    count = np.bincount(indices[inside], minlength=bins)
    total = np.bincount(indices[inside], y[inside], minlength=bins)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _band(x: Iterable[float], by_seed: Sequence[Any]) -> dict[str, list[Any]]:
    """Returns mean and 95 % interval over seeds at every x at which all seeds have a value.

    Args:
      by_seed: for each seed its y at every x; NaN or None if missing.
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
    """Returns the mean reward in bins of the axis.

    The last bin ends where the shortest run ends, because beyond that the mean would be over other
    seeds.
    """
    most_points = max(len(x) for x, _ in runs)
    end = min(x[-1] for x, _ in runs)
    bins = min(_BINS, most_points)
    edges = np.linspace(0.0, end, bins + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    return _band(middles, [_binned(run, edges) for run in runs])


def _accuracies(runs: Sequence[Points]) -> dict[str, list[Any]] | None:
    """Returns the mean held-out accuracy where the axes of all runs overlap; None if nowhere."""
    start = max(x[0] for x, _ in runs)
    stop = min(x[-1] for x, _ in runs)
    if stop < start:
        return None
    # Runs are evaluated at equal steps, but at different tokens and seconds.
    first_x, _ = runs[0]
    if all(np.array_equal(x, first_x) for x, _ in runs):
        x_of_band = first_x
    else:
        most_points = max(len(x) for x, _ in runs)
        x_of_band = np.linspace(start, stop, most_points)
    interpolated = [np.interp(x_of_band, x, y) for x, y in runs]
    return _band(x_of_band, interpolated)


# Averages the curves of several seeds; None if there is nothing to show.
_Average = Callable[[Sequence[Points]], dict[str, list[Any]] | None]


def convergence(grid: Grid) -> dict[str, Any]:
    """Returns rewards and held-out accuracies over training, and times to a level.

    Returns:
      By task: `curves` by variant, by `reward` or `accuracy`, and by axis, without arms that were
      not trained; `thresholds`, see `_times`.
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
    """Returns the averaged curve of a variant against each axis; axes without points left out."""
    by_axis = {}
    for axis in AXES:
        runs = list(series(grid, task, variant, axis, name).values())
        curve = average(runs) if runs else None
        if curve and curve["x"]:
            by_axis[axis] = curve
    return by_axis


def first_crossing(points: Points, level: float) -> float | None:
    """Returns the x where a curve first reaches a level; None if it never does.

    Between two points the curve is a straight line.
    """
    x, y = points
    reached = np.flatnonzero(y >= level)
    if not reached.size:
        return None
    index = int(reached[0])
    if index == 0:
        return float(x[0])
    x_before = x[index - 1]
    y_before = y[index - 1]
    share = (level - y_before) / (y[index] - y_before)
    return float(x_before + share * (x[index] - x_before))


def _times(grid: Grid, task: Task) -> list[dict[str, Any]]:
    """Returns steps, tokens and seconds until held-out accuracy reaches each of two levels.

    A level is start + share (end - start), with start and end the first reference arm's mean over
    seeds. Ratios to the reference are paired by seed: exp of the mean of log ratios, with its t
    interval.

    Returns:
      Records with variant, axis, share, level, seeds, reached (the number of seeds that reach the
      level), time (an estimate; None unless all seeds reach it) and ratio (of the time to the
      reference's; None for the reference).
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
    return {seed: first_crossing(points, level) for seed, points in by_seed.items()}


def _ratio(
    times: Mapping[int, float | None], others: Mapping[int, float | None]
) -> dict[str, Any] | None:
    """Returns the geometric mean of times / others over seeds, with its interval.

    None unless every seed of `times` that `others` has, too, has a time in both.
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
    """Returns budgets and weights of difficulty groups over training, averaged over seeds.

    Returns:
      By task and by variant with a curriculum: a list of groups, the easiest first, each with a
      curve over steps for every key of `OF_GROUP`.
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
    """Returns the curves of every difficulty group at steps that all cells have.

    None if the cells have no step in common.
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
