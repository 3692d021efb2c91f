"""Creates the tables of a study from its results.json."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bacr_jax.files import write_atomically
from bacr_jax.report.table import NONE, Item, Shown, Table, budget_name
from bacr_study import items
from bacr_study.budget_tables import free_tables, swap_tables
from bacr_study.cells import COSTS
from bacr_study.curves import AXES
from bacr_study.difference_tables import contrast_tables, decoding_tables, difference_tables
from bacr_study.items import Results
from bacr_study.spec import MEAN, PARTS, Study, Sweep, Task, Variant

# Token columns in the table of harder problems, and their headings.
_TOKENS = {
    "mean_thinking_tokens": "thinking tok",
    "mean_total_tokens": "total tok",
}
# Columns per task in the table "How the arms were trained".
_TRAINING = (
    "updates",
    "entropy coefficient",
    "learning rate",
    "tokens",
)


def write_table(folder: Path, table: Table) -> list[Path]:
    """Writes a table as Markdown, LaTeX and CSV, and returns the paths of the files."""
    texts = {
        "md": table.markdown(),
        "tex": table.latex(),
        "csv": table.csv(),
    }
    files = []
    for ending, text in texts.items():
        file = folder / f"{table.name}.{ending}"
        write_atomically(file, text)
        files.append(file)
    return files


def tables_of(results: Results, study: Study) -> list[Table]:
    """Returns the tables of all kinds of results in the study, in the order of study.html."""
    tables_of_view: Mapping[str, Callable[[Results, Study], Iterator[Table]]] = {
        "accuracy": accuracy_tables,
        "hard": functools.partial(accuracy_tables, hard=True),
        "ablation": ablation_tables,
        "scale": sweep_tables,
        "sensitivity": sweep_tables,
        "difficulty": difficulty_tables,
        "convergence": convergence_tables,
        "contrasts": contrast_tables,
    }
    views = [view for view in study.views if view in tables_of_view]
    # Two views may share a function, which must only be called once.
    makers = list(dict.fromkeys(tables_of_view[view] for view in views))
    tables: list[Table] = []
    for make in makers[:1]:
        tables += make(results, study)
    tables += free_tables(results, study)
    tables += swap_tables(results, study)
    tables += failure_tables(results, study)
    # Placed next to the accuracies, because numbers of updates and learning rates may explain them.
    tables += arm_tables(results, study)
    for make in makers[1:]:
        tables += make(results, study)
    tables += difference_tables(results, study)
    tables += decoding_tables(results, study)
    tables.append(cost_table(results, study))
    names = items.distinct_names([table.name for table in tables])
    return [replace(table, name=name) for table, name in zip(tables, names)]


# Accuracies ---------------------------------------------------------------------------------------


def accuracy_tables(results: Results, study: Study, *, hard: bool = False) -> Iterator[Table]:
    """Yields Table 1 or Table 2 of the paper: the accuracy of each method by task and budget.

    Args:
      results: the contents of results.json.
      study: the study.
      hard: if True, yields Table 2, which shows results on harder problems (`Task.hard`) and the
        tokens used.
    """
    names = [items.row_name(study, variant) for variant in study.variants()]
    header = ["method"]
    columns: list[Sequence[Item]] = [names]
    groups = [("", 1)]
    for task in study.tasks:
        if hard:
            columns_of_task = _hard_columns(results, study, task)
        else:
            columns_of_task = _main_columns(results, study, task)
        header += [heading for heading, _ in columns_of_task]
        columns += [column for _, column in columns_of_task]
        groups.append((task.label, len(columns_of_task)))
    if hard:
        explanation = (
            "Tokens are means at the largest budget; total counts thinking, forced tokens and "
            f"answer. {_training_explanation(results)}Best accuracy"
        )
    else:
        explanation = "Budgets in thinking tokens; mean: over all budgets. "
        explanation += _training_explanation(results)
        explanation += "Best"
    yield Table(
        "Harder problems than any trained on" if hard else "Accuracy by budget",
        header,
        list(zip(*columns)),
        groups=groups,
        caption=f"{items.shown_parts(study)} {explanation} in bold, second underlined."
        + items.marks_caption(study),
        name="hard" if hard else "accuracy",
    )


def _main_columns(results: Results, study: Study, task: Task) -> list[tuple[str, Sequence[Item]]]:
    """Returns the columns of a task in Table 1, as pairs of a heading and the entries.

    The columns are the accuracy at each budget, its mean over budgets, and numbers about training.
    """
    columns: list[tuple[str, Sequence[Item]]] = []
    for budget in (*map(str, task.budgets), MEAN):
        view = "anytime" if budget == MEAN else "accuracy"
        column = _marked_accuracies(results, study, view, task, task.main, budget)
        columns.append((budget_name(budget), column))
    return columns + items.training_columns(results, task, study.variants())


def _training_explanation(results: Results) -> str:
    """Returns sentences that explain the columns of `items.training_columns`, with a space."""
    sentences = ""
    costs = [cost for by_variant in results["costs"].values() for cost in by_variant.values()]
    if any("updates" in cost for cost in costs):
        sentences += "Updates: optimizer updates in training. "
    if any(results["failures"].values()):
        sentences += (
            "Failed: runs whose greedy answers ended worse than they began (table of failed runs), "
            "with the 95 % Clopper-Pearson interval of their share in %. Worst budget: the largest "
            "loss of a run, greedy accuracy before and after, unless another measure is named. "
        )
    return sentences


def _hard_columns(results: Results, study: Study, task: Task) -> list[tuple[str, Sequence[Item]]]:
    """Returns the columns of a task in Table 2, as pairs of a heading and the entries.

    The columns are the accuracy at each budget, the tokens used at the largest budget, and numbers
    about training.
    """
    columns: list[tuple[str, Sequence[Item]]] = []
    budgets = list(map(str, task.budgets))
    for budget in budgets:
        column = _marked_accuracies(results, study, "hard", task, task.hard, budget)
        columns.append((budget_name(budget), column))
    for key, heading in _TOKENS.items():
        tokens = []
        for variant in study.variants():
            estimate = items.estimate_of(results, task, task.hard, variant, budgets[-1], key)
            tokens.append(items.tokens_item(estimate))
        columns.append((heading, tokens))
    return columns + items.training_columns(results, task, study.variants())


def _marked_accuracies(
    results: Results, study: Study, view: str, task: Task, name: str, budget: str
) -> list[Item]:
    """Returns a column of accuracies with significance marks and ranks.

    Args:
      results: the contents of results.json.
      study: the study.
      view: the kind of result (view) whose tests determine the marks.
      task: the task.
      name: the evaluation set.
      budget: key of a budget, or `MEAN`.
    """
    column = []
    for variant in study.variants():
        marks = items.significance_marks(results, study, view, task, variant, budget)
        estimate = items.estimate_of(results, task, name, variant, budget)
        column.append(items.accuracy_item(estimate, marks))
    return items.ranked(column)


def _ranked_accuracies(
    results: Results, task: Task, variants: Sequence[Variant], budget: str
) -> list[Item]:
    """Returns a column of accuracies on the task's main evaluation set, with ranks."""
    column = []
    for variant in variants:
        estimate = items.estimate_of(results, task, task.main, variant, budget)
        column.append(items.accuracy_item(estimate))
    return items.ranked(column)


