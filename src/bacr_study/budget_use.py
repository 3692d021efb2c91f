"""Tests whether trained policies use their budget and beat the policy before training.

The first test uses swap tables: the accuracy for every pair of a budget as input and a number of
tokens after which the thinking is truncated. The second test uses the free curve: the accuracy of
the policy before training if its thinking is truncated early. `results` calls this module, and
`budget_tables` and `budget_figures` show its records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax.evaluation.samples import GREEDY, SAMPLED
from bacr_jax.evaluation.swap import length_differences, matched_gains
from bacr_study.cells import Cell, Grid
from bacr_study.spec import MEAN, Task, Variant
from bacr_study.statistics import crossed_test, mean_interval

# A JSON object in results.json.
Record = dict[str, Any]


@dataclass(frozen=True)
class _SwapTable:
    """The results of one run by the budget as input and by the truncation point (in tokens).

    Attributes:
      budgets: the B budgets in ascending order. Each is used as input and as truncation point.
      rates: fraction of correct samples, [problems, input budgets, truncation points].
      thinking: mean thinking tokens for each input budget, truncated at the largest budget.
    """

    budgets: list[int]
    rates: Float[np.ndarray, "n B B"]
    thinking: list[float]


@dataclass(frozen=True)
class _FreeCurve:
    """The free curve: results of the policy before training if its thinking is truncated early.

    The K truncation points are sorted by the mean number of tokens used.

    Attributes:
      rates: fraction of correct samples, [problems, truncation points].
      tokens: mean number of tokens used at each truncation point, in ascending order.
    """

    rates: Float[np.ndarray, "n K"]
    tokens: Float[np.ndarray, "K"]


@dataclass(frozen=True)
class _Distance:
    """The difference between a trained run and the free curve at the same mean number of tokens.

    The free curve is the accuracy of the policy before training if its thinking is truncated early.
    The difference is measured at one budget of the trained run, or averaged over budgets.

    Attributes:
      difference: fraction of correct samples of the trained run minus the fraction of the free
        curve, for each problem.
      tokens: mean number of tokens that the trained run uses.
      accuracy: mean accuracy of the trained run.
      free_accuracy: accuracy of the free curve at this number of tokens.
      inside: True if `tokens` lies between the ends of the free curve.
    """

    difference: Float[np.ndarray, "n"]
    tokens: float
    accuracy: float
    free_accuracy: float
    inside: bool


# Swap tables --------------------------------------------------------------------------------------


def swaps(grid: Grid) -> list[Record]:
    """Tests for every method with swap tables whether the policy uses the budget that it receives.

    A swap table contains the accuracy for every pair of a budget as input and a truncation point,
    the number of tokens after which the thinking is truncated. The gain at a truncation point is
    the accuracy with the same budget as input, minus the mean accuracy with the other budgets.

    Returns:
      Records with the fields `task`, `set` (evaluation set), `mode` (sampled or greedy), `variant`
      (key of the arm and its swept value), `budgets` and:
        accuracy: mean accuracy over seeds, by input budget and then by truncation point.
        thinking: mean thinking tokens by input budget, truncated at the largest budget.
        gains: the gain as the fields of `statistics.Contrast`, by truncation point, and its mean
          over them under the key `MEAN`.
        lengths: for each pair of input budgets (`budget` and `less`), an estimate over seeds of the
          difference in thinking tokens.
    """
    records = []
    for task in grid.study.tasks:
        for variant in grid.variants(task.id):
            for mode in (GREEDY, SAMPLED):
                tables = _swap_tables(grid.of(task.id, variant), task, mode)
                if not tables:
                    continue
                labels = {
                    "task": task.id,
                    "set": task.main,
                    "mode": mode,
                    "variant": variant.key,
                }
                records.append({**labels, **_swap_record(tables)})
    return records


def _swap_tables(cells: Sequence[Cell], task: Task, mode: str) -> list[_SwapTable]:
    """Returns the swap table of each run.

    A swap table contains results by the budget as input and by the truncation point. Returns an
    empty list if any run has no swap table, or if the budgets of the runs differ.
    """
    tables: list[_SwapTable] = []
    for cell in cells:
        table = _swap_table(cell, task.main, mode)
        if table is None:
            return []
        if tables and table.budgets != tables[0].budgets:
            return []
        tables.append(table)
    return tables


def _swap_table(cell: Cell, name: str, mode: str) -> _SwapTable | None:
    """Returns the swap table of a run; None if fewer than two budgets were evaluated as input."""
    by_mode = cell.truncated.get(name, {})
    by_input = by_mode.get(mode, {})
    if len(by_input) < 2:
        return None
    budgets = sorted(map(int, by_input))
    limit = str(budgets[-1])
    rows = []
    thinking = []
    for budget in budgets:
        by_cut = by_input[str(budget)]
        columns = []
        for cut in budgets:
            entry = by_cut[str(cut)]
            columns.append(cell.rates_of(entry["correct"], mode))
        rows.append(np.stack(columns, axis=1))
        thinking.append(by_cut[limit]["mean_thinking_tokens"])
    return _SwapTable(budgets, np.stack(rows, axis=1), thinking)


def _swap_record(tables: Sequence[_SwapTable]) -> Record:
    """Returns a method's record in the result of `swaps`, given its swap table for each seed."""
    budgets = tables[0].budgets
    return {
        "budgets": budgets,
        "accuracy": _mean_accuracies(tables),
        "thinking": _mean_thinking(tables),
        "gains": _gains(tables),
        "lengths": _lengths(tables),
    }


