"""Builds the tables and figures of an evaluation from its results.json."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.evaluation.folder import LATEX, MARKDOWN
from bacr_jax.evaluation.summary import Dense, Summary
from bacr_jax.files import write_atomically
from bacr_jax.report import figures
from bacr_jax.report.table import (
    NONE,
    FittedTable,
    Table,
    accuracy_text,
    budget_name,
    by_size,
    set_titles,
)


def _results(summary: Summary) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields decoding mode, budget as text, and metrics, ordered by mode, then budget."""
    for mode, budgets in summary.items():
        for budget in by_size(budgets):
            yield mode, budget_name(budget), budgets[budget]


def _think_and_total(entry: Mapping[str, Any]) -> list[str]:
    """Formats the mean numbers of thinking tokens and of total tokens of a result."""
    return [
        f"{entry['mean_thinking_tokens']:,.1f}",
        f"{entry['mean_total_tokens']:,.1f}",
    ]


def completion(name: str, summary: Summary) -> Table:
    """Builds the table of completion rates, and of accuracy given completed thinking."""
    columns = {
        "complete": ("completion_rate", "completion_ci95"),
        "answer closed": ("closed_rate", "closed_ci95"),
        "right if complete": ("accuracy_if_complete", "if_complete_ci95"),
        "right if cut": ("accuracy_if_cut", "if_cut_ci95"),
    }
    rows = []
    for mode, budget, entry in _results(summary):
        rates = [accuracy_text(entry, rate, interval) for rate, interval in columns.values()]
        rows.append([mode, budget, *rates])
    return Table(
        f"{name}: completion, and accuracy given completion",
        ["decoding", "budget", *columns],
        rows,
        caption="in % [95 % interval]; complete: the thinking ended by itself within the budget; "
        "wrong answers after complete thinking are mistakes, the others may be due to the cut",
        drop=(
            "answer closed",
            "right if cut",
        ),
    )


def adherence(name: str, summary: Summary) -> Table:
    """Builds the table of the requested and used thinking tokens, and of the other tokens."""
    rows = []
    for mode, budget, entry in _results(summary):
        adherence_entry = entry["adherence"]
        ratio = NONE
        if adherence_entry["ratio"] is not None:
            low, high = adherence_entry["ratio_ci95"]
            ratio = f"{adherence_entry['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        quantiles = adherence_entry["quantiles"]
        excess = "0"
        if adherence_entry["over_share"]:
            excess = f"{adherence_entry['mean_excess']:,.1f}"
        row = [
            mode,
            budget,
            f"{adherence_entry['used']:,.1f}",
            ratio,
            f"{quantiles['p10']:,.0f}",
            f"{quantiles['p50']:,.0f}",
            f"{quantiles['p90']:,.0f}",
            f"{quantiles['max']:,.0f}",
            excess,
            f"{entry['mean_forced_tokens']:,.1f}",
            f"{entry['mean_answer_tokens']:,.1f}",
            f"{entry['mean_total_tokens']:,.1f}",
        ]
        rows.append(row)
    header = ["decoding", "requested", "used", "used/requested", "10 %", "median", "90 %", "max"]
    return Table(
        f"{name}: thinking tokens requested and used",
        [*header, "excess", "forced", "answer", "total"],
        rows,
        caption="mean thinking tokens, their share of the budget [95 % interval] and quantiles; "
        "excess: mean tokens above the budget (a grace window); then mean forced and answer "
        "tokens, and all tokens after the prompt",
        drop=(
            "10 %",
            "excess",
            "forced",
            "answer",
            "90 %",
            "max",
            "median",
        ),
    )


def _tokens_text(entry: Mapping[str, Any], mean: str, interval: str) -> str:
    """Formats a mean number of tokens with its interval, or as a dash if it was not measured.

    `mean` and `interval` are the fields of `entry` that contain them.
    """
    if entry[mean] is None:
        return NONE
    low, high = entry[interval]
    return f"{entry[mean]:,.1f} [{low:,.1f}, {high:,.1f}]"


