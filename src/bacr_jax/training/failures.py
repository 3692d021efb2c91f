"""Errors with which the trainer stops a run that can't usefully continue.

`loop.Trainer` raises them; `train` converts them into exit codes.
"""

from pathlib import Path

from bacr_jax.errors import UserError


class TrainingFailed(Exception):
    """Training can't continue. The message contains what went wrong and what to do."""


class VerifierFailed(UserError):
    """A verifier scores no answer, so that training would only damage the policy."""


def skipped_updates(step: int, skipped: int, checkpoint: Path) -> TrainingFailed:
    """Returns the error for a run whose last updates were all skipped as not finite.

    Args:
      skipped: number of updates in a row that were skipped.
      checkpoint: folder of the checkpoint with the parameters before these updates.
    """
    return TrainingFailed(
        f"training: stopped after step {step}, since the loss or its gradient was not finite in "
        f"{skipped} updates in a row; parameters are those before them, in {checkpoint}. Write a "
        "lower optimizer.learning_rate or model.compute_dtype=float32, or look at the rewards"
    )


def head_not_finite(step: int, last_saved: int, checkpoints: Path) -> TrainingFailed:
    """Returns the error for a run whose value head contains NaN or infinity.

    Args:
      last_saved: step of the newest checkpoint.
      checkpoints: folder of all checkpoints.
    """
    return TrainingFailed(
        f"training: stopped after step {step}, since the value head or its optimizer contains "
        "numbers that are not finite; they were not saved. Write a lower value.learning_rate (or "
        "optimizer.learning_rate with optimizer.single_rate), and the same command goes on from "
        f"checkpoint {last_saved} in {checkpoints}; --allow-change names the key"
    )


def device_fault(step: int, last_saved: int, mismatch: Exception) -> TrainingFailed:
    """Returns the error for a run whose devices have other values than were written to them.

    Args:
      last_saved: step of the newest checkpoint.
      mismatch: the digests that differ.
    """
    return TrainingFailed(
        f"training: stopped after step {step}, since a device or its memory is at fault "
        f"({mismatch}); nothing was saved. On other devices the same command goes on from "
        f"checkpoint {last_saved}"
    )


def verifier_failed(
    verifier: str, answers: str, last_failure: str, step: int, checkpoints: Path
) -> VerifierFailed:
    """Returns the error for a run whose verifier scored none of the answers.

    Args:
      answers: which answers these were, as in "of 3 steps in a row".
      last_failure: the verifier's last error.
      checkpoints: folder of all checkpoints.
    """
    return VerifierFailed(
        f"{verifier}: gave no score to any of the answers {answers} (the last: {last_failure}); "
        "fix it, with 0 for answers that it can't read, and write another output.dir, or, if it "
        f"needs no change, the same command goes on from checkpoint {step} in {checkpoints}"
    )
