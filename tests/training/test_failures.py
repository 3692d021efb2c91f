"""Tests that errors which stop a run contain the step, the reason, the checkpoint and a remedy."""

from pathlib import Path

import pytest

from bacr_jax.runs.digest import DigestMismatch
from bacr_jax.training import failures

FOLDER = Path("run/checkpoints")
ERRORS = [
    failures.skipped_updates(7, 3, FOLDER / "4"),
    failures.head_not_finite(7, 4, FOLDER),
    failures.device_fault(7, 4, DigestMismatch("final_norm differs")),
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_one_line_with_its_step_and_its_checkpoint(error):
    assert isinstance(error, failures.TrainingFailed)
    line = str(error)
    assert "\n" not in line
    assert line.startswith("training: stopped after step 7, because ")
    assert "checkpoints/4" in line or "checkpoint 4" in line


def test_skipped_updates_are_counted():
    assert "not finite in 3 consecutive updates" in str(ERRORS[0])
    assert "lower optimizer.learning_rate" in str(ERRORS[0])


def test_a_mismatch_of_digests_is_quoted():
    assert "(final_norm differs)" in str(ERRORS[2])


def test_a_verifier_is_named_with_its_last_failure():
    error = failures.verifier_failed("mine.py:check", "of 3 steps in a row", "it fell", 7, FOLDER)
    assert isinstance(error, failures.VerifierFailed)
    line = str(error)
    assert line.startswith(
        "mine.py:check returned no score for any of the answers of 3 steps in a row"
    )
    assert "(last error: it fell)" in line and "from checkpoint 7 in run/checkpoints" in line
