"""Tables of a study's analyses: ablations, swept values, levels, times to an accuracy."""

from collections.abc import Iterator, Mapping
from typing import Any

from bacr_jax.report.table import NONE, Item, Shown, Table
from bacr_study.curves import AXES
from bacr_study.figures import CONTRASTS
from bacr_study.info import StudyInfo, Sweep, Task, Variant
from bacr_study.items import (
    Results,
    accuracy_column,
    accuracy_item,
    budget_heading,
    budget_phrase,
    difference_item,
    p_item,
    p_text,
    ranked,
    row_name,
    what_is_shown,
)


def ablation_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """Table 3 of the paper, and what each part does: a pair of tables for each task."""
    for task in study.tasks:
        by_budget = results["ablation"].get(task.id, {})
        columns: list[list[Item]] = []
        for budget in study.focus_budgets(task):
            rows = by_budget.get(budget, {}).get("rows", {})
            variants = [Variant(arm.id) for arm in study.arms]
            columns.append(ranked(accuracy_column(results, task, variants, budget)))
            columns.append([difference_item(rows.get(arm.id)) for arm in study.arms])
        checks = [
            [*["✓" if p in arm.parts else "" for p in study.parts], ", ".join(arm.marks)]
            for arm in study.arms
        ]
        groups = [(budget_phrase(b), 2) for b in study.focus_budgets(task)]
        yield Table(
            f"Ablation: {task.label}",
            [*study.parts, "marks", *["accuracy", "Δ"] * len(groups)],
            [[*check, *items] for check, items in zip(checks, zip(*columns))],
            groups=[("", len(study.parts) + 1), *groups],
            words=len(study.parts) + 1,
            caption=f"{what_is_shown(study)} Δ: percentage points from the row without any "
            "part, with the 95 % interval over seeds and problems.",
            name=f"ablation_{task.id}",
        )
        yield _effects_table(by_budget, study, task)


def _effects_table(by_budget: Results, study: StudyInfo, task: Task) -> Table:
    budgets = study.focus_budgets(task)
    effects = {
        budget: {(e["kind"], e["part"]): e for e in by_budget.get(budget, {}).get("effects", [])}
        for budget in budgets
    }
    rows: list[list[Item]] = []
    for kind, part in dict.fromkeys(key for found in effects.values() for key in found):
        items: list[Item] = []
        for budget in budgets:
            entry = effects[budget].get((kind, part))
            items += [difference_item(entry), p_text(entry["p"]) if entry else NONE]
        rows.append([kind, part or "all", *items])
    return Table(
        f"What each part adds: {task.label}",
        ["effect", "part", *["points", "p"] * len(budgets)],
        rows,
        groups=[("", 2), *[(budget_phrase(b), 2) for b in budgets]],
        words=2,
        caption="Percentage points with 95 % intervals over seeds and problems, p not corrected. "
        "Main effect: mean over all combinations of the other parts. Alone: against no part at "
        "all, or on top of the part named. Joint: all parts together. Surplus: joint less the sum "
        "of those alone; above 0 if parts help each other.",
        name=f"effects_{task.id}",
    )


def sweep_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """Table 4 of the paper, and the numbers of Fig. 5: arm by swept value."""
    for task in study.tasks:
        for sweep, arms in study.sweeps().items():
            rows: list[list[Item]] = []
            rules = []
            for budget in study.focus_budgets(task):
                named = budget_phrase(budget)
                columns = []
                for value in sweep.values:
                    variants = [Variant(arm.id, value) for arm in arms]
                    columns.append(ranked(accuracy_column(results, task, variants, budget)))
                for arm, items in zip(arms, zip(*columns)):
                    rows.append([named, row_name(study, Variant(arm.id)), *items])
                for entries, label in _sweep_differences(results, study, task, budget, sweep):
                    rows.append(
                        [named, label, *[difference_item(entries.get(v)) for v in sweep.values]]
                    )
                rules.append(len(rows) - 1)
            yield Table(
                f"{sweep.label}: {task.label}",
                ["budget", "method", *map(str, sweep.values)],
                rows,
                groups=[("", 2), (sweep.label, len(sweep.values))],
                words=2,
                caption=f"{what_is_shown(study)} Δ: percentage points, paired by seed and "
                "problem, with 95 % intervals.",
                rules=rules,
                name=f"sweep_{task.id}_{sweep.file_name}",
            )


def _sweep_differences(
    results: Results, study: StudyInfo, task: Task, budget: str, sweep: Sweep
) -> list[tuple[dict[Any, Mapping[str, Any]], str]]:
    """Rows of differences by value: from the reference arms, or from the default value."""
    entries = {
        (e["variant"], e["reference"]): e
        for e in results["comparisons"]
        if e["task"] == task.id and e["budget"] == budget and e["set"] == task.main
    }
    rows = []
    for arm in study.sweeps()[sweep]:
        for name, label in [
            *((other, f"Δ {arm.name} − {study.arm(other).name}") for other in study.references),
            (None, f"Δ {arm.name}, from {sweep.default}"),
        ]:
            found = {}
            for value in sweep.values:
                other = Variant(name, value) if name else Variant(arm.id, sweep.default)
                entry = entries.get((Variant(arm.id, value).key, other.key))
                if entry is not None:
                    found[value] = entry
            if found:
                rows.append((found, label))
    return rows


