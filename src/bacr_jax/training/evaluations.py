"""Stores the evaluations of a run and selects the best checkpoint from them.

`loop.Trainer` evaluates the policy and adds the record of every evaluation to `Evaluations`.
"""

from collections.abc import Collection, Iterable
from typing import Any

from bacr_jax.evaluation.decline import Decline, declines
from bacr_jax.evaluation.selection import Candidate, choose, make_candidate, to_record
from bacr_jax.evaluation.summary import Summary
from bacr_jax.files import write_json
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.runs.folder import RunFolder

# Evaluations that happen once per run, so their name identifies them without a step.
ENDPOINTS = ("before", "after")


class Evaluations:
    """All evaluations of a run.

    Attributes:
      records: records of all evaluations, in the format of eval.jsonl.
      endpoints: results of the evaluations "before" and "after" training, by evaluation and set.
      selected: name of the set that selects the best checkpoint, or None if no set does.
      best: best evaluated checkpoint that still exists, or None.
    """

    def __init__(self, selected: str | None, folder: RunFolder, checkpoints: Checkpoints):
        self.records: list[dict[str, Any]] = []
        self.endpoints: dict[str, dict[str, Summary]] = {}
        self.selected = selected
        self.best: Candidate | None = None
        self._candidates: list[Candidate] = []
        self._folder = folder
        self._checkpoints = checkpoints

    def add(self, record: dict[str, Any]) -> None:
        """Adds the record of an evaluation, and updates the selection of the best checkpoint."""
        previous = self.best
        self._append(record)
        if self.best is not None and (previous is None or self.best.step != previous.step):
            self._checkpoints.prefer(self.best.step)

    def restore(self, records: Iterable[dict[str, Any]], existing_steps: Collection[int]) -> None:
        """Adds the records of a run that is resumed.

        The best checkpoint is the same as before the run was stopped, unless it was deleted.

        Args:
          records: records of all evaluations, in the order in which they were added.
          existing_steps: steps of the checkpoints that exist.
        """
        for record in records:
            self._append(record)
        if self.best is not None and self.best.step not in existing_steps:
            existing = [one for one in self._candidates if one.step in existing_steps]
            self.best = choose(self._candidates, existing)
        if self.best is not None:
            self._checkpoints.prefer(self.best.step)

    def _append(self, record: dict[str, Any]) -> None:
        """Adds a record, and chooses between the previous best checkpoint and the new one.

        An older checkpoint cannot become the best, because only the best checkpoint and the newest
        ones are kept (`checkpoint.keep`), and others may not have been saved at all.
        """
        self.records.append(record)
        if record["when"] in ENDPOINTS:
            self.endpoints[record["when"]] = record["sets"]
        if record["when"] == "before":
            return
        before = self.endpoints.get("before", {})
        new = make_candidate(record, before, self.selected)
        self._candidates.append(new)
        self.best = choose(self._candidates, [new] if self.best is None else [self.best, new])

    def has(self, when: str, step: int) -> bool:
        """True if the evaluation `when` ("before", "during" or "after") is already recorded.

        The step is ignored for the evaluations before and after training.
        """
        if when in self.endpoints:
            return True
        return any(record["when"] == when and record["step"] == step for record in self.records)

    @property
    def best_record(self) -> dict[str, Any] | None:
        """Returns the content of best.json, or None if no checkpoint has been evaluated."""
        return None if self.best is None else to_record(self.best, self.selected)

    def write_best(self) -> None:
        """Writes best.json, or deletes it if none of the evaluated checkpoints exists any more."""
        if self.best is None:
            self._folder.best.unlink(missing_ok=True)
        else:
            write_json(self._folder.best, self.best_record)

    def declines_by_set(self) -> dict[str, list[Decline]]:
        """Returns the results that are worse after training than before, by evaluation set.

        A set without results before training has no declines. This happens if `eval.every` or
        `eval.select` was changed when the run was resumed.
        """
        before = self.endpoints["before"]
        after = self.endpoints["after"]
        return {name: list(declines(before.get(name, {}), after[name])) for name in after}
