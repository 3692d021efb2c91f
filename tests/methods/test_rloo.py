"""RLOO by hand: each outcome against the mean of the others."""

import numpy as np

from methods_world import credit_of, load


def test_advantages_leave_the_trace_itself_out_of_the_mean(tmp_path):
    config = load(tmp_path, "rloo", "rollout.questions=3", "rollout.group_size=4")
    outcomes = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])[..., None]
    method, _, _, _, credit, _ = credit_of(config, outcomes=outcomes)
    # 1 - 0 and 0 - 1/3; 1 - 1/3 and 0 - 2/3
    third = 1 / 3
    want = [[1, -third, -third, -third], [2 * third, 2 * third, -2 * third, -2 * third], [0] * 4]
    np.testing.assert_allclose(credit.thinking[..., 0], want, atol=1e-6)
    assert method.name == "RLOO"
