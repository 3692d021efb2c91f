"""Lambda and the cut weights as a config sets them."""

import numpy as np
import pytest

from bacr_jax.methods.reward_terms import cut_weights, progress_coefficient
from methods_world import load


@pytest.mark.parametrize(("dense", "expected"), [("true", 0.3), ("false", 0.0)])
def test_lambda_is_zero_without_the_dense_reward(tmp_path, dense, expected):
    config = load(tmp_path, "bacr-paper", f"reward.dense={dense}")
    assert progress_coefficient(config.reward) == expected


def test_the_paper_weighs_four_cuts_alike(tmp_path):
    np.testing.assert_array_equal(cut_weights(load(tmp_path, "bacr-paper").cuts), [0.25] * 4)
