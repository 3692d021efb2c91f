"""GRPO by hand: outcomes against the group's mean, in units of its deviation."""

import numpy as np

from methods_world import credit_of, load


def test_advantages_are_normalised_within_each_question(tmp_path):
    config = load(tmp_path, "grpo", "rollout.questions=3", "rollout.group_size=4")
    outcomes = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])[..., None]
    method, _, _, rewards, credit, state = credit_of(config, outcomes=outcomes)
    np.testing.assert_array_equal(rewards, outcomes)
    # means 1/4 and 1/2; deviations sqrt((9 + 1 + 1 + 1)/16/3) = 1/2 and sqrt(4/4/3)
    half = 0.5 * np.sqrt(3)
    want = [[1.5, -0.5, -0.5, -0.5], [half, half, -half, -half], [0, 0, 0, 0]]
    np.testing.assert_allclose(credit.thinking[..., 0], want, atol=1e-4)
    np.testing.assert_allclose(credit.baseline[..., 0], [[0.25] * 4, [0.5] * 4, [1.0] * 4])
    assert method.name == "GRPO" and state is None


def test_rewards_apart_keep_groups_that_differ_in_one_of_them(tmp_path):
    mixed = "reward.weights={correct: 3, mine.py:brief: 1}"
    shape = ("rollout.questions=2", "rollout.group_size=2")
    config = load(tmp_path, "grpo", mixed, "reward.normalize_each=true", *shape)
    correct = np.array([[1.0, 0.0], [1.0, 1.0]])[..., None, None]
    brief = np.array([[1.0, 0.0], [0.0, 0.5]])[..., None, None]
    scores = {"correct": correct, "mine.py:brief": brief}
    # What is credited: 3/4 of the one and 1/4 of the other.
    outcomes = np.array([[1.0, 0.0], [0.75, 0.875]])[..., None]
    *_, rewards, credit, _ = credit_of(config, outcomes=outcomes, by_reward=scores)
    np.testing.assert_allclose(rewards, outcomes)
    # In deviations of the group: (1, -1) / sqrt(2) by both, and (-1, 1) / sqrt(2) by the second
    # alone, of weight 1/4; over the deviation of the batch, sqrt((2 + 2/16) / 2 / 3).
    want = np.array([[1.0, -1.0], [-0.25, 0.25]]) / np.sqrt(2) / np.sqrt(17 / 48)
    np.testing.assert_allclose(credit.thinking[..., 0], want, rtol=1e-4)
    np.testing.assert_array_equal(credit.answers, credit.thinking)
    np.testing.assert_allclose(credit.baseline[..., 0], [[0.5, 0.5], [0.8125, 0.8125]])
