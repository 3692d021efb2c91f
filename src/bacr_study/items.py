"""Formats the entries of a study's tables: means, differences, p-values, ranks and marks."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bacr_jax.evaluation.decline import ACCURACY, CLOSED
from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.report.table import BEST, MARKS, NONE, SECOND, Item, Shown, budget_name
from bacr_study.failures import FOUND
from bacr_study.spec import MEAN, Study, Task, Variant
from bacr_study.statistics import LEVEL

# The contents of results.json.
Results = Mapping[str, Any]
_MINUS = "−"


def estimate_of(
    results: Results, task: Task, name: str, variant: Variant, budget: str, key: str = "accuracy"
) -> Mapping[str, Any] | None:
    """Returns one result of a variant from results.json; None if it was not measured.

    The result is a mean over training seeds with sampled decoding, with its 95 % interval.

    Args:
      results: the contents of results.json.
      task: the task.
      name: the evaluation set.
      variant: an arm (a method with its settings), at one of its swept values.
      budget: key of a budget, or `MEAN`.
      key: one of `cells.NUMBERS`.
    """
    by_set = results["means"].get(task.id, {})
    by_mode = by_set.get(name, {})
    by_variant = by_mode.get(SAMPLED, {})
    by_budget = by_variant.get(variant.key, {})
    return by_budget.get(budget, {}).get(key)


def budget_phrase(budget: str) -> str:
    """Returns a phrase for a budget key, such as `budget 1,024` or `mean over budgets`."""
    if budget == MEAN:
        return "mean over budgets"
    return f"budget {budget_name(budget)}"


def budget_list(budgets: Sequence[int]) -> str:
    """Lists budgets, such as `512, 1,024`."""
    return ", ".join(f"{budget:,}" for budget in budgets)


def held_out_phrase(results: Results, task: Task) -> str:
    """Returns over which budgets held-out accuracy is averaged: `mean over budgets 8, 16`.

    The budgets are the config key `eval.budgets` of the runs, and not the task's budgets.
    """
    budgets = results["convergence"][task.id].get("held_out_budgets", [])
    if len(budgets) == 1:
        return f"mean over budgets {budget_list(budgets[0])}"
    if budgets:
        return "mean over the budgets of each method's eval.budgets"
    return "mean over budgets"


def no_gain_sentence(results: Results, study: Study, task: Task) -> str:
    """Returns the sentence of a caption that explains why a task has no times to an accuracy.

    The sentence starts with a space. It is empty if the first reference arm (the method that the
    others are compared with) gains held-out accuracy, or if its held-out accuracy is unknown.
    """
    section = results["convergence"][task.id]
    for reference in study.references[:1]:
        if "accuracy" in section["curves"].get(reference, {}) and not section["thresholds"]:
            name = study.arm(reference).name
            return f" There are no times to a held-out accuracy, because {name} gains none."
    return ""


def signed(value: float) -> str:
    """Formats a number with one decimal and its sign, such as `+4.1`.

    Uses the minus sign U+2212. Values that round to zero are written as `0.0` without a sign.
    """
    text = f"{value:+.1f}"
    if text in ("-0.0", "+0.0"):
        return "0.0"
    return text.replace("-", _MINUS)


def difference_text(entry: Mapping[str, Any]) -> str:
    """Formats a difference and its interval in percentage points, such as `+4.1 [+2.0, +6.2]`."""
    value = signed(100 * entry["difference"])
    low = signed(100 * entry["low"])
    high = signed(100 * entry["high"])
    return f"{value} [{low}, {high}]"


def p_text(p: float) -> str:
    """Formats a p-value, such as `.013` or `<.001`."""
    if p < 0.001:
        return "<.001"
    return f"{p:.3f}".removeprefix("0")


def p_item(p: float) -> Item:
    """Returns a p-value as a table entry."""
    return Shown(p_text(p), (p,))


def sign_flip_item(entry: Mapping[str, Any]) -> Item:
    """Returns the p-value of a contrast's sign-flip test as a table entry; a dash if unknown."""
    p = entry.get("sign_flip")
    return NONE if p is None else p_item(p)


