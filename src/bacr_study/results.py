"""results.json of a study: every number its tables and figures show; study.html, and all beside it.

Numbers are rounded to six significant digits and keys sorted, so that the same cells give the same
bytes.
"""

import base64
import collections
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bacr_jax.documents import write_atomically
from bacr_jax.report.html_page import STYLE, renderer, security
from bacr_jax.report.table import Table
from bacr_study import curves, effects
from bacr_study.cells import COSTS, NUMBERS, Cell, Grid, Setting, read_cells
from bacr_study.configured import Configured
from bacr_study.failures import failure_rates
from bacr_study.figures import Drawn, draw_figures
from bacr_study.items import budget_phrase, difference_text, estimate_of, row_names
from bacr_study.spec import ACCOUNTING, MEAN, PARTS, Study, Task
from bacr_study.statistics import mean_interval, rounded
from bacr_study.tables import tables_of, write_table

_DIGITS = 6
_OF_TASK = ("id", "label", "main", "hard", "budgets")
# What two equal studies differ in: tables show it, and cells keep it.
_OF_THE_MACHINE = ("wall_seconds", "seconds", "date")
# What results leave to the cells.
_LONG = ("correct", "curve", "schedule", "levels_of")
_NOTHING = Configured()


def write_results(folder: Path, study: Study, known: Configured = _NOTHING) -> list[Path]:
    """Writes what the finished runs of a study say, whichever there are, beside its `cells/`."""
    results = build_results(read_cells(folder, study), study, known)
    written = [folder / "results.json"]
    write_atomically(written[0], as_text(without_times(results)))
    # Captions speak of the seeds that have runs.
    made = {cell["seed"] for cell in results["cells"].values()}
    shown = replace(study, seeds=tuple(seed for seed in study.seeds if seed in made))
    tables = tables_of(results, shown)
    for kind in ("tables", "figures"):
        (folder / kind).mkdir(exist_ok=True)
    for table in tables:
        written += write_table(folder / "tables", table)
    figures = draw_figures(folder / "figures", results, shown)
    written += [file for _, *files in figures for file in files]
    written.append(folder / "study.html")
    write_atomically(written[-1], page(results, study, tables, figures))
    return written


def build_results(
    cells: Mapping[str, Cell], study: Study, known: Configured = _NOTHING
) -> dict[str, Any]:
    """results.json as an object.

    Returns:
      study, missing (ids of cells that are not there), warnings, provenance, cells (without
      verdicts, curves and schedules), problems (rows and distinct ones by task, set and level,
      where known), means (by task, set, decoding, variant and budget), failures and costs (by task
      and variant), comparisons, decoding; and difficulty, ablation, convergence and curriculum if
      the study shows them.
    """
    counts: dict[str, Any] = {}
    for (task, name), found in known.problems.items():
        if any(cell.task == task and found.are_of(cell, name) for cell in cells.values()):
            counts.setdefault(task, {})[name] = dict(found.counts)
    grid = Grid(study, cells)
    results: dict[str, Any] = {
        "study": _of_study(study),
        "missing": [id_ for id_ in study.cell_ids() if id_ not in cells],
        "provenance": _provenance(cells.values()),
        "cells": {id_: _without(vars(cell), _LONG) for id_, cell in cells.items()},
        "problems": counts,
        "means": {task.id: _means(grid, task) for task in study.tasks},
        "failures": {task.id: failure_rates(grid, task) for task in study.tasks},
        "costs": {task.id: _costs(grid, task, known) for task in study.tasks},
        "comparisons": effects.comparisons(grid),
        "decoding": effects.decoding(grid),
    }
    results["warnings"] = list(_warnings(study, results))
    for view, make in (
        ("difficulty", effects.difficulty),
        ("ablation", effects.ablation),
        ("convergence", curves.convergence),
        ("curriculum", curves.schedules),
        ("contrasts", effects.contrasts),
    ):
        if view in study.views:
            results[view] = make(grid)
    # Through JSON: what is drawn is what the file says.
    return json.loads(json.dumps(rounded(results, _DIGITS), allow_nan=False))


def _of_study(study: Study) -> dict[str, Any]:
    """What was compared, without how it was run."""
    sweep = lambda one: one and {k: getattr(one, k) for k in ("key", "label", "values", "default")}
    same = ("name", "seeds", "views", "references", "focus", "size")
    return {
        **{key: getattr(study, key) for key in same},
        "title": study.heading,
        "parts": PARTS if "ablation" in study.views else (),
        "tasks": [{k: getattr(task, k) for k in _OF_TASK} for task in study.tasks],
        "arms": [
            {
                "id": arm.id,
                "label": arm.label,
                "marks": [arm.mark] if arm.mark else [],
                "parts": arm.parts,
                "accounting": ACCOUNTING[arm.accounting] if arm.votes else "",
                "sweep": sweep(arm.sweep),
            }
            for arm in study.arms
        ],
        "sweep": sweep(study.sweep),
        "contrasts": [[name, *pair] for name, pair in study.contrasts.items()],
    }


def without_times(results: Any) -> Any:
    """Results without what took how long, and when: equal for equal runs."""
    return _without(results, _OF_THE_MACHINE)


def _without(value: Any, names: Collection[str]) -> Any:
    """A value without the fields of these names, and without records about an axis of them."""
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    if isinstance(value, list):
        named = lambda one: isinstance(one, dict) and one.get("axis") in names
        return [_without(one, names) for one in value if not named(one)]
    return value