def thinking_by_verdict(name: str, summary: Summary) -> Table:
    """Builds a table of the mean number of thinking tokens for right and for wrong answers."""
    columns = {
        "right": ("thinking_if_right", "thinking_right_ci95"),
        "wrong": ("thinking_if_wrong", "thinking_wrong_ci95"),
    }
    rows = []
    for mode, budget, entry in _results(summary):
        means = [_tokens_text(entry, mean, interval) for mean, interval in columns.values()]
        rows.append([mode, budget, accuracy_text(entry), *means])
    return Table(
        f"{name}: thinking tokens of right and wrong answers",
        ["decoding", "budget", "accuracy", *columns],
        rows,
        caption="accuracy in %, and mean thinking tokens of the right and of the wrong answers "
        "[95 % interval]; the right answers of two policies are answers to different questions",
    )


def _cut_early(dense: Dense) -> str:
    """Returns the label of a dense curve, which contains the budget that the policy received."""
    budget = max(curve["budget"] for curve in dense.values())
    return f"one trace with {budget:,} tokens, truncated early"


def dense_table(name: str, dense: Dense, by_budget: Summary) -> Table:
    """Builds the table of a dense curve, with a row for each decoding mode and truncation point.

    Args:
      name: title of the set.
      dense: results of traces with the largest budget that were truncated at several points (cuts).
      by_budget: results of the same policy at each budget, for a second column.
    """
    rows = []
    for mode, dense_mode in dense.items():
        for cut, entry in dense_mode["curve"].items():
            budget_entry = by_budget.get(mode, {}).get(cut)
            row = [
                mode,
                f"{int(cut):,}",
                accuracy_text(entry),
                NONE if budget_entry is None else accuracy_text(budget_entry),
                _percent(entry["completion_rate"]),
                *_think_and_total(entry),
            ]
            rows.append(row)
        area = accuracy_text(dense_mode, "area", "area_ci95")
        rows.append([mode, "area", area, NONE, NONE, NONE, NONE])
    return Table(
        f"{name}: dense curve, {_cut_early(dense)}",
        ["decoding", "cut", "accuracy when cut", "with that budget", "complete", "think", "total"],
        rows,
        caption="accuracy in % [95 % interval]: every row is the same traces, with the largest "
        "budget and answered at the cut; next to it traces with that budget; complete: "
        "traces that ended by themselves by then, in %; area: over log2 of the cuts",
        drop=(
            "total",
            "think",
            "complete",
        ),
    )


def swap_table(name: str, swap: Mapping[str, Any]) -> Table:
    """Builds the swap table, with a row for each decoding mode and input budget.

    A swap table contains results for every pair of a budget that the policy receives as input and a
    truncation point.

    Args:
      name: title of the set.
      swap: entry `swap` of a set in results.json.
    """
    budgets = next(iter(swap.values()))["budgets"]
    rows = []
    for mode, swap_mode in swap.items():
        for budget in budgets:
            entries = swap_mode["pairs"][str(budget)]
            accuracies = []
            for cut in budgets:
                text = accuracy_text(entries[str(cut)])
                accuracies.append(f"*{text}" if cut == budget else text)
            thinking = entries[str(budgets[-1])]["mean_thinking_tokens"]
            rows.append([mode, f"{budget:,}", *accuracies, NONE, f"{thinking:,.1f}"])
        gain = swap_mode["matched_gain"]
        gains = [*(gain["by_cut"][str(cut)] for cut in budgets), gain]
        points = [_points(entry["difference"], entry["ci95"]) for entry in gains]
        rows.append([mode, "gain of *", *points, NONE])
    columns = [f"cut at {cut:,}" for cut in budgets]
    return Table(
        f"{name}: budget as input (rows) and truncation (columns)",
        ["decoding", "input", *columns, "mean", "think"],
        rows,
        words=2,
        caption="accuracy in % [95 % interval]; *: truncated at the budget that is the input; gain "
        "of *: * less the mean of the other inputs at the same truncation, in percentage points, "
        "paired by problem: above 0 if the policy uses its budget; think: mean thinking tokens "
        f"with the limit {budgets[-1]:,}",
    )


