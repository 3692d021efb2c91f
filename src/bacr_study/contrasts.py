"""Differences of named pairs of arms, which a study's file writes down beside what they will mean.

A study that asks a few questions tests those alone: Holm's correction is over them, and not over
all pairs that its arms make.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bacr_jax.report.charts import Axis, Chart, Mark, Series
from bacr_jax.report.table import Item, Shown, Table
from bacr_study.drawing import Drawn
from bacr_study.grid import Grid, Setting
from bacr_study.info import StudyInfo, Variant
from bacr_study.items import Results, budget_heading, budget_phrase, difference_item, p_text
from bacr_study.statistics import holm

TITLE = "Pairs that the study asks about"


def contrasts(grid: Grid) -> list[dict[str, Any]]:
    """Paired differences of the study's pairs at the budgets in focus and on their mean.

    Args:
      grid: the cells; a pair that lacks an arm is left out.

    Returns:
      Entries with name, of, less, task, budget, the fields of `Contrast`, `p_holm` over all of
      them, and their number.
    """
    entries: list[dict[str, Any]] = []
    for task in grid.study.tasks:
        for budget in grid.study.focus_budgets(task):
            where = Setting(task.id, task.main, budget)
            for name, of, less in grid.study.contrasts:
                found = grid.contrast({Variant(of): 1.0, Variant(less): -1.0}, where)
                if found is not None:
                    pair = {"name": name, "of": of, "less": less}
                    entries.append({**pair, "task": task.id, "budget": budget, **asdict(found)})
    adjusted = holm([entry["p"] for entry in entries])
    return [{**entry, "p_holm": p, "tests": len(entries)} for entry, p in zip(entries, adjusted)]


def _found(results: Results) -> dict[tuple[str, str, str], Any]:
    return {(e["name"], e["task"], e["budget"]): e for e in results["contrasts"]}


def contrast_tables(results: Results, study: StudyInfo) -> list[Table]:
    """A row for each pair, with its difference and Holm's p at each budget in focus."""
    found = _found(results)
    places = [(task, budget) for task in study.tasks for budget in study.focus_budgets(task)]
    rows: list[list[Item]] = []
    for name, of, less in study.contrasts:
        row: list[Item] = [name, of, less]
        for task, budget in places:
            entry = found.get((name, task.id, budget))
            p = Shown(p_text(entry["p_holm"]), (entry["p_holm"],)) if entry else ""
            row += [difference_item(entry), p]
        rows.append(row)
    heads = [text for _, budget in places for text in (budget_heading(budget), "Holm p")]
    tests = results["contrasts"][0]["tests"] if results["contrasts"] else 0
    return [
        Table(
            TITLE,
            ["pair", "arm", "less", *heads],
            rows,
            words=3,
            name="contrasts",
            caption="Percentage points, paired by seed and problem, with 95 % intervals (crossed "
            f"random effects of seeds and problems); Holm p: over these {tests} tests.",
        )
    ]


def contrast_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """The same as a picture: a row for each pair, a panel for each budget in focus."""
    found, names = _found(results), [name for name, *_ in study.contrasts]
    ticks = [(-float(row), name) for row, name in enumerate(names)]
    y = Axis("", low=0.5 - len(names), high=0.5, ticks=ticks)
    for task in study.tasks:
        charts = []
        for budget in study.focus_budgets(task):
            entries = [(at, found.get((name, task.id, budget))) for at, name in ticks]
            known = [(at, entry) for at, entry in entries if entry is not None]
            charts.append(
                Chart(
                    f"{task.label}, {budget_phrase(budget)}",
                    [
                        _differences([p for p in known if _holds_0(p[1])], "s0"),
                        _differences([p for p in known if not _holds_0(p[1])], "s1"),
                    ],
                    Axis("percentage points"),
                    y,
                    marks=[Mark("x", 0.0)],
                )
            )
        caption = (
            "Percentage points with 95 % intervals over seeds and problems; grey: the interval "
            "holds 0."
        )
        yield Drawn(f"contrasts_{task.id}", TITLE, caption, [charts])


def _holds_0(entry: dict[str, Any]) -> bool:
    return bool(entry["low"] <= 0 <= entry["high"])


def _differences(entries: list[tuple[float, dict[str, Any]]], colour: str) -> Series:
    return Series(
        "",
        [100 * entry["difference"] for _, entry in entries],
        [at for at, _ in entries],
        colour,
        [(100 * entry["low"], 100 * entry["high"]) for _, entry in entries],
        across=True,
        line="",
        marker="o",
    )
