"""The tables of a study, from its results.json."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.documents import write_atomically
from bacr_jax.report.table import NONE, Item, Shown, Table, budget_name
from bacr_study import items
from bacr_study.cells import COSTS
from bacr_study.curves import AXES
from bacr_study.figures import CONTRASTS
from bacr_study.items import Results
from bacr_study.spec import MEAN, PARTS, Study, Sweep, Task, Variant

_FAMILIES = {
    "accuracy": "",
    "anytime": ", mean over budgets",
    "hard": ", harder problems",
    "sensitivity": ", by swept value",
}
_TOKENS = {"mean_thinking_tokens": "thinking tok", "mean_total_tokens": "total tok"}


def write_table(folder: Path, table: Table) -> list[Path]:
    """Writes a table as Markdown, LaTeX and CSV; the files."""
    texts = {"md": table.markdown(), "tex": table.latex(), "csv": table.csv()}
    files = [folder / f"{table.name}.{ending}" for ending in texts]
    for file, text in zip(files, texts.values()):
        write_atomically(file, text)
    return files


def tables_of(results: Results, study: Study) -> list[Table]:
    """Every table that the study shows, in the order of its page."""
    makers: Mapping[str, Callable[[Results, Study], Iterator[Table]]] = {
        "accuracy": accuracy_tables,
        "hard": functools.partial(accuracy_tables, hard=True),
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
        *failure_tables(results, study),
        # Beside the numbers, since it says what else they may come from.
        *arm_tables(results, study),
        *itertools.chain(*rest),
        *difference_tables(results, study),
        *decoding_tables(results, study),
        cost_table(results, study),
    ]


def accuracy_tables(results: Results, study: Study, *, hard: bool = False) -> Iterator[Table]:
    """Tables 1 and 2 of the paper: arm by task and budget; the `hard` one with the tokens used."""
    variants = study.variants()
    columns: list[list[Item]] = [[items.row_name(study, variant) for variant in variants]]
    header, groups = ["method"], [("", 1)]
    for task in study.tasks:
        name, budgets = task.hard if hard else task.main, list(map(str, task.budgets))
        shown = budgets if hard else [*budgets, MEAN]
        for budget in shown:
            family = "hard" if hard else "anytime" if budget == MEAN else "accuracy"
            column = []
            for variant in variants:
                marks = items.significance_marks(results, study, family, task, variant, budget)
                found = items.estimate_of(results, task, name, variant, budget)
                column.append(items.accuracy_item(found, marks))
            columns.append(items.ranked(column))
        failures = {} if hard else results["failures"][task.id]
        if failures:
            columns.append([items.failed_item(failures.get(v.key)) for v in variants])
        tokens = _TOKENS if hard else {}
        for key in tokens:
            used = [items.estimate_of(results, task, name, v, budgets[-1], key) for v in variants]
            columns.append(list(map(items.tokens_item, used)))
        header += [*map(budget_name, shown), *(["failed"] if failures else []), *tokens.values()]
        groups.append((task.label, len(shown) + bool(failures) + len(tokens)))
    what = "Budgets in thinking tokens; mean: over all budgets. "
    if not hard and any(results["failures"].values()):
        what += "Failed: runs that ended worse than they began (table of failed runs). "
    what += "Best"
    if hard:
        what = (
            "Tokens are means at the largest budget; total counts thinking, forced tokens and "
            "answer. Best accuracy"
        )
    yield Table(
        "Harder problems than any trained on" if hard else "Accuracy by budget",
        header,
        list(zip(*columns)),
        groups=groups,
        caption=f"{items.what_is_shown(study)} {what} in bold, second underlined."
        + items.marks_caption(study),
        name="hard" if hard else "accuracy",
    )


def failure_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields the table of failed runs of every arm, if the study counts any."""
    names, rows = items.row_names(study), list[list[Item]]()
    for task in study.tasks:
        for variant, rate in results["failures"][task.id].items():
            counts = [items.failed_item(rate), items.failure_share_item(rate)]
            rows.append([names[variant], task.label, *counts, items.loss_text(rate["worst"])])
    if not rows:
        return
    yield Table(
        "Failed runs",
        ["method", "task", "failed", "share that fails", "largest loss"],
        rows,
        words=2,
        caption="A run has failed if, for greedy answers at some budget, its accuracy is below the "
        f"95 % Wilson interval of the accuracy before training ({study.arm(study.before).name}), "
        "or less than 95 % of its answers are closed and this share is below the interval of the "
        "share before. Share: in %, with its 95 % Clopper-Pearson interval. Largest loss: the "
        "budget and run that lost most, accuracy in % before and after.",
        name="failures",
    )