def swap_lengths(name: str, swap: Mapping[str, Any]) -> Table:
    """Builds the table of differences in thinking length between two input budgets."""
    limit = next(iter(swap.values()))["budgets"][-1]
    rows = []
    for mode, swap_mode in swap.items():
        for entry in swap_mode["lengths"]:
            row = [
                mode,
                f"{entry['budget']:,}",
                f"{entry['less']:,}",
                _token_difference(entry["difference"], entry["ci95"]),
            ]
            rows.append(row)
    return Table(
        f"{name}: thinking length by budget as input",
        ["decoding", "input", "less input", "thinking tokens"],
        rows,
        caption=f"difference in mean thinking tokens [95 % interval], paired by problem; the limit "
        f"is {limit:,} for all inputs",
    )


def _token_difference(value: float, interval: Sequence[float]) -> str:
    """Formats a difference of numbers of tokens with its interval."""
    low, high = interval
    return f"{value:+,.1f} [{low:+,.1f}, {high:+,.1f}]"


def _percent(rate: float | int) -> str:
    return f"{100 * rate:.1f}"


def _points(value: float, interval: Sequence[float]) -> str:
    """Formats a difference of rates in percentage points with its interval."""
    low, high = interval
    return f"{100 * value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _at_k(entry: Mapping[str, Any], metric: str, k: int) -> str:
    """Formats pass@k or maj@k. `metric` is the field of the metric: `pass_at` or `maj_at`."""
    rate = entry.get(metric, {}).get(str(k))
    return NONE if rate is None else accuracy_text(rate, "value", "ci95")


def _budgets(name: str, result: Mapping[str, Any]) -> Table:
    """Builds the main table of a set: accuracy and tokens by decoding mode and budget."""
    modes = result["by_budget"]
    near = result["near_duplicates"]
    caption = (
        "accuracy in % [95 % interval]; verdicts that differ between lenient and strict, and "
        "thinking cut by the budget, in %; mean tokens of thinking and in total"
    )
    if near is not None:
        caption += f"; near-duplicates of training questions ({near['of']}): {near['count']:,}"
    if result["note"]:
        caption += f"; {result['note']}"
    k = max(entry["samples"] for _, _, entry in _results(modes))
    header = ["decoding", "budget", "accuracy", "strict", "differ"]
    if k > 1:
        header += [f"pass@{k}", f"maj@{k}"]
    rows = []
    for mode, budget, entry in _results(modes):
        label = mode
        if entry["samples"] > 1:
            label += f", avg@{entry['samples']}"
        row = [
            label,
            budget,
            accuracy_text(entry),
            _percent(entry["strict_accuracy"]),
            _percent(entry["disagreement"]),
        ]
        if k > 1:
            row += [_at_k(entry, "pass_at", k), _at_k(entry, "maj_at", k)]
        row += _think_and_total(entry)
        row.append(_percent(entry["forced_share"]))
        rows.append(row)
    return Table(
        f"{name}: {result['problems']:,} problems",
        [*header, "think", "total", "forced"],
        rows,
        caption=caption,
        drop=("differ", "strict", "total", "forced"),
    )


def _without_duplicates(name: str, result: Mapping[str, Any]) -> Table:
    """Builds the table that compares accuracy with and without near-duplicates."""
    near_duplicates = result["near_duplicates"]
    num_others = 0
    rows = []
    for mode, budget, entry in _results(result["by_budget"]):
        others = entry["without_near_duplicates"]
        num_others = others["problems"]
        accuracies = [accuracy_text(entry), accuracy_text(others)]
        rows.append([mode, budget, *accuracies, *_think_and_total(others)])
    header = [
        "decoding",
        "budget",
        f"all {result['problems']:,}",
        f"the other {num_others:,}",
        "think",
        "total",
    ]
    return Table(
        f"{name}: without {near_duplicates['count']:,} near-duplicates of training questions",
        header,
        rows,
        caption="accuracy in % [95 % interval]; tokens are those of the other problems; training "
        f"set: {near_duplicates['of']}",
    )


def _anytime(name: str, result: Mapping[str, Any]) -> Table:
    rows = []
    for mode, rates in result["anytime"].items():
        mean = accuracy_text(rates, "mean", "mean_ci95")
        area = accuracy_text(rates, "area", "area_ci95")
        rows.append([mode, mean, area])
    return Table(f"{name}: anytime accuracy", ["decoding", "mean over budgets", "area"], rows)