def _mean_accuracies(tables: Sequence[_SwapTable]) -> dict[str, dict[str, float]]:
    """Returns the mean accuracy over seeds, by input budget and then by truncation."""
    keys = list(map(str, tables[0].budgets))
    by_seed = [table.rates.mean(0) for table in tables]
    means = np.mean(by_seed, axis=0)
    accuracies = {}
    for budget, row in zip(keys, means):
        accuracies[budget] = dict(zip(keys, row.tolist()))
    return accuracies


def _mean_thinking(tables: Sequence[_SwapTable]) -> dict[str, float]:
    """Returns the mean thinking tokens over seeds, by input budget."""
    keys = list(map(str, tables[0].budgets))
    by_seed = [table.thinking for table in tables]
    means = np.mean(by_seed, axis=0)
    return dict(zip(keys, means.tolist()))


def _gains(tables: Sequence[_SwapTable]) -> dict[str, Record]:
    """Tests the gain from the matching input at each truncation point, and the mean over them.

    The gain is the accuracy if the input budget equals the truncation point, minus the mean
    accuracy with the other input budgets.
    """
    by_seed = [matched_gains(table.rates) for table in tables]
    gains = np.stack(by_seed)
    by_cut = {MEAN: gains.mean(2)}
    for column, cut in enumerate(tables[0].budgets):
        by_cut[str(cut)] = gains[:, :, column]
    tests = {}
    for key, values in by_cut.items():
        test = crossed_test(values)
        if test is not None:
            tests[key] = asdict(test)
    return tests


def _lengths(tables: Sequence[_SwapTable]) -> list[Record]:
    """Estimates the difference in thinking tokens between each pair of input budgets."""
    budgets = tables[0].budgets
    thinking = np.array([table.thinking for table in tables])
    pairs, differences = length_differences(thinking)
    lengths = []
    for column, (i, j) in enumerate(pairs):
        by_seed = differences[:, column]
        estimate = mean_interval(by_seed.tolist())
        record = {
            "budget": budgets[i],
            "less": budgets[j],
            **asdict(estimate),
        }
        lengths.append(record)
    return lengths


# Free curve ---------------------------------------------------------------------------------------


