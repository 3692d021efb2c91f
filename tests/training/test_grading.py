"""Tests outcomes that are weighted sums of several rewards, and outcomes that are flipped."""

import jax
import numpy as np

from bacr_jax.training.grading import credited, flipped
from methods_world import group_batch, load


def test_what_is_credited_is_a_mixture_and_the_rest_of_the_batch_stays(tmp_path):
    files = "reward.weights={correct: 3, mine.py:brief: .5, mine.py:formal: .5}"
    config = load(tmp_path, "grpo", files, "rollout.questions=1", "rollout.group_size=2")
    scores = {"correct": [1.0, 0.0], "mine.py:brief": [0.0, 1.0], "mine.py:formal": [0.5, 0.5]}
    scores = {name: np.reshape(x, (1, 2, 1, 1)) for name, x in scores.items()}
    batch = group_batch(config, outcomes=scores["correct"][..., 0], by_reward=scores)
    paid = credited(config.reward, batch)
    # The weighted sums are 3/4 + 0 + 1/16 and 0 + 1/8 + 1/16.
    np.testing.assert_array_equal(paid.outcomes[..., 0], [[0.8125, 0.1875]])
    np.testing.assert_array_equal(paid.by_answer[..., 0], paid.outcomes)
    assert paid.by_reward is batch.by_reward and paid.lengths is batch.lengths
    # If correctness is the only reward, the batch itself is returned.
    alone = group_batch(config)
    assert credited(config.reward, alone) is alone


def test_an_answer_that_serves_several_places_is_flipped_at_all_of_them_or_at_none():
    source = np.broadcast_to(np.array([0, 1, 1, 1]), (100, 4))
    found = flipped(jax.random.key(0), np.ones((100, 4), np.float32), source, rate=0.3)
    np.testing.assert_array_equal(found[:, 1:], np.repeat(found[:, 1:2], 3, axis=1))
    # 100 rows have two answers each. The share of flips is within three standard errors.
    assert abs((1 - found[:, :2]).mean() - 0.3) < 3 * (0.21 / 200) ** 0.5
