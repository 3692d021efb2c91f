"""Stores the evaluations of a run and selects the best checkpoint from them.

`loop.Trainer` evaluates the policy and adds the record of every evaluation to `Evaluations`.
"""

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
        # Steps of the candidates whose checkpoints still exist.
        self._existing_steps: set[int] = set()
        self._folder = folder
        self._checkpoints = checkpoints

    def add(self, record: dict[str, Any], *, has_checkpoint: bool = True) -> None:
        """Adds the record of an evaluation, and updates the selection of the best checkpoint.

        Args:
          has_checkpoint: False if the checkpoint that was evaluated no longer exists.
        """
        self.records.append(record)
        if record["when"] in ENDPOINTS:
            self.endpoints[record["when"]] = record["sets"]
        if record["when"] == "before":
            return
        before = self.endpoints.get("before", {})
        self._candidates.append(make_candidate(record, before, self.selected))
        if has_checkpoint:
            self._existing_steps.add(record["step"])
        # Compare all evaluations, also those whose checkpoints were deleted (checkpoint.keep).
        # Otherwise a resumed run could choose another checkpoint.
        best = choose(self._candidates)
        if best is None or best.step not in self._existing_steps:
            best = choose([one for one in self._candidates if one.step in self._existing_steps])
        if best is None:
            return
        if self.best is None or best.step != self.best.step:
            self._checkpoints.prefer(best.step)
        self.best = best

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
