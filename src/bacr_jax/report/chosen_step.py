"""Describes in one line which checkpoint a command uses, and which checkpoint of a run is best."""

from collections.abc import Iterator, Mapping
from typing import Any

from bacr_jax.config.cli import BEST, NEWEST
from bacr_jax.errors import printable
from bacr_jax.evaluation.decline import Decline
from bacr_jax.report.table import budget_name, decline_text, set_title
from bacr_jax.runs.chosen_step import ChosenStep


def describe_best(best: Mapping[str, Any]) -> str:
    """Describes the results of the best checkpoint, such as `mean accuracy 71.2 % on GSM8K, ...`.

    Args:
      best: content of best.json, which must name an evaluation set.
    """
    text = f"mean accuracy {100 * best['accuracy']:.1f} % on {set_title(best['set'])}"
    worst = best.get("worst")
    if worst is None:
        return text
    change = f"{100 * worst['before']:.1f} to {100 * worst['after']:.1f} %"
    return f"{text}, worst budget {budget_name(worst['budget'])}: {change}"


def declines_of(best: Mapping[str, Any]) -> list[Decline]:
    """Returns the results of the best checkpoint that are worse than before training."""
    return [
        Decline(**{name: decline[name] for name in Decline._fields})
        for decline in best.get("declines", [])
    ]


def step_lines(chosen: ChosenStep) -> Iterator[str]:
    """Yields a line with the selected checkpoint and the reason for its selection.

    If the user passed a step number, this line is omitted. If the best checkpoint is worse than the
    policy before training at any budget, a second line contains a warning.
    """
    if reason := _reason(chosen):
        yield printable(f"{chosen.folder}: step {chosen.step}, {reason}")
    if not chosen.is_best or chosen.best is None:
        return
    if declines := declines_of(chosen.best):
        yield printable(
            f"WARNING, step {chosen.step}: the best checkpoint, yet worse than before training on "
            f"{set_title(chosen.best['set'])}: {decline_text(declines)}"
        )


def _reason(chosen: ChosenStep) -> str:
    best = chosen.best
    if chosen.requested == NEWEST:
        return "the newest"
    if isinstance(chosen.requested, int):
        return ""
    if chosen.is_best and best is not None:
        newest = f"; --step {NEWEST} takes step {chosen.newest}"
        more = newest if chosen.newest != chosen.step else ", and the newest"
        return f"the best: {describe_best(best)}{more}"
    if chosen.requested == BEST:
        return "the only one that was evaluated in or after training"
    if best is None or best["set"] is None:
        return "the newest, as no evaluation chose a best one"
    return f"the newest, as the best, step {best['step']}, has no checkpoint any more"


def best_note(best: Mapping[str, Any] | None) -> str:
    """Returns a sentence that names the best checkpoint of a finished run.

    Args:
      best: content of best.json, or None if no checkpoint was evaluated.
    """
    if best is None or best["set"] is None:
        return (
            "no evaluation chose a best checkpoint, so export takes the newest; a run with "
            "eval.every can choose one"
        )
    note = (
        f"the best checkpoint is step {best['step']} ({describe_best(best)}); export, evaluate, "
        "generate and serve take it"
    )
    if declines := declines_of(best):
        return f"{note}, although it is worse than before training: {decline_text(declines)}"
    return note
