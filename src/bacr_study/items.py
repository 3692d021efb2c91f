"""Formats the items of a study's tables: means, differences, p-values, ranks and marks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.report.table import BEST, MARKS, NONE, SECOND, Item, Shown, budget_name
from bacr_study.spec import MEAN, Study, Task, Variant

# The object in results.json.
Results = Mapping[str, Any]
# Level of the tests after Holm's correction.
_LEVEL = 0.05
_MINUS = "−"


def estimate_of(
    results: Results, task: Task, name: str, variant: Variant, budget: str, key: str = "accuracy"
) -> Mapping[str, Any] | None:
    """Returns a number of a variant over its seeds from results.json; None if not measured.

    Args:
      name: the evaluation set.
      key: one of `cells.NUMBERS`.
    """
    by_set = results["means"].get(task.id, {})
    by_mode = by_set.get(name, {})
    by_variant = by_mode.get(SAMPLED, {})
    by_budget = by_variant.get(variant.key, {})
    return by_budget.get(budget, {}).get(key)


def budget_phrase(budget: str) -> str:
    """Returns `budget 1,024`, or `mean over budgets`."""
    if budget == MEAN:
        return "mean over budgets"
    return f"budget {budget_name(budget)}"


def signed(value: float) -> str:
    """Returns a number such as `+4.1`, with a minus sign (U+2212) and `0.0` without a sign."""
    text = f"{value:+.1f}"
    if text in ("-0.0", "+0.0"):
        return "0.0"
    return text.replace("-", _MINUS)


def difference_text(entry: Mapping[str, Any]) -> str:
    """Returns a difference in percentage points with its interval: `+4.1 [+2.0, +6.2]`."""
    value = signed(100 * entry["difference"])
    low = signed(100 * entry["low"])
    high = signed(100 * entry["high"])
    return f"{value} [{low}, {high}]"


def p_text(p: float) -> str:
    """Returns a p-value such as `.013`, or `<.001`."""
    if p < 0.001:
        return "<.001"
    return f"{p:.3f}".removeprefix("0")


def p_item(p: float) -> Item:
    """Returns a p-value as an item of a table."""
    return Shown(p_text(p), (p,))


def difference_item(entry: Mapping[str, Any] | None) -> Item:
    """Returns a difference in percentage points as an item; a dash for None."""
    if entry is None:
        return NONE
    numbers = (
        100 * entry["difference"],
        100 * entry["low"],
        100 * entry["high"],
    )
    return Shown(difference_text(entry), numbers)


def differs_by_mode(entry: Mapping[str, Any]) -> bool:
    """True if a difference of two arms depends on the decoding.

    It does if the sampled and the greedy difference are significantly apart, or have opposite signs
    and are each significant.

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
    """Returns a mean and half the width of its interval, such as `52.7 ± 1.2`; a dash for None.

    Args:
      scale: factor of the numbers, such as 100 for percent.
      digits: digits after the point.
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
    """Returns an accuracy in percent, with its interval."""
    return mean_item(estimate, scale=100, marks=marks)


def failed_item(rate: Mapping[str, Any] | None) -> Item:
    """Returns the number of failed runs, such as `1 of 6`; a dash for None."""
    if rate is None:
        return NONE
    return Shown(f"{rate['failed']} of {rate['runs']}", (rate["failed"],))


def failure_share_item(rate: Mapping[str, Any]) -> Item:
    """Returns the share of failed runs in %, such as `16.7 [0.4, 64.1]`."""
    share = 100 * (rate["failed"] / rate["runs"])
    low = 100 * rate["low"]
    high = 100 * rate["high"]
    return Shown(f"{share:.1f} [{low:.1f}, {high:.1f}]", (share, low, high))


def loss_text(change: Mapping[str, Any]) -> str:
    """Returns a change of accuracy, such as `55.8 to 0.0 at 48, seed 2`."""
    before = 100 * change["before"]
    after = 100 * change["after"]
    budget = budget_name(change["budget"])
    return f"{before:.1f} to {after:.1f} at {budget}, seed {change['seed']}"


def tokens_item(estimate: Mapping[str, Any] | None) -> Item:
    """Returns mean tokens such as `1,234.5`; a dash for None."""
    if estimate is None:
        return NONE
    mean = estimate["mean"]
    return Shown(f"{mean:,.1f}", (mean, estimate["low"], estimate["high"]))


def ranked(column: Sequence[Item]) -> list[Item]:
    """Marks the best and the second-best number of a column.

    Numbers are compared as they are printed, so equal ones share a rank. A column with fewer than
    two different numbers gets no marks.
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
    """Returns the first number of an item with one digit after the point; a dash if none."""
    if not isinstance(item, Shown):
        return NONE
    return f"{item.numbers[0]:.1f}"


def significance_marks(
    results: Results, study: Study, view: str, task: Task, variant: Variant, budget: str
) -> str:
    """Returns the marks of the reference arms that a variant differs from (Holm p < .05)."""
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
            if entry["p_holm"] < _LEVEL:
                marks += mark
    return marks


def marks_caption(study: Study) -> str:
    """Returns the caption of `significance_marks`, after a space; empty without references."""
    meanings = [
        f"{mark} differs from {study.arm(reference).name}"
        for reference, mark in zip(study.references, MARKS)
    ]
    if not meanings:
        return ""
    return f" {', '.join(meanings)} (paired by seed and problem, Holm p < .05)."


def what_is_shown(study: Study) -> str:
    """Returns the first sentence of every caption of accuracies."""
    if len(study.seeds) > 1:
        numbers = f"mean ± half the 95 % t interval over {len(study.seeds)} seeds"
    else:
        numbers = "one seed, ± half the 95 % interval over problems"
    return f"Accuracy in %, {SAMPLED} decoding, {numbers}."


def variant_name(study: Study, variant: Variant) -> str:
    """Returns the arm's name and the swept value."""
    name = study.arm(variant.arm).name
    if variant.value is None:
        return name
    return f"{name}, {variant.value}"


def row_name(study: Study, variant: Variant) -> str:
    """Returns the name of a variant with its arm's remark, as rows of tables have it."""
    name = variant_name(study, variant)
    mark = study.arm(variant.arm).mark
    return f"{name} ({mark})" if mark else name


def row_names(study: Study) -> dict[str, str]:
    """Returns the row name of every variant, by the variant's key."""
    return {variant.key: row_name(study, variant) for variant in study.variants()}
