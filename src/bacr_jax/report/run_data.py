"""Reads and checks a run folder for reports: config, summary, metrics and evaluations."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax import documents
from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.open import read_config

# What fields raise that no check has heard of: of a later version, or of somebody's own making.
ODD = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
_KINDS = {int: "whole number", str: "text", dict: "object"}


@dataclass(frozen=True)
class RunData:
    """A run, finished or under way."""

    label: str
    paths: RunPaths
    config: Config
    summary: dict[str, Any]
    method: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def sets(self) -> list[str]:
        """Names of the sets that were evaluated."""
        return list(dict.fromkeys(name for record in self.evaluations for name in record["sets"]))

    def of_set(self, name: str) -> list[dict[str, Any]]:
        """Evaluations of a set, the first one first."""
        return [record for record in self.evaluations if name in record["sets"]]


def read_run(folder: Path, label: str | None = None) -> RunData:
    """Reads a run folder."""
    paths, config = RunPaths(folder), read_config(folder)
    summary = _read_summary(paths.summary)
    return RunData(
        label=folder.absolute().name if label is None else label,
        paths=paths,
        config=config,
        summary=summary,
        method=str(summary.get("method", config.method)),
        metrics=_records(paths.metrics, {"step": int}),
        evaluations=read_evaluations(paths.evaluations),
    )


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Reads a run's eval.jsonl."""
    evaluations = _records(path, {"step": int, "when": str, "sets": dict})
    for number, record in enumerate(evaluations, 1):
        known = all(map(_is_summary, record["sets"].values()))
        if not known or not isinstance(record.get("dense", {}), dict):
            raise UserError(
                f"{path}, line {number}: its sets are no accuracies by decoding and budget; fix or "
                "remove the line"
            )
    return evaluations


@contextlib.contextmanager
def odd_refused(where: str) -> Iterator[None]:
    """A line that says where there is something else than a run writes: `FILES hold`."""
    try:
        yield
    # It is a ValueError too.
    except UserError:
        raise
    except ODD as error:
        raise UserError(
            f"{where} something else than a run writes ({type(error).__name__}: {error}); put back "
            "what was there"
        ) from None


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        summary = documents.read_object(path)
        numbers = (summary.get(name, 0) for name in ("steps", "generated_tokens", "wall_seconds"))
        sound = {*map(type, numbers)} <= {int, float}
    except ValueError:
        sound = False
    if not sound or not isinstance(summary.get("departures", []), list):
        raise UserError(f"{path}: is damaged; remove it, or run the training again")
    return summary


def _records(path: Path, fields: dict[str, type]) -> list[dict[str, Any]]:
    records = documents.read_lines(path)
    for number, record in enumerate(records, 1):
        for name, kind in fields.items():
            if not isinstance(record.get(name), kind):
                raise UserError(
                    f"{path}, line {number}: its field {name!r} is missing or no "
                    f"{_KINDS[kind]}; fix or remove the line"
                )
    return records


def _is_summary(found: Any) -> bool:
    """True if a record of a set has the fields that every picture needs."""
    try:
        items = [item for budgets in found.values() for item in budgets.items()]
        names = ("accuracy", "mean_thinking_tokens", "mean_total_tokens")
        numbers = [(*(entry[name] for name in names), *entry["ci95"]) for _, entry in items]
    except (AttributeError, KeyError, TypeError):
        return False
    known = all(budget.isdecimal() or budget == UNLIMITED for budget, _ in items)
    sound = all(len(five) == 5 and {*map(type, five)} <= {int, float} for five in numbers)
    return bool(found) and all(found.values()) and known and sound


def labels_of(folders: list[Path], given: list[str]) -> list[str]:
    """Returns the labels of the runs of a comparison.

    Args:
      given: names for all of them, or none: then their folders' names, with as many folders above
        as it takes to tell them apart.
    """
    if given and len(given) != len(folders):
        raise UserError(
            f"--label: {len(given)} names for {len(folders)} runs; write one --label for each "
            "--run, in their order, or none"
        )
    labels = given
    for depth in range(1, max(len(folder.absolute().parts) for folder in folders) + 1):
        labels = given or ["/".join(f.absolute().parts[-depth:]) for f in folders]
        if len(set(labels)) == len(labels):
            return labels
    twice = next(label for label in labels if labels.count(label) > 1)
    what = "--label" if given else "--run"
    raise UserError(f"{what} {twice}: stands there twice; write another for each run")