def free_distances(grid: Grid) -> list[Record]:
    """Compares every trained arm with the policy before training, truncated at smaller budgets.

    An arm is a method with its settings. The accuracy of the policy before training is interpolated
    linearly between its truncation points, at the mean number of tokens that the arm uses. A
    trained arm saves tokens only if it is above this free curve. The test ignores the sampling
    error of the mean number of tokens.

    Returns:
      Records with the fields `task`, `set`, `budget` (or `MEAN`), `variant`, `tokens`, `accuracy`,
      `free_accuracy`, `inside` (True if the tokens of all seeds lie between the ends of the curve)
      and the fields of `statistics.Contrast`. Empty if the study does not specify `before`.
    """
    study = grid.study
    records: list[Record] = []
    if not study.before:
        return records
    for task in study.tasks:
        untrained = {cell.seed: cell for cell in grid.of(task.id, Variant(study.before))}
        for variant in grid.variants(task.id):
            if variant.arm == study.before:
                continue
            cells = grid.of(task.id, variant)
            by_budget = _distances(cells, untrained, task)
            for budget, distances in by_budget.items():
                record = _distance_record(distances)
                if record is None:
                    continue
                labels = {
                    "task": task.id,
                    "set": task.main,
                    "budget": budget,
                    "variant": variant.key,
                }
                records.append({**labels, **record})
    return records


def _distances(
    cells: Sequence[Cell], untrained: Mapping[int, Cell], task: Task
) -> dict[str, list[_Distance]]:
    """Returns the differences between a method and the free curve, one per seed, for each budget.

    The free curve is the accuracy of the policy before training if its thinking is truncated early.
    The key `MEAN` contains the mean over budgets.

    Args:
      cells: results of the method's runs. Seeds that are not in `untrained` are left out.
      untrained: results of the policy before training, by seed.
      task: the task.
    """
    by_budget: dict[str, list[_Distance]] = {}
    for cell in cells:
        before = untrained.get(cell.seed)
        curve = None if before is None else _free_curve(before, task)
        if curve is None:
            continue
        distances = []
        for budget in map(str, task.budgets):
            distance = _distance(cell, task.main, budget, curve)
            if distance is None:
                continue
            by_budget.setdefault(budget, []).append(distance)
            distances.append(distance)
        if len(distances) == len(task.budgets):
            mean = _mean_distance(distances)
            by_budget.setdefault(MEAN, []).append(mean)
    return by_budget


def _points(cell: Cell, task: Task) -> list[Mapping[str, Any]]:
    """Returns the results of the policy before training at each truncation point.

    If only one input budget was evaluated with truncation, its truncation points are used.
    Otherwise the evaluated budgets are used as truncation points. This is valid because the budget
    as input has no effect before training.
    """
    by_mode = cell.truncated.get(task.main, {})
    by_input = by_mode.get(SAMPLED, {})
    if len(by_input) == 1:
        (by_cut,) = by_input.values()
        return list(by_cut.values())
    by_mode_of_budgets = cell.sets.get(task.main, {})
    by_budget = by_mode_of_budgets.get(SAMPLED, {})
    return list(by_budget.values())


def _free_curve(cell: Cell, task: Task) -> _FreeCurve | None:
    """Returns the accuracy of the untrained policy by truncation point; None if it has no point."""
    points = [entry for entry in _points(cell, task) if entry.get("correct")]
    if not points:
        return None
    points.sort(key=lambda entry: entry["mean_total_tokens"])
    rates = []
    tokens = []
    for entry in points:
        rates.append(cell.rates_of(entry["correct"], SAMPLED))
        tokens.append(entry["mean_total_tokens"])
    return _FreeCurve(
        rates=np.stack(rates, axis=1),
        tokens=np.array(tokens, np.float64),
    )


