"""Tests that data.order=shuffled uses each question once per pass, also in a resumed run."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.runs.folder import open_run
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.training.loop import Trainer
from bacr_jax.training.stages import in_stream_order
from small_config import small_config

pytest.importorskip("grain", reason="Grain is not installed")

CHANGES = """
data: {ledger: {train_size: 22}, order: shuffled, num_groups: 1} # 20 without those held out
train: {steps: 5}
"""


def draw(trainer, state, steps):
    """The questions of some steps whose schedule asks for group 0 only."""
    zeros = jnp.zeros((4, 2), jnp.int32)
    plan = BatchPlan(zeros[:, 0], zeros[:, 0], zeros, zeros[..., None])
    found = []
    for _ in range(steps):
        chosen, stream = in_stream_order(trainer.run.stream, plan, state.stream)
        state = dataclasses.replace(state, stream=stream)
        found += np.asarray(chosen.questions).tolist()
    return found, state


def test_each_question_comes_once_in_a_pass_also_after_a_resume(tmp_path):
    run = tmp_path / "run"
    settings = small_config(tmp_path, CHANGES, f"output.dir={run}")
    with open_run(run, settings) as folder:
        trainer = Trainer(settings, folder)
        first, state = draw(trainer, trainer.start()[0], 2)
        trainer.save(state, 2)
        trainer.checkpoints.close()
    # Resume the run with nothing but its folder.
    with open_run(run, settings) as folder:
        trainer = Trainer(settings, folder)
        state, step = trainer.start()
        assert step == 2
        assert np.asarray(state.stream).tolist() == [8]
        second, _ = draw(trainer, state, 3)
        trainer.checkpoints.close()
    assert sorted(first + second) == list(range(20))
    assert first + second != list(range(20))