def difficulty_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """Fig. 4b of the paper as numbers: differences from the reference arm, level by level."""
    for task in study.tasks:
        for budget, by_variant in results["difficulty"].get(task.id, {}).items():
            levels = list(dict.fromkeys(level for found in by_variant.values() for level in found))
            counts = {k: e["problems"] for found in by_variant.values() for k, e in found.items()}
            rows: list[list[Item]] = []
            for variant in study.variants():
                found = by_variant.get(variant.key, {})
                items: list[Item] = []
                for level in levels:
                    entry = found.get(level)
                    items.append(accuracy_item(entry["accuracy"]) if entry else NONE)
                    items.append(difference_item(entry["difference"]) if entry else NONE)
                rows.append([row_name(study, variant), *items])
            reference = study.arm(study.references[0]).name if study.references else "none"
            yield Table(
                f"Accuracy by level: {task.label}, {budget_phrase(budget)}",
                ["method", *["accuracy", "Δ"] * len(levels)],
                rows,
                groups=[("", 1), *[(f"level {k} ({counts[k]} problems)", 2) for k in levels]],
                caption=f"{what_is_shown(study)} Δ: percentage points from {reference}, paired "
                "by seed and problem, with 95 % intervals; not corrected for their number.",
                name=f"difficulty_{task.id}_{budget}",
            )


def convergence_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """Time until held-out accuracy reaches a share of the reference arm's gain."""
    for task in study.tasks:
        records = results["convergence"].get(task.id, {}).get("thresholds", [])
        by = {(r["variant"], r["share"], r["axis"]): r for r in records}
        shares = list(dict.fromkeys(r["share"] for r in records))
        rows: list[list[Item]] = []
        for share in shares:
            for variant in study.variants():
                found = [by.get((variant.key, share, axis)) for axis in AXES]
                if any(found):
                    items = [item for record in found for item in _time_items(record)]
                    first = next(record for record in found if record)
                    name = row_name(study, variant)
                    reached = f"{first['reached']} of {first['seeds']}"
                    level = f"{100 * first['level']:.1f} % ({share:.0%} of the gain)"
                    rows.append([level, name, reached, *items])
        if rows:
            reference = study.arm(study.references[0]).name
            yield Table(
                f"Time to a held-out accuracy: {task.label}",
                ["level", "method", "seeds", *["time", "ratio"] * len(AXES)],
                rows,
                groups=[("", 3), *[(axis if axis != "step" else "steps", 2) for axis in AXES]],
                words=2,
                caption=f"Levels: shares of what {reference} gains in mean held-out accuracy. "
                "Time: mean ± half the 95 % t interval over seeds, where every seed reaches "
                f"the level. Ratio: to {reference}, geometric mean over seeds with its "
                "interval; below 1 is faster.",
                name=f"convergence_{task.id}",
            )


def _time_items(record: Mapping[str, Any] | None) -> list[Item]:
    if record is None or record["time"] is None:
        return [NONE, NONE]
    time, ratio = record["time"], record["ratio"]
    digits = 1 if time["mean"] < 100 else 0
    half = "" if time["low"] is None else f" ± {(time['high'] - time['low']) / 2:,.{digits}f}"
    shown = Shown(f"{time['mean']:,.{digits}f}{half}", (time["mean"], time["low"], time["high"]))
    if ratio is None:
        return [shown, NONE]
    numbers = (ratio["mean"], ratio["low"], ratio["high"])
    ends = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return [shown, Shown(f"{ratio['mean']:.2f}{ends}", numbers)]


def contrast_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """A row for each pair, with its difference and Holm's p at each budget in focus."""
    found = {(e["name"], e["task"], e["budget"]): e for e in results["contrasts"]}
    places = [(task, budget) for task in study.tasks for budget in study.focus_budgets(task)]
    rows: list[list[Item]] = []
    for name, of, less in study.contrasts:
        row: list[Item] = [name, of, less]
        for task, budget in places:
            entry = found.get((name, task.id, budget))
            row += [difference_item(entry), p_item(entry["p_holm"]) if entry else ""]
        rows.append(row)
    heads = [text for _, budget in places for text in (budget_heading(budget), "Holm p")]
    tests = results["contrasts"][0]["tests"] if results["contrasts"] else 0
    yield Table(
        CONTRASTS,
        ["pair", "arm", "less", *heads],
        rows,
        words=3,
        name="contrasts",
        caption="Percentage points, paired by seed and problem, with 95 % intervals (crossed "
        f"random effects of seeds and problems); Holm p: over these {tests} tests.",
    )
