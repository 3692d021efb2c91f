"""Events of a run, and the `Reporter` that passes them to the user's callbacks.

`session.train` creates the reporter. docs/notebook.md describes what callbacks are allowed to do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bacr_jax.runs.folder import RunFolder, steps_in


@dataclass(frozen=True)
class Started:
    """Sent before the first step of a run, after the warm-up, and when a run is resumed.

    Attributes:
      folder: folder of the run.
      method: name of the training method.
      step: number of steps already done; 0 in a new run.
      steps: total number of steps. The run may end earlier if it reaches the limit on generated
        tokens.
    """

    folder: Path
    method: str
    step: int
    steps: int


@dataclass(frozen=True)
class StepDone:
    """Sent after each iteration of Algorithm 1.

    Attributes:
      step: number of steps done.
      steps: total number of steps.
      metrics: metrics of the step. The event is also sent for steps that are not logged because of
        `output.log_every`.
    """

    step: int
    steps: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class EvaluationDone:
    """Sent after each evaluation of the policy.

    Attributes:
      when: "before", "during" or "after" training.
      sets: accuracy and other results by set name, decoding mode and budget, in the format of
        eval.jsonl.
    """

    step: int
    when: str
    sets: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointSaved:
    """Sent when a checkpoint is completely written. Checkpoints are written in the background."""

    step: int
    path: Path


@dataclass(frozen=True)
class Finished:
    """Sent when the run is finished and its folder is complete.

    Attributes:
      summary: content of summary.json.
    """

    folder: Path
    step: int
    summary: Mapping[str, Any]


Event = Started | StepDone | EvaluationDone | CheckpointSaved | Finished
Callback = Callable[[Event], Any]


def frozen(value: Any) -> Any:
    """Converts nested dicts and lists to read-only mappings and tuples."""
    if isinstance(value, Mapping):
        return MappingProxyType({name: frozen(item) for name, item in value.items()})
    if isinstance(value, list):
        return tuple(frozen(item) for item in value)
    return value


class CallbackRaised(Exception):
    """Wraps an exception of a callback, so that the run can save a checkpoint before it exits.

    Attributes:
      error: the exception that the callback raised.
    """

    def __init__(self, error: BaseException):
        super().__init__(str(error))
        self.error = error


class Reporter:
    """Passes each event of a run to all callbacks, once."""

    def __init__(
        self,
        folder: RunFolder,
        callbacks: Sequence[Callback],
        evaluated: Sequence[Mapping[str, Any]],
    ):
        """Creates a reporter that ignores the checkpoints and evaluations that already exist.

        Args:
          folder: folder of the run.
          callbacks: functions to which each event is passed.
          evaluated: list of evaluation records. The run appends new records to it.
        """
        self._folder = folder
        self._callbacks = tuple(callbacks)
        self._reported_checkpoints = set(self._checkpoint_steps())
        self._evaluated = evaluated
        self._num_reported = len(evaluated)

    def _checkpoint_steps(self) -> Sequence[int]:
        """Returns the steps of all checkpoints, or an empty sequence if there are no callbacks."""
        return steps_in(self._folder.checkpoints) if self._callbacks else ()

    def send(self, event: Event) -> None:
        """Passes an event to every callback.

        Raises:
          CallbackRaised: a callback raised an exception.
        """
        for callback in self._callbacks:
            try:
                callback(event)
            except BaseException as error:
                raise CallbackRaised(error) from error

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Reports a finished step."""
        if self._callbacks:
            self.send(StepDone(step, steps, frozen(metrics)))

    def catch_up(self) -> None:
        """Reports evaluations and checkpoints that were finished since the last call."""
        new_records = self._evaluated[self._num_reported :]
        self._num_reported = len(self._evaluated)
        if not self._callbacks:
            return
        for record in new_records:
            self.send(EvaluationDone(record["step"], record["when"], frozen(record["sets"])))
        for step in self._checkpoint_steps():
            if step not in self._reported_checkpoints:
                self._reported_checkpoints.add(step)
                self.send(CheckpointSaved(step, self._folder.checkpoints / str(step)))