def curve_weights(tokens: float, curve_tokens: Float[np.ndarray, "K"]) -> Float[np.ndarray, "K"]:
    """Returns the weight of each point of a curve in a linear interpolation.

    Beyond the ends of the curve, the point at the end has weight 1.

    Args:
      tokens: number of tokens (x coordinate) at which the curve is interpolated.
      curve_tokens: number of tokens of each of the K points, in ascending order.
    """
    unit_vectors = np.eye(len(curve_tokens))
    weights = [np.interp(tokens, curve_tokens, vector) for vector in unit_vectors]
    return np.array(weights)


def _distance(cell: Cell, name: str, budget: str, curve: _FreeCurve) -> _Distance | None:
    """Returns a run's difference from the free curve at a budget; None if it was not evaluated.

    The free curve is the accuracy of the policy before training if its thinking is truncated early.
    """
    entry = cell.entry(name, SAMPLED, budget)
    rates = cell.rates(name, SAMPLED, budget)
    if entry is None or rates is None:
        return None
    tokens = entry["mean_total_tokens"]
    weights = curve_weights(tokens, curve.tokens)
    free_rates = curve.rates @ weights
    is_inside = curve.tokens[0] <= tokens <= curve.tokens[-1]
    return _Distance(
        difference=rates - free_rates,
        tokens=tokens,
        accuracy=float(rates.mean()),
        free_accuracy=float(free_rates.mean()),
        inside=bool(is_inside),
    )


def _mean_distance(distances: Sequence[_Distance]) -> _Distance:
    """Averages each field of the distances. `inside` is True if it is True for all of them."""
    differences = [one.difference for one in distances]
    tokens = [one.tokens for one in distances]
    accuracies = [one.accuracy for one in distances]
    free_accuracies = [one.free_accuracy for one in distances]
    return _Distance(
        difference=np.mean(differences, axis=0),
        tokens=float(np.mean(tokens)),
        accuracy=float(np.mean(accuracies)),
        free_accuracy=float(np.mean(free_accuracies)),
        inside=all(one.inside for one in distances),
    )


def _distance_record(distances: Sequence[_Distance]) -> Record | None:
    """Tests whether the mean distance over seeds differs from 0; None if it can't be tested."""
    differences = [one.difference for one in distances]
    contrast = crossed_test(np.stack(differences))
    if contrast is None:
        return None
    mean = _mean_distance(distances)
    return {
        "tokens": mean.tokens,
        "accuracy": mean.accuracy,
        "free_accuracy": mean.free_accuracy,
        "inside": mean.inside,
        **asdict(contrast),
    }


def free_curves(grid: Grid) -> dict[str, list[Record]]:
    """Averages the accuracy of the policy before training over seeds at each truncation point.

    Returns:
      For each task, records in ascending order of truncation points. The fields are `cut` (the
      truncation point in tokens), `tokens` (mean tokens used) and the fields of an `Estimate` of
      the accuracy. A task is left out if any seed was evaluated without truncation points.
    """
    curves: dict[str, list[Record]] = {}
    if not grid.study.before:
        return curves
    for task in grid.study.tasks:
        cells = grid.of(task.id, Variant(grid.study.before))
        by_seed: list[Record] = []
        for cell in cells:
            by_mode = cell.truncated.get(task.main, {})
            by_input = by_mode.get(SAMPLED, {})
            if len(by_input) == 1:
                by_seed += by_input.values()
        if by_seed and len(by_seed) == len(cells):
            curves[task.id] = _mean_curve(by_seed)
    return curves


def _mean_curve(by_seed: Sequence[Record]) -> list[Record]:
    """Averages the results at each truncation point over seeds."""
    points = []
    for cut in sorted(by_seed[0], key=int):
        entries = [by_cut[cut] for by_cut in by_seed]
        tokens = [entry["mean_total_tokens"] for entry in entries]
        accuracies = [entry["accuracy"] for entry in entries]
        estimate = mean_interval(accuracies)
        point = {
            "cut": int(cut),
            "tokens": float(np.mean(tokens)),
            **asdict(estimate),
        }
        points.append(point)
    return points
