"""Baselines that are means of the batch, against sums worked out by hand."""

import dataclasses

import numpy as np
import pytest

from methods_world import credit_of, load


@pytest.mark.parametrize("kind", ["batch", "same_budget"])
def test_the_mean_of_the_batch_is_a_baseline_without_value_head_and_memory(tmp_path, kind):
    own = ["advantage.normalise=none", "reward.dense=false"]
    config = load(tmp_path, "bacr-robust", f"advantage.baseline={kind}", *own)
    config = dataclasses.replace(
        config, advantage=dataclasses.replace(config.advantage, score_weighted=False)
    )
    method, batch, state, rewards, credit, _ = credit_of(config)
    assert not method.uses_value and state is None
    budgets = np.asarray(batch.budgets) if kind == "same_budget" else np.zeros_like(batch.budgets)
    flat_budgets, flat_rewards = budgets.ravel(), np.asarray(rewards)[..., 0].ravel()
    for i, advantage in enumerate(np.asarray(credit.thinking)[..., 0].ravel()):
        alike = (flat_budgets == flat_budgets[i]) & (np.arange(len(flat_budgets)) != i)
        if not alike.any():
            alike = np.arange(len(flat_budgets)) != i
        expected = flat_rewards[i] - flat_rewards[alike].mean()
        np.testing.assert_allclose(advantage, expected, atol=1e-6)
