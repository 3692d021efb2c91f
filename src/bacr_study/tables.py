"""The tables of a study, from its results.json."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.documents import write_atomically
from bacr_jax.report.table import NONE, Item, Shown, Table
from bacr_study.analyses import (
    ablation_tables,
    contrast_tables,
    convergence_tables,
    difficulty_tables,
    sweep_tables,
)
from bacr_study.info import MEAN, StudyInfo, Task
from bacr_study.items import (
    Results,
    accuracy_item,
    budget_heading,
    difference_item,
    differs_by_mode,
    estimate_of,
    interval_item,
    marks_caption,
    p_item,
    ranked,
    row_name,
    row_names,
    significance_marks,
    tokens_item,
    what_is_shown,
)

_FAMILIES = {
    "accuracy": "",
    "anytime": ", mean over budgets",
    "hard": ", harder problems",
    "sensitivity": ", by swept value",
}


def write_table(folder: Path, table: Table) -> list[Path]:
    """Writes a table as Markdown, LaTeX and CSV; the files."""
    texts = {"md": table.markdown(), "tex": table.latex(), "csv": table.csv()}
    files = [folder / f"{table.name}.{ending}" for ending in texts]
    for file, text in zip(files, texts.values()):
        write_atomically(file, text)
    return files


def tables_of(results: Results, study: StudyInfo) -> list[Table]:
    """Every table that the study shows, in the order of its page."""
    makers: Mapping[str, Callable[[Results, StudyInfo], Iterator[Table]]] = {
        "accuracy": accuracy_tables,
        "hard": hard_tables,
        "ablation": ablation_tables,
        "scale": sweep_tables,
        "sensitivity": sweep_tables,
        "difficulty": difficulty_tables,
        "convergence": convergence_tables,
        "contrasts": contrast_tables,
    }
    made = dict.fromkeys(makers[view] for view in study.views if view in makers)
    first, *rest = [list(make(results, study)) for make in made] or [[]]
    return [
        *first,
        # Beside the numbers, since it says what else they may come from.
        *arm_tables(results, study),
        *itertools.chain(*rest),
        *difference_tables(results, study),
        *decoding_tables(results, study),
        cost_table(results, study),
    ]


def _accuracies(
    results: Results, study: StudyInfo, view: str, task: Task, budgets: Sequence[str]
) -> list[list[Item]]:
    """A column for each budget: accuracies on the set of a view, ranked and marked."""
    columns = []
    name = task.hard if view == "hard" else task.main
    for budget in budgets:
        family = "anytime" if budget == MEAN else view
        column = []
        for variant in study.variants():
            found = estimate_of(results, task, name, variant, budget) or {}
            marks = significance_marks(results, study, family, task, variant, budget)
            column.append(accuracy_item(found.get("accuracy"), marks))
        columns.append(ranked(column))
    return columns


def accuracy_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """Table 1 of the paper: arm by task and budget."""
    columns: list[list[Item]] = [[row_name(study, variant) for variant in study.variants()]]
    header, groups = ["method"], [("", 1)]
    for task in study.tasks:
        budgets = [*map(str, task.budgets), MEAN]
        columns += _accuracies(results, study, "accuracy", task, budgets)
        header += map(budget_heading, budgets)
        groups.append((task.label, len(budgets)))
    yield Table(
        "Accuracy by budget",
        header,
        list(zip(*columns)),
        groups=groups,
        caption=f"{what_is_shown(study)} Budgets in thinking tokens; mean: over all budgets. "
        f"Best in bold, second underlined.{marks_caption(study)}",
        name="accuracy",
    )


def hard_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """Table 2 of the paper: harder problems, with the tokens used at the largest budget."""
    variants = study.variants()
    columns: list[list[Item]] = [[row_name(study, variant) for variant in variants]]
    header, groups = ["method"], [("", 1)]
    for task in (task for task in study.tasks if task.hard):
        budgets = list(map(str, task.budgets))
        columns += _accuracies(results, study, "hard", task, budgets)
        found = [estimate_of(results, task, task.hard, v, budgets[-1]) for v in variants]
        for key in ("mean_thinking_tokens", "mean_total_tokens"):
            columns.append([tokens_item((entry or {}).get(key)) for entry in found])
        header += [*map(budget_heading, budgets), "thinking tok", "total tok"]
        groups.append((task.label, len(budgets) + 2))
    yield Table(
        "Harder problems than any trained on",
        header,
        list(zip(*columns)),
        groups=groups,
        caption=f"{what_is_shown(study)} Tokens are means at the largest budget; total counts "
        "thinking, forced tokens and answer. Best accuracy in bold, second underlined."
        f"{marks_caption(study)}",
        name="hard",
    )


def difference_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """Every paired comparison with its p-values, a table for each reference arm."""
    labels = row_names(study)
    tasks = {task.id: task.label for task in study.tasks}
    by_reference: dict[str, list[Mapping[str, Any]]] = {}
    arms = {variant.key: variant.arm for variant in study.variants()}
    for entry in results["comparisons"]:
        by_reference.setdefault(arms[entry["reference"]], []).append(entry)
    for reference, entries in by_reference.items():
        rows = [
            [
                labels[e["variant"]],
                f"{tasks[e['task']]}{_FAMILIES[e['view']]}",
                budget_heading(e["budget"]),
                difference_item(e),
                interval_item(e["seed_low"], e["seed_high"]),
                p_item(e["p"]),
                p_item(e["p_holm"]),
                str(e["tests"]),
                f"{e['seeds']} × {e['problems']:,}",
            ]
            for e in entries
        ]
        header = ["method", "task", "budget", "points", "one new seed"]
        header += ["p", "Holm p", "tests", "seeds × problems"]
        yield Table(
            f"Differences from {study.arm(reference).name}",
            header,
            rows,
            words=2,
            caption="Percentage points, paired by seed and problem, with 95 % intervals "
            "(crossed random effects of seeds and problems, Satterthwaite's degrees of "
            "freedom). One new seed: 95 % prediction interval of the difference that one more "
            "seed would have on these problems. Holm p: corrected for the tests of the family. "
            "One problem: only means over problems are known.",
            name=f"differences_{reference}",
        )


def arm_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """What arms differ in besides their method: updates, entropy bonus, rate and tokens.

    None where no config is known.
    """
    costs = results["costs"]
    known = [task for task in study.tasks if any("updates" in c for c in costs[task.id].values())]
    rows: list[list[Item]] = []
    for variant in study.variants() if known else ():
        row: list[Item] = [row_name(study, variant)]
        for task in known:
            row += _arm_items(costs[task.id].get(variant.key, {}))
        rows.append(row)
    if not rows:
        return
    yield Table(
        "How the arms were trained",
        ["method", *["updates", "entropy coefficient", "learning rate", "tokens"] * len(known)],
        rows,
        groups=[("", 1), *[(task.label, 4) for task in known]],
        caption="Updates: steps × train.minibatches, mean over seeds, without warm-up. Entropy "
        "coefficient: loss.entropy_coef. Tokens: generated in training, mean over seeds. Equal "
        "tokens are not equal updates: the fewer tokens a method's step takes, the more steps "
        "it makes.",
        name="arms",
    )


def _arm_items(cost: Mapping[str, Any]) -> list[Item]:
    """Four items of a row; dashes for what an arm that is not trained does not have."""
    if "updates" not in cost or cost["updates"]["mean"] == 0:
        return [NONE] * 4
    values = [cost["updates"]["mean"]]
    values += [cost["settings"][key] for key in ("loss.entropy_coef", "optimizer.learning_rate")]
    values.append(cost["generated_tokens"]["mean"])
    forms = ("{:,.0f}", "{:g}", "{:g}", "{:,.0f}")
    return [Shown(form.format(value), (value,)) for form, value in zip(forms, values)]


def decoding_tables(results: Results, study: StudyInfo) -> Iterator[Table]:
    """Differences from the references that are others greedily than sampled; none: all agree."""
    labels = row_names(study)
    rows = [
        [
            labels[e["variant"]],
            labels[e["reference"]],
            study.task(e["task"]).label,
            budget_heading(e["budget"]),
            difference_item(e["sampled"]),
            difference_item(e["greedy"]),
            difference_item(e["change"]),
        ]
        for e in results["decoding"]
        if differs_by_mode(e)
    ]
    if not rows:
        return
    header = ["method", "less", "task", "budget", "sampled", "greedy", "greedy less sampled"]
    yield Table(
        "Where greedy decoding says something else than sampling",
        header,
        rows,
        words=3,
        caption=f"{len(rows)} of {len(results['decoding'])} differences of two arms, in "
        "percentage points, paired by seed and problem, with 95 % intervals, not corrected for "
        "their number (about 5 % would be here by chance alone). Here are those whose two "
        "forms are apart by more than the interval of their difference, and those with the "
        "opposite sign, each by more than its interval. Read a row as: by so much is the "
        "method ahead of the other if answers are sampled, by so much if they are greedy; a "
        "claim that holds in one column alone is one about that decoding.",
        name="decoding",
    )


def cost_table(results: Results, study: StudyInfo) -> Table:
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
    return Table(
        "What the runs took",
        ["method", "task", "departs from its publication", "runs"]
        + ["steps", "generated tokens", "seconds"],
        rows,
        words=3,
        caption="Means over runs. Seconds: of training, on the run's share of the machine; the "
        "warm-up, which the runs of a seed and a task share, counts in the one that made it.",
        name="costs",
    )
