"""Writes the report of a study: results.json, tables, figures and study.html.

results.json contains every number shown in the tables and figures, except for wall-clock times.
Numbers are rounded to six significant digits and keys are sorted, so that cells with the same
results produce an identical file.
"""

import collections
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bacr_jax.files import write_atomically
from bacr_jax.report import plots
from bacr_jax.report.html_page import SCRIPT, STYLE, renderer, security
from bacr_jax.report.table import Table
from bacr_study import budget_use, curves, effects
from bacr_study.cells import COSTS, NUMBERS, Cell, Grid, Setting, read_cells
from bacr_study.configured import Configured, held_out_warnings
from bacr_study.failures import failure_rates
from bacr_study.figure_parts import StudyFigure
from bacr_study.figures import draw_figures
from bacr_study.items import (
    budget_phrase,
    difference_text,
    estimate_of,
    is_shown,
    row_names,
    simultaneous,
)
from bacr_study.spec import ACCOUNTING, MEAN, PARTS, Arm, Study, Sweep, Task, Variant
from bacr_study.statistics import mean_interval, rounded
from bacr_study.tables import tables_of, write_table

_DIGITS = 6
_TASK_FIELDS = ("id", "label", "main", "hard", "budgets")
# Fields that differ between two otherwise identical studies. They appear in cells and tables, but
# not in results.json.
_MACHINE_FIELDS = ("wall_seconds", "seconds", "date")
# Long fields of a cell, which results.json omits.
_LONG_FIELDS = ("correct", "curve", "schedule", "levels_of", "truncated")
_NO_FACTS = Configured()


def write_results(folder: Path, study: Study, facts: Configured = _NO_FACTS) -> list[Path]:
    """Writes the report of a study into the study's folder, from the stored results of its runs.

    Args:
      folder: the study's folder.
      study: the study, with the evaluation sets of its tasks filled in.
      facts: information about the runs that the cells do not store.

    Returns:
      The paths of the files written: results.json, tables, figures (PNG and PDF) and study.html.
    """
    results = build_results(read_cells(folder, study), study, facts)
    results_path = folder / "results.json"
    write_atomically(results_path, as_text(without_times(results)))
    files = [results_path]
    # Captions mention the number of seeds, so seeds without any cell are removed.
    seeds_with_cells = {cell["seed"] for cell in results["cells"].values()}
    seeds = tuple(seed for seed in study.seeds if seed in seeds_with_cells)
    reported_study = replace(study, seeds=seeds)

    for part in ("tables", "figures"):
        (folder / part).mkdir(exist_ok=True)
    tables = tables_of(results, reported_study)
    for table in tables:
        files += write_table(folder / "tables", table)
    figures = draw_figures(folder / "figures", results, reported_study)
    for _, figure_files in figures:
        files += figure_files
    page_path = folder / "study.html"
    write_atomically(page_path, page(results, study, tables, figures))
    files.append(page_path)
    return files


