"""report.html of a run, or of several beside each other: one file with everything in it."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bacr_jax import documents
from bacr_jax.config import io as config_io
from bacr_jax.config.derived import mixture
from bacr_jax.errors import UserError, attempt
from bacr_jax.evaluation.decline import declines
from bacr_jax.evaluation.folder import finished_evaluations
from bacr_jax.evaluation.summary import Summary
from bacr_jax.methods.registry import built_in_departures
from bacr_jax.report import evaluation, figures, svg, table
from bacr_jax.report.charts import Bars, Chart
from bacr_jax.report.chosen_step import best_note
from bacr_jax.report.evaluation_charts import (
    accuracy_charts,
    completion_charts,
    mean_over_steps,
    over_steps,
)
from bacr_jax.report.html_page import SCRIPT, STYLE, render, security
from bacr_jax.report.run_data import ODD, RunData, labels_of, odd_refused, read_run
from bacr_jax.report.table import NONE, Table, budget_name, by_size, decline_text, set_title
from bacr_jax.report.traces import read_traces, shown_traces, traces_section
from bacr_jax.report.training_charts import (
    budget_charts,
    compared_charts,
    machinery_charts,
    training_charts,
)
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.progress import duration

COMPARISON = "comparison.html"
_WHAT = "accuracy in % [95 % interval], mean thinking tokens"
# Of the later half of a run's steps: what it says of its baseline (docs/theory.md).
_OF_CREDIT = (
    ("gradient noise that score weights save, predicted", "score/predicted_saving", "{:.1%}"),
    ("mean advantage", "advantage/mean", "{:+.3f}"),
)
# A comparison opens with what came out; more settings than this are folded.
_MANY_SETTINGS = 6
# Of a section: what `report.html` shows, by the name that it has there.
Part = dict[str, Any]


def _facts(run: RunData) -> list[tuple[str, str]]:
    """What a run is, in a few rows."""
    config, summary, records = run.config, run.summary, run.metrics
    steps = summary.get("steps", records[-1]["step"] if records else 0)
    tokens = summary.get("generated_tokens")
    if tokens is None and records:
        tokens = int(float(records[-1].get("rollout/tokens_total", 0)))
    state = "finished" if summary else "not finished"
    model = config.model
    random = f"random, {model.num_layers} layers of width {model.hidden_size}"
    shape = random if model.preset == "custom" else model.preset
    rows = [
        ("state", f"{state}, {steps:,} steps"),
        ("method", run.method),
        ("model", model.path or shape),
        ("trained on", ", ".join(set_title(name) for _, name in mixture(config.data.train))),
        ("budgets", f"{config.budget.min:,} to {config.budget.max:,} thinking tokens"),
        ("seed", str(config.seed)),
    ]
    later = records[len(records) // 2 :]
    for name, key, form in _OF_CREDIT:
        found = [float(record[key]) for record in later if key in record]
        if found:
            rows.append((name, form.format(fmean(found))))
    if tokens is not None:
        rows.append(("generated tokens", f"{tokens:,}"))
    if "wall_seconds" in summary:
        rows.append(("time", duration(summary["wall_seconds"])))
    return rows


def _departures(run: RunData) -> list[Part]:
    found = run.summary.get("departures", built_in_departures(run.config))
    title = f"{len(found)} settings depart from the method's publication"
    inside = [{"note": line} for line in found]
    return [{"fold": title, "closed": True, "inside": inside}] if found else []


def _headline(run: RunData, name: str, title: str) -> list[Part]:
    """What came out on a set, by its first decoding: a sentence, the numbers, and the chart."""
    policies = _policies([run], name)
    mode = next(iter(next(iter(policies.values()))))
    of_mode = {label: {mode: found[mode]} for label, found in policies.items() if mode in found}
    drawn = accuracy_charts(of_mode, _first_colour([run], of_mode))[:1]
    whole = table.comparison(f"{title}, {mode}: {_WHAT}", of_mode, between=",\n")
    # The title says the decoding: without its column, and in two lines, it fits a telephone.
    rows = [row[1:] for row in whole.rows]
    short = replace(whole, header=whole.header[1:], rows=rows, sections=False, words=0)
    return [
        {"lead": _sentence(of_mode, mode, run.summary)},
        _table(short, "headline"),
        *_charts(drawn),
    ]


def _sentence(policies: Mapping[str, Summary], mode: str, summary: Mapping[str, Any]) -> str:
    """Describes where accuracy rose or fell beyond the intervals, and the change in thinking.

    If a budget is worse than before training, it names the best checkpoint of a finished run too.
    `summary`: content of summary.json; empty before the end.
    """
    first, last = (list(policies.values())[place][mode] for place in (0, -1))
    both = [budget for budget in by_size(last) if budget in first]
    if len(policies) < 2 or not both:
        return "Evaluated once so far: there is nothing to compare with yet."
    above = lambda b, one, other: one[b]["ci95"][0] > other[b]["ci95"][1]
    named = lambda *two: ", ".join(budget_name(b) for b in both if above(b, *two)) or "no budget"
    name, (before, after) = both[-1], (x[both[-1]]["mean_thinking_tokens"] for x in (first, last))
    sentence = (
        f"Accuracy rose at {named(last, first)} and fell at {named(first, last)} (intervals apart, "
        f"{mode}); thinking tokens at {budget_name(name)} went from {before:,.1f} to {after:,.1f}."
    )
    worse = list(declines({mode: first}, {mode: last}))
    if worse:
        note = best_note(summary["best"]) if "best" in summary else ""
        best = f" {note[0].upper()}{note[1:]}." if note else ""
        return f"Worse than before training: {decline_text(worse)}.{best} {sentence}"
    return sentence


def _table(shown: Table, style: str | None = None) -> Part:
    return {"html": shown.html()} | ({"style": style} if style else {})


def _charts(charts: Sequence[Chart | Bars]) -> list[Part]:
    return [{"charts": list(map(svg.figure, charts))}] if charts else []


def _facts_table(runs: Sequence[RunData]) -> Part:
    """A column for each run."""
    found = [dict(_facts(run)) for run in runs]
    names = list(dict.fromkeys(name for facts in found for name in facts))
    rows = [[name, *(facts.get(name, NONE) for facts in found)] for name in names]
    header = ["", *(run.label if len(runs) > 1 else "" for run in runs)]
    return _table(Table("In short", header, rows, words=len(header)), "facts")


def _differing(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Keys of the config in which runs differ, with their values."""
    configs = [config_io.flatten(run.config) for run in runs]
    written = {key: [config_io.value_text(config[key]) for config in configs] for key in configs[0]}
    return {key: texts for key, texts in written.items() if len(set(texts)) > 1}


