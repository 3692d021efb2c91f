"""Pictures of a run, drawn from its files into its folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bacr_jax.evaluation.summary import Summary
from bacr_jax.report import figures
from bacr_jax.report.table import set_title
from bacr_jax.runs.files import read_lines
from bacr_jax.runs.folder import RunPaths


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


def sets_of(evaluations: list[dict[str, Any]]) -> list[str]:
    """Names of the sets that were evaluated."""
    return list(dict.fromkeys(name for record in evaluations for name in record["sets"]))


def first_and_last(evaluations: list[dict[str, Any]], name: str, method: str) -> dict[str, Summary]:
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
      method: name of the method, for titles.

    Returns:
      Pictures by their names, without the ending.
    """
    paths, drawn = RunPaths(folder), dict[str, Path]()

    def picture(name: str, draw: Callable[..., None], *args: Any) -> None:
        if figures.attempt(paths.picture(name), draw, *args):
            drawn[name] = paths.picture(name)

    records, evaluations = read_lines(paths.metrics), read_lines(paths.evaluations)
    if records:
        picture("training", figures.training_curves, records, f"{method}, training")
    if any(name.startswith("budget/median_") for record in records for name in record):
        title = f"{method}, sampled budgets by difficulty group"
        picture("budgets", figures.budget_distributions, records, title)
    names = sets_of(evaluations)
    for name, short in short_names(dict.fromkeys(names)).items():
        picture(
            f"accuracy_{short}",
            figures.accuracy_by_budget,
            first_and_last(evaluations, name, method),
            f"{set_title(name)}: accuracy by thinking budget, 95 % intervals",
        )
        measured = [(r["step"], r["sets"][name]) for r in evaluations if name in r["sets"]]
        if len(measured) > 2:
            picture(
                f"evaluation_{short}",
                figures.accuracy_over_steps,
                measured,
                f"{set_title(name)}: accuracy during training, 95 % intervals",
            )
    return drawn