def failure_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields the table of failed runs per method, if the study counts failed runs."""
    names = items.row_names(study)
    rows: list[list[Item]] = []
    rates: list[Mapping[str, Any]] = []
    for task in study.tasks:
        for variant, rate in results["failures"][task.id].items():
            rates.append(rate)
            row = [
                names[variant],
                task.label,
                items.failed_runs_item(rate),
                items.failure_share_item(rate),
                items.shown_losses_item(rate),
                items.loss_text(rate["worst"]),
            ]
            rows.append(row)
    if not rows:
        return
    measures = {measure for rate in rates for measure in rate["measures"]}
    yield Table(
        "Failed runs",
        ["method", "task", "failed", "share that fails", "shown", "largest loss"],
        rows,
        words=2,
        caption="A run has failed if, for greedy answers at some budget, its accuracy is below the "
        f"95 % Wilson interval of the accuracy before training ({study.arm(study.before).name}), "
        f"or its share of {items.answers_measure(measures)} is below 95 % and below the interval "
        "of the share before. Share that fails: in %, with its 95 % Clopper-Pearson interval. "
        "Shown: runs with a loss beyond sampling error, by a one-sided exact sign test over the "
        "same problems (p < .025 / number of budgets at some budget), or with such a share of "
        "answers. Largest loss: the budget and run that lost most, in accuracy or in this share; "
        f"in % before and after.{items.other_machine_sentence(rates)}",
        name="failures",
    )


# Ablation -----------------------------------------------------------------------------------------


def ablation_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields two tables per task: Table 3 of the paper, and the effect of each part."""
    for task in study.tasks:
        by_budget = results["ablation"][task.id]
        yield _ablation_table(results, study, task)
        yield _effects_table(by_budget, task)