def _differing_keys(runs: Sequence[RunData]) -> Part:
    rows = [[key, *texts] for key, texts in _differing(runs).items() if key != "output.dir"]
    if not rows:
        return {"note": "The same config, but for the folder."}
    header = ["key", *(run.label for run in runs)]
    title = f"Settings that differ: {len(rows)}"
    inside = [_table(Table("", header, rows, words=len(header)), "facts differs")]
    return {"fold": title, "closed": len(rows) > _MANY_SETTINGS, "inside": inside}


def _evaluations(run: RunData) -> list[Part]:
    parts = list[Part]()
    for path in finished_evaluations(run.paths.path):
        try:
            results = documents.read_json(path)
            tables = evaluation.tables(results)
            title = f"{results['name']} ({path.parent.name})"
        except ODD:
            raise UserError(f"{path}: is damaged; run its evaluation again") from None
        parts.append({"fold": title, "closed": False, "inside": list(map(_table, tables))})
    return parts


def _policies(runs: Sequence[RunData], name: str) -> dict[str, Summary]:
    """What is compared on a set: a run before and after, or the last of each of several runs."""
    if len(runs) == 1:
        return figures.first_and_last(runs[0], name)
    records = {run.label: run.of_set(name) for run in runs}
    # A run without it keeps its place, and so its colour.
    found = {label: made[-1]["sets"][name] if made else {} for label, made in records.items()}
    starts = [made[0] for made in records.values() if made]
    first = starts[0]["sets"][name]
    if all(r["when"] == "before" and r["sets"][name] == first for r in starts):
        # They began as the same policy.
        return {"before": first} | found
    return found


def _first_colour(runs: Sequence[RunData], policies: dict[str, Summary]) -> int:
    """Grey where the first is what others are compared with; a run has one colour everywhere."""
    return 0 if len(policies) > len(runs) else 1


def _accuracy(runs: Sequence[RunData], name: str, title: str) -> list[Part]:
    policies = _policies(runs, name)
    start = _first_colour(runs, policies)
    drawn = accuracy_charts(policies, start) + completion_charts(policies, start)
    measured = {
        run.label: [(record["step"], record["sets"][name]) for record in run.of_set(name)]
        for run in runs
    }
    if any(len(rows) > 2 for rows in measured.values()):
        one = next(iter(measured.values()))
        drawn += over_steps(one) if len(runs) == 1 else mean_over_steps(measured)
    both = table.with_and_without(title, policies)
    tables = [table.comparison(f"{which}: {_WHAT}", found) for which, found in both]
    if len(runs) == 1:
        last = list(policies.values())[-1]
        tables += [evaluation.completion(title, last), evaluation.adherence(title, last)]
        dense = [record["dense"].get(name) for record in runs[0].evaluations if "dense" in record]
        if dense and dense[-1]:
            tables.append(evaluation.dense_table(title, dense[-1], last))
    return [{"heading": title}, *_charts(drawn), *map(_table, tables)]


