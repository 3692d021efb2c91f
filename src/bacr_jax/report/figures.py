"""Draws pictures of a run and of evaluations into files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bacr_jax.evaluation.summary import Summary
from bacr_jax.report import png
from bacr_jax.report.charts import Chart
from bacr_jax.report.evaluation_charts import accuracy_charts, over_steps
from bacr_jax.report.run_data import RunData
from bacr_jax.report.table import set_title
from bacr_jax.report.training_charts import budget_charts, training_charts


def accuracy_picture(path: Path, policies: Mapping[str, Summary], title: str) -> bool:
    """Draws accuracy by budget and by tokens used, for each decoding; True if it succeeds."""
    return png.attempt(path, title, _accuracies, policies)


def _accuracies(policies: Mapping[str, Summary]) -> list[list[Chart]]:
    """Returns a row of charts by budget, and a row of charts by tokens."""
    charts = accuracy_charts(policies, 0 if len(policies) > 1 else 1)
    half = len(charts) // 2
    return [charts] if half == 1 else [charts[:half], charts[half:]]


def short_names(specs: Iterable[str]) -> dict[str, str]:
    """Returns file names of sets: the part before the colon, numbered if it repeats."""
    short: dict[str, str] = {}
    for spec in specs:
        base = "".join(c if c.isalnum() or c in "-_" else "_" for c in spec.partition(":")[0])
        name = base
        count = 1
        while name in short.values():
            count += 1
            name = f"{base}_{count}"
        short[spec] = name
    return short


def first_and_last(run: RunData, name: str) -> dict[str, Summary]:
    """Returns the summaries of a run's first and last evaluation of a set, by label."""
    first, *others = run.of_set(name)
    policies = {"before" if first["when"] == "before" else f"step {first['step']}": first}
    if others:
        last = others[-1]
        label = run.method if last["when"] == "after" else f"{run.method}, step {last['step']}"
        policies[label] = last
    return {label: record["sets"][name] for label, record in policies.items()}


def draw_run(run: RunData) -> None:
    """Draws the metrics and evaluations of a run so far into its folder.

    The files are training.png, budgets.png, for every set accuracy_SET.png and, with more than two
    evaluations, evaluation_SET.png.
    """

    def draw(name: str, title: str, rows: Callable[..., list[list[Chart]]], *args: Any) -> None:
        png.attempt(run.paths.picture(name), title, rows, *args)

    def training_rows() -> list[list[Chart]]:
        charts = training_charts(run.metrics)
        return [charts[:3], charts[3:]]

    if run.metrics:
        draw("training", f"{run.method}, training", training_rows)
    if any(name.startswith("budget/median_") for record in run.metrics for name in record):
        title = f"{run.method}, sampled budgets by difficulty group"
        draw("budgets", title, lambda: [budget_charts(run.metrics)])
    for name, short in short_names(run.sets).items():
        title = f"{set_title(name)}: accuracy by thinking budget, 95 % intervals"
        draw(f"accuracy_{short}", title, _accuracies, first_and_last(run, name))
        measured = [(record["step"], record["sets"][name]) for record in run.of_set(name)]
        if len(measured) > 2:
            title = f"{set_title(name)}: accuracy during training, 95 % intervals"
            draw(f"evaluation_{short}", title, lambda rows: [over_steps(rows)], measured)
