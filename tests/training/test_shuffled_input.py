"""Tests budget.shuffle_input, with which the budget as input is independent of the truncation."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import train
from bacr_jax.config import checks
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method
from bacr_jax.training.dynamic_sampling import BatchPlan, with_shuffled_input
from small_config import SMALL, small_config

SHUFFLED = "budget.shuffle_input=true"
# A baseline that does not depend on the budget, and learning rates with which the budget embedding
# is far from 0 after one step.
RUN = [
    SHUFFLED,
    "advantage.baseline=group",
    "budget.prior=uniform",
    "rollout.group_size=4",
    "output.rollouts=16",
    "train.steps=3",
    "optimizer.conditioning_learning_rate=1.0",
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=0.01",
]


def plan_of(budgets):
    zeros = jnp.zeros(len(budgets), jnp.int32)
    return BatchPlan(zeros, zeros, jnp.asarray(budgets), jnp.zeros((*np.shape(budgets), 1)))


def test_the_input_is_the_batchs_budgets_in_another_order():
    budgets = np.arange(8, 24).reshape(4, 4)
    plan = with_shuffled_input(plan_of(budgets), jax.random.key(0))
    np.testing.assert_array_equal(plan.budgets, budgets)
    assert plan.shuffled_budgets.shape == budgets.shape
    assert sorted(plan.input_budgets) == list(range(8, 24))
    assert (plan.input_budgets != budgets.reshape(-1)).any()
    np.testing.assert_array_equal(plan_of(budgets).input_budgets, budgets.reshape(-1))


def test_the_input_is_independent_of_the_truncation():
    # Both budgets are equally frequent, so half of the traces with input 8 are truncated at 8.
    budgets = np.repeat([[8, 16]], 8, axis=0)
    keys = jax.random.split(jax.random.key(1), 200)
    inputs = np.array([with_shuffled_input(plan_of(budgets), key).input_budgets for key in keys])
    truncated_at_8 = np.tile(budgets.reshape(-1) == 8, (200, 1))
    share = truncated_at_8[inputs == 8].mean()
    # 1,600 draws have a standard error of .0125.
    assert share == pytest.approx(0.5, abs=0.05)


def test_a_run_truncates_at_its_own_budgets_and_learns_with_the_shuffled_ones(tmp_path):
    run = tmp_path / "run"
    assert train.main(["--config", str(SMALL), f"output.dir={run}", *RUN]) == 0
    *_, path = sorted((run / "rollouts").glob("*.jsonl"))
    traces = [json.loads(line) for line in path.read_text().splitlines()]
    inputs = [trace["policy_budget"] for trace in traces]
    truncations = [trace["budget"] for trace in traces]
    assert sorted(inputs) == sorted(truncations) and inputs != truncations
    assert all(trace["thinking_tokens"] <= trace["budget"] for trace in traces)
    # Sampler and learner give the policy the same input, because their log-probabilities agree.
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(record["mismatch/absolute"] for record in records) < 1e-4


def test_a_policy_without_input_is_refused(tmp_path):
    settings = small_config(tmp_path, "", SHUFFLED, "conditioning.budget_input=none")
    assert any("budget.shuffle_input" in problem for problem in checks.problems(settings))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("advantage.baseline=value", "value head"),
        ("advantage.baseline=optimal_token", "score norms"),
    ],
)
def test_methods_that_read_one_budget_a_trace_are_refused(tmp_path, override, message):
    settings = small_config(tmp_path, "", SHUFFLED, override)
    with pytest.raises(UserError, match=message):
        load_method(resolve(settings).method)
