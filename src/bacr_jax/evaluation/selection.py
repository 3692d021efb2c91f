"""Selects the best checkpoint of a run from its evaluations.

The training loop calls `choose` after every evaluation and writes the result to best.json. A mean
over budgets can hide a budget at which training degraded the policy, so `choose` first checks every
budget. This module neither reads files nor samples answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bacr_jax.evaluation.decline import Decline, declines
from bacr_jax.evaluation.summary import Summary, anytime_score, scoring_mode


class WorstBudget(NamedTuple):
    """The budget at which a checkpoint lost the most accuracy, or gained the least.

    Attributes:
      budget: thinking budget in tokens, as the text that is its key in the results.
      before: accuracy before training, in [0, 1].
      after: accuracy of the checkpoint, in [0, 1].
    """

    budget: str
    before: float
    after: float

    @property
    def loss(self) -> float:
        """Returns the accuracy before training minus the accuracy after. Negative for a gain."""
        # Rounded, because equal losses at different accuracies differ by float rounding errors.
        return round(self.before - self.after, 9)


class Candidate(NamedTuple):
    """An evaluated checkpoint.

    Attributes:
      step: training step of the checkpoint.
      accuracy: mean accuracy over budgets on the selection set, in [0, 1], or None if this set was
        not evaluated.
      lower_bound: lower end of the 95 % interval of `accuracy`, or None without an accuracy.
      worst: budget with the largest loss, or None if the set was not evaluated before training.
      declines: results that are significantly worse than before training, in the decoding mode used
        for selection.
    """

    step: int
    accuracy: float | None
    lower_bound: float | None = None
    worst: WorstBudget | None = None
    declines: tuple[Decline, ...] = ()


def make_candidate(
    record: Mapping[str, Any], before: Mapping[str, Summary], set_name: str | None
) -> Candidate:
    """Creates a candidate from a record of eval.jsonl.

    Args:
      record: record of an evaluation during or after training.
      before: results of the evaluation before training, by set. The selection set is missing if
        `eval.select` or `eval.every` was changed when the run was resumed. In this case, no
        declines are reported.
      set_name: name of the selection set, or None if no set is used for selection.
    """
    accuracy = anytime_score(record["anytime"], set_name)
    if set_name is None or accuracy is None:
        return Candidate(record["step"], None)
    mode = scoring_mode(record["anytime"][set_name])
    lower_bound = record["anytime"][set_name][mode]["mean_ci95"][0]
    entries = record["sets"][set_name][mode]
    entries_before = before.get(set_name, {}).get(mode, {})
    changes = []
    for budget, entry in entries.items():
        if budget in entries_before:
            accuracy_before = entries_before[budget]["accuracy"]
            changes.append(WorstBudget(budget, accuracy_before, entry["accuracy"]))
    worst = max(changes, key=lambda change: change.loss, default=None)
    declined = tuple(declines({mode: entries_before}, {mode: entries}))
    return Candidate(record["step"], accuracy, lower_bound, worst, declined)


def choose(
    candidates: Sequence[Candidate], among: Sequence[Candidate] | None = None
) -> Candidate | None:
    """Returns the best checkpoint, or None if there is none to select.

    A decline is a result at some budget that is significantly worse than before training. A
    checkpoint without a decline is preferred to a checkpoint with a decline.

    Among checkpoints without a decline, the highest mean accuracy and its 95 % interval are
    determined. Of the checkpoints whose mean accuracy is not below this interval, the one with the
    smallest loss at its worst budget is selected. A checkpoint that lost nothing at any budget has
    a loss of 0, and ties go to the newer checkpoint. Selection sets are small, so differences of
    the mean within the interval are mostly noise, and a newer checkpoint has learned from more
    answers.

    If all checkpoints have a decline, the checkpoint with the smallest loss at its worst budget is
    selected. The mean accuracy breaks ties, and remaining ties go to the earlier checkpoint. If no
    checkpoint has an accuracy, the last one is returned.

    Args:
      candidates: evaluated checkpoints in the order of their steps.
      among: the candidates that can be selected, in the same order. The other candidates only count
        for the highest mean accuracy. If no selectable checkpoint is within the interval of this
        accuracy, the others are ignored. None: all candidates can be selected.
    """
    if among is None:
        among = candidates
    measured = [candidate for candidate in among if candidate.accuracy is not None]
    if not measured:
        return among[-1] if among else None
    without_decline = _without_decline(measured)
    if not without_decline:
        return max(measured, key=_rank_after_decline)
    bound = max(_without_decline(candidates), key=_accuracy).lower_bound
    assert bound is not None
    within = [candidate for candidate in without_decline if _accuracy(candidate) >= bound]
    if not within:
        return choose(without_decline)
    # `min` returns the first minimum, so the newest checkpoint comes first.
    return min(reversed(within), key=_worst_loss)


def _without_decline(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that have an accuracy and no decline."""
    return [one for one in candidates if one.accuracy is not None and not one.declines]


def _accuracy(candidate: Candidate) -> float:
    """Returns the mean accuracy of a candidate that has one."""
    assert candidate.accuracy is not None
    return candidate.accuracy


def _worst_loss(candidate: Candidate) -> float:
    """Returns the loss of accuracy at the worst budget, or 0 without a loss at any budget."""
    return max(candidate.worst.loss, 0.0) if candidate.worst else 0.0


def _rank_after_decline(candidate: Candidate) -> tuple[float, float]:
    """Returns the sort key of a candidate with a decline.

    `max` returns the first maximum, so ties go to the earlier checkpoint.
    """
    loss = candidate.worst.loss if candidate.worst else 0.0
    return -loss, round(_accuracy(candidate), 9)


def to_record(best: Candidate, set_name: str | None) -> dict[str, Any]:
    """Returns the content of best.json."""
    return {
        "step": best.step,
        "accuracy": best.accuracy,
        "set": None if best.accuracy is None else set_name,
        "worst": None if best.worst is None else best.worst._asdict(),
        "declines": [decline._asdict() for decline in best.declines],
    }