def _self_consistency(name: str, result: Mapping[str, Any]) -> Table:
    rows = []
    for k, accountings in result["self_consistency"].items():
        for accounting, budgets in accountings.items():
            for budget, entry in budgets.items():
                row = [
                    f"maj@{k}",
                    accounting.replace("_", " "),
                    f"{int(budget):,}",
                    f"{k} x {entry['budget_each']:,}",
                    accuracy_text(entry, "value", "ci95"),
                    *_think_and_total(entry),
                ]
                rows.append(row)
    return Table(
        f"{name}: Self-Consistency",
        ["vote", "accounting", "budget", "samples x tokens", "accuracy", "think", "total"],
        rows,
        words=2,
        caption="tokens are those of all k samples of a vote; only matched total compares with "
        "one answer at that budget",
    )


def _parts(name: str, result: Mapping[str, Any], part: str) -> Table:
    """Builds the table of accuracy by difficulty level or subject, for the last decoding mode.

    Args:
      part: `level` or `subject`, by which the problems are grouped.
    """
    mode, entries = list(result["by_budget"].items())[-1]
    budgets = by_size(entries)
    parts_by_budget = [entries[budget][f"{part}s"] for budget in budgets]
    rows = []
    for label, first_entry in parts_by_budget[0].items():
        accuracies = [accuracy_text(parts[label]) for parts in parts_by_budget]
        rows.append([label, f"{first_entry['problems']:,}", *accuracies])
    return Table(
        f"{name}: accuracy by {part}, {mode}",
        [part, "problems", *map(budget_name, budgets)],
        rows,
    )


def difference(name: str, other: str, comparison: Mapping[str, Any]) -> Table:
    """Builds the table of differences between this policy and the policy named `other`."""
    rows = []
    for mode, budget, entry in _results(comparison["by_budget"]):
        row = [
            mode,
            budget,
            _percent(entry["accuracy"]),
            _percent(entry["other_accuracy"]),
            _points(entry["difference"], entry["ci95"]),
            _token_difference(entry["thinking_tokens_difference"], entry["thinking_ci95"]),
        ]
        rows.append(row)
    for mode, anytime in comparison["anytime"].items():
        points = _points(anytime["mean_difference"], anytime["mean_ci95"])
        rows.append([mode, "mean", NONE, NONE, points, NONE])
    return Table(
        f"{name}: difference to {other}",
        ["decoding", "budget", "accuracy", "other", "difference", "thinking tokens"],
        rows,
        caption="percentage points and tokens with 95 % intervals, paired problem by problem",
        drop=(
            "other",
            "accuracy",
        ),
    )


