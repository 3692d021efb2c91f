"""ThinkPrune: nothing for a response above the limit, and a limit that falls."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method
from methods_world import group_batch, load


def test_a_truncated_response_earns_nothing_and_its_forced_answer_has_no_advantage(tmp_path):
    """Rewards 1, 0, 0, 1 have the mean 1/2 and the deviation sqrt(1/3)."""
    config = load(tmp_path, "thinkprune", "rollout.questions=1", "rollout.group_size=4")
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [1.0], [0.0], [1.0]]])),
        closed=jnp.array([[True, False, True, True]]),
    )
    method = load_method(resolve(config).method)
    rewards = method.rewards(None, batch)
    np.testing.assert_array_equal(rewards[..., 0], [[1.0, 0.0, 0.0, 1.0]])
    credit = method.advantages(None, batch, rewards, None)
    size = 0.5 * 3**0.5
    np.testing.assert_allclose(credit.thinking[0, :, 0], [size, -size, -size, size], rtol=1e-5)
    np.testing.assert_allclose(credit.answers[0, :, 0], [size, 0.0, -size, size], rtol=1e-5)
    assert method.metrics(None, batch)["thinkprune/truncated_share"] == 0.25


def test_stages_need_a_method_that_truncates_at_its_budget(tmp_path):
    with pytest.raises(UserError, match=r"budget.stages=\[1, 0.5\]: method=l1 truncates traces at"):
        load(tmp_path, "l1_max", "budget.stages=[1,0.5]")
    load(tmp_path, "bacr-robust", "budget.stages=[1,0.5]")
