"""HAPO, DAPO, AnytimeReasoner and the evaluation-only methods, on observations made by hand."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.methods import baselines, cot, load_method, self_consistency
from methods_world import load, seen


class TestHAPO:
    def test_rewards_use_the_history_from_before_the_batch(self, tmp_path):
        config = load(tmp_path, "hapo", "rollout.questions=2", "rollout.group_size=2")
        method = load_method(config)
        history = method.init_state(5).at[3].set(10)
        observed = seen(config, questions=np.array([3, 1]))
        observed = dataclasses.replace(
            observed,
            lengths=jnp.array([[5, 20], [4, 4]]),
            outcomes=jnp.array([[1.0, 0.0], [1.0, 0.0]])[..., None],
        )
        rewards = method.rewards(history, observed)[..., 0]
        # cos(pi/4) for half the length; twice the length and wrong; no history, no length reward
        np.testing.assert_allclose(rewards, [[1 + np.sqrt(0.5), -1.0], [1.0, 0.0]], atol=1e-6)
        after = method.update(history, observed, rewards, None)
        none = baselines.HAPO_NO_HISTORY
        np.testing.assert_array_equal(after, [none, 4, none, 5, none])


class TestDAPO:
    def test_right_and_wrong_are_plus_and_minus_one_less_the_punishment(self, tmp_path):
        config = load(tmp_path, "dapo", "rollout.questions=1", "rollout.group_size=4")
        method = load_method(config)
        observed = dataclasses.replace(
            seen(config),
            # longest response 12 + 2 tokens, the punishment starts a fifth of that earlier
            lengths=jnp.array([[5, 14, 14, 12]]),
            outcomes=jnp.array([[1.0, 1.0, 0.0, 0.0]])[..., None],
            closed=jnp.array([[True, False, False, True]]),
        )
        rewards = method.rewards(None, observed)[..., 0]
        np.testing.assert_allclose(rewards, [[1.0, 0.0, -2.0, -1.0 - 0.8 / 2.8]], rtol=1e-5)
        np.testing.assert_array_equal(method.resampling.keep(observed), [True])

    def test_overlong_filtering_leaves_cut_traces_out_of_the_loss(self, tmp_path):
        config = load(tmp_path, "dapo", "dapo.overlong_filter=true")
        method = load_method(config)
        observed = seen(config)
        rewards = method.rewards(None, observed)
        credit = method.advantages(None, observed, rewards, None)
        np.testing.assert_array_equal(credit.keep, observed.closed)
        plain = load_method(load(tmp_path, "dapo")).advantages(None, observed, rewards, None)
        assert plain.keep is None

    def test_dynamic_sampling_can_be_switched_off(self, tmp_path):
        assert load_method(load(tmp_path, "dapo", "dapo.dynamic_sampling=false")).resampling is None


class TestAnytime:
    def test_is_cut_at_fixed_budgets_whatever_the_trace(self, tmp_path):
        method = load_method(load(tmp_path, "anytime"))
        np.testing.assert_array_equal(method.cuts(jnp.full((1, 2), 12)), [[[3, 6, 9, 12]] * 2])

    @pytest.mark.parametrize("prior", ["base", "uniform", "linear"])
    def test_thinking_and_answers_have_priors_of_their_own(self, tmp_path, prior):
        outcomes = np.array([[[0, 0.5, 1, 1], [0, 0, 0.25, 0.5]]])
        config = load(tmp_path, "anytime", f"anytime.prior={prior}", "rollout.questions=1",
                      "rollout.group_size=2")  # fmt: skip
        method = load_method(config)
        observed = seen(config, outcomes=outcomes)
        credit = method.advantages(None, observed, method.rewards(None, observed), None)
        weights = baselines.brpo_prior(prior, jnp.array([3, 6, 9, 12]))
        np.testing.assert_allclose(
            credit.thinking, baselines.brpo_advantage(jnp.asarray(outcomes, jnp.float32), weights)
        )
        # Equal answers at a cut have no advantage over each other.
        np.testing.assert_array_equal(credit.answers, np.zeros((1, 2, 4, 4)))
        mixed = dataclasses.replace(
            observed, by_answer=jnp.zeros((1, 2, 4, 4)).at[0, 0, 1, 2].set(1.0)
        )
        answers = method.advantages(None, mixed, mixed.outcomes, None).answers
        np.testing.assert_allclose(answers[0, 0, 1], [-0.25, -0.25, 0.75, -0.25])
        linear = load_method(
            load(tmp_path, "anytime", "anytime.answer_prior=linear", "rollout.questions=1",
                 "rollout.group_size=2")
        )  # fmt: skip
        again = linear.advantages(None, mixed, mixed.outcomes, None).answers
        np.testing.assert_allclose(again[0, 0, 1], 0.8 * answers[0, 0, 1], rtol=1e-5)

    def test_the_simplified_form_is_named_so_and_is_the_group_mean_within_a_budget(self, tmp_path):
        config = load(tmp_path, "anytime-simplified")
        method = load_method(config)
        assert "simplified" in method.name
        observed = seen(config)
        thinking = method.advantages(None, observed, observed.outcomes, None).thinking
        np.testing.assert_allclose(thinking.sum(1), 0.0, atol=1e-6)


class TestEvaluationOnly:
    def test_accounting_of_self_consistency(self):
        ask = self_consistency.samples_and_budget
        assert ask(512, samples=8, accounting="per_sample") == (8, 512)
        assert ask(512, samples=8) == (8, 64)
        assert ask(515, samples=8) == (8, 64)
        with pytest.raises(UserError, match="fewer samples"):
            ask(7, samples=8)
        with pytest.raises(UserError, match="matched_total"):
            inspect.unwrap(ask)(8, samples=8, accounting="total")

    def test_a_vote_costs_the_sum_of_its_samples(self):
        spent = self_consistency.tokens_spent(np.array([[3, 4, 5], [1, 1, 1]]))
        np.testing.assert_array_equal(spent, [12.0, 3.0])

    def test_standard_chain_of_thought_spends_its_budget_once(self):
        assert cot.samples_and_budget(512) == (1, 512)