def _overview(runs: Sequence[RunData], titles: Mapping[str, str]) -> list[Part]:
    # The set that most of them have.
    name = max(titles, key=lambda one: sum(one in run.sets for run in runs), default="")
    if len(runs) == 1:
        drawn = training_charts(runs[0].metrics)[:2] if runs[0].metrics else []
        first = _headline(runs[0], name, titles[name]) if name else []
        return [*first, _facts_table(runs), *_departures(runs[0]), *_charts(drawn)]
    policies = _policies(runs, name) if name else {}
    drawn = accuracy_charts(policies, _first_colour(runs, policies))[:1] if name else []
    if any(run.metrics for run in runs):
        drawn += compared_charts(runs)[:2]
    return [*_charts(drawn), *_rewards_note(runs), _facts_table(runs), _differing_keys(runs)]


def _rewards_note(runs: Sequence[RunData]) -> list[Part]:
    """Says that rewards can't be compared, where runs differ in what is paid for."""
    paid = ("method", "reward", "cuts")
    differ = [key for key in _differing(runs) if key.partition(".")[0] in paid]
    text = f"Rewards are not comparable here, only accuracies: runs differ in {', '.join(differ)}."
    return [{"note": text}] if differ else []


def page(runs: Sequence[RunData]) -> str:
    """The HTML of one run, or of several beside each other."""
    traces = {run.label: read_traces(run.paths.rollouts) for run in runs}
    titles = table.set_titles(dict.fromkeys(name for run in runs for name in run.sets))
    several = len(runs) > 1
    title = "Comparison of runs" if several else f"{runs[0].method}: {runs[0].label}"
    shown = [(run.label, shown_traces(traces[run.label], runs=len(runs))) for run in runs]
    training: list[Chart | Bars] = list(compared_charts(runs) if several else [])
    if not several and runs[0].metrics:
        training += training_charts(runs[0].metrics) + budget_charts(runs[0].metrics)
    if any(run.metrics for run in runs):
        training += machinery_charts(runs, traces)
    sampled, settings = traces_section(shown), runs[0].paths.config
    config = {"note": settings.name, "settings": settings.read_text(encoding="utf-8")}
    sections: dict[str, list[Part]] = {
        "Overview": _overview(runs, titles),
        "Accuracy": [part for name, t in titles.items() for part in _accuracy(runs, name, t)],
        "Training": [*(_rewards_note(runs) if several and training else []), *_charts(training)],
        "Evaluations": [part for run in runs for part in _evaluations(run)],
        "Traces": [{"html": sampled}] if sampled else [],
        "Config": [] if several else [config],
    }
    there = [(name, parts) for name, parts in sections.items() if parts]
    return render("report.html", title=title, sections=there, **security(STYLE, SCRIPT))


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes the report of a run, and its pictures into its folder."""
    path = _target(RunPaths(folder).report, out, [folder])
    with _refused(folder):
        run = read_run(folder)
        figures.draw_run(run)
        text = page([run])
    documents.write_atomically(path, text)
    return path


def write_comparison(folders: Sequence[Path], labels: Sequence[str], out: Path | None) -> Path:
    """Writes one page of several runs."""
    runs = []
    for folder, label in zip(folders, labels_of(list(folders), list(labels))):
        with _refused(folder):
            runs.append(read_run(folder, label))
    path = _target(folders[0] / COMPARISON, out, folders)
    with _refused(*folders):
        text = page(runs)
    documents.write_atomically(path, text)
    return path


def try_report(folder: Path) -> None:
    """`write_report` of a run that is done; a failure is a warning, since the results are there."""
    attempt(f"{RunPaths(folder).report}: can't be written", write_report, folder)


def _target(default: Path, out: Path | None, runs: Sequence[Path]) -> Path:
    path = default if out is None else out
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; write the name of a file")
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out {path}: its folder does not exist; make it first")
    inside = any(path.resolve().is_relative_to(folder.resolve()) for folder in runs)
    if inside and path.exists() and path.suffix != ".html":
        raise UserError(f"--out {path}: is a file of the run; write another, such as report.html")
    return path


def _refused(*folders: Path) -> contextlib.AbstractContextManager[None]:
    paths = RunPaths(Path())
    names = ", ".join(p.name for p in (paths.metrics, paths.evaluations, paths.summary))
    return odd_refused(f"{', '.join(map(str, folders))}: {names} hold")
