"""Writes report.html of a run, or a page that compares several runs."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bacr_jax import files
from bacr_jax.config import ModelConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.derived import mixture
from bacr_jax.config.presets import method_text, preset_of
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError, attempt
from bacr_jax.evaluation.decline import Decline, declines, interval_before
from bacr_jax.evaluation.folder import finished_evaluations
from bacr_jax.evaluation.summary import Summary
from bacr_jax.methods.registry import built_in_departures
from bacr_jax.report import evaluation, figures, plots, table
from bacr_jax.report.charts import Bars, Chart
from bacr_jax.report.chosen_step import best_note, certainty_text, declines_of
from bacr_jax.report.evaluation_charts import (
    accuracy_charts,
    completion_charts,
    mean_over_steps,
    over_steps,
)
from bacr_jax.report.html_page import SCRIPT, STYLE, render, security
from bacr_jax.report.paired import paired_differences
from bacr_jax.report.run_data import ODD, RunData, labels_of, malformed_files_refused, read_run
from bacr_jax.report.table import NONE, Table, budget_name, by_size, set_title
from bacr_jax.report.traces import Trace, read_traces, shown_traces, traces_section
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
# Table rows about the baseline of the policy gradient (docs/theory.md): name, metric and format.
# The metric is averaged over the second half of the steps.
_OF_CREDIT = (
    ("gradient noise that score weights save, predicted", "score/predicted_saving", "{:.1%}"),
    ("mean advantage", "advantage/mean", "{:+.3f}"),
)
# Maximum number of differing settings that a comparison shows expanded. A longer table would push
# the results off the first screen.
_MANY_SETTINGS = 6
# Part of a section: values of the template `report.html`, by name.
Part = dict[str, Any]


def _facts(run: RunData) -> list[tuple[str, str]]:
    """Returns (name, text) rows that describe a run, such as its state, method and model."""
    config = run.config
    summary = run.summary
    records = run.metrics
    last_record = records[-1] if records else {"step": 0}
    steps = summary.get("steps", last_record["step"])
    tokens = summary.get("generated_tokens")
    if tokens is None and records:
        tokens = int(float(last_record.get("rollout/tokens_total", 0)))
    state = "finished" if summary else "not finished"
    training_sets = [set_title(name) for _, name in mixture(config.data.train)]
    rows = [
        ("state", f"{state}, {steps:,} steps"),
        ("method", method_text(preset_of(config_io.flatten(config)), run.method)),
        ("model", _model_text(config.model)),
        ("trained on", ", ".join(training_sets)),
        ("budgets", f"{config.budget.min:,} to {config.budget.max:,} thinking tokens"),
        ("seed", str(config.seed)),
    ]
    later = records[len(records) // 2 :]
    for name, key, form in _OF_CREDIT:
        values = [float(record[key]) for record in later if key in record]
        if values:
            rows.append((name, form.format(fmean(values))))
    updates = steps * config.train.minibatches
    rows.append(("updates", f"{updates:,}"))
    for kind, limited_steps in summary.get("limited_updates", {}).items():
        if limited_steps:
            rows.append((f"updates {kind}", f"in {limited_steps:,} of {steps:,} steps"))
    if tokens is not None:
        rows.append(("generated tokens", f"{tokens:,}"))
    if "wall_seconds" in summary:
        rows.append(("time", duration(summary["wall_seconds"])))
    return rows


def _model_text(model: ModelConfig) -> str:
    if model.path:
        return model.path
    if model.preset == "custom":
        return f"random, {model.num_layers} layers of width {model.hidden_size}"
    return model.preset


def _departures(run: RunData) -> list[Part]:
    """Returns a collapsed list of settings that differ from the method's publication, if any."""
    departures = run.summary.get("departures", built_in_departures(resolve(run.config).method))
    if not departures:
        return []
    title = f"{len(departures)} settings depart from the method's publication"
    inside = [{"note": line} for line in departures]
    return [{"fold": title, "closed": True, "inside": inside}]


