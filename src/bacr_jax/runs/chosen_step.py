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
    """A checkpoint of a run, and what it was chosen from.

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

    UserError: it is damaged and `required`; else a damaged file counts as missing.
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
    """Returns best.json with all its fields; older versions wrote only the first three."""
    chosen_on = best.get("set")
    worst = best.get("worst")
    declines = best.get("declines", [])
    shares: list[Any] = []
    kinds: list[tuple[Any, Any]] = [(best["step"], int)]
    if chosen_on is not None:
        kinds += [(chosen_on, str)]
        shares += [best["accuracy"]]
    for change in (*declines, *([] if worst is None else [worst])):
        kinds += [(change["budget"], str)]
        shares += [change["before"], change["after"]]
    for decline in declines:
        kinds += [(decline[name], str) for name in ("mode", "measure")]
    if not all(isinstance(value, kind) for value, kind in kinds):
        raise TypeError
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError
    return {
        "step": best["step"],
        "accuracy": best.get("accuracy"),
        "set": chosen_on,
        "worst": worst,
        "declines": declines,
    }
