"""Chooses the best checkpoint of a run by its evaluations.

The training loop applies the rule after every evaluation and writes the result to best.json. A mean
over budgets hides a budget at which the policy was ruined, so the rule looks at every budget first.
It reads no file and decodes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bacr_jax.evaluation.decline import Decline, declines
from bacr_jax.evaluation.summary import Summary, anytime_score, scoring_mode


class WorstBudget(NamedTuple):
    """The budget at which a checkpoint lost most, or gained least.

    Attributes:
      budget: thinking budget in tokens, as a key of a summary.
      before: accuracy before training, in [0, 1].
      after: accuracy of the checkpoint, in [0, 1].
    """

    budget: str
    before: float
    after: float

    @property
    def loss(self) -> float:
        """Accuracy lost since the start; negative if it was gained."""
        return self.before - self.after


class Candidate(NamedTuple):
    """An evaluated checkpoint.

    Attributes:
      step: training step of the checkpoint.
      accuracy: mean accuracy over budgets on the selection set, in [0, 1]; None if the set was not
        evaluated.
      worst: None without an evaluation of the set before training.
      declines: what is worse than before training, in the decoding that chooses.
    """

    step: int
    accuracy: float | None
    worst: WorstBudget | None = None
    declines: tuple[Decline, ...] = ()


def make_candidate(
    record: Mapping[str, Any], before: Mapping[str, Summary], set_name: str | None
) -> Candidate:
    """Returns the candidate of a record of eval.jsonl.

    Args:
      record: an evaluation during or after training.
      before: summaries by set of the evaluation before training. It lacks the selection set if
        eval.select or eval.every was changed in a run that was resumed; then nothing has declined.
      set_name: the selection set; None if there is nothing to choose from.
    """
    accuracy = anytime_score(record["anytime"], set_name)
    if set_name is None or accuracy is None:
        return Candidate(record["step"], None)
    mode = scoring_mode(record["anytime"][set_name])
    entries = record["sets"][set_name][mode]
    entries_before = before.get(set_name, {}).get(mode, {})
    changes = []
    for budget, entry in entries.items():
        if budget in entries_before:
            accuracy_before = entries_before[budget]["accuracy"]
            changes.append(WorstBudget(budget, accuracy_before, entry["accuracy"]))
    worst = max(changes, key=lambda change: change.loss, default=None)
    declined = tuple(declines({mode: entries_before}, {mode: entries}))
    return Candidate(record["step"], accuracy, worst, declined)


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Returns the best checkpoint, or None if the list is empty.

    A checkpoint that has not declined at any budget beats one that has. Of those that have not, the
    one with the highest mean wins. If all have declined, the one that lost least at its worst
    budget wins, then the one with the highest mean. The earlier one wins a tie. If nothing was
    measured, the last one is returned.
    """
    measured = [candidate for candidate in candidates if candidate.accuracy is not None]
    if measured:
        return max(measured, key=_rank)
    return candidates[-1] if candidates else None


def _rank(candidate: Candidate) -> tuple[bool, float, float]:
    """Returns a sort key; `max` takes the first of equal keys."""
    assert candidate.accuracy is not None
    if not candidate.declines:
        return True, candidate.accuracy, 0.0
    loss = candidate.worst.loss if candidate.worst else 0.0
    return False, -loss, candidate.accuracy


def to_record(best: Candidate, set_name: str | None) -> dict[str, Any]:
    """Returns the content of best.json."""
    return {
        "step": best.step,
        "accuracy": best.accuracy,
        "set": None if best.accuracy is None else set_name,
        "worst": None if best.worst is None else best.worst._asdict(),
        "declines": [decline._asdict() for decline in best.declines],
    }