def build_results(
    cells: Mapping[str, Cell], study: Study, facts: Configured = _NO_FACTS
) -> dict[str, Any]:
    """Computes the contents of results.json.

    Args:
      cells: results of the study's finished runs, by id.
      study: the study.
      facts: information about the runs that the cells do not store.

    Returns:
      A dictionary with the keys:

      * study: the study's definition, without the settings of its runs.
      * missing: ids of missing cells.
      * warnings: messages that the page shows before the results.
      * provenance: commits, package versions, machines and dates of the cells.
      * cells: the cells by id, without per-problem results, curves and schedules.
      * problems: numbers of rows and of distinct problems by task, set and level, if known.
      * means: means over seeds by task, set, decoding mode, variant and budget.
      * failures, costs: numbers of failed runs, and training costs, by task and variant.
      * comparisons, decoding: the results of the functions of the same name in `effects`.
      * free, free_curves, swap: the results of `budget_use.free_distances`,
        `budget_use.free_curves` and `budget_use.swaps`.
      * difficulty, ablation, convergence, curriculum, contrasts: present only if the study has the
        view of this name. For each task, `convergence` also has `held_out_budgets`: the lists of
        budgets over which held-out accuracy is averaged, if known.
    """
    grid = Grid(study, cells)
    results: dict[str, Any] = {
        "study": _study_object(study),
        "missing": [id_ for id_ in study.cell_ids() if id_ not in cells],
        "provenance": _provenance([cell for cell in cells.values() if study.has_runs(cell.arm)]),
        "cells": {id_: _without(vars(cell), _LONG_FIELDS) for id_, cell in cells.items()},
        "problems": _problem_counts(cells.values(), facts),
        "means": {task.id: _means(grid, task) for task in study.tasks},
        "failures": {task.id: failure_rates(grid, task) for task in study.tasks},
        "costs": {task.id: _costs(grid, task, facts) for task in study.tasks},
        "comparisons": effects.comparisons(grid),
        "decoding": effects.decoding(grid),
        "free": budget_use.free_distances(grid),
        "free_curves": budget_use.free_curves(grid),
        "swap": budget_use.swaps(grid),
    }
    sections: dict[str, Callable[[Grid], Any]] = {
        "difficulty": effects.difficulty,
        "ablation": effects.ablation,
        "convergence": curves.convergence,
        "curriculum": curves.schedules,
        "contrasts": effects.contrasts,
    }
    for view, section in sections.items():
        if view in study.views:
            results[view] = section(grid)
    for task_id, section_of_task in results.get("convergence", {}).items():
        section_of_task["held_out_budgets"] = _held_out_budgets(
            facts, task_id, section_of_task["curves"]
        )
    results["warnings"] = list(_warnings(study, results))
    # Converted to JSON and back, so that tables and figures use exactly the numbers in the file.
    text = json.dumps(rounded(results, _DIGITS), allow_nan=False)
    return json.loads(text)


def _held_out_budgets(
    facts: Configured, task: str, variants: Collection[str]
) -> list[Sequence[int]]:
    """Returns the different budgets over which the held-out accuracies of a task are averaged.

    Args:
      facts: information about the runs that the cells do not store.
      task: id of the task.
      variants: keys of the variants (method and swept value) that have training curves.

    Returns:
      One list of budgets if all runs are evaluated at the same ones. Empty if they are not known.
    """
    by_text = {}
    for variant in variants:
        budgets = facts.held_out.get((task, variant))
        if budgets:
            by_text[str(budgets)] = budgets
    return list(by_text.values())


def _problem_counts(cells: Collection[Cell], facts: Configured) -> dict[str, Any]:
    """Returns how many rows and how many distinct problems each generated set has.

    Only sets that were used in evaluations are included.

    Args:
      cells: finished runs of the study.
      facts: evaluated problems and settings of the study.

    Returns:
      The entry `counts` of `Problems`, by task and name of the set.
    """
    counts: dict[str, Any] = {}
    for (task, name), problems in facts.problems.items():
        cells_of_task = [cell for cell in cells if cell.task == task]
        if any(problems.are_of(cell, name) for cell in cells_of_task):
            counts.setdefault(task, {})[name] = dict(problems.counts)
    return counts


def _study_object(study: Study) -> dict[str, Any]:
    """Converts the study to a JSON object for results.json, without the settings of its runs."""
    contrasts = [[name, *pair] for name, pair in study.contrasts.items()]
    tasks = []
    for task in study.tasks:
        tasks.append({key: getattr(task, key) for key in _TASK_FIELDS})
    return {
        "name": study.name,
        "seeds": study.seeds,
        "views": study.views,
        "references": study.references,
        "focus": study.focus,
        "size": study.size,
        "title": study.heading,
        "parts": PARTS if "ablation" in study.views else (),
        "tasks": tasks,
        "arms": [_arm_object(arm) for arm in study.arms],
        "sweep": _sweep_object(study.sweep),
        "contrasts": contrasts,
    }


def _arm_object(arm: Arm) -> dict[str, Any]:
    """Converts a method with its settings (an arm) to a JSON object for results.json."""
    return {
        "id": arm.id,
        "label": arm.label,
        "marks": [arm.mark] if arm.mark else [],
        "parts": arm.parts,
        "accounting": ACCOUNTING[arm.accounting] if arm.votes else "",
        "sweep": _sweep_object(arm.sweep),
    }


