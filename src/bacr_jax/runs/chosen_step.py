"""Selects the checkpoint of a run that a command uses: the best, the newest or a requested step.

`evaluate`, `generate`, `export` and `bacr_jax.load` use this module. It reads only best.json,
summary.json and the names of the checkpoints. It neither opens nor evaluates a checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bacr_jax import files
from bacr_jax.config.cli import BEST, NEWEST
from bacr_jax.config.reader import read_dataclass
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import RunPaths, steps_in


@dataclass(frozen=True)
class ChosenStep:
    """The selected checkpoint of a run, and the information used for the selection.

    Attributes:
      folder: run folder.
      step: training step of the selected checkpoint.
      newest: step of the newest checkpoint of the run.
      requested: value of --step: a step number, "best" or "newest", or None if --step was not
        passed.
      best: content of best.json. None if the file is missing, or if it is damaged but was not
        needed.
      declines_at_end: results of the evaluation after training that are worse than before, by
        evaluation set, from summary.json. Empty if the checkpoint is not that of the last step.
    """

    folder: Path
    step: int
    newest: int
    requested: int | str | None = None
    best: Mapping[str, Any] | None = None
    declines_at_end: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def is_best(self) -> bool:
        """True if the selected checkpoint had the best evaluation of the run."""
        best = self.best
        return best is not None and best["set"] is not None and best["step"] == self.step


def choose_step(folder: Path, requested: int | str | None = None) -> ChosenStep:
    """Selects a finished checkpoint of a run.

    Args:
      folder: run folder.
      requested: a step number, "best" or "newest". None selects the best checkpoint, or the newest
        if no evaluation determined a best step or if the best checkpoint was deleted.

    Raises:
      UserError: if the run has no finished checkpoint, the requested checkpoint does not exist, or
        best.json is needed and damaged.
    """
    paths = RunPaths(folder)
    steps = steps_in(paths.checkpoints)
    if not steps:
        raise UserError(
            f"--run {folder} contains no finished checkpoint yet; wait until the run has saved one"
        )
    newest = steps[-1]
    step: Any = requested
    best = _read_best(paths, required=requested in (None, BEST))
    if requested == BEST:
        if best is None:
            raise UserError(
                f"--step {BEST}: the best checkpoint of {folder} is unknown, because the run was "
                f"not evaluated during or after training; use the number of a step, or {NEWEST}"
            )
        step = best["step"]
    elif requested is None and best is not None and best["set"] is not None:
        step = best["step"] if best["step"] in steps else newest
    elif requested is None or requested == NEWEST:
        step = newest
    if step not in steps:
        raise UserError(
            f"--step {step}: {folder} contains no checkpoint of this step; use one of "
            f"{', '.join(map(str, steps))}"
        )
    return ChosenStep(folder, step, newest, requested, best, _declines_at_end(paths, step))


def _read_best(paths: RunPaths, *, required: bool) -> dict[str, Any] | None:
    """Returns the content of best.json, or None if the file is missing.

    Raises:
      UserError: if the file is damaged and `required` is True. If `required` is False, a damaged
        file is treated as missing.
    """
    try:
        best = read_dataclass(_Best, files.read_object(paths.best), str(paths.best))
        if best.set is not None:
            _check_rate(best.accuracy)
        worst = None if best.worst is None else _read_change(_Change, best.worst, paths.best)
        declines = [_read_change(_Decline, decline, paths.best) for decline in best.declines]
    except FileNotFoundError:
        return None
    # A UserError of `read_dataclass` is a ValueError.
    except (OSError, ValueError, TypeError):
        if not required:
            return None
        raise UserError(
            f"{paths.best}, which names the best checkpoint, is damaged; pass --step with the "
            f"number of a step, or --step {NEWEST}"
        ) from None
    return {**vars(best), "worst": worst, "declines": declines}


def _declines_at_end(paths: RunPaths, step: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the declines in summary.json by evaluation set, if the run ended at this step.

    The result is empty if the file is missing or damaged, because it is only used for a warning.
    """
    try:
        summary = files.read_object(paths.summary)
        if summary["steps"] != step:
            return {}
        return {
            name: [_read_change(_Decline, decline, paths.summary) for decline in of_set]
            for name, of_set in dict(summary["declines"]).items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclass(frozen=True)
class _Change:
    """A rate at one budget, before and after training, in best.json and summary.json."""

    budget: str
    before: float
    after: float


@dataclass(frozen=True)
class _Decline(_Change):
    """A result that is worse than before training (`evaluation.decline.Decline`)."""

    mode: str
    measure: str
    problems: int
    is_shown: bool


@dataclass(frozen=True)
class _Best:
    """The content of best.json (`evaluation.selection.to_record`)."""

    step: int
    accuracy: float | None
    set: str | None
    worst: Any
    declines: Any


def _read_change(cls: type[_Change], parsed: Any, path: Path) -> dict[str, Any]:
    """Checks the types and the rates of a parsed record, and returns its fields by name.

    Args:
      cls: class that defines the fields.
      parsed: the record, as JSON parses it.
      path: file that contains the record, for error messages.

    Raises:
      ValueError: if a field is missing, unknown or of another type, or a rate is outside [0, 1].
    """
    change = read_dataclass(cls, parsed, str(path))
    _check_rate(change.before)
    _check_rate(change.after)
    return vars(change)


def _check_rate(rate: float | None) -> None:
    """Raises ValueError if a rate is None or outside [0, 1]."""
    if rate is None or not 0.0 <= rate <= 1.0:
        raise ValueError
