"""The pictures of a run, drawn from its files into its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bacr_jax.report import figures
from bacr_jax.report.tables import Summary
from bacr_jax.runs.folder import read_lines


def short_names(specs: Mapping[str, Any]) -> dict[str, str]:
    """Names of sets for files: the part before the colon, numbered where it repeats."""
    found: dict[str, str] = {}
    for spec in specs:
        base = "".join(c if c.isalnum() or c in "-_" else "_" for c in spec.partition(":")[0])
        name, count = base, 2
        while name in found.values():
            name, count = f"{base}_{count}", count + 1
        found[spec] = name
    return found


def sets_of(evaluations: list[dict[str, Any]]) -> list[str]:
    """Names of the sets that were evaluated."""
    return list(dict.fromkeys(name for record in evaluations for name in record["sets"]))


def first_and_last(evaluations: list[dict[str, Any]], name: str, method: str) -> dict[str, Summary]:
    """The policy before training, and as it was evaluated last."""
    found = [record for record in evaluations if name in record["sets"]]
    policies = {"before" if found[0]["when"] == "before" else f"step {found[0]['step']}": found[0]}
    if len(found) > 1:
        last = found[-1]
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
    found: dict[str, Path] = {}

    def picture(name: str) -> Path:
        found[name] = folder / f"{name}.png"
        return found[name]

    records = read_lines(folder / "metrics.jsonl")
    evaluations = read_lines(folder / "eval.jsonl")
    if records:
        figures.training_curves(picture("training"), records, f"{method}, training")
    if any(name.startswith("budget/median_") for record in records for name in record):
        figures.budgets_by_group(
            picture("budgets"), records, f"{method}, sampled budgets by difficulty group"
        )
    names = sets_of(evaluations)
    for name, short in short_names(dict.fromkeys(names)).items():
        figures.accuracy_by_budget(
            picture(f"accuracy_{short}"),
            first_and_last(evaluations, name, method),
            f"{name}: accuracy by thinking budget, 95 % intervals",
        )
        measured = [(r["step"], r["sets"][name]) for r in evaluations if name in r["sets"]]
        if len(measured) > 2:
            figures.accuracy_over_steps(
                picture(f"evaluation_{short}"),
                measured,
                f"{name}: accuracy during training, 95 % intervals",
            )
    return found
