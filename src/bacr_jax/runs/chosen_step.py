"""Chooses the checkpoint of a run that a command uses: the best, the newest, or a given step.

`evaluate`, `generate`, `export` and `bacr_jax.load` call it. It reads best.json and the names of
checkpoints; it does not open a checkpoint and does not evaluate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax import documents
from bacr_jax.config.cli import BEST, NEWEST
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import RunPaths, steps_in


@dataclass(frozen=True)
class ChosenStep:
    """A checkpoint of a run, and the alternatives from which it was chosen.

    Attributes:
      step: training step of the checkpoint.
      newest: step of the run's newest checkpoint.
      requested: what --step contained: a step, "best" or "newest"; None if it was left out.
      best: content of best.json; None if the run has none, or if it was not needed and damaged.
    """

    folder: Path
    step: int
    newest: int
    requested: int | str | None = None
    best: Mapping[str, Any] | None = None

    @property
    def is_best(self) -> bool:
        """True if an evaluation of this checkpoint was the best one."""
        best = self.best
        return best is not None and best["set"] is not None and best["step"] == self.step


def choose_step(folder: Path, requested: int | str | None = None) -> ChosenStep:
    """Chooses a finished checkpoint of a run.

    Args:
      requested: a step, "best" or "newest". None: the best, or the newest if no evaluation chose
        one or if the best has no checkpoint any more.

    Raises:
      UserError: the run has no checkpoint, not the requested one, or its best.json is damaged.
    """
    paths = RunPaths(folder)
    steps = steps_in(paths.checkpoints)
    if not steps:
        raise UserError(f"--run {folder}: holds no finished checkpoint; let the run save one")
    newest = steps[-1]
    step: Any = requested
    best = _read_best(paths, required=requested in (None, BEST))
    if requested == BEST:
        if best is None:
            raise UserError(
                f"--step {BEST}: {folder} holds no evaluation made in or after training; write "
                f"the number of a step, or {NEWEST}"
            )
        step = best["step"]
    elif requested is None and best is not None and best["set"] is not None:
        step = best["step"] if best["step"] in steps else newest
    elif requested is None or requested == NEWEST:
        step = newest
    if step not in steps:
        raise UserError(
            f"--step {step}: {folder} holds no such checkpoint; write one of "
            f"{', '.join(map(str, steps))}"
        )
    return ChosenStep(folder, step, newest, requested, best)


def _read_best(paths: RunPaths, *, required: bool) -> dict[str, Any] | None:
    """Returns the content of best.json, or None if it is missing.

    Raises:
      UserError: it is damaged and `required`. Otherwise a damaged file counts as missing.
    """
    try:
        return _checked(documents.read_object(paths.best))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        if not required:
            return None
        raise UserError(
            f"{paths.best}: is damaged; write --step and the number of a step, or --step {NEWEST}"
        ) from None


def _checked(best: dict[str, Any]) -> dict[str, Any]:
    """Checks the fields of best.json, and adds those that the file lacks.

    Raises:
      KeyError: a field is missing.
      TypeError: a field has another type.
      ValueError: an accuracy is not in [0, 1].
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
        _check_change(decline)
        _check_type(decline["mode"], str)
        _check_type(decline["measure"], str)
    return {
        "step": best["step"],
        "accuracy": best.get("accuracy"),
        "set": chosen_on,
        "worst": worst,
        "declines": declines,
    }


def _check_type(value: Any, kind: type) -> None:
    """Raises TypeError if a value has another type."""
    if not isinstance(value, kind):
        raise TypeError


def _check_share(value: Any) -> None:
    """Raises ValueError if a number is not in [0, 1], and TypeError if it is not a number."""
    # A comparison with another type than a number raises TypeError.
    if not 0 <= value <= 1:
        raise ValueError


def _check_change(change: Any) -> None:
    """Checks a share at one budget, before and after training."""
    _check_type(change["budget"], str)
    _check_share(change["before"])
    _check_share(change["after"])