def _ranked_accuracies(
    results: Results, task: Task, variants: Sequence[Variant], budget: str
) -> list[Item]:
    """A column of accuracies on the task's main set."""
    found = [items.estimate_of(results, task, task.main, variant, budget) for variant in variants]
    return items.ranked(list(map(items.accuracy_item, found)))


def ablation_tables(results: Results, study: Study) -> Iterator[Table]:
    """Table 3 of the paper, and what each part does: a pair of tables for each task."""
    for task in study.tasks:
        by_budget = results["ablation"][task.id]
        columns: list[list[Item]] = []
        for budget, found in by_budget.items():
            variants = [Variant(arm.id) for arm in study.arms]
            columns.append(_ranked_accuracies(results, task, variants, budget))
            columns.append([items.difference_item(found["rows"].get(arm.id)) for arm in study.arms])
        checks = [[*["✓" if p in arm.parts else "" for p in PARTS], arm.mark] for arm in study.arms]
        groups = [(items.budget_phrase(budget), 2) for budget in by_budget]
        yield Table(
            f"Ablation: {task.label}",
            [*PARTS, "marks", *["accuracy", "Δ"] * len(groups)],
            [[*check, *row] for check, row in zip(checks, zip(*columns))],
            groups=[("", len(PARTS) + 1), *groups],
            words=len(PARTS) + 1,
            caption=f"{items.what_is_shown(study)} Δ: percentage points from the row without any "
            "part, with the 95 % interval over seeds and problems.",
            name=f"ablation_{task.id}",
        )
        yield _effects_table(by_budget, task)


def _effects_table(by_budget: Results, task: Task) -> Table:
    effects = {
        budget: {(effect["kind"], effect["part"]): effect for effect in found["effects"]}
        for budget, found in by_budget.items()
    }
    rows: list[list[Item]] = []
    for kind, part in dict.fromkeys(key for found in effects.values() for key in found):
        row: list[Item] = [kind, part or "all"]
        for found in effects.values():
            entry = found.get((kind, part))
            row += [items.difference_item(entry), items.p_text(entry["p"]) if entry else NONE]
        rows.append(row)
    return Table(
        f"What each part adds: {task.label}",
        ["effect", "part", *["points", "p"] * len(effects)],
        rows,
        groups=[("", 2), *[(items.budget_phrase(budget), 2) for budget in effects]],
        words=2,
        caption="Percentage points with 95 % intervals over seeds and problems, p not corrected. "
        "Main effect: mean over all combinations of the other parts. Alone: against no part at "
        "all, or on top of the part named. Joint: all parts together. Surplus: joint less the sum "
        "of those alone; above 0 if parts help each other.",
        name=f"effects_{task.id}",
    )


def sweep_tables(results: Results, study: Study) -> Iterator[Table]:
    """Table 4 of the paper, and the numbers of Fig. 4: arm by swept value."""
    for task, (sweep, arms) in itertools.product(study.tasks, study.sweeps().items()):
        rows: list[list[Item]] = []
        rules = []
        for budget in study.focus_budgets(task):
            columns: list[list[Item]] = [[items.row_name(study, Variant(arm.id)) for arm in arms]]
            for value in sweep.values:
                variants = [Variant(arm.id, value) for arm in arms]
                columns.append(_ranked_accuracies(results, task, variants, budget))
            for row in (*zip(*columns), *_difference_rows(results, study, task, budget, sweep)):
                rows.append([items.budget_phrase(budget), *row])
            rules.append(len(rows) - 1)
        yield Table(
            f"{sweep.label}: {task.label}",
            ["budget", "method", *map(str, sweep.values)],
            rows,
            groups=[("", 2), (sweep.label, len(sweep.values))],
            words=2,
            caption=f"{items.what_is_shown(study)} Δ: percentage points, paired by seed and "
            "problem, with 95 % intervals.",
            rules=rules,
            name=f"sweep_{task.id}_{sweep.file_name}",
        )


