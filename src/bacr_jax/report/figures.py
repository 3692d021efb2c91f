"""Draws the charts of runs and evaluations into image files."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.config import io as config_io
from bacr_jax.config.presets import preset_of
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report import pictures
from bacr_jax.report.charts import Chart, Series
from bacr_jax.report.curve_styles import REFERENCE, styles_of
from bacr_jax.report.evaluation_charts import accuracy_charts, over_steps, swap_charts
from bacr_jax.report.run_data import RunData
from bacr_jax.report.table import set_title
from bacr_jax.report.training_charts import budget_charts, training_charts


def accuracy_picture(path: Path, policies: Mapping[str, Summary], title: str) -> bool:
    """Draws accuracy by budget and by tokens used, with a chart for each decoding mode.

    Returns:
      True if the picture was written. If drawing fails, a warning is printed instead.
    """
    return pictures.attempt(path, title, _accuracies, policies)


def tokens_picture(path: Path, policies: Mapping[str, Summary], title: str) -> bool:
    """Draws accuracy by tokens used, with a chart per decoding mode. Returns True on success."""
    return pictures.attempt(path, title, _by_tokens, policies)


def _by_tokens(policies: Mapping[str, Summary]) -> list[list[Chart]]:
    """Returns the charts of accuracy by tokens used in one row."""
    charts = accuracy_charts(policies, policy_styles(list(policies)))
    return [charts[len(charts) // 2 :]]


def swap_picture(path: Path, swap: Mapping[str, Any], title: str) -> bool:
    """Draws the swap table, with a row of charts per decoding mode. Returns True on success."""
    return pictures.attempt(path, title, swap_charts, swap)


def policy_styles(labels: Sequence[str]) -> dict[str, Series]:
    """Returns the curve style (color, marker and dashes) of each policy of an evaluation.

    If there are several policies, the first is drawn in the style of the reference.

    Args:
      labels: names of the policies.
    """
    has_reference = len(labels) > 1
    compared = labels[1:] if has_reference else labels
    styles = dict(zip(compared, styles_of(compared)))
    if has_reference:
        styles[labels[0]] = REFERENCE
    return styles


def _accuracies(
    policies: Mapping[str, Summary], styles: Mapping[str, Series] | None = None
) -> list[list[Chart]]:
    """Returns a row of charts by budget and a row of charts by tokens.

    With a single decoding mode, both charts are in the same row.

    Args:
      styles: a curve with each policy's style, or None to use `policy_styles`.
    """
    charts = accuracy_charts(policies, styles or policy_styles(list(policies)))
    half = len(charts) // 2
    if half == 1:
        return [charts]
    return [charts[:half], charts[half:]]


def short_names(specs: Iterable[str]) -> dict[str, str]:
    """Returns a short name for each evaluation set, which can be used in file names.

    The name is the part of the set before the colon. Characters that file systems may not allow are
    replaced with underscores. A number is appended if another set has the same name.
    """
    names: dict[str, str] = {}
    for spec in specs:
        set_name, _, _ = spec.partition(":")
        base = re.sub(r"[^\w-]", "_", set_name)
        name = base
        count = 1
        while name in names.values():
            count += 1
            name = f"{base}_{count}"
        names[spec] = name
    return names


def first_and_last(run: RunData, name: str) -> dict[str, Summary]:
    """Returns the results of a run's first and last evaluation on a set, by label."""
    evaluations = run.of_set(name)
    first = evaluations[0]
    last = evaluations[-1]
    first_label = "before" if first["when"] == "before" else f"step {first['step']}"
    policies = {first_label: first["sets"][name]}
    if len(evaluations) > 1:
        last_label = run.method
        if last["when"] != "after":
            last_label += f", step {last['step']}"
        policies[last_label] = last["sets"][name]
    return policies


def policies_styles(runs: Sequence[RunData], policies: Mapping[str, Summary]) -> dict[str, Series]:
    """Returns a curve style for each policy: a colour for each method, and grey before training.

    Args:
      runs: the runs, in the order of their policies.
      policies: results of the last policy of each run, by label, possibly after the policy before
        training.
    """
    labels = list(policies)
    styles = list(run_styles(runs).values())
    if len(labels) > len(runs):
        styles.insert(0, REFERENCE)
    return dict(zip(labels, styles))


def run_styles(runs: Sequence[RunData]) -> dict[str, Series]:
    """Returns a curve with the style of each run's method, by the run's label."""
    names = []
    for run in runs:
        preset = preset_of(config_io.flatten(run.config))
        names.append(run.config.method if preset is None else preset.name)
    return dict(zip([run.label for run in runs], styles_of(names)))


def draw_run(run: RunData) -> None:
    """Draws the metrics and evaluations that a run has recorded so far, into its folder.

    The files are training.png, budgets.png, accuracy_SET.png for every evaluation set, and
    evaluation_SET.png for every set with more than two evaluations.
    """

    def draw(name: str, title: str, rows: Callable[..., list[list[Chart]]], *args: Any) -> None:
        pictures.attempt(run.paths.picture(name), title, rows, *args)

    if run.metrics:
        draw("training", f"{run.method}, training", _training_rows, run)
    if any(name.startswith("budget/median_") for record in run.metrics for name in record):
        title = f"{run.method}, sampled budgets by difficulty group"
        draw("budgets", title, _budget_rows, run.metrics)
    for name, short_name in short_names(run.sets).items():
        title = f"{set_title(name)}: accuracy by thinking budget, 95 % intervals"
        policies = first_and_last(run, name)
        draw(
            f"accuracy_{short_name}", title, _accuracies, policies, policies_styles([run], policies)
        )
        evaluations = [(record["step"], record["sets"][name]) for record in run.of_set(name)]
        if len(evaluations) > 2:
            title = f"{set_title(name)}: accuracy during training, 95 % intervals"
            draw(f"evaluation_{short_name}", title, _step_rows, evaluations)


def _in_rows(charts: Sequence[Chart], per_row: int) -> list[list[Chart]]:
    """Splits charts into rows of at most `per_row` charts."""
    return [list(charts[start : start + per_row]) for start in range(0, len(charts), per_row)]


def _training_rows(run: RunData) -> list[list[Chart]]:
    return _in_rows(training_charts(run.metrics, run.config.budget.prior), 3)


def _budget_rows(records: Sequence[Mapping[str, Any]]) -> list[list[Chart]]:
    return _in_rows(budget_charts(records), 4)


def _step_rows(evaluations: Sequence[tuple[int, Summary]]) -> list[list[Chart]]:
    return [over_steps(evaluations)]
