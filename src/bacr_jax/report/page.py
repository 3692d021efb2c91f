"""Writes report.html of a run, or a page that compares several runs, as one file."""

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
# Rows about the baseline (docs/theory.md): name, metric and format. The metric is averaged over the
# later half of the steps.
_OF_CREDIT = (
    ("gradient noise that score weights save, predicted", "score/predicted_saving", "{:.1%}"),
    ("mean advantage", "advantage/mean", "{:+.3f}"),
)
# Most differing settings that a comparison shows unfolded, because results should come first.
_MANY_SETTINGS = 6
# Part of a section: values of the template `report.html`, by name.
Part = dict[str, Any]


def _facts(run: RunData) -> list[tuple[str, str]]:
    """Returns rows (name, text) that describe a run."""
    config = run.config
    summary = run.summary
    records = run.metrics
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
        values = [float(record[key]) for record in later if key in record]
        if values:
            rows.append((name, form.format(fmean(values))))
    if tokens is not None:
        rows.append(("generated tokens", f"{tokens:,}"))
    if "wall_seconds" in summary:
        rows.append(("time", duration(summary["wall_seconds"])))
    return rows


def _departures(run: RunData) -> list[Part]:
    departures = run.summary.get("departures", built_in_departures(run.config))
    if not departures:
        return []
    title = f"{len(departures)} settings depart from the method's publication"
    inside = [{"note": line} for line in departures]
    return [{"fold": title, "closed": True, "inside": inside}]


def _headline(run: RunData, name: str, title: str) -> list[Part]:
    """Returns the results on a set with its first decoding: a sentence, a table and a chart."""
    policies = _policies([run], name)
    mode = next(iter(next(iter(policies.values()))))
    of_mode = {
        label: {mode: summary[mode]} for label, summary in policies.items() if mode in summary
    }
    drawn = accuracy_charts(of_mode, _first_colour([run], of_mode))[:1]
    full_table = table.comparison(f"{title}, {mode}: {_WHAT}", of_mode, between=",\n")
    # The title names the decoding, so that its column can be left out to fit a phone's screen.
    rows = [row[1:] for row in full_table.rows]
    short = replace(full_table, header=full_table.header[1:], rows=rows, sections=False, words=0)
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
    summaries = list(policies.values())
    first = summaries[0][mode]
    last = summaries[-1][mode]
    both = [budget for budget in by_size(last) if budget in first]
    if len(policies) < 2 or not both:
        return "Evaluated once so far: there is nothing to compare with yet."
    rose = _budgets_above(last, first, both)
    fell = _budgets_above(first, last, both)
    largest = both[-1]
    before = first[largest]["mean_thinking_tokens"]
    after = last[largest]["mean_thinking_tokens"]
    sentence = (
        f"Accuracy rose at {rose} and fell at {fell} (intervals apart, {mode}); thinking tokens at "
        f"{budget_name(largest)} went from {before:,.1f} to {after:,.1f}."
    )
    worse = list(declines({mode: first}, {mode: last}))
    if worse:
        note = best_note(summary["best"]) if "best" in summary else ""
        best = f" {note[0].upper()}{note[1:]}." if note else ""
        return f"Worse than before training: {decline_text(worse)}.{best} {sentence}"
    return sentence


def _budgets_above(one: Mapping[str, Any], other: Mapping[str, Any], budgets: Sequence[str]) -> str:
    """Lists the budgets at which the interval of `one` lies above the interval of `other`."""
    above = [b for b in budgets if one[b]["ci95"][0] > other[b]["ci95"][1]]
    return ", ".join(map(budget_name, above)) or "no budget"


def _table(content: Table, style: str | None = None) -> Part:
    part: Part = {"html": content.html()}
    if style:
        part["style"] = style
    return part


def _charts(charts: Sequence[Chart | Bars]) -> list[Part]:
    return [{"charts": list(map(svg.figure, charts))}] if charts else []


def _facts_table(runs: Sequence[RunData]) -> Part:
    """Returns the table of `_facts`, with a column for each run."""
    facts_of_runs = [dict(_facts(run)) for run in runs]
    names = list(dict.fromkeys(name for facts in facts_of_runs for name in facts))
    rows = [[name, *(facts.get(name, NONE) for facts in facts_of_runs)] for name in names]
    header = ["", *(run.label if len(runs) > 1 else "" for run in runs)]
    return _table(Table("In short", header, rows, words=len(header)), "facts")


