"""What stands in the tables of a study: means, differences, ranks and marks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.report.table import BEST, MARKS, NONE, SECOND, Item, Shown, budget_name
from bacr_study.spec import MEAN, Study, Task, Variant

Results = Mapping[str, Any]
_LEVEL = 0.05
_MINUS = "−"


def estimate_of(
    results: Results, task: Task, name: str, variant: Variant, budget: str, key: str = "accuracy"
) -> Mapping[str, Any] | None:
    """A number of a variant, over its seeds, as results.json has it; None: not measured."""
    by_mode = results["means"].get(task.id, {}).get(name, {})
    return by_mode.get(SAMPLED, {}).get(variant.key, {}).get(budget, {}).get(key)


def budget_phrase(budget: str) -> str:
    """`budget 1,024`, or `mean over budgets`."""
    return "mean over budgets" if budget == MEAN else f"budget {budget_name(budget)}"


def signed(value: float) -> str:
    """`+4.1`, with a minus sign that is not a hyphen."""
    text = f"{value:+.1f}"
    return text.replace("-", _MINUS) if text not in ("-0.0", "+0.0") else "0.0"


def difference_text(entry: Mapping[str, Any]) -> str:
    """`+4.1 [+2.0, +6.2]` in percentage points."""
    value, low, high = (signed(100 * entry[key]) for key in ("difference", "low", "high"))
    return f"{value} [{low}, {high}]"


def p_text(p: float) -> str:
    """`.013`, or `<.001`."""
    return "<.001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def p_item(p: float) -> Item:
    """`p_text`, with the number."""
    return Shown(p_text(p), (p,))


def difference_item(entry: Mapping[str, Any] | None) -> Item:
    """`difference_text` of a comparison; a dash for None."""
    if entry is None:
        return NONE
    numbers = tuple(100 * entry[key] for key in ("difference", "low", "high"))
    return Shown(difference_text(entry), numbers)


def differs_by_mode(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of results.json's `decoding` says something else greedily than sampled."""
    beyond = lambda contrast: contrast["low"] > 0 or contrast["high"] < 0
    sampled, greedy = entry["sampled"], entry["greedy"]
    opposite = sampled["difference"] * greedy["difference"] < 0
    return beyond(entry["change"]) or (opposite and beyond(sampled) and beyond(greedy))


def mean_item(
    estimate: Mapping[str, Any] | None, *, scale: int = 1, digits: int = 1, marks: str = ""
) -> Item:
    """`52.7 ± 1.2`: mean and half the width of its interval."""
    if estimate is None:
        return NONE
    ends = [estimate["mean"], estimate["low"], estimate["high"]]
    mean, low, high = (None if end is None else scale * end for end in ends)
    half = "" if low is None else f" ± {(high - low) / 2:,.{digits}f}"
    return Shown(f"{mean:,.{digits}f}{half}", (mean, low, high), marks=marks)


def accuracy_item(estimate: Mapping[str, Any] | None, marks: str = "") -> Item:
    """`mean_item` in percent."""
    return mean_item(estimate, scale=100, marks=marks)


def failed_item(rate: Mapping[str, Any] | None) -> Item:
    """Returns the number of failed runs, such as `1 of 6`; a dash for None."""
    if rate is None:
        return NONE
    return Shown(f"{rate['failed']} of {rate['runs']}", (rate["failed"],))


def failure_share_item(rate: Mapping[str, Any]) -> Item:
    """Returns the share of failed runs in %, such as `16.7 [0.4, 64.1]`."""
    shares = (rate["failed"] / rate["runs"], rate["low"], rate["high"])
    share, low, high = (100 * number for number in shares)
    return Shown(f"{share:.1f} [{low:.1f}, {high:.1f}]", (share, low, high))


def loss_text(change: Mapping[str, Any]) -> str:
    """Returns a change of accuracy, such as `55.8 to 0.0 at 48, seed 2`."""
    before, after = (100 * change[key] for key in ("before", "after"))
    budget = budget_name(change["budget"])
    return f"{before:.1f} to {after:.1f} at {budget}, seed {change['seed']}"


def tokens_item(estimate: Mapping[str, Any] | None) -> Item:
    """`1,234.5`: mean tokens."""
    if estimate is None:
        return NONE
    return Shown(f"{estimate['mean']:,.1f}", (estimate["mean"], estimate["low"], estimate["high"]))


def ranked(column: Sequence[Item]) -> list[Item]:
    """The column with its best and second-best number marked, as they are printed; ties share."""
    value = lambda item: f"{item.numbers[0]:.1f}" if isinstance(item, Shown) else NONE
    order = sorted({value(item) for item in column} - {NONE}, key=float, reverse=True)
    ranks = dict(zip(order, (BEST, SECOND)))
    if len(order) < 2:
        return list(column)
    return [
        replace(item, rank=ranks.get(value(item), "")) if isinstance(item, Shown) else item
        for item in column
    ]


def significance_marks(
    results: Results, study: Study, view: str, task: Task, variant: Variant, budget: str
) -> str:
    """Marks of the reference arms from which a variant differs, by Holm's p."""
    found = ""
    for reference, mark in zip(study.references, MARKS):
        other = Variant(reference, variant.value).key
        for entry in results["comparisons"]:
            where = (entry["view"], entry["task"], entry["budget"], entry["variant"])
            if where == (view, task.id, budget, variant.key) and entry["reference"] == other:
                found += mark if entry["p_holm"] < _LEVEL else ""
    return found


def marks_caption(study: Study) -> str:
    """What the marks of `significance_marks` mean; starts with a space."""
    words = [
        f"{mark} differs from {study.arm(reference).name}"
        for reference, mark in zip(study.references, MARKS)
    ]
    return f" {', '.join(words)} (paired by seed and problem, Holm p < .05)." if words else ""


def what_is_shown(study: Study) -> str:
    """The sentence every caption of accuracies begins with."""
    several = f"mean ± half the 95 % t interval over {len(study.seeds)} seeds"
    one = "one seed, ± half the 95 % interval over problems"
    return f"Accuracy in %, {SAMPLED} decoding, {several if len(study.seeds) > 1 else one}."


def variant_name(study: Study, variant: Variant) -> str:
    """An arm's name and value."""
    name = study.arm(variant.arm).name
    return name if variant.value is None else f"{name}, {variant.value}"


def row_name(study: Study, variant: Variant) -> str:
    """`variant_name`, and what is said of the arm."""
    mark = study.arm(variant.arm).mark
    return f"{variant_name(study, variant)} ({mark})" if mark else variant_name(study, variant)


def row_names(study: Study) -> dict[str, str]:
    """`row_name` by a variant's name in results.json."""
    return {variant.key: row_name(study, variant) for variant in study.variants()}