def _difference_rows(
    results: Results, study: Study, task: Task, budget: str, sweep: Sweep
) -> Iterator[list[Item]]:
    """Differences by swept value: from the reference arms, or from the default value."""
    entries = {
        (e["variant"], e["reference"]): e
        for e in results["comparisons"]
        if e["task"] == task.id and e["budget"] == budget and e["set"] == task.main
    }
    for arm in study.sweeps()[sweep]:
        for other in (*study.references, None):
            found = []
            for value in sweep.values:
                less = Variant(other, value) if other else Variant(arm.id, sweep.default)
                found.append(entries.get((Variant(arm.id, value).key, less.key)))
            if any(found):
                of = f" − {study.arm(other).name}" if other else f", from {sweep.default}"
                yield [f"Δ {arm.name}{of}", *map(items.difference_item, found)]


def difficulty_tables(results: Results, study: Study) -> Iterator[Table]:
    """Fig. 3b of the paper as numbers: differences from the reference arm, level by level."""
    for task in study.tasks:
        for budget, by_variant in results["difficulty"].get(task.id, {}).items():
            counts = {k: e["problems"] for found in by_variant.values() for k, e in found.items()}
            rows: list[list[Item]] = []
            for variant in study.variants():
                row: list[Item] = [items.row_name(study, variant)]
                for level in counts:
                    entry = by_variant.get(variant.key, {}).get(level, {})
                    row.append(items.accuracy_item(entry.get("accuracy")))
                    row.append(items.difference_item(entry.get("difference")))
                rows.append(row)
            reference = study.arm(study.references[0]).name if study.references else "none"
            yield Table(
                f"Accuracy by level: {task.label}, {items.budget_phrase(budget)}",
                ["method", *["accuracy", "Δ"] * len(counts)],
                rows,
                groups=[("", 1), *[(f"level {k} ({n} problems)", 2) for k, n in counts.items()]],
                caption=f"{items.what_is_shown(study)} Δ: percentage points from {reference}, "
                "paired by seed and problem, with 95 % intervals; not corrected for their number.",
                name=f"difficulty_{task.id}_{budget}",
            )


def convergence_tables(results: Results, study: Study) -> Iterator[Table]:
    """Time until held-out accuracy reaches a share of the reference arm's gain."""
    names = items.row_names(study)
    for task in study.tasks:
        rows: dict[tuple[float, str], list[Item]] = {}
        for record in results["convergence"][task.id]["thresholds"]:
            level = f"{100 * record['level']:.1f} % ({record['share']:.0%} of the gain)"
            reached = f"{record['reached']} of {record['seeds']}"
            first: list[Item] = [level, names[record["variant"]], reached]
            rows.setdefault((record["share"], record["variant"]), first).extend(_times(record))
        if rows:
            reference = study.arm(study.references[0]).name
            yield Table(
                f"Time to a held-out accuracy: {task.label}",
                ["level", "method", "seeds", *["time", "ratio"] * len(AXES)],
                list(rows.values()),
                groups=[("", 3), *[(axis if axis != "step" else "steps", 2) for axis in AXES]],
                words=2,
                caption=f"Levels: shares of what {reference} gains in mean held-out accuracy. "
                "Time: mean ± half the 95 % t interval over seeds, where every seed reaches "
                f"the level. Ratio: to {reference}, geometric mean over seeds with its "
                "interval; below 1 is faster.",
                name=f"convergence_{task.id}",
            )


def _times(record: Mapping[str, Any]) -> list[Item]:
    time, ratio = record["time"], record["ratio"]
    shown = items.mean_item(time, digits=1 if time and time["mean"] < 100 else 0)
    if ratio is None:
        return [shown, NONE]
    numbers = (ratio["mean"], ratio["low"], ratio["high"])
    ends = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return [shown, Shown(f"{ratio['mean']:.2f}{ends}", numbers)]