def free_table(name: str, policy: str, free: Mapping[str, Any]) -> Table:
    """Builds the table that compares a policy with the policy before training, truncated early.

    Args:
      name: title of the set.
      policy: name of the policy before training.
      free: entry of a set in `free_curve` of results.json.
    """
    rows = []
    for mode, free_mode in free.items():
        for budget in by_size(free_mode["by_budget"]):
            entry = free_mode["by_budget"][budget]
            tokens = f"{entry['tokens']:,.1f}"
            free_tokens = NONE
            if entry["free_tokens"] is not None:
                free_tokens = f"{entry['free_tokens']:,.1f}"
            row = [
                mode,
                budget_name(budget),
                tokens if entry["inside"] else f"{tokens}*",
                _percent(entry["accuracy"]),
                _percent(entry["free_accuracy"]),
                _points(entry["difference"], entry["ci95"]),
                free_tokens,
            ]
            rows.append(row)
    return Table(
        f"{name}: distance from {policy}, truncated early",
        ["decoding", "budget", "tokens", "accuracy", "free", "difference", "free tokens"],
        rows,
        words=2,
        caption="free: accuracy in % of the policy before training at the same mean tokens, "
        "interpolated between its truncation points; difference in percentage points [95 % "
        "interval], paired by problem; free tokens: tokens with which it first reaches this "
        "accuracy, - if it never does; *: beyond the ends of its curve",
    )


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Builds all tables of an evaluation, ordered by evaluation set.

    Args:
      results: content of results.json.
    """
    titles = set_titles(results["sets"])
    all_tables = []
    for name, result in results["sets"].items():
        title = titles[name]
        all_tables += _set_tables(title, result)
        for other, sets in results["comparisons"].items():
            if name in sets:
                all_tables.append(difference(title, other, sets[name]))
        free = results.get("free_curve", {})
        if name in free.get("sets", {}):
            all_tables.append(free_table(title, free["name"], free["sets"][name]))
    return all_tables


def _set_tables(title: str, result: Mapping[str, Any]) -> list[Table]:
    """Builds the tables of the results on a set, without comparisons to other policies."""
    by_budget = result["by_budget"]
    set_tables = [_budgets(title, result)]
    if result["anytime"]:
        set_tables.append(_anytime(title, result))
    if result["dense"]:
        set_tables.append(dense_table(title, result["dense"], by_budget))
    if result.get("swap"):
        set_tables.append(swap_table(title, result["swap"]))
        set_tables.append(swap_lengths(title, result["swap"]))
    set_tables.append(completion(title, by_budget))
    set_tables.append(thinking_by_verdict(title, by_budget))
    set_tables.append(adherence(title, by_budget))
    # All entries of a set have the same fields.
    _, _, entry = next(_results(by_budget))
    if "without_near_duplicates" in entry:
        set_tables.append(_without_duplicates(title, result))
    for part in ("level", "subject"):
        if entry[f"{part}s"]:
            set_tables.append(_parts(title, result, part))
    if result["self_consistency"]:
        set_tables.append(_self_consistency(title, result))
    return set_tables


def write_tables(folder: Path, results: Mapping[str, Any]) -> list[FittedTable]:
    """Writes results.md, results.tex and the figures of every set into a folder.

    Args:
      results: content of results.json.

    Returns:
      The tables, formatted for a terminal.
    """
    all_tables = tables(results)
    markdown = "\n".join(table.markdown() for table in all_tables)
    write_atomically(folder / MARKDOWN, f"# {results['name']}\n\n{markdown}")
    latex = "\n".join(table.latex() for table in all_tables)
    write_atomically(folder / LATEX, latex)
    _draw_sets(folder, results)
    return [table.terminal() for table in all_tables]


def _draw_sets(folder: Path, results: Mapping[str, Any]) -> None:
    """Draws the figures of every set.

    The files are accuracy_SET.png, dense_SET.png if the set has a dense curve, swap_SET.png if it
    has a swap table, and free_SET.png if it is compared with the policy before training (--free).
    """
    titles = set_titles(results["sets"])
    for name, short_name in figures.short_names(results["sets"]).items():
        result = results["sets"][name]
        policies = {
            other: sets[name]["other"]
            for other, sets in results["comparisons"].items()
            if name in sets
        }
        policies[results["name"]] = result["by_budget"]
        figures.accuracy_picture(
            folder / f"accuracy_{short_name}.png",
            policies,
            f"{titles[name]}: accuracy by thinking budget, 95 % intervals",
        )
        free = results.get("free_curve", {})
        if name in free.get("sets", {}):
            free_curves = {mode: entry["curve"] for mode, entry in free["sets"][name].items()}
            figures.tokens_picture(
                folder / f"free_{short_name}.png",
                {
                    f"{free['name']}, truncated early": free_curves,
                    results["name"]: result["by_budget"],
                },
                f"{titles[name]}: accuracy by tokens used, 95 % intervals",
            )
        dense = result["dense"]
        if dense:
            curves = {mode: dense_mode["curve"] for mode, dense_mode in dense.items()}
            figures.accuracy_picture(
                folder / f"dense_{short_name}.png",
                {"each budget": result["by_budget"], _cut_early(dense): curves},
                f"{titles[name]}: each budget, and one trace truncated early; 95 % intervals",
            )
        if result.get("swap"):
            figures.swap_picture(
                folder / f"swap_{short_name}.png",
                result["swap"],
                f"{titles[name]}: budget as input and truncation; 95 % intervals",
            )
