"""What several rewards credit; data.order=shuffled in complete passes, also across a resume."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.runs.folder import open_run
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.training.loop import Trainer
from bacr_jax.training.stages import credited, in_stream_order
from methods_world import group_batch, load
from small_config import small_config

pytest.importorskip("grain", reason="Grain is not installed")

CHANGES = """
data: {ledger: {train_size: 22}, order: shuffled, num_groups: 1} # 20 without those held out
train: {steps: 5}
"""


def test_what_is_credited_is_a_mixture_and_the_rest_of_the_batch_stays(tmp_path):
    files = "reward.weights={correct: 3, mine.py:brief: .5, mine.py:formal: .5}"
    config = load(tmp_path, "grpo", files, "rollout.questions=1", "rollout.group_size=2")
    scores = {"correct": [1.0, 0.0], "mine.py:brief": [0.0, 1.0], "mine.py:formal": [0.5, 0.5]}
    scores = {name: np.reshape(x, (1, 2, 1, 1)) for name, x in scores.items()}
    batch = group_batch(config, outcomes=scores["correct"][..., 0], by_reward=scores)
    paid = credited(config, batch)
    # 3/4 + 0 + 1/16, and 0 + 1/8 + 1/16
    np.testing.assert_array_equal(paid.outcomes[..., 0], [[0.8125, 0.1875]])
    np.testing.assert_array_equal(paid.by_answer[..., 0], paid.outcomes)
    assert paid.by_reward is batch.by_reward and paid.lengths is batch.lengths
    # Correctness alone is the batch itself.
    alone = group_batch(config)
    assert credited(config, alone) is alone


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
    # another process finds only the folder
    with open_run(run, settings) as folder:
        trainer = Trainer(settings, folder)
        state, step = trainer.start()
        assert step == 2
        assert np.asarray(state.stream).tolist() == [8]
        second, _ = draw(trainer, state, 3)
        trainer.checkpoints.close()
    assert sorted(first + second) == list(range(20))
    assert first + second != list(range(20))