def as_text(results: Mapping[str, Any]) -> str:
    """JSON with a line for each cell, comparison and the like: small, and easy to diff."""
    kept: Any = {"sort_keys": True, "allow_nan": False, "ensure_ascii": False}
    dump = lambda value: json.dumps(value, separators=(",", ":"), **kept)
    parts = []
    for key, value in sorted(results.items()):
        text = dump(value)
        if isinstance(value, dict) and value:
            lines = (f"  {dump(name)}: {dump(item)}" for name, item in sorted(value.items()))
            text = "{\n" + ",\n".join(lines) + "\n }"
        elif isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {dump(item)}" for item in value) + "\n ]"
        parts.append(f" {dump(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _means(grid: Grid, task: Task) -> dict[str, Any]:
    """Numbers over seeds, by set, decoding, variant and budget."""
    found: dict[str, Any] = {}
    for variant in grid.variants(task.id):
        evaluated = dict.fromkeys(
            (name, mode, budget)
            for cell in grid.of(task.id, variant)
            for name, modes in cell.sets.items()
            for mode, budgets in modes.items()
            for budget in (*budgets, MEAN)
        )
        for name, mode, budget in evaluated:
            where = Setting(task.id, name, budget, mode=mode)
            numbers = {key: grid.estimate(variant, where, key) for key in NUMBERS}
            shown = {key: vars(estimate) for key, estimate in numbers.items() if estimate}
            if shown:
                by_mode = found.setdefault(name, {}).setdefault(mode, {})
                by_mode.setdefault(variant.key, {})[budget] = shown
    return found


def _costs(grid: Grid, task: Task, known: Configured) -> dict[str, Any]:
    """What runs took, by variant, how they trained, and where they depart from publications."""
    found: dict[str, Any] = {}
    for variant in grid.variants(task.id):
        cells = grid.of(task.id, variant)
        how: dict[str, Any] = {}
        if settings := known.settings.get((task.id, variant.key)):
            updates = [cell.steps * settings["train.minibatches"] for cell in cells]
            how = {"updates": vars(mean_interval(updates)), "settings": dict(settings)}
        found[variant.key] = {
            **how,
            "runs": len(cells),
            **{key: vars(mean_interval([getattr(c, key) for c in cells])) for key in COSTS},
            "departures": list(dict.fromkeys(line for cell in cells for line in cell.departures)),
        }
    return found


def _provenance(cells: Collection[Cell]) -> dict[str, list[str]]:
    """Every commit, set of versions, machine and date that occurs, and how many cells have it."""
    joined = lambda versions: ", ".join(f"{key} {text}" for key, text in sorted(versions.items()))
    text = lambda value: joined(value) if isinstance(value, dict) else str(value)
    found = {
        key: collections.Counter(text(cell.provenance.get(key, "unknown")) for cell in cells)
        for key in ("commit", "versions", "machine", "date")
    }
    ends = sorted(found.pop("date"))
    lines = {key: [f"{said} ({n} cells)" for said, n in c.items()] for key, c in found.items()}
    return {**lines, "date": ends if len(ends) < 2 else [f"{ends[0]} to {ends[-1]}"]}


def _warnings(study: Study, results: Mapping[str, Any]) -> Iterator[str]:
    """What is to be known before a number is read."""
    if missing := len(results["missing"]):
        yield (
            f"{missing} of {missing + len(results['cells'])} cells are missing: what is shown of a "
            "method is over the seeds that it has, and not over the same for all"
        )
    if len(study.seeds) == 1:
        yield (
            "one seed: intervals and tests are over problems only, and say nothing about other "
            "trainings"
        )
    elif len(study.seeds) == 2:
        yield "two seeds: intervals are wide, and their 95 % only roughly right"
    for task, sets in results["problems"].items():
        for name, entry in sets.items():
            if entry["distinct_problems"] < entry["rows"]:
                yield (
                    f"{study.task(task).label}: {entry['rows']:,} rows of {name} are "
                    f"{entry['distinct_problems']:,} distinct problems, and tests take rows for "
                    "problems"
                )
    words = {"commit": "commits", "versions": "sets of versions", "machine": "machines"}
    for key, word in words.items():
        found = results["provenance"][key]
        if len(found) > 1:
            yield f"cells come from {len(found)} {word}: {'; '.join(found)}"


_STYLE = """
figure { margin: 1.2rem 0; } figcaption { color: var(--soft); font-size: .87rem; }
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
    figures: Sequence[tuple[Drawn, Path, Path]],
) -> str:
    """study.html: everything a study found, in one file that needs no other."""
    pictures = [(drawn, base64.b64encode(png.read_bytes()).decode()) for drawn, png, _ in figures]
    return _render(
        "study.html",
        title=study.heading,
        study=study,
        results=results,
        verdict=list(_verdict(results, study)),
        tables=tables,
        pictures=pictures,
        provenance=[f"{k}: {'; '.join(v)}" for k, v in sorted(results["provenance"].items())],
        **security(f"{STYLE}\n{_STYLE}"),
    )


def _verdict(results: Mapping[str, Any], study: Study) -> Iterator[str]:
    """Which arm leads each task at its smallest and largest budget and on average, and by what."""
    pairs = dict[tuple[str, ...], Any]()
    for entry in results["comparisons"]:
        pairs.setdefault(tuple(entry[k] for k in ("task", "set", "budget", "variant")), entry)
    names = row_names(study)
    for task in study.tasks:
        for budget in (str(min(task.budgets)), str(max(task.budgets)), MEAN):
            found = {
                variant.key: estimate["mean"]
                for variant in study.variants()
                if (estimate := estimate_of(results, task, task.main, variant, budget))
            }
            if found:
                best = max(found, key=lambda key: found[key])
                line = f"{task.label}, {budget_phrase(budget)}: {names[best]} leads with "
                line += f"{100 * found[best]:.1f} %"
                if entry := pairs.get((task.id, task.main, budget, best)):
                    line += f", {difference_text(entry)} points from {names[entry['reference']]}"
                yield line
