"""Creates the tables that show whether trained policies use their thinking budget.

`budget_use` computes the numbers, and defines the swap table and the free curve shown here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from bacr_jax.report.table import NONE, Item, Shown, Table, budget_name
from bacr_study import items
from bacr_study.items import Results
from bacr_study.spec import MEAN, Study


def free_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields the table that compares trained policies with the policy before training.

    The thinking of the policy before training is truncated so early that both policies use the same
    mean number of tokens. Yields nothing if the study does not name the policy before training.
    """
    names = items.row_names(study)
    rows: list[list[Item]] = []
    for entry in results["free"]:
        star = "" if entry["inside"] else "*"
        row: list[Item] = [
            names[entry["variant"]],
            study.task(entry["task"]).label,
            budget_name(entry["budget"]),
            Shown(f"{entry['tokens']:,.1f}", (entry["tokens"],), marks=star),
            _percent(entry["accuracy"]),
            _percent(entry["free_accuracy"]),
            items.difference_item(entry),
            items.p_item(entry["p"]),
            items.sign_flip_item(entry),
        ]
        rows.append(row)
    if not rows:
        return
    yield Table(
        "Distance from the free curve",
        ["method", "task", "budget", "tokens", "accuracy", "free", "points", "p", "sign flip"],
        rows,
        words=2,
        caption="Free: accuracy in % of the policy before training "
        f"({study.arm(study.before).name}), truncated so early that it uses the same mean tokens "
        "(thinking, forced, answer; *: beyond the ends of its curve). Only a positive distance is "
        "a saving that training made. Points: paired by seed and problem, with 95 % intervals, not "
        "corrected for their number.",
        name="free",
    )


def swap_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields the tables that show whether trained policies use the budget that they get as input.

    One table contains, for each arm (a method with its settings), the gain in accuracy if the input
    equals the number of tokens after which the thinking is truncated. The others are the swap
    tables of the arms: accuracy by input budget and by truncation. Yields nothing if no arm was
    evaluated with a swap table.
    """
    if not results["swap"]:
        return
    yield _gain_table(results, study)
    names = items.row_names(study)
    for entry in results["swap"]:
        yield _swap_table(study, names[entry["variant"]], entry)


def _gain_table(results: Results, study: Study) -> Table:
    """Creates the table of the gain from the matching input, with a row for each arm and mode.

    An arm is a method with its settings, and a mode is sampled or greedy decoding. The gain is the
    accuracy if the budget that the policy receives equals the number of tokens after which its
    thinking is truncated, minus the mean accuracy with other budgets as input at the same
    truncation.
    """
    names = items.row_names(study)
    rows: list[list[Item]] = []
    for entry in results["swap"]:
        gain = entry["gains"].get(MEAN)
        p: Item = NONE
        sign_flip: Item = NONE
        if gain:
            p = items.p_item(gain["p"])
            sign_flip = items.sign_flip_item(gain)
        longest = _extreme_lengths(entry)
        row: list[Item] = [
            names[entry["variant"]],
            study.task(entry["task"]).label,
            entry["mode"],
            items.difference_item(gain),
            p,
            sign_flip,
            items.mean_item(longest),
        ]
        rows.append(row)
    return Table(
        "Does the policy use its budget?",
        ["method", "task", "decoding", "points", "p", "sign flip", "thinking tokens"],
        rows,
        words=3,
        caption="Points: accuracy with the input budget equal to the truncation, less the mean of "
        "the other inputs at the same truncation, mean over truncations, paired by seed and "
        "problem, with 95 % intervals. Thinking tokens: with the largest budget as input less with "
        "the smallest, both with the largest as limit, ± half the 95 % t interval over seeds.",
        name="swap",
    )


def _extreme_lengths(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the difference in thinking tokens between the largest and smallest input budgets.

    The result is one of the `lengths` in an entry of `swap` in results.json; None if it is missing.
    """
    budgets = entry["budgets"]
    for length in entry["lengths"]:
        if length["budget"] == budgets[-1] and length["less"] == budgets[0]:
            return length
    return None


def _swap_table(study: Study, name: str, entry: Mapping[str, Any]) -> Table:
    """Creates the swap table of an arm (a method with its settings).

    It contains the accuracy by the budget that the policy receives as input (rows) and by the
    number of tokens after which its thinking is truncated (columns).
    """
    cuts = list(map(str, entry["budgets"]))
    rows: list[list[Item]] = []
    for budget in cuts:
        row: list[Item] = [budget_name(budget)]
        for cut in cuts:
            accuracy = entry["accuracy"][budget][cut]
            row.append(_percent(accuracy, starred=cut == budget))
        thinking = entry["thinking"][budget]
        row.append(Shown(f"{thinking:,.1f}", (thinking,)))
        rows.append(row)
    gains: list[Item] = ["gain of *"]
    for cut in cuts:
        gain = entry["gains"].get(cut)
        gains.append(items.difference_item(gain))
    rows.append([*gains, NONE])
    task = study.task(entry["task"])
    return Table(
        f"Budget as input and truncation: {name}, {task.label}, {entry['mode']}",
        ["input", *[f"cut at {budget_name(cut)}" for cut in cuts], "think"],
        rows,
        caption="Accuracy in %, mean over seeds; *: input and truncation are equal. Gain: * less "
        "the mean of the other inputs, percentage points with 95 % intervals. Think: mean thinking "
        "tokens with the largest budget as limit.",
        name=f"swap_{task.id}_{_file_name(entry['variant'])}_{entry['mode']}",
    )


def _file_name(variant: str) -> str:
    """Returns the key of a variant (`arm` or `arm.value`), with dots replaced by underscores."""
    return variant.replace(".", "_")


def _percent(share: float, *, starred: bool = False) -> Item:
    """Formats a fraction in percent, with a star if `starred` is True."""
    percent = 100 * share
    text = f"{percent:.1f}"
    if starred:
        text = f"*{text}"
    return Shown(text, (percent,))
