"""Builds the tables and pictures of an evaluation's results."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rich.table

from bacr_jax.documents import write_atomically
from bacr_jax.evaluation.folder import LATEX, MARKDOWN
from bacr_jax.evaluation.summary import Dense, Summary
from bacr_jax.report import figures
from bacr_jax.report.table import NONE, Table, accuracy_text, budget_name, by_size, set_titles


def _cells(summary: Summary) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for mode, budgets in summary.items():
        for budget in by_size(budgets):
            yield mode, budget_name(budget), budgets[budget]


def _think_and_total(entry: Mapping[str, Any]) -> list[str]:
    return [f"{entry[f'mean_{kind}_tokens']:,.1f}" for kind in ("thinking", "total")]


def completion(name: str, summary: Summary) -> Table:
    """Builds the table of completed traces and answers, and of accuracy given completion."""
    columns = {
        "complete": ("completion_rate", "completion_ci95"),
        "answer closed": ("closed_rate", "closed_ci95"),
        "right if complete": ("accuracy_if_complete", "if_complete_ci95"),
        "right if cut": ("accuracy_if_cut", "if_cut_ci95"),
    }
    return Table(
        f"{name}: completion, and accuracy given completion",
        ["decoding", "budget", *columns],
        [
            [mode, budget, *(accuracy_text(entry, *names) for names in columns.values())]
            for mode, budget, entry in _cells(summary)
        ],
        caption="in % [95 % interval]; complete: the thinking ended by itself within the budget; "
        "wrong answers after complete thinking are mistakes, the others may be due to the cut",
    )


def adherence(name: str, summary: Summary) -> Table:
    """Builds the table of thinking tokens requested and used, and of tokens by kind."""
    rows = []
    for mode, budget, entry in _cells(summary):
        used = entry["adherence"]
        ratio = NONE
        if used["ratio"] is not None:
            low, high = used["ratio_ci95"]
            ratio = f"{used['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        quantiles = [f"{used['quantiles'][q]:,.0f}" for q in ("p10", "p50", "p90", "max")]
        tokens = [entry[f"mean_{kind}_tokens"] for kind in ("forced", "answer", "total")]
        over = "0" if not used["over_share"] else f"{used['mean_excess']:,.1f}"
        rows.append(
            [mode, budget, f"{used['used']:,.1f}", ratio, *quantiles, over]
            + [f"{count:,.1f}" for count in tokens]
        )
    return Table(
        f"{name}: thinking tokens requested and used",
        ["decoding", "requested", "used", "used/requested", "10 %", "median", "90 %", "max"]
        + ["excess", "forced", "answer", "total"],
        rows,
        caption="mean thinking tokens, their share of the budget [95 % interval] and quantiles; "
        "excess: mean tokens above the budget (a grace window); then mean forced and answer "
        "tokens, and all tokens after the prompt",
    )


def _cut_early(dense: Dense) -> str:
    """Returns the label of a dense curve."""
    budget = max(curve["told"] for curve in dense.values())
    return f"one trace told {budget:,} tokens, cut early"


def dense_table(name: str, dense: Dense, told: Summary) -> Table:
    """Builds the table of a dense curve, with a row per decoding and cut.

    `told`: summary of the policy at its evaluated budgets, whose accuracy a second column shows.
    """
    rows = []
    for mode, dense_mode in dense.items():
        for cut, entry in dense_mode["curve"].items():
            with_budget = told.get(mode, {}).get(cut)
            budget_accuracy = NONE if with_budget is None else accuracy_text(with_budget)
            accuracies = [accuracy_text(entry), budget_accuracy]
            complete = _percent(entry["completion_rate"])
            rows.append([mode, f"{int(cut):,}", *accuracies, complete, *_think_and_total(entry)])
        area = accuracy_text(dense_mode, "area", "area_ci95")
        rows.append([mode, "area", area, *[NONE] * 4])
    return Table(
        f"{name}: dense curve, {_cut_early(dense)}",
        ["decoding", "cut", "accuracy when cut", "told that budget", "complete", "think", "total"],
        rows,
        caption="accuracy in % [95 % interval]: every row is the same traces, told the largest "
        "budget and answered at the cut; beside it traces that were told that budget; complete: "
        "traces that ended by themselves by then, in %; area: over log2 of the cuts",
    )


def _percent(rate: float | int) -> str:
    return f"{100 * rate:.1f}"


def _points(value: float, low: float, high: float) -> str:
    return f"{100 * value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _of_k(entry: Mapping[str, Any], family: str, k: int) -> str:
    rate = entry.get(family, {}).get(str(k))
    return NONE if rate is None else accuracy_text(rate, "value", "ci95")


def _budgets(name: str, result: Mapping[str, Any]) -> Table:
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
    most = max(entry["samples"] for budgets in modes.values() for entry in budgets.values())
    voting = [f"pass@{most}", f"maj@{most}"] if most > 1 else []
    rows = []
    for mode, budget, entry in _cells(modes):
        label = mode if entry["samples"] == 1 else f"{mode}, avg@{entry['samples']}"
        strict = [_percent(entry[name]) for name in ("strict_accuracy", "disagreement")]
        votes = [_of_k(entry, "pass_at", most), _of_k(entry, "maj_at", most)] if voting else []
        tokens = [*_think_and_total(entry), _percent(entry["forced_share"])]
        rows.append([label, budget, accuracy_text(entry), *strict, *votes, *tokens])
    return Table(
        f"{name}: {result['problems']:,} problems",
        ["decoding", "budget", "accuracy", "strict", "differ", *voting, "think", "total", "forced"],
        rows,
        caption=caption,
    )


def _without_duplicates(name: str, result: Mapping[str, Any]) -> Table:
    """Builds the table of accuracy on all problems, and without near-duplicates."""
    count = result["near_duplicates"]["count"]
    left = 0
    rows = []
    for mode, budget, entry in _cells(result["by_budget"]):
        others = entry["without_near_duplicates"]
        left = others["problems"]
        accuracies = [accuracy_text(entry), accuracy_text(others)]
        rows.append([mode, budget, *accuracies, *_think_and_total(others)])
    return Table(
        f"{name}: without {count:,} near-duplicates of training questions",
        ["decoding", "budget", f"all {result['problems']:,}", f"the other {left:,}"]
        + ["think", "total"],
        rows,
        caption="accuracy in % [95 % interval]; tokens are those of the other problems; training "
        f"set: {result['near_duplicates']['of']}",
    )


def _anytime(name: str, result: Mapping[str, Any]) -> Table:
    rows = [
        [mode, accuracy_text(rates, "mean", "mean_ci95"), accuracy_text(rates, "area", "area_ci95")]
        for mode, rates in result["anytime"].items()
    ]
    return Table(f"{name}: anytime accuracy", ["decoding", "mean over budgets", "area"], rows)


def _self_consistency(name: str, result: Mapping[str, Any]) -> Table:
    rows = []
    for k, ways in result["self_consistency"].items():
        for way, budgets in ways.items():
            for budget, entry in budgets.items():
                vote = [f"maj@{k}", way.replace("_", " "), f"{int(budget):,}"]
                right = accuracy_text(entry, "value", "ci95")
                each = f"{k} x {entry['budget_each']:,}"
                rows.append([*vote, each, right, *_think_and_total(entry)])
    return Table(
        f"{name}: Self-Consistency",
        ["vote", "accounting", "budget", "samples x tokens", "accuracy", "think", "total"],
        rows,
        words=2,
        caption="tokens are those of all k samples of a vote; only matched total compares with "
        "one answer at that budget",
    )


def _parts(name: str, result: Mapping[str, Any], part: str) -> Table:
    modes = result["by_budget"]
    mode = next(reversed(modes))
    budgets = by_size(modes[mode])
    names = list(modes[mode][budgets[0]][f"{part}s"])
    rows = []
    for label in names:
        entries = [modes[mode][budget][f"{part}s"][label] for budget in budgets]
        rows.append([label, f"{entries[0]['problems']:,}", *map(accuracy_text, entries)])
    return Table(
        f"{name}: accuracy by {part}, {mode}", [part, "problems", *map(budget_name, budgets)], rows
    )


def _difference(name: str, other: str, comparison: Mapping[str, Any]) -> Table:
    rows = []
    for mode, budget, entry in _cells(comparison["by_budget"]):
        both = [_percent(entry[name]) for name in ("accuracy", "other_accuracy")]
        points = _points(entry["difference"], *entry["ci95"])
        first, last = entry["thinking_ci95"]
        tokens = f"{entry['thinking_tokens_difference']:+,.1f} [{first:+,.1f}, {last:+,.1f}]"
        rows.append([mode, budget, *both, points, tokens])
    for mode, over in comparison["anytime"].items():
        points = _points(over["mean_difference"], *over["mean_ci95"])
        rows.append([mode, "mean", NONE, NONE, points, NONE])
    return Table(
        f"{name}: difference to {other}",
        ["decoding", "budget", "accuracy", "other", "difference", "thinking tokens"],
        rows,
        caption="percentage points and tokens with 95 % intervals, paired problem by problem",
    )


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Builds every table of an evaluation, set by set."""
    tables_of_sets = []
    titles = set_titles(results["sets"])
    for name, result in results["sets"].items():
        title = titles[name]
        tables_of_sets.append(_budgets(title, result))
        if result["anytime"]:
            tables_of_sets.append(_anytime(title, result))
        if result["dense"]:
            tables_of_sets.append(dense_table(title, result["dense"], result["by_budget"]))
        tables_of_sets.append(completion(title, result["by_budget"]))
        tables_of_sets.append(adherence(title, result["by_budget"]))
        first = next(iter(next(iter(result["by_budget"].values())).values()))
        if "without_near_duplicates" in first:
            tables_of_sets.append(_without_duplicates(title, result))
        tables_of_sets += [
            _parts(title, result, part) for part in ("level", "subject") if first[f"{part}s"]
        ]
        if result["self_consistency"]:
            tables_of_sets.append(_self_consistency(title, result))
        for other, sets in results["comparisons"].items():
            if name in sets:
                tables_of_sets.append(_difference(title, other, sets[name]))
    return tables_of_sets


