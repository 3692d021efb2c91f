"""The tables of a study, from its results.json."""

from collections.abc import Callable, Mapping
from typing import Any

from bacr_jax.study.analyses import (
    ablation_tables,
    convergence_tables,
    difficulty_tables,
    sweep_tables,
)
from bacr_jax.study.info import MEAN, StudyInfo, Task, Variant, study_of
from bacr_jax.study.items import (
    Results,
    accuracy_item,
    budget_heading,
    difference_item,
    estimate_of,
    marks_caption,
    p_text,
    ranked,
    row_name,
    significance_marks,
    tokens_item,
    what_is_shown,
)
from bacr_jax.study.typeset import Item, Shown, StudyTable

_FAMILIES = {
    "accuracy": "",
    "anytime": ", mean over budgets",
    "hard": ", harder problems",
    "sensitivity": ", by swept value",
}


def tables_of(results: Results) -> list[StudyTable]:
    """Every table that the study shows, in the order of its page.

    Args:
      results: results.json.
    """
    study = study_of(results["study"])
    makers: Mapping[str, Callable[[Results, StudyInfo], list[StudyTable]]] = {
        "accuracy": accuracy_tables,
        "hard": hard_tables,
        "ablation": ablation_tables,
        "scale": sweep_tables,
        "sensitivity": sweep_tables,
        "difficulty": difficulty_tables,
        "convergence": convergence_tables,
    }
    tables: list[StudyTable] = []
    for make in dict.fromkeys(makers[view] for view in study.views if view in makers):
        tables += make(results, study)
    return [*tables, *difference_tables(results, study), cost_table(results, study)]


def accuracy_tables(results: Results, study: StudyInfo) -> list[StudyTable]:
    """Table 1 of the paper: arm by task and budget."""
    columns, variants = list[list[Item]](), study.variants()
    budgets_of = lambda task: [*map(str, task.budgets), MEAN]
    for task in study.tasks:
        for budget in budgets_of(task):
            column: list[Item] = []
            view = "anytime" if budget == MEAN else "accuracy"
            for variant in variants:
                found = estimate_of(results, study, task, task.main, variant, budget)
                marks = significance_marks(results, study, view, task, variant, budget)
                column.append(accuracy_item(found["accuracy"] if found else None, marks))
            columns.append(ranked(column))
    names: list[Item] = [row_name(study, variant) for variant in variants]
    caption = (
        f"{what_is_shown(study)} Budgets in thinking tokens; mean: over all budgets. Best in "
        f"bold, second underlined.{marks_caption(study)}"
    )
    return [
        StudyTable(
            "accuracy",
            "Accuracy by budget",
            ["method", *[budget_heading(b) for task in study.tasks for b in budgets_of(task)]],
            list(zip(names, *columns)),
            [("", 1), *[(task.label, len(budgets_of(task))) for task in study.tasks]],
            caption=caption,
        )
    ]


def hard_tables(results: Results, study: StudyInfo) -> list[StudyTable]:
    """Table 2 of the paper: harder problems, with the tokens used at the largest budget."""
    tasks = [task for task in study.tasks if task.hard]
    columns, variants, header = list[list[Item]](), study.variants(), list[str]()
    groups: list[tuple[str, int]] = [("", 1)]
    for task in tasks:
        budgets = list(map(str, task.budgets))
        header += [*map(budget_heading, budgets), "thinking tok", "total tok"]
        groups.append((task.label, len(budgets) + 2))
        for budget in budgets:
            column = [
                accuracy_item(
                    _hard(results, study, task, variant, budget, "accuracy"),
                    significance_marks(results, study, "hard", task, variant, budget),
                )
                for variant in variants
            ]
            columns.append(ranked(column))
        for key in ("mean_thinking_tokens", "mean_total_tokens"):
            columns.append(
                [tokens_item(_hard(results, study, task, v, budgets[-1], key)) for v in variants]
            )
    names: list[Item] = [row_name(study, variant) for variant in variants]
    caption = (
        f"{what_is_shown(study)} Tokens are means at the largest budget; total counts "
        "thinking, forced tokens and answer. Best accuracy in bold, second underlined."
        f"{marks_caption(study)}"
    )
    return [
        StudyTable(
            "hard",
            "Harder problems than any trained on",
            ["method", *header],
            list(zip(names, *columns)),
            groups,
            caption=caption,
        )
    ]


def _hard(
    results: Results, study: StudyInfo, task: Task, variant: Variant, budget: str, key: str
) -> Mapping[str, Any] | None:
    return (estimate_of(results, study, task, task.hard, variant, budget) or {}).get(key)


def difference_tables(results: Results, study: StudyInfo) -> list[StudyTable]:
    """Every paired comparison with its p-values, a table for each reference arm."""
    labels = {variant.key: row_name(study, variant) for variant in study.variants()}
    tasks = {task.id: task.label for task in study.tasks}
    by_reference: dict[str, list[Mapping[str, Any]]] = {}
    arms = {variant.key: variant.arm for variant in study.variants()}
    for entry in results["comparisons"]:
        by_reference.setdefault(arms[entry["reference"]], []).append(entry)
    tables = []
    for reference, entries in by_reference.items():
        rows = [
            [
                labels[e["variant"]],
                f"{tasks[e['task']]}{_FAMILIES[e['view']]}",
                budget_heading(e["budget"]),
                difference_item(e),
                Shown(p_text(e["p"]), (e["p"],)),
                Shown(p_text(e["p_holm"]), (e["p_holm"],)),
                str(e["tests"]),
                f"{e['seeds']} × {e['problems']:,}",
            ]
            for e in entries
        ]
        header = ["method", "task", "budget", "points", "p", "Holm p", "tests", "seeds × problems"]
        tables.append(
            StudyTable(
                f"differences_{reference}",
                f"Differences from {study.arm(reference).name}",
                header,
                rows,
                words=2,
                caption="Percentage points, paired by seed and problem, with 95 % intervals "
                "(crossed random effects of seeds and problems, Satterthwaite's degrees of "
                "freedom). Holm p: corrected for the tests of the family. One problem: only "
                "means over problems are known.",
            )
        )
    return tables


def cost_table(results: Results, study: StudyInfo) -> StudyTable:
    """What the runs took."""
    rows: list[list[Item]] = []
    for task in study.tasks:
        for variant in study.variants():
            cost = results["costs"].get(task.id, {}).get(variant.key)
            if cost is None:
                continue
            numbers = [
                Shown(f"{cost[key]['mean']:,.0f}", (cost[key]["mean"],))
                for key in ("steps", "generated_tokens", "wall_seconds")
            ]
            departures = "; ".join(cost["departures"])
            rows.append(
                [row_name(study, variant), task.label, departures, str(cost["runs"]), *numbers]
            )
    return StudyTable(
        "costs",
        "What the runs took",
        ["method", "task", "departs from its publication", "runs"]
        + ["steps", "generated tokens", "seconds"],
        rows,
        words=3,
        caption="Means over runs. Seconds: of training, on the run's share of the machine; the "
        "warm-up, which the runs of a seed and a task share, counts in the one that made it.",
    )