def contrast_tables(results: Results, study: Study) -> Iterator[Table]:
    """A row for each pair, with its difference and Holm's p at each budget in focus."""
    found = {(e["name"], e["task"], e["budget"]): e for e in results["contrasts"]}
    places = [(task, budget) for task in study.tasks for budget in study.focus_budgets(task)]
    rows: list[list[Item]] = []
    for name, (of, less) in study.contrasts.items():
        row: list[Item] = [name, of, less]
        for task, budget in places:
            entry = found.get((name, task.id, budget))
            row += [items.difference_item(entry), items.p_item(entry["p_holm"]) if entry else ""]
        rows.append(row)
    heads = [text for _, budget in places for text in (budget_name(budget), "Holm p")]
    yield Table(
        CONTRASTS,
        ["pair", "arm", "less", *heads],
        rows,
        words=3,
        name="contrasts",
        caption="Percentage points, paired by seed and problem, with 95 % intervals (crossed "
        f"random effects of seeds and problems); Holm p: over these {len(found)} tests.",
    )


def difference_tables(results: Results, study: Study) -> Iterator[Table]:
    """Every paired comparison with its p-values, a table for each reference arm."""
    labels = items.row_names(study)
    arms = {variant.key: variant.arm for variant in study.variants()}
    by_reference: dict[str, list[Mapping[str, Any]]] = {}
    for entry in results["comparisons"]:
        by_reference.setdefault(arms[entry["reference"]], []).append(entry)
    for reference, entries in by_reference.items():
        rows = [
            [
                labels[e["variant"]],
                f"{study.task(e['task']).label}{_FAMILIES[e['view']]}",
                budget_name(e["budget"]),
                items.difference_item(e),
                items.p_item(e["p"]),
                items.p_item(e["p_holm"]),
                str(e["tests"]),
                f"{e['seeds']} × {e['problems']:,}",
            ]
            for e in entries
        ]
        header = ["method", "task", "budget", "points", "p", "Holm p", "tests", "seeds × problems"]
        yield Table(
            f"Differences from {study.arm(reference).name}",
            header,
            rows,
            words=2,
            caption="Percentage points, paired by seed and problem, with 95 % intervals "
            "(crossed random effects of seeds and problems, Satterthwaite's degrees of "
            "freedom). Holm p: corrected for the tests of the family. One problem: only means over "
            "problems are known.",
            name=f"differences_{reference}",
        )


def arm_tables(results: Results, study: Study) -> Iterator[Table]:
    """What arms differ in besides their method: updates, entropy bonus, rate and tokens."""
    costs = results["costs"]
    known = [task for task in study.tasks if any("updates" in c for c in costs[task.id].values())]
    if not known:
        return
    rows: list[list[Item]] = []
    for variant in study.variants():
        of_tasks = [_arm_items(costs[task.id].get(variant.key, {})) for task in known]
        rows.append([items.row_name(study, variant), *itertools.chain(*of_tasks)])
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


def decoding_tables(results: Results, study: Study) -> Iterator[Table]:
    """Differences from the references that are others greedily than sampled; none: all agree."""
    labels = items.row_names(study)
    rows = [
        [
            labels[e["variant"]],
            labels[e["reference"]],
            study.task(e["task"]).label,
            budget_name(e["budget"]),
            *[items.difference_item(e[key]) for key in ("sampled", "greedy", "change")],
        ]
        for e in results["decoding"]
        if items.differs_by_mode(e)
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


def cost_table(results: Results, study: Study) -> Table:
    """What the runs took."""
    names, rows = items.row_names(study), list[list[Item]]()
    for task in study.tasks:
        for variant, cost in results["costs"][task.id].items():
            means = [cost[key]["mean"] for key in COSTS]
            about = [names[variant], task.label, "; ".join(cost["departures"]), str(cost["runs"])]
            rows.append([*about, *(Shown(f"{mean:,.0f}", (mean,)) for mean in means)])
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
