"""Reads and checks a run folder for reports: config, summary, metrics and evaluations."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax import files
from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.saved_policy import read_config

# Errors that a report can raise if a file has unexpected content. The checks below cover only the
# fields that every report needs. Other fields can contain anything, for example if a later version
# wrote the file or a user edited it.
ODD = (
    ArithmeticError,
    AttributeError,
    LookupError,
    StopIteration,
    TypeError,
    ValueError,
)
_KINDS = {
    int: "whole number",
    str: "string",
    dict: "JSON object",
}


@dataclass(frozen=True)
class RunData:
    """The content of a run folder. The run may still be in progress.

    Attributes:
      label: name of the run in charts and tables.
      summary: content of summary.json. Empty before the end of the run.
      method: name of the method.
      metrics: records of metrics.jsonl.
      evaluations: records of eval.jsonl.
    """

    label: str
    paths: RunPaths
    config: Config
    summary: dict[str, Any]
    method: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def sets(self) -> list[str]:
        """Returns the names of the evaluated sets, in the order of their first evaluation."""
        return list(dict.fromkeys(name for record in self.evaluations for name in record["sets"]))

    def of_set(self, name: str) -> list[dict[str, Any]]:
        """Returns the evaluations of a set in the order of the steps."""
        return [record for record in self.evaluations if name in record["sets"]]


def read_run(folder: Path, label: str | None = None) -> RunData:
    """Reads a run folder.

    Args:
      label: label of the run. The default is the name of the folder.

    Raises:
      UserError: if a file of the run is missing or malformed.
    """
    paths = RunPaths(folder)
    config = read_config(folder)
    summary = _read_summary(paths.summary)
    return RunData(
        label=folder.absolute().name if label is None else label,
        paths=paths,
        config=config,
        summary=summary,
        method=str(summary.get("method", config.method)),
        metrics=_read_records(paths.metrics, {"step": int}),
        evaluations=read_evaluations(paths.evaluations),
    )


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Reads and checks the eval.jsonl of a run.

    Raises:
      UserError: if a record does not contain the results that charts need.
    """
    evaluations = _read_records(path, {"step": int, "when": str, "sets": dict})
    for number, record in enumerate(evaluations, 1):
        has_summaries = all(map(_is_summary, record["sets"].values()))
        if not has_summaries or not isinstance(record.get("dense", {}), dict):
            raise UserError(
                f"{path}, line {number}: this record of an evaluation has no accuracies by "
                "decoding mode and budget; correct the line, or delete it"
            )
    return evaluations


@contextlib.contextmanager
def malformed_files_refused(where: str) -> Iterator[None]:
    """Context manager that converts the errors in `ODD` to a UserError.

    Args:
      where: beginning of the message: the file and a verb, such as `metrics.jsonl holds`.
    """
    try:
        yield
    # A UserError is a ValueError, which is in ODD.
    except UserError:
        raise
    except ODD as error:
        raise UserError(
            f"{where} content that this package did not write ({type(error).__name__}: {error}); "
            "restore the original files"
        ) from None


def _read_summary(path: Path) -> dict[str, Any]:
    """Reads summary.json. Returns an empty dict if the file is missing."""
    if not path.exists():
        return {}
    damaged = UserError(f"{path} is damaged; delete the file, or run the training again")
    try:
        summary = files.read_object(path)
    except ValueError:
        raise damaged from None
    for name in ("steps", "generated_tokens", "wall_seconds"):
        # Do not use isinstance, because True is an instance of int.
        if type(summary.get(name, 0)) not in (int, float):
            raise damaged
    if not isinstance(summary.get("departures", []), list):
        raise damaged
    return summary


def _read_records(path: Path, fields: dict[str, type]) -> list[dict[str, Any]]:
    """Reads a JSONL file and checks that every record has fields of these types."""
    records = files.read_lines(path)
    for number, record in enumerate(records, 1):
        for name, kind in fields.items():
            if not isinstance(record.get(name), kind):
                raise UserError(
                    f"{path}, line {number}: the field {name!r} is missing or is not a "
                    f"{_KINDS[kind]}; correct the line, or delete it"
                )
    return records


def _is_summary(value: Any) -> bool:
    """True if the results of a set have the fields that every chart needs."""
    try:
        if not value or not all(value.values()):
            return False
        for budgets in value.values():
            for budget, entry in budgets.items():
                if not budget.isdecimal() and budget != UNLIMITED:
                    return False
                low, high = entry["ci95"]
                numbers = [low, high, entry["accuracy"]]
                numbers += [entry["mean_thinking_tokens"], entry["mean_total_tokens"]]
                if any(type(number) not in (int, float) for number in numbers):
                    return False
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


def labels_of(folders: list[Path], names: list[str]) -> list[str]:
    """Returns the labels of the runs of a comparison.

    Args:
      folders: folders of the runs.
      names: a label for every run, or an empty list. In this case, the label is the name of the
        run's folder. Names of parent folders are added until all labels are distinct.

    Raises:
      UserError: if the number of names is wrong, or two runs have the same label.
    """
    if names and len(names) != len(folders):
        raise UserError(
            f"--label: found {len(names)} names for {len(folders)} runs; pass one --label for "
            "each --run in the same order, or none"
        )
    if names:
        _check_distinct("--label", names)
        return names
    parts = [folder.absolute().parts for folder in folders]
    labels = list[str]()
    for depth in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(parts_of_run[-depth:]) for parts_of_run in parts]
        if len(set(labels)) == len(labels):
            return labels
    _check_distinct("--run", labels)
    return labels


def _check_distinct(option: str, labels: list[str]) -> None:
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(
                f"{option} {label} was passed twice; pass a different value for each run"
            )
