"""Describes in one line which checkpoint a command uses, and which checkpoint of a run is best."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    worst = best["worst"]
    if worst is None:
        return text
    change = f"{100 * worst['before']:.1f} to {100 * worst['after']:.1f} %"
    return f"{text}, worst budget {budget_name(worst['budget'])}: {change}"


def declines_of(records: Iterable[Mapping[str, Any]]) -> list[Decline]:
    """Converts entries of `declines` in best.json or summary.json."""
    return [Decline(**record) for record in records]


def certainty_text(worse: Sequence[Decline]) -> str:
    """Lists results that are worse than before training, and whether they may be chance.

    Results that a test shows to be worse come first.

    Args:
      worse: results of one evaluation set; at least one.
    """
    parts = []
    shown = [decline for decline in worse if decline.is_shown]
    if shown:
        parts.append(f"{decline_text(shown)} (shown by an exact test)")
    others = [decline for decline in worse if not decline.is_shown]
    if others:
        remark = f"may be chance with {others[0].problems:,} questions"
        parts.append(f"{decline_text(others)} ({remark})")
    return "; ".join(parts)


def step_lines(chosen: ChosenStep) -> Iterator[str]:
    """Yields a line with the selected checkpoint and the reason for its selection.

    If the user passed a step number, this line is omitted. Further lines contain warnings if the
    checkpoint is the best one or the last one, and is worse than the policy before training at any
    budget: one for each evaluation set.
    """
    if reason := _reason(chosen):
        yield printable(f"{chosen.folder}: step {chosen.step}, {reason}")
    warned_set = None
    if chosen.is_best and chosen.best is not None:
        declines = declines_of(chosen.best["declines"])
        if declines:
            warned_set = chosen.best["set"]
            yield printable(
                f"WARNING, step {chosen.step}: the best checkpoint, yet worse than before training "
                f"on {set_title(warned_set)}: {certainty_text(declines)}"
            )
    for name, records in chosen.declines_at_end.items():
        if name != warned_set and records:
            yield printable(
                f"WARNING, step {chosen.step}: worse than before training on {set_title(name)}: "
                f"{certainty_text(declines_of(records))}"
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
    if declines := declines_of(best["declines"]):
        return f"{note}, although it is worse than before training: {decline_text(declines)}"
    return note
