"""Selects the checkpoint of a run that a command uses: the best, the newest or a requested step.

`evaluate`, `generate`, `export` and `bacr_jax.load` use this module. It reads only best.json,
summary.json and the names of the checkpoints. It neither opens nor evaluates a checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from bacr_jax import files
from bacr_jax.config.cli import BEST, NEWEST
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
        return _checked(files.read_object(paths.best))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        if not required:
            return None
        raise UserError(
            f"{paths.best}, which names the best checkpoint, is damaged; pass --step with the "
            f"number of a step, or --step {NEWEST}"
        ) from None


def _declines_at_end(paths: RunPaths, step: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the declines in summary.json by evaluation set, if the run ended at this step.

    The result is empty if the file is missing or damaged, because it is only used for a warning.
    """
    try:
        summary = files.read_object(paths.summary)
        if summary["steps"] != step:
            return {}
        declines = dict(summary["declines"])
        for of_set in declines.values():
            for decline in of_set:
                _check_decline(decline)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return declines


def _checked(best: dict[str, Any]) -> dict[str, Any]:
    """Validates the fields of best.json, and adds defaults for missing optional fields.

    Raises:
      KeyError: if a required field is missing.
      TypeError: if a field has the wrong type.
      ValueError: if an accuracy is outside [0, 1].
    """
    chosen_on = best.get("set")
    worst = best.get("worst")
    declines = best.get("declines", [])
    _check_type(best["step"], int)
    if chosen_on is not None:
        _check_type(chosen_on, str)
        _check_share(best["accuracy"])
    if worst is not None:
        _check_change(worst)
    for decline in declines:
        _check_decline(decline)
    return {
        "step": best["step"],
        "accuracy": best.get("accuracy"),
        "set": chosen_on,
        "worst": worst,
        "declines": declines,
    }


def _check_type(value: Any, kind: type | UnionType) -> None:
    """Raises TypeError if a value is not an instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError


def _check_share(value: Any) -> None:
    """Raises ValueError if a number is outside [0, 1], and TypeError if it is not a number."""
    # Comparing a value that is not a number raises TypeError.
    if not 0 <= value <= 1:
        raise ValueError


def _check_change(change: Any) -> None:
    """Validates a record that contains a metric at one budget, before and after training."""
    _check_type(change["budget"], str)
    _check_share(change["before"])
    _check_share(change["after"])


def _check_decline(decline: Any) -> None:
    """Validates a record of a result that is worse than before training."""
    _check_change(decline)
    _check_type(decline["mode"], str)
    _check_type(decline["measure"], str)
    # Results of earlier versions lack these fields.
    _check_type(decline.get("problems"), int | None)
    _check_type(decline.get("is_shown"), bool | None)