def _differing(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Returns the config keys in which runs differ, with the value of each run."""
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
    """Returns summaries to compare on a set, by label.

    For one run: its first and its last evaluation. For several: the last evaluation of each, and
    before them the starting policy if it is the same for all runs.
    """
    if len(runs) == 1:
        return figures.first_and_last(runs[0], name)
    records = {run.label: run.of_set(name) for run in runs}
    # A run without this set keeps its index, and so its colour.
    last = {label: evals[-1]["sets"][name] if evals else {} for label, evals in records.items()}
    starts = [evals[0] for evals in records.values() if evals]
    first = starts[0]["sets"][name]
    if all(r["when"] == "before" and r["sets"][name] == first for r in starts):
        # The runs started from the same policy.
        return {"before": first} | last
    return last


def _first_colour(runs: Sequence[RunData], policies: dict[str, Summary]) -> int:
    """Returns the first colour: grey (0) if the first policy is the reference, else 1.

    So a run has the same colour in every chart.
    """
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
    tables = [
        table.comparison(f"{heading}: {_WHAT}", summaries)
        for heading, summaries in table.with_and_without(title, policies)
    ]
    if len(runs) == 1:
        last = list(policies.values())[-1]
        tables += [evaluation.completion(title, last), evaluation.adherence(title, last)]
        dense = [record["dense"].get(name) for record in runs[0].evaluations if "dense" in record]
        if dense and dense[-1]:
            tables.append(evaluation.dense_table(title, dense[-1], last))
    return [{"heading": title}, *_charts(drawn), *map(_table, tables)]


def _overview(runs: Sequence[RunData], titles: Mapping[str, str]) -> list[Part]:
    # The set that most runs were evaluated on.
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
    """Returns a note that rewards can't be compared if runs differ in how they reward."""
    reward_sections = ("method", "reward", "cuts")
    differ = [key for key in _differing(runs) if key.partition(".")[0] in reward_sections]
    text = f"Rewards are not comparable here, only accuracies: runs differ in {', '.join(differ)}."
    return [{"note": text}] if differ else []


def page(runs: Sequence[RunData]) -> str:
    """Returns the HTML of one run, or of a comparison of several."""
    traces = {run.label: read_traces(run.paths.rollouts) for run in runs}
    titles = table.set_titles(dict.fromkeys(name for run in runs for name in run.sets))
    several = len(runs) > 1
    title = "Comparison of runs" if several else f"{runs[0].method}: {runs[0].label}"
    trace_choices = [(run.label, shown_traces(traces[run.label], runs=len(runs))) for run in runs]
    training: list[Chart | Bars] = list(compared_charts(runs) if several else [])
    if not several and runs[0].metrics:
        training += training_charts(runs[0].metrics) + budget_charts(runs[0].metrics)
    if any(run.metrics for run in runs):
        training += machinery_charts(runs, traces)
    sampled = traces_section(trace_choices)
    settings = runs[0].paths.config
    config = {"note": settings.name, "settings": settings.read_text(encoding="utf-8")}
    sections: dict[str, list[Part]] = {
        "Overview": _overview(runs, titles),
        "Accuracy": [part for name, t in titles.items() for part in _accuracy(runs, name, t)],
        "Training": [*(_rewards_note(runs) if several and training else []), *_charts(training)],
        "Evaluations": [part for run in runs for part in _evaluations(run)],
        "Traces": [{"html": sampled}] if sampled else [],
        "Config": [] if several else [config],
    }
    filled_sections = [(name, parts) for name, parts in sections.items() if parts]
    return render("report.html", title=title, sections=filled_sections, **security(STYLE, SCRIPT))


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes the report of a run, and its pictures into its folder; returns the report's path."""
    path = _target(RunPaths(folder).report, out, [folder])
    with _refused(folder):
        run = read_run(folder)
        figures.draw_run(run)
        text = page([run])
    documents.write_atomically(path, text)
    return path


def write_comparison(folders: Sequence[Path], labels: Sequence[str], out: Path | None) -> Path:
    """Writes one page that compares several runs; returns its path."""
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
    """Writes the report of a finished run; a failure is only a warning, as the results exist."""
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
