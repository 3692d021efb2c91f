"""What happened during training, averaged over seeds: curves, times to a level, the schedule."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_study.cells import OF_GROUP, Grid
from bacr_study.spec import Task, Variant
from bacr_study.statistics import mean_interval

AXES = ("step", "tokens", "seconds")
# Points of a curve: enough to see its shape, few enough for small files.
_BINS = 30
_SCHEDULE_POINTS = 40
# Shares of the reference arm's gain that define the levels to be reached.
SHARES = (0.5, 0.9)

Series = tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]


def series(grid: Grid, task: Task, variant: Variant, axis: str, key: str) -> dict[int, Series]:
    """A column of trained runs' curves where it was recorded, against an axis, by seed."""
    found = {}
    for cell in grid.of(task.id, variant):
        points = [(r[axis], r[key]) for r in cell.curve if r.get(key) is not None]
        if points and cell.steps > 0:
            x, y = np.array(points, np.float64).T
            found[cell.seed] = x, y
    return found


def _binned(one: Series, edges: Float[np.ndarray, "N"]) -> Float[np.ndarray, "K"]:
    """Means of the points in each bin; NaN without points."""
    x, y = one
    place = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
    inside = (x >= edges[0]) & (x <= edges[-1])
    count = np.bincount(place[inside], minlength=len(edges) - 1)
    total = np.bincount(place[inside], y[inside], minlength=len(edges) - 1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _band(x: Iterable[float], by_seed: Sequence[Any]) -> dict[str, list[Any]]:
    """Mean and interval over seeds at every x at which all seeds have a value."""
    rows: Float[np.ndarray, "seeds n"] = np.array(by_seed, np.float64)
    keep = np.isfinite(rows).all(0)
    estimates = [mean_interval(column.tolist()) for column in rows.T[keep]]
    return {
        "x": [float(v) for v, k in zip(x, keep) if k],
        "mean": [e.mean for e in estimates],
        "low": [e.low for e in estimates],
        "high": [e.high for e in estimates],
    }


def _rewards(runs: Sequence[Series]) -> dict[str, list[Any]]:
    # Up to where the shortest run ends: beyond, the average would be of other seeds.
    longest = max(len(x) for x, _ in runs)
    edges = np.linspace(0.0, min(x[-1] for x, _ in runs), min(_BINS, longest) + 1)
    return _band((edges[1:] + edges[:-1]) / 2, [_binned(one, edges) for one in runs])


def _accuracies(runs: Sequence[Series]) -> dict[str, list[Any]] | None:
    start, stop = max(x[0] for x, _ in runs), min(x[-1] for x, _ in runs)
    if stop < start:
        return None
    # Evaluations of the runs at the same steps are taken as they are; tokens and seconds differ.
    alike = all(np.array_equal(x, runs[0][0]) for x, _ in runs)
    points = max(len(x) for x, _ in runs)
    grid = runs[0][0] if alike else np.linspace(start, stop, points)
    return _band(grid, [np.interp(grid, *one) for one in runs])


def convergence(grid: Grid) -> dict[str, Any]:
    """Reward and held-out accuracy against steps, tokens and seconds, and times to a level.

    By task: `curves` by variant, `reward` or `accuracy`, and axis, without arms that were not
    trained; `thresholds`, see `_times`.
    """
    found: dict[str, Any] = {}
    for task in grid.study.tasks:
        curves: dict[str, Any] = {}
        for variant in grid.variants(task.id):
            for name, draw in (("reward", _rewards), ("accuracy", _accuracies)):
                drawn = {}
                for axis in AXES:
                    runs = list(series(grid, task, variant, axis, name).values())
                    band = draw(runs) if runs else None
                    if band and band["x"]:
                        drawn[axis] = band
                if drawn:
                    curves.setdefault(variant.key, {})[name] = drawn
        found[task.id] = {"curves": curves, "thresholds": _times(grid, task)}
    return found


def first_crossing(one: Series, level: float) -> float | None:
    """The x where a curve first reaches a level, between its points on a straight line, or None."""
    x, y = one
    reached = np.flatnonzero(y >= level)
    if not reached.size:
        return None
    i = int(reached[0])
    if i == 0:
        return float(x[0])
    share = (level - y[i - 1]) / (y[i] - y[i - 1])
    return float(x[i - 1] + share * (x[i] - x[i - 1]))


def _times(grid: Grid, task: Task) -> list[dict[str, Any]]:
    """Steps, tokens and seconds until held-out accuracy reaches a share of the reference's gain.

    The level is start + share (end - start) of the first reference arm's mean over seeds. Ratios
    to the reference are paired by seed: exp of the mean of log ratios, with its t interval.

    Records have variant, axis, share, level, seeds, reached (how many seeds reach it), time (an
    estimate; None unless all seeds do) and ratio (of the time to the reference's).
    """
    study = grid.study
    if not study.references:
        return []
    base = Variant(study.references[0])
    ends = [(y[0], y[-1]) for _, y in series(grid, task, base, "step", "accuracy").values()]
    if not ends:
        return []
    start, stop = np.mean(ends, axis=0)
    records = []
    for share, axis in itertools.product(SHARES, AXES):
        level = float(start + share * (stop - start))
        others = _crossings(grid, task, base, axis, level)
        for variant in grid.variants(task.id):
            times = _crossings(grid, task, variant, axis, level)
            known = [time for time in times.values() if time is not None]
            if times:
                records.append(
                    {
                        "variant": variant.key,
                        "axis": axis,
                        "share": share,
                        "level": level,
                        "seeds": len(times),
                        "reached": len(known),
                        "time": asdict(mean_interval(known)) if len(known) == len(times) else None,
                        "ratio": _ratio(times, others) if variant != base else None,
                    }
                )
    return records


def _crossings(
    grid: Grid, task: Task, variant: Variant, axis: str, level: float
) -> dict[int, float | None]:
    """Where each seed first reaches a level of held-out accuracy."""
    found = series(grid, task, variant, axis, "accuracy")
    return {seed: first_crossing(one, level) for seed, one in found.items()}


def _ratio(
    times: Mapping[int, float | None], others: Mapping[int, float | None]
) -> dict[str, Any] | None:
    """Geometric mean of times / others over seeds; None unless all seeds of both have a time."""
    pairs = [(time, others[seed]) for seed, time in times.items() if seed in others]
    known = [float(np.log(one / other)) for one, other in pairs if one and other]
    if not known or len(known) < len(pairs):
        return None
    logs = asdict(mean_interval(known))
    return {k: float(np.exp(v)) if isinstance(v, float) else v for k, v in logs.items()}


def schedules(grid: Grid) -> dict[str, Any]:
    """Budgets and weights of difficulty groups over training, averaged over seeds.

    By task and variant with a curriculum: a list of groups, the easiest first, each with a curve
    over steps for every one of `OF_GROUP`.
    """
    found: dict[str, Any] = {}
    for task in grid.study.tasks:
        for variant in grid.variants(task.id):
            cells = [cell for cell in grid.of(task.id, variant) if cell.schedule]
            runs = [{int(r["step"]): r["groups"] for r in cell.schedule} for cell in cells]
            steps = sorted(set.intersection(*map(set, runs))) if runs else []
            if not steps:
                continue
            chosen = np.linspace(0, len(steps) - 1, min(_SCHEDULE_POINTS, len(steps)))
            steps = [steps[place] for place in chosen.round().astype(int)]
            groups = range(min(len(run[step]) for run in runs for step in steps))
            found.setdefault(task.id, {})[variant.key] = [
                {
                    key: _band(steps, [[run[s][group].get(key) for s in steps] for run in runs])
                    for key in OF_GROUP
                }
                for group in groups
            ]
    return found