def _ablation_table(results: Results, study: Study, task: Task) -> Table:
    """Creates Table 3 of the paper for a task: the accuracy of each combination of parts."""
    by_budget = results["ablation"][task.id]
    variants = [Variant(arm.id) for arm in study.arms]
    columns: list[list[Item]] = []
    for budget, section in by_budget.items():
        differences = section["rows"]
        columns.append(_ranked_accuracies(results, task, variants, budget))
        columns.append([items.difference_item(differences.get(arm.id)) for arm in study.arms])
    training = items.training_columns(results, task, variants)
    columns += [list(column) for _, column in training]
    rows: list[list[Item]] = []
    for arm, numbers in zip(study.arms, zip(*columns)):
        checks = ["✓" if part in arm.parts else "" for part in PARTS]
        rows.append([*checks, arm.mark, *numbers])
    groups = [(items.budget_phrase(budget), 2) for budget in by_budget]
    headings = [heading for heading, _ in training]
    training_group = [("training", len(training))] if training else []
    return Table(
        f"Ablation: {task.label}",
        [*PARTS, "marks", *["accuracy", "Δ"] * len(groups), *headings],
        rows,
        groups=[("", len(PARTS) + 1), *groups, *training_group],
        words=len(PARTS) + 1,
        caption=f"{items.shown_parts(study)} Δ: percentage points from the row without any "
        "part, with the 95 % interval over seeds and problems.",
        name=f"ablation_{task.id}",
    )


def _effects_table(by_budget: Results, task: Task) -> Table:
    """Creates the table of the effect of each part in an ablation.

    Args:
      by_budget: the task's object under `ablation` in results.json.
      task: the task.
    """
    effects: dict[str, dict[tuple[str, str], Any]] = {}
    for budget, section in by_budget.items():
        effects[budget] = {
            (effect["kind"], effect["part"]): effect for effect in section["effects"]
        }
    keys = dict.fromkeys(key for by_key in effects.values() for key in by_key)
    rows: list[list[Item]] = []
    for kind, part in keys:
        row: list[Item] = [kind, part or "all"]
        for by_key in effects.values():
            entry = by_key.get((kind, part))
            row.append(items.difference_item(entry))
            row.append(items.p_text(entry["p"]) if entry else NONE)
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


# Sweeps and levels --------------------------------------------------------------------------------


