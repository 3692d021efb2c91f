"""What methods at one budget share: questions alike, the largest budget, one outcome a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import MethodSettings, resolve
from bacr_jax.curriculum import init_curriculum
from bacr_jax.methods import grpo_family as family
from config_world import changed
from methods_world import group_batch, load

SETTINGS = ("rollout.questions=1", "rollout.group_size=3")


@pytest.fixture
def config(tmp_path):
    return load(tmp_path, "grpo", *SETTINGS)


def test_questions_are_drawn_as_often_as_there_are_of_their_group():
    state = init_curriculum(3, mu0=8.0)
    shares = family.by_size(state, jnp.array([1, 0, 3]))
    np.testing.assert_allclose(shares, [0.25, 0.0, 0.75])


def test_every_trace_has_the_largest_budget_and_one_cut_at_its_end(config):
    method = family.grpo_family(resolve(config).method, "mine", lambda rewards: rewards)
    state = init_curriculum(4, mu0=8.0)
    budgets = method.sample_budgets(jax.random.key(0), state, jnp.array([0, 3]))
    np.testing.assert_array_equal(budgets, np.full((2, 3), 12))
    np.testing.assert_array_equal(method.cuts(jax.random.key(0), budgets), np.full((2, 3, 1), 12))


def test_one_advantage_a_trace_serves_its_thinking_and_its_answer(config):
    method = family.grpo_family(resolve(config).method, "mine", lambda rewards: 10 * rewards)
    batch = group_batch(config, outcomes=np.array([[[1.0], [0.0], [0.5]]]))
    rewards = method.rewards(None, batch)
    np.testing.assert_array_equal(rewards, [[[1.0], [0.0], [0.5]]])
    credit = method.advantages(None, batch, rewards, None)
    np.testing.assert_array_equal(credit.thinking, [[[10.0], [0.0], [5.0]]])
    np.testing.assert_array_equal(credit.answers, credit.thinking)
    np.testing.assert_allclose(credit.baseline, np.full((1, 3, 1), 0.5))
    assert credit.keep is None
    assert (method.conditioned, method.uses_value, method.answers) == (False, False, 1)


def test_the_reward_can_be_a_methods_own(config):
    method = family.grpo_family(
        resolve(config).method,
        "mine",
        lambda rewards: rewards,
        reward=lambda state, batch: batch.outcomes[..., -1] - state,
    )
    batch = group_batch(config, outcomes=np.array([[[1.0], [0.0], [0.5]]]))
    rewards = method.rewards(2.0, batch)
    np.testing.assert_array_equal(rewards[..., 0], [[-1.0, -2.0, -1.5]])


def test_correctness_is_the_outcome_at_the_last_cut(tmp_path):
    config = load(tmp_path, None, *SETTINGS, "cuts.count=2")
    batch = group_batch(config, outcomes=np.array([[[1, 0], [0, 1], [1, 0.5]]]))
    np.testing.assert_array_equal(family.correctness(None, batch), [[0.0, 1.0, 0.5]])


def test_a_group_of_one_is_refused_where_rollouts_are_compared():
    assert list(family.problems(MethodSettings(method="rloo"))) == []
    alone = changed(method="rloo", rollout={"group_size": 1})
    (problem,) = family.problems(resolve(alone).method)
    assert problem.startswith("rollout.group_size=1: method=rloo compares several traces")