def _sweep_object(sweep: Sweep | None) -> dict[str, Any] | None:
    """Converts a sweep to a JSON object for results.json; None stays None."""
    if sweep is None:
        return None
    return {
        "key": sweep.key,
        "label": sweep.label,
        "values": sweep.values,
        "default": sweep.default,
    }


def without_times(results: Any) -> Any:
    """Removes times and dates from results, so that identical runs produce identical results."""
    return _without(results, _MACHINE_FIELDS)


def _without(value: Any, names: Collection[str]) -> Any:
    """Removes all fields with the given names from a nested value.

    Records in lists are removed if their field `axis` is one of the names.
    """
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    if isinstance(value, list):
        items = []
        for item in value:
            has_axis = isinstance(item, dict) and item.get("axis") in names
            if not has_axis:
                items.append(_without(item, names))
        return items
    return value


def as_text(results: Mapping[str, Any]) -> str:
    """Serializes results as JSON with one line for each run, comparison and other entry.

    The file stays small, and a diff shows which entries changed.
    """
    parts = []
    for key, value in sorted(results.items()):
        text = _compact_json(value)
        if isinstance(value, dict) and value:
            lines = [
                f"  {_compact_json(name)}: {_compact_json(item)}"
                for name, item in sorted(value.items())
            ]
            text = "{\n" + ",\n".join(lines) + "\n }"
        elif isinstance(value, list) and value:
            lines = [f"  {_compact_json(item)}" for item in value]
            text = "[\n" + ",\n".join(lines) + "\n ]"
        parts.append(f" {_compact_json(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _compact_json(value: Any) -> str:
    """Serializes a value as JSON on one line, without spaces and with sorted keys."""
    return json.dumps(
        value,
        separators=(",", ":"),
        sort_keys=True,
        allow_nan=False,
        ensure_ascii=False,
    )


def _means(grid: Grid, task: Task) -> dict[str, Any]:
    """Computes a task's means over seeds, by set, decoding mode, variant, budget and metric."""
    by_set: dict[str, Any] = {}
    for variant in grid.variants(task.id):
        for name, mode, budget in _evaluated(grid.of(task.id, variant)):
            where = Setting(task.id, name, budget, mode=mode)
            numbers = {}
            for key in NUMBERS:
                estimate = grid.estimate(variant, where, key)
                if estimate:
                    numbers[key] = vars(estimate)
            if numbers:
                by_mode = by_set.setdefault(name, {})
                by_variant = by_mode.setdefault(mode, {})
                by_variant.setdefault(variant.key, {})[budget] = numbers
    return by_set


def _evaluated(cells: Sequence[Cell]) -> list[tuple[str, str, str]]:
    """Returns all combinations of set, decoding mode and budget for which any run has results.

    The mean over budgets (`MEAN`) is included as an additional budget.
    """
    evaluated: dict[tuple[str, str, str], None] = {}
    for cell in cells:
        for name, by_mode in cell.sets.items():
            for mode, by_budget in by_mode.items():
                for budget in (*by_budget, MEAN):
                    evaluated[name, mode, budget] = None
    return list(evaluated)


def _costs(grid: Grid, task: Task, facts: Configured) -> dict[str, Any]:
    """Computes the training costs of a task's runs, averaged over seeds.

    Returns:
      A record for each variant: `runs` (number of runs), an estimate for each key of `COSTS`, and
      `departures` (settings that differ from the method's publication). If the settings are known,
      the record also has `updates` (an estimate of the number of optimizer updates) and `settings`.
    """
    by_variant: dict[str, Any] = {}
    for variant in grid.variants(task.id):
        cells = grid.of(task.id, variant)
        record: dict[str, Any] = {}
        settings = facts.settings.get((task.id, variant.key))
        if settings:
            updates = [cell.steps * settings["train.minibatches"] for cell in cells]
            record["updates"] = vars(mean_interval(updates))
            record["settings"] = dict(settings)
        record["runs"] = len(cells)
        for key in COSTS:
            values = [getattr(cell, key) for cell in cells]
            record[key] = vars(mean_interval(values))
        departures = [line for cell in cells for line in cell.departures]
        record["departures"] = list(dict.fromkeys(departures))
        by_variant[variant.key] = record
    return by_variant


def _provenance(cells: Collection[Cell]) -> dict[str, list[str]]:
    """Lists the commits, package versions and machines of runs, each with its number of runs.

    The field `date` contains the range of dates.
    """
    lines = {}
    for key in ("commit", "versions", "machine"):
        counts = collections.Counter(_provenance_text(cell, key) for cell in cells)
        lines[key] = [f"{text} ({count} runs)" for text, count in counts.items()]
    dates = sorted({_provenance_text(cell, "date") for cell in cells})
    if len(dates) > 1:
        dates = [f"{dates[0]} to {dates[-1]}"]
    lines["date"] = dates
    return lines


def _provenance_text(cell: Cell, key: str) -> str:
    """Formats one field of a run's provenance as text. Package versions are joined by commas."""
    value = cell.provenance.get(key, "unknown")
    if isinstance(value, dict):
        versions = [f"{name} {version}" for name, version in sorted(value.items())]
        return ", ".join(versions)
    return str(value)


def _warnings(study: Study, results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the warnings that the report shows before the results."""
    run_ids = list(study.cell_ids(has_votes=False))
    missing_ids = set(results["missing"])
    missing_runs = missing_ids.intersection(run_ids)
    text = ""
    if missing_runs:
        text = f"{len(missing_runs)} of {len(run_ids)} runs"
    elif missing_ids:
        text = f"{len(missing_ids)} majority votes"
    if text:
        yield (
            f"the results of {text} are missing, so the means of different methods may be over "
            "different seeds"
        )
    if len(study.seeds) == 1:
        yield (
            "one seed: intervals and tests are over problems only, and do not show how much other "
            "training runs would differ"
        )
    elif len(study.seeds) == 2:
        yield "two seeds: intervals are wide, and their level of 95 % is only approximate"
    for task, sets in results["problems"].items():
        for name, counts in sets.items():
            if counts["distinct_problems"] < counts["rows"]:
                yield (
                    f"{study.task(task).label}: the {counts['rows']:,} rows of {name} contain only "
                    f"{counts['distinct_problems']:,} distinct problems, but the tests treat each "
                    "row as a different problem"
                )
    plurals = {
        "commit": "commits",
        "versions": "sets of versions",
        "machine": "machines",
    }
    for key, plural in plurals.items():
        lines = results["provenance"][key]
        if len(lines) > 1:
            yield f"the runs are from {len(lines)} {plural}: {'; '.join(lines)}"
    for task_id, section in results.get("convergence", {}).items():
        yield from held_out_warnings(study.task(task_id), section["held_out_budgets"])


_STYLE = """
th.group { text-align: center; } th.group:empty { border-bottom: 0; }
tr.rule td { border-bottom: 2px solid var(--soft); } sup { line-height: 0; }
details > h3 { display: none; } details { margin: .4rem 0; }
td.words { white-space: normal; min-width: 6rem; } .warning { border-left: 3px solid #d55e00;
  padding-left: .7rem; } nav a { margin-right: .9rem; white-space: nowrap; }
li { overflow-wrap: anywhere; }
""".strip()
_render = renderer(Path(__file__).with_name("templates"))


def page(
    results: Mapping[str, Any],
    study: Study,
    tables: Sequence[Table],
    figures: Sequence[tuple[StudyFigure, Sequence[Path]]],
) -> str:
    """Renders study.html as a single page that does not load any other file.

    Args:
      results: the contents of results.json.
      study: the study.
      tables: the tables of the page.
      figures: each figure with the paths of its files.
    """
    pictures = []
    for figure, paths in figures:
        charts = list(itertools.chain.from_iterable(figure.rows))
        drawn = []
        for chart in charts:
            drawn.append(plots.figure(chart, has_legend=False))
        links = []
        for path in paths:
            address = f"{path.parent.name}/{path.name}"
            links.append((path.name, address))
        legend = plots.legend(charts)
        pictures.append((figure, legend, drawn, links))
    provenance = []
    for key, lines in sorted(results["provenance"].items()):
        provenance.append(f"{key}: {'; '.join(lines)}")
    cells = results["cells"].values()
    return _render(
        "study.html",
        num_runs=sum(study.has_runs(cell["arm"]) for cell in cells),
        title=study.heading,
        study=study,
        results=results,
        verdict=list(_verdict(results, study)),
        tables=tables,
        pictures=pictures,
        provenance=provenance,
        **security(f"{STYLE}\n{_STYLE}", f"{plots.library()}\n{SCRIPT}"),
    )


def _verdict(results: Mapping[str, Any], study: Study) -> Iterator[str]:
    """Yields sentences that report which method has the highest accuracy on each task.

    There is one sentence each for the smallest budget, the largest budget and the mean over
    budgets. A lead is claimed only if the simultaneous interval of the difference excludes 0.
    """
    names = row_names(study)
    for task in study.tasks:
        for budget in (str(min(task.budgets)), str(max(task.budgets)), MEAN):
            accuracies = _accuracies(results, task, study.variants(), budget)
            if not accuracies:
                continue
            ranking = sorted(accuracies, key=lambda variant: -accuracies[variant])
            best = ranking[0]
            start = f"{task.label}, {budget_phrase(budget)}: {names[best]} has the highest accuracy"
            start += f", {100 * accuracies[best]:.1f} %"
            where = (task.id, task.main, budget)
            entry = _lead_entry(results["comparisons"], where, ranking)
            if entry is None:
                yield f"{start}; no difference was tested"
            else:
                yield f"{start}, {_claim(entry, best, names)}"


def _lead_entry(
    comparisons: Sequence[Mapping[str, Any]], where: tuple[str, str, str], ranking: Sequence[str]
) -> Mapping[str, Any] | None:
    """Returns the test of the most accurate method's lead over another, or None without a test.

    The study compares every method with a few references. If the most accurate method is a
    reference, the result is its comparison with the method of the second-highest accuracy.
    Otherwise, the result is its comparison with the first of the references.

    Args:
      comparisons: the comparisons of results.json.
      where: task, set and budget.
      ranking: variant keys by decreasing accuracy.
    """
    entries: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in comparisons:
        if (entry["task"], entry["set"], entry["budget"]) == where:
            entries[entry["variant"], entry["reference"]] = entry
    best = ranking[0]
    for second in ranking[1:2]:
        if (second, best) in entries:
            return entries[second, best]
    return next((entry for (variant, _), entry in entries.items() if variant == best), None)


def _claim(entry: Mapping[str, Any], best: str, names: Mapping[str, str]) -> str:
    """Returns what a comparison shows about the lead of the most accurate method, as text.

    Args:
      entry: comparison of the most accurate arm with a reference, or of another arm with it.
      best: key of the most accurate arm.
      names: names of the arms, by variant key.
    """
    lead = simultaneous(entry)
    other = entry["reference"]
    if other == best:
        other = entry["variant"]
        lead = {"difference": -lead["difference"], "low": -lead["high"], "high": -lead["low"]}
    points = f"{difference_text(lead)} points"
    interval = f"95 % interval that holds for {entry['tests']} differences at once"
    if is_shown(entry):
        return f"and leads {names[other]} by {points} ({interval})"
    return f"but no lead over {names[other]} is shown: {points} ({interval})"


def _accuracies(
    results: Mapping[str, Any], task: Task, variants: Sequence[Variant], budget: str
) -> dict[str, float]:
    """Returns the mean accuracy of each variant that was measured at a budget, by variant key.

    A variant is a method at one swept value.
    """
    accuracies = {}
    for variant in variants:
        estimate = estimate_of(results, task, task.main, variant, budget)
        if estimate:
            accuracies[variant.key] = estimate["mean"]
    return accuracies
