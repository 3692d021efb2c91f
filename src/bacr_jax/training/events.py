"""What a run tells its callbacks, and when; docs/notebook.md says what these may do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bacr_jax.runs.folder import RunFolder, steps_in


@dataclass(frozen=True)
class Started:
    """The run stands at its first step, or where it goes on; the warm-up is over.

    Attributes:
      step: steps done already; 0 unless it goes on.
      steps: steps in all, unless the allowance of tokens ends it first.
    """

    folder: Path
    method: str
    step: int
    steps: int


@dataclass(frozen=True)
class StepDone:
    """An iteration of Algorithm 1 is over; its metrics, also where `output.log_every` skips it."""

    step: int
    steps: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class EvaluationDone:
    """The policy was evaluated.

    Attributes:
      when: before, during or after training.
      sets: by name of the set, decoding and budget: accuracy and the rest, as in eval.jsonl.
    """

    step: int
    when: str
    sets: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is whole on the disk; it is written beside the training."""

    step: int
    path: Path


@dataclass(frozen=True)
class Finished:
    """The run is over and its folder complete; `summary` is the content of summary.json."""

    folder: Path
    step: int
    summary: Mapping[str, Any]


Event = Started | StepDone | EvaluationDone | CheckpointSaved | Finished
Callback = Callable[[Event], Any]


def frozen(value: Any) -> Any:
    """Nested dicts and lists that can't be written to any more."""
    if isinstance(value, Mapping):
        return MappingProxyType({name: frozen(inside) for name, inside in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list) else value


class CallbackRaised(Exception):
    """Carries what a callback raised to where the run can be left in good order."""

    def __init__(self, error: BaseException):
        super().__init__(str(error))
        self.error = error


class Reporter:
    """Tells callbacks what has come to a run since they were told last."""

    def __init__(
        self,
        folder: RunFolder,
        callbacks: Sequence[Callback],
        evaluated: Sequence[Mapping[str, Any]],
    ):
        """What is there by now is never told; the run adds to `evaluated`."""
        self._folder, self._callbacks = folder, tuple(callbacks)
        self._saved, self._evaluated, self._told = set(self._steps()), evaluated, len(evaluated)

    def _steps(self) -> Sequence[int]:
        return steps_in(self._folder.checkpoints) if self._callbacks else ()

    def tell(self, event: Event) -> None:
        """Hands an event to every callback."""
        for callback in self._callbacks:
            try:
                callback(event)
            except BaseException as error:
                raise CallbackRaised(error) from error

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Tells of a finished step."""
        if self._callbacks:
            self.tell(StepDone(step, steps, frozen(metrics)))

    def catch_up(self) -> None:
        """Tells of evaluations and checkpoints that were not there at the last call."""
        new, self._told = self._evaluated[self._told :], len(self._evaluated)
        for record in new if self._callbacks else ():
            self.tell(EvaluationDone(record["step"], record["when"], frozen(record["sets"])))
        for step in self._steps():
            if step not in self._saved:
                self._saved.add(step)
                self.tell(CheckpointSaved(step, self._folder.checkpoints / str(step)))