def training_columns(
    results: Results, task: Task, variants: Sequence[Variant]
) -> list[tuple[str, Sequence[Item]]]:
    """Returns the table columns about training that are shown next to the accuracies of a task.

    The columns are the number of updates, the number of failed runs with the interval of their
    share, and the largest loss over all runs and budgets. A column is left out if its numbers are
    not known.

    Returns:
      The heading and the entries of each column.
    """
    columns: list[tuple[str, Sequence[Item]]] = []
    costs = results["costs"][task.id]
    if any("updates" in cost for cost in costs.values()):
        updates = []
        for variant in variants:
            cost = costs.get(variant.key, {})
            updates.append(updates_item(cost))
        columns.append(("updates", updates))
    failures = results["failures"][task.id]
    if failures:
        failed = []
        worst = []
        for variant in variants:
            rate = failures.get(variant.key)
            failed.append(failed_item(rate))
            worst.append(NONE if rate is None else loss_text(rate["worst"]))
        columns.append(("failed", failed))
        columns.append(("worst budget", worst))
    return columns


def updates_item(cost: Mapping[str, Any]) -> Item:
    """Formats the mean number of optimizer updates; a dash if it is unknown or 0."""
    if "updates" not in cost or cost["updates"]["mean"] == 0:
        return NONE
    mean = cost["updates"]["mean"]
    return Shown(f"{mean:,.0f}", (mean,))


def difference_item(entry: Mapping[str, Any] | None) -> Item:
    """Returns a difference in percentage points as a table entry; a dash for None."""
    if entry is None:
        return NONE
    numbers = (
        100 * entry["difference"],
        100 * entry["low"],
        100 * entry["high"],
    )
    return Shown(difference_text(entry), numbers)


