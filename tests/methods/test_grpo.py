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