def write_tables(folder: Path, results: Mapping[str, Any]) -> list[rich.table.Table]:
    """Writes results.md, results.tex and a picture per set; returns the tables for a terminal."""
    result_tables = tables(results)
    head = f"# {results['name']}\n\n"
    write_atomically(
        folder / MARKDOWN, head + "\n".join(table.markdown() for table in result_tables)
    )
    write_atomically(folder / LATEX, "\n".join(table.latex() for table in result_tables))
    titles = set_titles(results["sets"])
    for name, short in figures.short_names(results["sets"]).items():
        result = results["sets"][name]
        others = {
            other: sets[name]["other"]
            for other, sets in results["comparisons"].items()
            if name in sets
        }
        figures.accuracy_picture(
            folder / f"accuracy_{short}.png",
            {**others, results["name"]: result["by_budget"]},
            f"{titles[name]}: accuracy by thinking budget, 95 % intervals",
        )
        dense = result["dense"]
        if dense:
            cut = {mode: dense_mode["curve"] for mode, dense_mode in dense.items()}
            figures.accuracy_picture(
                folder / f"dense_{short}.png",
                {"told each budget": result["by_budget"], _cut_early(dense): cut},
                f"{titles[name]}: told each budget, and one trace cut early; 95 % intervals",
            )
    return [table.terminal() for table in result_tables]