def simultaneous(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a tested difference with its interval replaced by the simultaneous interval.

    The simultaneous interval is corrected for the number of differences tested together.
    """
    return {**entry, "low": entry["simultaneous_low"], "high": entry["simultaneous_high"]}


def is_shown(entry: Mapping[str, Any]) -> bool:
    """True if the simultaneous interval of a tested difference does not contain 0."""
    return _excludes_zero(simultaneous(entry))


def simultaneous_item(entry: Mapping[str, Any]) -> Item:
    """Returns the simultaneous interval of a difference in percentage points as a table entry."""
    low = 100 * entry["simultaneous_low"]
    high = 100 * entry["simultaneous_high"]
    return Shown(f"[{signed(low)}, {signed(high)}]", (low, high))


def differs_by_mode(entry: Mapping[str, Any]) -> bool:
    """True if the difference in accuracy between two methods depends on the decoding mode.

    This is the case if the sampled and the greedy difference differ significantly from each other,
    or if both are significant with opposite signs.

    Args:
      entry: an entry of `decoding` in results.json.
    """
    sampled = entry["sampled"]
    greedy = entry["greedy"]
    if _excludes_zero(entry["change"]):
        return True
    opposite = sampled["difference"] * greedy["difference"] < 0
    return opposite and _excludes_zero(sampled) and _excludes_zero(greedy)


def _excludes_zero(contrast: Mapping[str, Any]) -> bool:
    """True if the interval of a contrast does not contain 0."""
    return contrast["low"] > 0 or contrast["high"] < 0


def mean_item(
    estimate: Mapping[str, Any] | None, *, scale: int = 1, digits: int = 1, marks: str = ""
) -> Item:
    """Formats a mean and half the width of its interval, such as `52.7 ± 1.2`; a dash for None.

    Args:
      estimate: an estimate from results.json.
      scale: factor that the numbers are multiplied by, such as 100 for percent.
      digits: number of decimals.
      marks: significance marks that are appended to the number.
    """
    if estimate is None:
        return NONE
    mean = scale * estimate["mean"]
    text = f"{mean:,.{digits}f}"
    if estimate["low"] is None:
        return Shown(text, (mean, None, None), marks=marks)
    low = scale * estimate["low"]
    high = scale * estimate["high"]
    half_width = (high - low) / 2
    return Shown(f"{text} ± {half_width:,.{digits}f}", (mean, low, high), marks=marks)


def accuracy_item(estimate: Mapping[str, Any] | None, marks: str = "") -> Item:
    """Formats an accuracy in percent with half the width of its interval."""
    return mean_item(estimate, scale=100, marks=marks)


def failed_runs_item(rate: Mapping[str, Any] | None) -> Item:
    """Formats the number of failed runs, such as `1 of 6`; a dash for None."""
    if rate is None:
        return NONE
    return _number_of_runs(rate["failed"], rate)


def failed_item(rate: Mapping[str, Any] | None) -> Item:
    """Formats the number of failed runs and the interval of their share in percent.

    The result is a text such as `1 of 6 [0, 64]`, or a dash for None.
    """
    if rate is None:
        return NONE
    low = 100 * rate["low"]
    high = 100 * rate["high"]
    text = f"{rate['failed']} of {rate['runs']} [{low:.0f}, {high:.0f}]"
    return Shown(text, (rate["failed"], low, high))


def failure_share_item(rate: Mapping[str, Any]) -> Item:
    """Formats the percentage of failed runs with its interval, such as `16.7 [0.4, 64.1]`."""
    share = 100 * (rate["failed"] / rate["runs"])
    low = 100 * rate["low"]
    high = 100 * rate["high"]
    return Shown(f"{share:.1f} [{low:.1f}, {high:.1f}]", (share, low, high))


def shown_losses_item(rate: Mapping[str, Any]) -> Item:
    """Formats the number of runs whose loss is larger than sampling error, such as `1 of 6`."""
    return _number_of_runs(rate["shown"], rate)


def _number_of_runs(count: int, rate: Mapping[str, Any]) -> Item:
    """Formats a number of runs next to the number of all counted runs, such as `1 of 6`."""
    return Shown(f"{count} of {rate['runs']}", (count,))


def other_machine_sentence(rates: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence with the number of runs that were compared across machines, with a space.

    The sentence is empty if there are no such runs.

    Args:
      rates: records of arms that `failures.failure_rates` returned.
    """
    count = sum(rate["other_machine"] for rate in rates)
    if not count:
        return ""
    runs = sum(rate["runs"] for rate in rates)
    return (
        f" Machines: {count} of {runs} runs are compared with a policy before training that was "
        "evaluated on another machine, where the same warm-up can give another policy."
    )


def loss_text(change: Mapping[str, Any]) -> str:
    """Formats a change in percent at a budget: `55.8 to 0.0 at 48, seed 2`.

    Measures other than the accuracy are named: `answers found 100.0 to 0.0 at 12, seed 11`.
    """
    before = 100 * change["before"]
    after = 100 * change["after"]
    budget = budget_name(change["budget"])
    text = f"{before:.1f} to {after:.1f} at {budget}, seed {change['seed']}"
    if change["measure"] == ACCURACY:
        return text
    return f"{change['measure']} {text}"


def answers_measure(measures: Collection[str]) -> str:
    """Returns the name of the measure that counts failures next to the accuracy, for a caption.

    It is the share of answers found, or the share of closed answers if the cells contain it.

    Args:
      measures: the measures of all changes (`failures.changes_of`).
    """
    if FOUND not in measures:
        return CLOSED
    found = f"{FOUND} (texts in which the grader finds an answer)"
    return f"{CLOSED} (in older cells: {found})" if CLOSED in measures else found


def tokens_item(estimate: Mapping[str, Any] | None) -> Item:
    """Formats a mean number of tokens, such as `1,234.5`; a dash for None."""
    if estimate is None:
        return NONE
    mean = estimate["mean"]
    return Shown(f"{mean:,.1f}", (mean, estimate["low"], estimate["high"]))


def ranked(column: Sequence[Item]) -> list[Item]:
    """Marks the best and the second-best number in a column.

    Numbers are compared as printed, so numbers that round to the same text share a rank. A column
    with fewer than two distinct numbers is returned unchanged.
    """
    printed_numbers = {_printed(item) for item in column} - {NONE}
    order = sorted(printed_numbers, key=float, reverse=True)
    if len(order) < 2:
        return list(column)
    ranks = dict(zip(order, (BEST, SECOND)))
    result: list[Item] = []
    for item in column:
        if isinstance(item, Shown):
            rank = ranks.get(_printed(item), "")
            item = replace(item, rank=rank)
        result.append(item)
    return result


def _printed(item: Item) -> str:
    """Returns an entry's first number, rounded to one decimal; a dash if it has no number."""
    if not isinstance(item, Shown):
        return NONE
    return f"{item.numbers[0]:.1f}"


def significance_marks(
    results: Results, study: Study, view: str, task: Task, variant: Variant, budget: str
) -> str:
    """Returns a mark such as † for each reference arm from which a variant differs (Holm p < .05).

    A variant is an arm (a method with its settings) at one of its swept values. Reference arms are
    the ones that the others are compared with.
    """
    marks = ""
    where = (view, task.id, budget, variant.key)
    for reference, mark in zip(study.references, MARKS):
        reference_key = Variant(reference, variant.value).key
        for entry in results["comparisons"]:
            place_of_entry = (
                entry["view"],
                entry["task"],
                entry["budget"],
                entry["variant"],
            )
            if place_of_entry != where or entry["reference"] != reference_key:
                continue
            if entry["p_holm"] < LEVEL:
                marks += mark
    return marks


def marks_caption(study: Study) -> str:
    """Returns a sentence that explains the marks of `significance_marks`.

    The sentence starts with a space. It is empty if the study names no methods that the others are
    compared with.
    """
    meanings = [
        f"{mark} differs from {study.arm(reference).name}"
        for reference, mark in zip(study.references, MARKS)
    ]
    if not meanings:
        return ""
    return f" {', '.join(meanings)} (paired by seed and problem, Holm p < .05)."


def distinct_names(names: Sequence[str]) -> list[str]:
    """Appends a number to repeated names of tables or figures, such as `accuracy_2`.

    Without the number, the file of one table would overwrite the file of another. The first of
    several equal names stays the same.
    """
    taken = set(names)
    seen: set[str] = set()
    result = []
    for name in names:
        distinct = name
        numbers = itertools.count(2)
        while distinct in seen or (distinct != name and distinct in taken):
            distinct = f"{name}_{next(numbers)}"
        seen.add(distinct)
        result.append(distinct)
    return result


def shown_parts(study: Study) -> str:
    """Returns the first sentence of an accuracy table's caption, which describes the numbers."""
    if len(study.seeds) > 1:
        numbers = f"mean ± half the 95 % t interval over {len(study.seeds)} seeds"
    else:
        numbers = "one seed, ± half the 95 % interval over problems"
    return f"Accuracy in %, {SAMPLED} decoding, {numbers}."


def variant_name(study: Study, variant: Variant) -> str:
    """Returns the name of an arm (a method with its settings), followed by its swept value."""
    name = study.arm(variant.arm).name
    if variant.value is None:
        return name
    return f"{name}, {variant.value}"


def row_name(study: Study, variant: Variant) -> str:
    """Returns the label of a variant's table row, with the remark "paper's row" if it has one.

    A variant is an arm (a method with its settings) at one swept value. The remark marks arms that
    the paper's table contains.
    """
    name = variant_name(study, variant)
    mark = study.arm(variant.arm).mark
    return f"{name} ({mark})" if mark else name


def row_names(study: Study) -> dict[str, str]:
    """Returns the label of every variant's table row (`row_name`), by the key of the variant."""
    return {variant.key: row_name(study, variant) for variant in study.variants()}
