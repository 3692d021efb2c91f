"""Exceptions that stop a run when further training would be useless.

`loop.Trainer` raises them. `train` converts them into exit codes.
"""

from pathlib import Path

from bacr_jax.errors import UserError


class TrainingFailed(Exception):
    """Raised if training can't continue. The message describes the problem and how to fix it."""


class VerifierFailed(UserError):
    """Raised if a verifier can't score any answer, so that training would damage the policy."""


def skipped_updates(step: int, skipped: int, checkpoint: Path) -> TrainingFailed:
    """Returns the exception for a run that skipped too many consecutive non-finite updates.

    Args:
      step: number of steps done.
      skipped: number of consecutive updates that were skipped.
      checkpoint: folder of the checkpoint, which contains the parameters from before these updates.
    """
    return TrainingFailed(
        f"training: stopped after step {step}, because the loss or its gradient was not finite in "
        f"{skipped} consecutive updates; {checkpoint} contains the parameters before these "
        "updates. Set a lower optimizer.learning_rate or model.compute_dtype=float32, or check "
        "the rewards"
    )


def head_not_finite(step: int, last_saved: int, checkpoints: Path) -> TrainingFailed:
    """Returns the exception for a run whose value head contains NaN or infinity.

    Args:
      step: number of steps done.
      last_saved: step of the newest checkpoint.
      checkpoints: folder that contains all checkpoints.
    """
    return TrainingFailed(
        f"training: stopped after step {step}, because the parameters of the value head or of its "
        "optimizer are not finite; this state was not saved. Set a lower value.learning_rate (or "
        "optimizer.learning_rate with optimizer.single_rate) and pass it with --allow-change; "
        f"the same command then continues from checkpoint {last_saved} in {checkpoints}"
    )


def device_fault(step: int, last_saved: int, mismatch: Exception) -> TrainingFailed:
    """Returns the exception for a run in which values on a device were corrupted.

    Args:
      step: number of steps done.
      last_saved: step of the newest checkpoint.
      mismatch: exception that describes the digests that differ.
    """
    return TrainingFailed(
        f"training: stopped after step {step}, because a device or its memory is faulty "
        f"({mismatch}); this state was not saved. Run the same command on other devices to "
        f"continue from checkpoint {last_saved}"
    )


def verifier_failed(
    verifier: str, answers: str, last_failure: str, step: int, checkpoints: Path
) -> VerifierFailed:
    """Returns the exception for a run whose verifier could not score any of the answers.

    Args:
      verifier: name of the verifier.
      answers: phrase that describes the answers, such as "of 3 steps in a row".
      last_failure: last error of the verifier.
      step: step of the checkpoint from which the run can be resumed.
      checkpoints: folder that contains all checkpoints.
    """
    return VerifierFailed(
        f"{verifier} returned no score for any of the answers {answers} (last error: "
        f"{last_failure}). Change this function to return 0 for answers that it can't read, and "
        "use another output.dir; if the function is correct, run the same command again to "
        f"continue from checkpoint {step} in {checkpoints}"
    )
