"""Pictures of a run and of evaluations, as files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.documents import read_lines
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report import png
from bacr_jax.report.charts import Chart
from bacr_jax.report.evaluation_charts import accuracy_charts, over_steps
from bacr_jax.report.table import set_title
from bacr_jax.report.training_charts import budget_charts, training_charts
from bacr_jax.runs.folder import RunPaths


def accuracy_picture(path: Path, policies: Mapping[str, Summary], title: str) -> bool:
    """Accuracy by budget and by tokens used, for each decoding."""
    return png.attempt(path, title, _accuracies, policies)


def _accuracies(policies: Mapping[str, Summary]) -> list[list[Chart]]:
    """A row of charts by budget, and one by tokens."""
    charts = accuracy_charts(policies, 0 if len(policies) > 1 else 1)
    half = len(charts) // 2
    return [charts] if half == 1 else [charts[:half], charts[half:]]


def short_names(specs: Mapping[str, Any]) -> dict[str, str]:
    """Names of sets for files: the part before the colon, numbered where it repeats."""
    short: dict[str, str] = {}
    for spec in specs:
        base = "".join(c if c.isalnum() or c in "-_" else "_" for c in spec.partition(":")[0])
        name, count = base, 2
        while name in short.values():
            name, count = f"{base}_{count}", count + 1
        short[spec] = name
    return short


def sets_of(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the sets that were evaluated."""
    return list(dict.fromkeys(name for record in evaluations for name in record["sets"]))


def first_and_last(
    evaluations: Sequence[Mapping[str, Any]], name: str, method: str
) -> dict[str, Summary]:
    """The policy before training, and as it was evaluated last."""
    records = [record for record in evaluations if name in record["sets"]]
    first, last = records[0], records[-1]
    policies = {"before" if first["when"] == "before" else f"step {first['step']}": first}
    if len(records) > 1:
        label = method if last["when"] == "after" else f"{method}, step {last['step']}"
        policies[label] = last
    return {label: record["sets"][name] for label, record in policies.items()}


def draw_run(folder: Path, method: str) -> dict[str, Path]:
    """Draws what the run's files hold so far.

    Args:
      folder: the run folder; gets training.png, budgets.png, and for every set accuracy_SET.png
        and, with more than two evaluations, evaluation_SET.png.
    """
    paths = RunPaths(folder)
    records, evaluations = read_lines(paths.metrics), read_lines(paths.evaluations)
    made = dict[str, bool]()
    if records:
        rows = lambda: [training_charts(records)[:3], training_charts(records)[3:]]
        made["training"] = png.attempt(paths.picture("training"), f"{method}, training", rows)
    if any(name.startswith("budget/median_") for record in records for name in record):
        title = f"{method}, sampled budgets by difficulty group"
        rows = lambda: [budget_charts(records)]
        made["budgets"] = png.attempt(paths.picture("budgets"), title, rows)
    for name, short in short_names(dict.fromkeys(sets_of(evaluations))).items():
        policies = first_and_last(evaluations, name, method)
        title = f"{set_title(name)}: accuracy by thinking budget, 95 % intervals"
        path = paths.picture(f"accuracy_{short}")
        made[path.stem] = accuracy_picture(path, policies, title)
        measured = [(r["step"], r["sets"][name]) for r in evaluations if name in r["sets"]]
        if len(measured) > 2:
            title = f"{set_title(name)}: accuracy during training, 95 % intervals"
            path = paths.picture(f"evaluation_{short}")
            made[path.stem] = png.attempt(path, title, lambda rows: [over_steps(rows)], measured)
    return {name: paths.picture(name) for name, drawn in made.items() if drawn}
