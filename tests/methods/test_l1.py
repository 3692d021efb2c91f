"""L1: rewards for keeping to a told length; what is told does not end a trace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.curriculum import init_curriculum
from bacr_jax.methods import l1, load_method
from bacr_jax.methods.registry import problems
from methods_world import group_batch, load, run_of


class TestFormulas:
    def test_exact_in_the_published_setting(self):
        """Right or wrong, 1,000 tokens off cost .3 either way."""
        got = l1.length_reward(
            jnp.array([1.0, 1.0, 0.0]), jnp.array([1000, 3000, 1000]), jnp.full(3, 2000),
            kind="exact", alpha=3e-4,
        )  # fmt: skip
        np.testing.assert_allclose(got, [0.7, 0.7, -0.3], rtol=1e-6)

    def test_at_most_in_the_published_setting(self):
        """.5 at the length told, 1 from 1,667 tokens below it, 0 from 1,667 above; wrong is 0."""
        got = l1.length_reward(
            jnp.array([1.0, 1.0, 1.0, 1.0, 0.0]), jnp.array([2000, 1000, 300, 4000, 300]),
            jnp.full(5, 2000), kind="max", alpha=3e-4,
        )  # fmt: skip
        np.testing.assert_allclose(got, [0.5, 0.8, 1.0, 0.0, 0.0], rtol=1e-6)


class TestMethod:
    def test_the_weight_is_that_of_a_miss_by_the_largest_budget(self, tmp_path):
        batch = lambda config: dataclasses.replace(
            group_batch(config, outcomes=np.array([[[1.0], [0.0]]])),
            lengths=jnp.array([[6, 14]]),
            budgets=jnp.array([[8, 8]]),
        )
        small = ("rollout.questions=1", "rollout.group_size=2", "l1.weight=1.2")
        config = load(tmp_path, "l1_exact", *small)
        rewards = load_method(resolve(config).method).rewards(None, batch(config))
        np.testing.assert_allclose(rewards[..., 0], [[1 - 0.2, -0.6]], rtol=1e-6)
        config = load(tmp_path, "l1_max", *small)
        rewards = load_method(resolve(config).method).rewards(None, batch(config))
        np.testing.assert_allclose(rewards[..., 0], [[0.7, 0.0]], rtol=1e-6)
        metrics = load_method(resolve(config).method).metrics(None, batch(config))
        assert (metrics["l1/deviation"], metrics["l1/over_share"]) == (4.0, 0.5)

    def test_a_group_is_told_one_length_and_cut_at_the_largest(self, tmp_path):
        method = load_method(resolve(load(tmp_path, "l1_max", "rollout.group_size=3")).method)
        state = init_curriculum(4, mu0=8.0)
        budgets = method.sample_budgets(jax.random.key(0), state, jnp.arange(64) % 4)
        assert (budgets == budgets[:, :1]).all() and len(set(budgets[:, 0].tolist())) > 4
        np.testing.assert_array_equal(
            method.cuts(jax.random.key(0), budgets), np.full((64, 3, 1), 12)
        )

    def test_an_embedding_is_refused(self, tmp_path):
        config = load(tmp_path, "l1_exact")
        told = dataclasses.replace(config.conditioning, budget_input="both")
        found = list(problems(dataclasses.replace(resolve(config).method, conditioning=told)))
        assert found[0].startswith(
            "conditioning.budget_input=both: method=l1 needs the budget in the"
        )

    @pytest.mark.slow
    def test_traces_may_outlast_what_they_were_told(self, tmp_path, ledger_tokens):
        """The prompt says the plan's budget; the trace ends by itself or at the largest."""
        from bacr_jax.training.algorithm import iterate

        config = load(tmp_path, "l1_max", "loss.kl_coef=0")
        run, state = run_of(config, (ledger_tokens, len(ledger_tokens)))
        _, done = iterate(run, state, 0)
        told = np.asarray(done.chosen.plan.budgets).reshape(-1)
        trunks = done.chosen.rollout.trunks
        assert (np.asarray(trunks.thinking) > told).any()
        np.testing.assert_array_equal(trunks.budgets, np.full(16, 12))
        np.testing.assert_array_equal(done.chosen.group_batch.budgets.reshape(-1), told)
        # Two rows of one question with different numbers would have different prompts.
        tokens = np.asarray(done.chosen.prompts.tokens)
        own = run.task_data.train.at(done.chosen.plan.rows, told)
        np.testing.assert_array_equal(tokens, own.tokens)
        assert done.metrics["budget/mean"] == told.mean()
        assert done.metrics["mismatch/k3"] < 1e-6