def _headline(run: RunData, name: str, title: str) -> list[Part]:
    """Returns the main results of a run: text, chart and table.

    The chart and the table show one set in its first decoding mode. The text also contains all
    results of the run that are worse than before training.
    """
    policies = _policies([run], name)
    first_policy = next(iter(policies.values()))
    mode = next(iter(first_policy))
    of_mode = {
        label: {mode: summary[mode]} for label, summary in policies.items() if mode in summary
    }
    charts = accuracy_charts(of_mode, figures.policies_styles([run], of_mode))
    full_table = table.comparison(f"{title}, {mode}: {_WHAT}", of_mode, between=",\n")
    # The title names the decoding mode, so its column can be left out to fit a phone's screen.
    short_table = replace(
        full_table,
        header=full_table.header[1:],
        rows=[row[1:] for row in full_table.rows],
        sections=False,
        words=0,
    )
    return [
        {"lead": " ".join([*_worse_sentences(run), _sentence(of_mode, mode)])},
        *_charts(charts[:1], wide=True),
        _table(short_table, "headline"),
    ]


def _sentence(policies: Mapping[str, Summary], mode: str) -> str:
    """Returns a sentence about the change of accuracy and of thinking tokens in training.

    The sentence lists the budgets at which accuracy rose above or fell below its 95 % interval
    before training.

    Args:
      policies: results of the first and the last evaluation.
      mode: decoding mode.
    """
    summaries = list(policies.values())
    first = summaries[0][mode]
    last = summaries[-1][mode]
    both = [budget for budget in by_size(last) if budget in first]
    if len(policies) < 2 or not both:
        return "Evaluated once so far: there is nothing to compare with yet."
    intervals = {budget: interval_before(first[budget]) for budget in both}
    rose = [budget for budget in both if last[budget]["accuracy"] > intervals[budget][1]]
    fell = [budget for budget in both if last[budget]["accuracy"] < intervals[budget][0]]
    largest = both[-1]
    before = first[largest]["mean_thinking_tokens"]
    after = last[largest]["mean_thinking_tokens"]
    return (
        f"Accuracy rose at {_budget_list(rose)} and fell at {_budget_list(fell)} (outside the 95 % "
        f"interval of before, {mode}); thinking tokens at {budget_name(largest)} went from "
        f"{before:,.1f} to {after:,.1f}."
    )


def _worse_sentences(run: RunData) -> list[str]:
    """Returns sentences about all results of a run that are worse than before training.

    If there are any, the last sentence names the best checkpoint of a finished run.
    """
    text = _worse_text(run)
    if not text:
        return []
    sentences = [f"Worse than before training {text}."]
    if "best" in run.summary:
        note = best_note(run.summary["best"])
        sentences.append(f"{note[0].upper()}{note[1:]}.")
    return sentences


def _worse_notes(runs: Sequence[RunData]) -> list[Part]:
    """Returns a line for each run with results that are worse than before training."""
    return [
        {"lead": f"{run.label} is worse than before training {text}."}
        for run in runs
        if (text := _worse_text(run))
    ]


def _worse_text(run: RunData) -> str:
    """Lists the declines of a run, such as `on GSM8K: greedy at 48: accuracy 55.8 to 0.0 %`.

    Returns an empty text if the run has no declines.
    """
    worse = _declines_by_set(run)
    titles = table.set_titles(worse)
    return "; ".join(
        f"on {titles[name]}: {certainty_text(of_set)}" for name, of_set in worse.items() if of_set
    )


def _declines_by_set(run: RunData) -> dict[str, list[Decline]]:
    """Returns the declines of a run in all decoding modes, by evaluation set.

    They are read from summary.json. If it is missing, because the run is unfinished, they are
    computed from the evaluations.
    """
    recorded = run.summary.get("declines")
    if recorded is not None:
        return {name: declines_of(records) for name, records in recorded.items()}
    worse = dict[str, list[Decline]]()
    for name in run.sets:
        records = run.of_set(name)
        worse[name] = []
        if records[0]["when"] == "before":
            worse[name] += declines(records[0]["sets"][name], records[-1]["sets"][name])
    return worse


def _budget_list(budgets: Sequence[str]) -> str:
    return ", ".join(map(budget_name, budgets)) or "no budget"