def sweep_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields Table 4 and the numbers of Fig. 4 of the paper: results by the value of a setting."""
    for task, (sweep, arms) in itertools.product(study.tasks, study.sweeps().items()):
        names = [items.row_name(study, Variant(arm.id)) for arm in arms]
        rows: list[list[Item]] = []
        rules = []
        for budget in study.focus_budgets(task):
            phrase = items.budget_phrase(budget)
            columns: list[Sequence[Item]] = [names]
            for value in sweep.values:
                variants = [Variant(arm.id, value) for arm in arms]
                columns.append(_ranked_accuracies(results, task, variants, budget))
            for row in zip(*columns):
                rows.append([phrase, *row])
            for row in _difference_rows(results, study, task, budget, sweep):
                rows.append([phrase, *row])
            rules.append(len(rows) - 1)
        for row in _training_rows(results, study, task, sweep):
            rows.append([NONE, *row])
        yield Table(
            f"{sweep.label}: {task.label}",
            ["budget", "method", *map(str, sweep.values)],
            rows,
            groups=[("", 2), (sweep.label, len(sweep.values))],
            words=2,
            caption=f"{items.shown_parts(study)} Δ: percentage points, paired by seed and "
            "problem, with 95 % intervals.",
            rules=rules,
            name=f"sweep_{task.id}_{sweep.file_name}",
        )


def _training_rows(
    results: Results, study: Study, task: Task, sweep: Sweep
) -> Iterator[tuple[Item, ...]]:
    """Yields table rows with numbers of the training runs, one column per swept value.

    There is a row for each arm (method) and each of `items.training_columns`.
    """
    for arm in study.sweeps()[sweep]:
        variants = [Variant(arm.id, value) for value in sweep.values]
        for heading, column in items.training_columns(results, task, variants):
            yield (f"{arm.name}: {heading}", *column)


def _difference_rows(
    results: Results, study: Study, task: Task, budget: str, sweep: Sweep
) -> Iterator[tuple[Item, ...]]:
    """Yields table rows with an arm's differences in accuracy, one column per swept value.

    An arm is a method with its settings, and a sweep varies one of the settings. Each arm that the
    sweep applies to is compared with every reference arm at the same swept value, and with itself
    at the sweep's default value. Each comparison is one row. Rows without any difference are left
    out.
    """
    entries = {}
    for entry in results["comparisons"]:
        place_of_entry = (entry["task"], entry["budget"], entry["set"])
        if place_of_entry == (task.id, budget, task.main):
            entries[entry["variant"], entry["reference"]] = entry
    for arm in study.sweeps()[sweep]:
        for reference in (*study.references, None):
            differences = []
            for value in sweep.values:
                other = Variant(arm.id, sweep.default)
                if reference is not None:
                    other = Variant(reference, value)
                variant = Variant(arm.id, value)
                differences.append(entries.get((variant.key, other.key)))
            if not any(differences):
                continue
            name = f"Δ {arm.name}, from {sweep.default}"
            if reference is not None:
                name = f"Δ {arm.name} − {study.arm(reference).name}"
            yield (name, *map(items.difference_item, differences))


def difficulty_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields Fig. 3b of the paper as tables: differences in accuracy by difficulty level.

    The differences are from the reference arm, the first method that the others are compared with.
    """
    for task in study.tasks:
        by_budget = results["difficulty"].get(task.id, {})
        for budget, by_variant in by_budget.items():
            yield _difficulty_table(results, study, task, budget, by_variant)


def _difficulty_table(
    results: Results, study: Study, task: Task, budget: str, by_variant: Mapping[str, Any]
) -> Table:
    """Creates the table of accuracies and differences by difficulty level at one budget.

    Args:
      results: the contents of results.json.
      study: the study.
      task: the task.
      budget: key of a budget, or `MEAN`.
      by_variant: results of `effects.difficulty`, by variant key and by level.
    """
    problem_counts = {}
    for by_level in by_variant.values():
        for level, entry in by_level.items():
            problem_counts[level] = entry["problems"]
    rows: list[list[Item]] = []
    for variant in study.variants():
        row: list[Item] = [items.row_name(study, variant)]
        for level in problem_counts:
            entry = by_variant.get(variant.key, {}).get(level, {})
            row.append(items.accuracy_item(entry.get("accuracy")))
            row.append(items.difference_item(entry.get("difference")))
        rows.append(row)
    reference = "none"
    if study.references:
        reference = study.arm(study.references[0]).name
    groups = [("", 1)]
    for level, count in problem_counts.items():
        groups.append((f"level {level} ({count} problems)", 2))
    training = items.training_columns(results, task, study.variants())
    headings = [heading for heading, _ in training]
    for row, training_items in zip(rows, zip(*(column for _, column in training))):
        row += training_items
    if training:
        groups.append(("training", len(training)))
    return Table(
        f"Accuracy by level: {task.label}, {items.budget_phrase(budget)}",
        ["method", *["accuracy", "Δ"] * len(problem_counts), *headings],
        rows,
        groups=groups,
        caption=f"{items.shown_parts(study)} Δ: percentage points from {reference}, "
        "paired by seed and problem, with 95 % intervals; not corrected for their number.",
        name=f"difficulty_{task.id}_{budget}",
    )


# Training -----------------------------------------------------------------------------------------


