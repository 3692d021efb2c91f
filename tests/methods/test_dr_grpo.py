"""Dr.GRPO by hand: outcomes against the group's mean, divided by nothing."""

import numpy as np

from methods_world import credit_of, load


def test_advantages_keep_the_scale_of_the_outcomes(tmp_path):
    config = load(tmp_path, "dr_grpo", "rollout.questions=3", "rollout.group_size=4")
    outcomes = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])[..., None]
    method, _, _, _, credit, _ = credit_of(config, outcomes=outcomes)
    want = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0] * 4]
    np.testing.assert_allclose(credit.thinking[..., 0], want, atol=1e-6)
    assert method.name == "Dr.GRPO"
