"""Trains a policy in an opened run folder, from its first or newest step to its last.

`train.main` and `train.run` call `train`, which drives `loop.Trainer`: it starts or resumes the
run, repeats the steps, exports the policy, and sends the events of the run to callbacks. This
module parses no arguments and returns no exit codes.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.evaluation.folder import evaluations_after
from bacr_jax.out_of_memory import OutOfMemory
from bacr_jax.parallel import processes
from bacr_jax.parallel.peers import watched
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.runs.folder import RunFolder
from bacr_jax.training.events import (
    Callback,
    CallbackRaised,
    Finished,
    Reporter,
    Started,
    frozen,
)
from bacr_jax.training.failures import TrainingFailed, VerifierFailed
from bacr_jax.training.loop import Trainer
from bacr_jax.types import Poll

# Name of the temporary folder in which `model.hf.archive.complete_or_absent` writes the export of a
# step. `tempfile` appends eight random characters.
_INCOMPLETE_EXPORT = re.compile(r"\.\d+\.[a-z0-9_]{8}")


def train(
    config: Config,
    folder: RunFolder,
    poll: Poll = None,
    callbacks: Sequence[Callback] = (),
) -> Finished:
    """Trains a policy in an opened run folder until the last step.

    Args:
      config: config of the run.
      folder: opened run folder.
      poll: function that is called wherever the work can be interrupted. It raises `Preempted` to
        stop the run, and a checkpoint is then saved. If None, the run can't be stopped in this way.
      callbacks: functions that are called with every event of the run, such as the end of a step.

    Returns:
      The last event of the run, which contains the content of summary.json.
    """
    with watched((Preempted, TrainingFailed, VerifierFailed)) as on_phase:
        try:
            trainer = Trainer(config, folder, poll, on_phase)
        except BaseException as error:
            if folder.is_new and isinstance(error, UserError):
                # A run that is refused leaves no files.
                folder.restarts.unlink(missing_ok=True)
            folder.discard()
            raise
        state, step = start(trainer, folder)
        reporter = Reporter(folder, callbacks, trainer.evaluations.records)
        try:
            reporter.send(Started(folder.path, trainer.method.name, step, trainer.steps))
            trainer.evaluate(state, step, "before")
            reporter.catch_up()
            with trainer.training(state, step):
                # The run may have been stopped before it evaluated or saved the step at which it
                # resumes.
                trainer.maintain(state, step)
                export_if_due(trainer, state, step)
                while not trainer.finished(state, step):
                    state = trainer.iterate(state, step)
                    step += 1
                    reporter.step(step, trainer.steps, trainer.step_metrics)
                    trainer.maintain(state, step)
                    export_if_due(trainer, state, step)
                    reporter.catch_up()
            trainer.save(state, step)
            export_if_due(trainer, state, step, last=True)
            trainer.evaluate(state, step, "after")
            reporter.catch_up()
        except OutOfMemory:
            # Several processes end without waiting for threads (`exit_if_failed`).
            trainer.checkpoints.wait()
            raise
        except (Preempted, CallbackRaised) as error:
            trainer.leave(state, step)
            raise (error.error if isinstance(error, CallbackRaised) else error) from None
        done = Finished(folder.path, step, frozen(trainer.finish(state, step)))
        try:
            # `Trainer.finish` has waited for the last checkpoint to be written.
            reporter.catch_up()
            reporter.send(done)
        except CallbackRaised as raised:
            raise raised.error from None
        return done


def start(trainer: Any, folder: RunFolder) -> Any:
    """Initializes or restores the training state.

    Values that --allow-change permits to differ are written to the run folder only after the run
    was resumed successfully.

    Args:
      trainer: the `Trainer` of the run.
      folder: opened run folder.

    Returns:
      A tuple of the training state and the step to continue from.
    """
    try:
        state, step = trainer.start()
    except UserError as error:
        changed = folder.changed()
        if not changed:
            raise
        raise UserError(
            f"{error} (no file was changed; if the new value of {', '.join(changed)} is the "
            "cause, leave --allow-change out)"
        ) from None
    folder.keep_config()
    processes.on_first(lambda: _set_aside_abandoned(trainer, folder, step))
    return state, step


def _set_aside_abandoned(trainer: Any, folder: RunFolder, step: int) -> None:
    """Moves the exports and evaluations of later steps, whose checkpoints were deleted.

    Otherwise they would be taken for results of the resumed run when it reaches these steps.

    Args:
      trainer: the `Trainer` of the run.
      folder: opened run folder.
      step: step from which the run continues.

    Raises:
      UserError: if a folder can't be moved.
    """
    abandoned = [*folder.exports_after(step), *evaluations_after(folder.path, step)]
    destinations = folder.set_aside(abandoned)
    if destinations:
        trainer.progress.print_line(
            f"exports and evaluations after step {step} belong to deleted checkpoints, and "
            f"were moved to {' and '.join(map(str, destinations))}"
        )


def export_if_due(trainer: Any, state: Any, step: int, *, last: bool = False) -> None:
    """Exports the policy to a Hugging Face folder in exports/ every `export.every` steps.

    Nothing is exported if `export.every` is None, at step 0, or if the export exists already.

    Args:
      trainer: the `Trainer` of the run, in whose run folder exports/ is located.
      state: current training state, which is saved as a checkpoint before the export.
      step: current step.
      last: True at the end of the run. The last step is always exported if `export.every` is set.

    Raises:
      UserError: if the export can't be written. Raised in all processes.
    """
    every = trainer.config.export.every
    out = trainer.folder.exports / str(step)
    if every is None or step == 0 or (step % every and not last):
        return
    if processes.text_from_first("exists" if out.exists() else ""):
        return
    trainer.save(state, step)
    trainer.checkpoints.wait()
    trainer.poll()
    trainer.on_phase("export", step)
    processes.on_first(lambda: _export(trainer.folder, out, step))
    trainer.progress.print_line(f"step {step} as a Hugging Face folder: {out}")


def _export(folder: RunFolder, out: Path, step: int) -> None:
    """Writes the export of a step, and removes incomplete exports of processes that were killed.

    Args:
      folder: run folder, which contains the checkpoint of the step.
      out: folder of the export.
      step: step of the checkpoint.

    Raises:
      UserError: if the export can't be written.
    """
    # Imported here because few runs export a policy.
    from bacr_jax.export.from_run import export

    for path in folder.exports.glob(".*"):
        if _INCOMPLETE_EXPORT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    export(folder.path, out, step=step)