def convergence_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields for each task the table of times until held-out accuracy reaches given levels."""
    names = items.row_names(study)
    for task in study.tasks:
        rows: dict[tuple[float, str], list[Item]] = {}
        for record in results["convergence"][task.id]["thresholds"]:
            key = (record["share"], record["variant"])
            if key not in rows:
                percent = 100 * record["level"]
                rows[key] = [
                    f"{percent:.1f} % ({record['share']:.0%} of the gain)",
                    names[record["variant"]],
                    f"{record['reached']} of {record['seeds']}",
                ]
            rows[key] += _time_items(record)
        if not rows:
            continue
        reference = study.arm(study.references[0]).name
        groups = [("", 3)]
        for axis in AXES:
            groups.append(("steps" if axis == "step" else axis, 2))
        yield Table(
            f"Time to a held-out accuracy: {task.label}",
            ["level", "method", "seeds", *["time", "ratio"] * len(AXES)],
            list(rows.values()),
            groups=groups,
            words=2,
            caption=f"Levels: shares of what {reference} gains in held-out accuracy (greedy, "
            f"{items.held_out_phrase(results, task)}). Time: mean ± half the 95 % t interval over "
            "seeds, where every seed reaches the level; 0 if they start there. Ratio: to "
            f"{reference}, geometric mean over seeds with its interval, where all times are above "
            "0; below 1 is faster.",
            name=f"convergence_{task.id}",
        )


def _time_items(record: Mapping[str, Any]) -> list[Item]:
    """Formats the time until an accuracy is reached, and its ratio to the reference arm's time.

    The reference arm is the method that the others are compared with.
    """
    time = record["time"]
    ratio = record["ratio"]
    digits = 1 if time and time["mean"] < 100 else 0
    time_item = items.mean_item(time, digits=digits)
    if ratio is None:
        return [time_item, NONE]
    text = f"{ratio['mean']:.2f}"
    if ratio["low"] is not None:
        text += f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    numbers = (ratio["mean"], ratio["low"], ratio["high"])
    return [time_item, Shown(text, numbers)]


def arm_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields the table of each method's updates, entropy coefficient, learning rate and tokens.

    Yields nothing if the settings of the runs are not known.
    """
    costs = results["costs"]
    tasks = [
        task for task in study.tasks if any("updates" in cost for cost in costs[task.id].values())
    ]
    if not tasks:
        return
    rows: list[list[Item]] = []
    for variant in study.variants():
        row: list[Item] = [items.row_name(study, variant)]
        for task in tasks:
            row += _training_items(costs[task.id].get(variant.key, {}))
        rows.append(row)
    yield Table(
        "How the arms were trained",
        ["method", *_TRAINING * len(tasks)],
        rows,
        groups=[("", 1), *[(task.label, len(_TRAINING)) for task in tasks]],
        caption="Updates: steps × train.minibatches, mean over seeds, without warm-up. Entropy "
        "coefficient: loss.entropy_coef. Tokens: generated in training, mean over seeds. Equal "
        "tokens are not equal updates: the fewer tokens a method's step takes, the more steps "
        "it makes.",
        name="arms",
    )


def _training_items(cost: Mapping[str, Any]) -> list[Item]:
    """Returns a method's entries in the table columns `_TRAINING`; dashes if it was not trained.

    Args:
      cost: the arm's object under `costs` in results.json.
    """
    if "updates" not in cost or cost["updates"]["mean"] == 0:
        return [NONE] * len(_TRAINING)
    entropy = cost["settings"]["loss.entropy_coef"]
    rate = cost["settings"]["optimizer.learning_rate"]
    tokens = cost["generated_tokens"]["mean"]
    return [
        items.updates_item(cost),
        Shown(f"{entropy:g}", (entropy,)),
        Shown(f"{rate:g}", (rate,)),
        Shown(f"{tokens:,.0f}", (tokens,)),
    ]


def cost_table(results: Results, study: Study) -> Table:
    """Creates the table of training steps, generated tokens and wall-clock seconds per method."""
    names = items.row_names(study)
    rows: list[list[Item]] = []
    for task in study.tasks:
        for variant, cost in results["costs"][task.id].items():
            row: list[Item] = [
                names[variant],
                task.label,
                "; ".join(cost["departures"]),
                str(cost["runs"]),
            ]
            for key in COSTS:
                mean = cost[key]["mean"]
                row.append(Shown(f"{mean:,.0f}", (mean,)))
            rows.append(row)
    return Table(
        "What the runs took",
        [
            "method",
            "task",
            "departs from its publication",
            "runs",
            "steps",
            "generated tokens",
            "seconds",
        ],
        rows,
        words=3,
        caption="Means over runs. Seconds: of training, on the run's share of the machine; the "
        "warm-up, which the runs of a seed and a task share, counts in the one that made it.",
        name="costs",
    )