def _table(content: Table, style: str | None = None) -> Part:
    part: Part = {"html": content.html()}
    if style:
        part["style"] = style
    return part


def _charts(charts: Sequence[Chart | Bars], *, wide: bool = False) -> list[Part]:
    """Returns a grid of charts.

    Args:
      wide: True if each chart has the full width of the page.
    """
    if not charts:
        return []
    return [{"charts": [plots.figure(chart, wide=wide) for chart in charts]}]


def _facts_table(runs: Sequence[RunData]) -> Part:
    """Returns the table of `_facts` about the runs, with a column for each run."""
    facts_of_runs = [dict(_facts(run)) for run in runs]
    names = list(dict.fromkeys(name for facts in facts_of_runs for name in facts))
    rows = [[name, *(facts.get(name, NONE) for facts in facts_of_runs)] for name in names]
    header = ["", *(run.label if len(runs) > 1 else "" for run in runs)]
    return _table(Table("In short", header, rows, words=len(header)), "facts")


def _differing(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Returns the config keys in which runs differ, with the value of each run."""
    configs = [config_io.flatten(run.config) for run in runs]
    differing = {}
    for key in configs[0]:
        texts = [config_io.value_text(config[key]) for config in configs]
        if len(set(texts)) > 1:
            differing[key] = texts
    return differing


def _differing_keys(runs: Sequence[RunData]) -> Part:
    """Returns the table of config keys in which runs differ, without their output folder."""
    differing = _differing(runs)
    differing.pop("output.dir", None)
    if not differing:
        return {"note": "The same config, but for the folder."}
    header = ["key", *(run.label for run in runs)]
    rows = [[key, *texts] for key, texts in differing.items()]
    content = Table("", header, rows, words=len(header))
    return {
        "fold": f"Settings that differ: {len(rows)}",
        "closed": len(rows) > _MANY_SETTINGS,
        "inside": [_table(content, "facts differs")],
    }


def _evaluations(run: RunData) -> list[Part]:
    """Returns the tables of the finished evaluations in a run's folder."""
    parts = list[Part]()
    for path in finished_evaluations(run.paths.path):
        try:
            results = files.read_json(path)
            tables = evaluation.tables(results)
            title = f"{results['name']} ({path.parent.name})"
        except ODD:
            raise UserError(
                f"{path} does not contain the results of an evaluation; delete the folder "
                f"{path.parent}, and run bacr evaluate again"
            ) from None
        parts.append({"fold": title, "closed": False, "inside": list(map(_table, tables))})
    return parts


def _policies(runs: Sequence[RunData], name: str) -> dict[str, Summary]:
    """Returns the results that are compared on a set, by label.

    For a single run, these are its first and its last evaluation. For several runs, they are the
    last evaluation of each run. The policy before training comes first if it is the same for all
    runs.
    """
    if len(runs) == 1:
        return figures.first_and_last(runs[0], name)
    last = dict[str, Summary]()
    for run in runs:
        records = run.of_set(name)
        # A run without results on this set has an empty entry, so that other runs keep their
        # colours.
        last[run.label] = records[-1]["sets"][name] if records else {}
    before = _records_before(runs, name)
    return {"before": before[0]["sets"][name]} | last if before else last


def _records_before(runs: Sequence[RunData], name: str) -> list[dict[str, Any]]:
    """Returns the evaluation of each run before training, if all runs start from one policy.

    Returns no evaluations if their results on the set differ, or if a run was not evaluated before
    training. Runs without results on the set are ignored.

    Args:
      name: the evaluation set.
    """
    records = [record for run in runs for record in run.of_set(name)[:1]]
    for record in records:
        if record["when"] != "before" or record["sets"][name] != records[0]["sets"][name]:
            return []
    return records


def _accuracy(runs: Sequence[RunData], name: str, title: str) -> list[Part]:
    """Returns the charts and tables of the results on a set."""
    policies = _policies(runs, name)
    styles = figures.policies_styles(runs, policies)
    charts = accuracy_charts(policies, styles, _cut_early(runs, name))
    charts += completion_charts(policies, styles)
    charts += _step_charts(runs, name)
    tables = [
        table.comparison(f"{heading}: {_WHAT}", summaries)
        for heading, summaries in table.with_and_without(title, policies)
    ]
    if len(runs) == 1:
        last = list(policies.values())[-1]
        tables.append(evaluation.completion(title, last))
        tables.append(evaluation.thinking_by_verdict(title, last))
        tables.append(evaluation.adherence(title, last))
        dense = None
        for record in runs[0].evaluations:
            if "dense" in record:
                dense = record["dense"].get(name)
        if dense:
            tables.append(evaluation.dense_table(title, dense, last))
    return [{"heading": title}, *_charts(charts), *map(_table, tables)]


def _cut_early(runs: Sequence[RunData], name: str) -> Summary:
    """Returns the results of the policy before training if its thinking is truncated early.

    The results are by decoding mode and by truncation point. They are empty if no run evaluated
    truncation points (`eval.cut_every`) before training, or if the runs started from different
    policies.
    """
    for record in _records_before(runs, name):
        if name in record.get("dense", {}):
            dense = record["dense"][name]
            return {mode: dense_mode["curve"] for mode, dense_mode in dense.items()}
    return {}


def _step_charts(runs: Sequence[RunData], name: str) -> list[Chart]:
    """Returns charts of accuracy over training steps, or [] if no run has 3 evaluations.

    Args:
      runs: the runs of the page.
      name: the evaluation set.
    """
    evaluations = {
        run.label: [(record["step"], record["sets"][name]) for record in run.of_set(name)]
        for run in runs
    }
    if max(map(len, evaluations.values())) <= 2:
        return []
    if len(runs) == 1:
        return over_steps(evaluations[runs[0].label])
    return mean_over_steps(evaluations, figures.run_styles(runs))


def _overview(runs: Sequence[RunData], titles: Mapping[str, str]) -> list[Part]:
    """Returns the first section of the page.

    Args:
      titles: titles of all evaluated sets.
    """

    def num_evaluated_runs(name: str) -> int:
        return sum(name in run.sets for run in runs)

    # The overview shows the set on which most runs were evaluated.
    main_set = max(titles, key=num_evaluated_runs, default=None)
    parts = list[Part]()
    charts = list[Chart]()
    if len(runs) == 1:
        run = runs[0]
        if main_set is not None:
            parts += _headline(run, main_set, titles[main_set])
        parts.append(_facts_table(runs))
        parts += _departures(run)
        if run.metrics:
            charts = training_charts(run.metrics, run.config.budget.prior)[:2]
        return parts + _charts(charts)
    return [
        *_worse_notes(runs),
        *_compared(runs, main_set, titles),
        _facts_table(runs),
        _differing_keys(runs),
    ]


def _compared(
    runs: Sequence[RunData], main_set: str | None, titles: Mapping[str, str]
) -> list[Part]:
    """Returns the results of several runs: accuracy by budget, differences, and training curves.

    Args:
      main_set: the set on which most runs were evaluated, or None if no run was evaluated.
      titles: titles of all evaluated sets.
    """
    parts = list[Part]()
    if main_set is not None:
        policies = _policies(runs, main_set)
        charts = accuracy_charts(policies, figures.policies_styles(runs, policies))
        parts += _charts(charts[:1], wide=True)
        parts.append(_table(table.comparison(f"{titles[main_set]}: {_WHAT}", policies)))
    tables, notes = paired_differences(runs)
    parts += map(_table, tables)
    parts += [{"note": note} for note in notes]
    if any(run.metrics for run in runs):
        parts += _charts(compared_charts(runs, figures.run_styles(runs))[:2])
    return parts + _rewards_note(runs)


def _rewards_note(runs: Sequence[RunData]) -> list[Part]:
    """Returns a note that rewards can't be compared if the runs have different reward settings."""
    reward_sections = ("method", "reward", "cuts")
    keys = [key for key in _differing(runs) if key.split(".")[0] in reward_sections]
    if not keys:
        return []
    text = f"Rewards are not comparable here, only accuracies: runs differ in {', '.join(keys)}."
    return [{"note": text}]


def page(runs: Sequence[RunData]) -> str:
    """Returns the HTML page of a run, or of a comparison of several runs."""
    traces = {run.label: read_traces(run.paths.rollouts) for run in runs}
    titles = table.set_titles(dict.fromkeys(name for run in runs for name in run.sets))
    title = "Comparison of runs"
    if len(runs) == 1:
        title = f"{runs[0].method}: {runs[0].label}"
    accuracy = list[Part]()
    for name, set_heading in titles.items():
        accuracy += _accuracy(runs, name, set_heading)
    sections = {
        "Overview": _overview(runs, titles),
        "Accuracy": accuracy,
        "Training": _training(runs, traces),
        "Evaluations": [part for run in runs for part in _evaluations(run)],
        "Traces": _traces(traces),
        "Config": _config(runs),
    }
    return render(
        "report.html",
        title=title,
        sections=[(name, parts) for name, parts in sections.items() if parts],
        **security(STYLE, f"{plots.library()}\n{SCRIPT}"),
    )


def _training(runs: Sequence[RunData], traces: Mapping[str, Sequence[Trace]]) -> list[Part]:
    charts = list[Chart | Bars]()
    styles = figures.run_styles(runs)
    if len(runs) > 1:
        charts += compared_charts(runs, styles)
    elif runs[0].metrics:
        charts += training_charts(runs[0].metrics, runs[0].config.budget.prior)
        charts += budget_charts(runs[0].metrics)
    if any(run.metrics for run in runs):
        charts += machinery_charts(runs, traces, styles)
    if len(runs) > 1 and charts:
        return _rewards_note(runs) + _charts(charts)
    return _charts(charts)


def _traces(traces: Mapping[str, Sequence[Trace]]) -> list[Part]:
    selected = [
        (label, shown_traces(traces_of_run, runs=len(traces)))
        for label, traces_of_run in traces.items()
    ]
    section = traces_section(selected)
    return [{"html": section}] if section else []


def _config(runs: Sequence[RunData]) -> list[Part]:
    """Returns the config file of a single run, or nothing for a comparison of runs."""
    if len(runs) > 1:
        return []
    path = runs[0].paths.config
    return [{"note": path.name, "settings": path.read_text(encoding="utf-8")}]


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes the report of a run and its charts as image files. Returns the path of the report."""
    path = _target(RunPaths(folder).report, out, [folder])
    with _refused(folder):
        run = read_run(folder)
        figures.draw_run(run)
        text = page([run])
    files.write_atomically(path, text)
    return path


def write_comparison(folders: Sequence[Path], labels: Sequence[str], out: Path | None) -> Path:
    """Writes a page that compares several runs, and returns its path."""
    runs = []
    for folder, label in zip(folders, labels_of(list(folders), list(labels))):
        with _refused(folder):
            runs.append(read_run(folder, label))
    path = _target(folders[0] / COMPARISON, out, folders)
    with _refused(*folders):
        text = page(runs)
    files.write_atomically(path, text)
    return path


def try_report(folder: Path) -> None:
    """Writes the report of a finished run. Prints a warning if this fails."""
    attempt(f"{RunPaths(folder).report}: can't be written", write_report, folder)


def _target(default: Path, out: Path | None, runs: Sequence[Path]) -> Path:
    """Returns the path of the page to write.

    Raises:
      UserError: if the path is a folder, its folder is missing, or it is a data file of a run.
    """
    path = default if out is None else out
    if path.is_dir():
        raise UserError(
            f"--out {path}: this path is a folder; pass the path of a file, such as report.html"
        )
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out {path}: the folder {path.parent} does not exist; create it first")
    inside = any(path.resolve().is_relative_to(folder.resolve()) for folder in runs)
    if inside and path.exists() and path.suffix != ".html":
        raise UserError(
            f"--out {path}: this is a data file of the run, which must not be overwritten; use "
            "another name, such as report.html"
        )
    return path


def _refused(*folders: Path) -> contextlib.AbstractContextManager[None]:
    """Context manager that converts errors from malformed files in run folders to a UserError."""
    paths = RunPaths(Path())
    folder_names = ", ".join(map(str, folders))
    file_names = f"{paths.metrics.name}, {paths.evaluations.name}, {paths.summary.name}"
    return malformed_files_refused(f"{folder_names}: {file_names} hold")
