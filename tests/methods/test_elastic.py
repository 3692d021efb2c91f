"""Elastic Reasoning: one small budget, and GRPO."""

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config.settings import resolve
from bacr_jax.curriculum import init_curriculum
from bacr_jax.methods import load_method
from methods_world import group_batch, load


def test_every_trace_is_cut_at_a_share_of_the_largest_budget(tmp_path):
    state = init_curriculum(4, mu0=8.0)
    for share, budget in ((0.25, 3), (0.3, 4), (1.0, 12)):
        config = load(tmp_path, "elastic", f"elastic.share={share}")
        method = load_method(resolve(config).method)
        budgets = method.sample_budgets(jax.random.key(0), state, jnp.array([0, 3]))
        np.testing.assert_array_equal(budgets, np.full((2, 4), budget))
        np.testing.assert_array_equal(method.cuts(jax.random.key(0), budgets)[..., 0], budgets)


def test_the_rest_is_grpo(tmp_path):
    config = load(tmp_path, "elastic", "rollout.questions=1", "rollout.group_size=4")
    method = load_method(resolve(config).method)
    batch = group_batch(config, outcomes=np.array([[[1.0], [0.0], [0.0], [0.0]]]))
    credit = method.advantages(None, batch, method.rewards(None, batch), None)
    # A deviation of one half.
    want = [[1.5, -0.5, -0.5, -0.5]]
    np.testing.assert_allclose(credit.thinking[..., 0], want, rtol=1e-5)
