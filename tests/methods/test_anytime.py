"""AnytimeReasoner: BRPO on two traces worked out by hand, and the method around it."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods import anytime, load_method
from methods_world import group_batch, load

unchecked = inspect.unwrap


class TestBRPO:
    R = jnp.array([[[0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 0.25, 0.5]]])
    BUDGETS = jnp.array([2000, 4000, 6000, 8000])

    @pytest.mark.parametrize(
        "prior, first, second",
        [
            ("uniform", [0.21875, 0.3203125, 0.244792, 0.069196],
                        [-0.21875, -0.1171875, 0.015625, 0.051339]),
            ("linear", [0.2625, 0.396875, 0.339583, 0.110714],
                       [-0.2625, -0.128125, 0.03125, 0.082143]),
            ("base", [0.25, 0.4375, 0.458333, 0.276786],
                     [-0.25, -0.0625, 0.125, 0.205357]),
        ],
    )  # fmt: skip
    def test_published_form_on_two_traces(self, prior, first, second):
        prior = anytime.brpo_prior(prior, self.BUDGETS)
        got = jax.jit(anytime.brpo_advantage)(self.R, prior)
        np.testing.assert_allclose(got, [[first, second]], atol=2e-6)

    def test_priors(self):
        np.testing.assert_allclose(
            anytime.brpo_prior("linear", self.BUDGETS), [0.1, 0.2, 0.3, 0.4], rtol=1e-6
        )
        np.testing.assert_array_equal(anytime.brpo_prior("base", self.BUDGETS), [0, 0, 0, 1])
        np.testing.assert_array_equal(anytime.brpo_prior("uniform", self.BUDGETS), [0.25] * 4)

    def test_parts_by_hand(self):
        prior = jnp.full(4, 0.25)
        returns = np.array([[0.625, 0.625, 0.5, 0.25], [0.1875, 0.1875, 0.1875, 0.125]])
        none = anytime.brpo_advantage(self.R, prior, mode="none")
        np.testing.assert_allclose(none[0], returns)
        group = anytime.brpo_advantage(self.R, prior, mode="v2")
        np.testing.assert_allclose(group[0], returns - returns.mean(0))
        # V1 of trace A: segment 2 sees (.5 * .5 + .25 * 0) / .75 over a remaining mass of 1/2;
        # segment 3 sees (.5 * 1 + .25 * .5 + .125 * 0) / .875 over 1/4.
        v1 = np.array([0.0, 0.0, 1 / 6, 0.625 / 0.875 / 4])
        past = anytime.brpo_advantage(self.R, prior, mode="v1")
        np.testing.assert_allclose(past[0, 0], returns[0] - v1, rtol=1e-6)

    def test_leave_one_out_compares_with_the_other_traces_only(self):
        prior = jnp.full(4, 0.25)
        loo = anytime.brpo_advantage(self.R, prior, mode="v2", loo=True)
        plain = anytime.brpo_advantage(self.R, prior, mode="v2")
        np.testing.assert_allclose(loo, 2 * plain, rtol=1e-6)

    def test_a_lone_trace_has_no_group_baseline(self):
        alone = anytime.brpo_advantage(self.R[:, :1], jnp.full(4, 0.25), mode="v2")
        np.testing.assert_allclose(alone[0, 0], [0.625, 0.625, 0.5, 0.25])

    def test_later_outcomes_do_not_change_the_past_reward_baseline(self):
        prior = jnp.full(4, 0.25)
        other = self.R.at[0, 0, 3].set(0.0)
        for changed, segment in ((other, 3), (self.R.at[0, 0, 2].set(0.0), 2)):
            with_baseline = anytime.brpo_advantage(changed, prior, mode="v1")
            without = anytime.brpo_advantage(changed, prior, mode="none")
            before = anytime.brpo_advantage(self.R, prior, mode="v1")
            before_without = anytime.brpo_advantage(self.R, prior, mode="none")
            np.testing.assert_allclose(
                (without - with_baseline)[0, 0, : segment + 1],
                (before_without - before)[0, 0, : segment + 1], atol=1e-6,
            )  # fmt: skip

    def test_answers_compare_within_a_cut_or_within_the_group_when_alone(self):
        r = jnp.array([[[[1.0, 0.0, 0.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]]]])
        np.testing.assert_allclose(
            anytime.answer_advantage(r), [[[[0.5, -0.5, -0.5, 0.5]], [[0, 0, 0, 0]]]]
        )
        alone = jnp.array([[[[1.0]], [[0.0]], [[0.0]], [[0.0]]]])
        np.testing.assert_allclose(
            anytime.answer_advantage(alone)[0, :, 0, 0], [0.75, -0.25, -0.25, -0.25]
        )

    def test_unknown_names_are_refused(self):
        with pytest.raises(ValueError, match="must be base, uniform or linear"):
            unchecked(anytime.brpo_prior)("flat", self.BUDGETS)
        with pytest.raises(ValueError, match="must be brpo, v1, v2 or none"):
            unchecked(anytime.brpo_advantage)(self.R, jnp.full(4, 0.25), mode="v3")


class TestMethod:
    def test_is_cut_at_fixed_budgets_whatever_the_trace(self, tmp_path):
        method = load_method(resolve(load(tmp_path, "anytime")).method)
        np.testing.assert_array_equal(
            method.cuts(jax.random.key(0), jnp.full((1, 2), 12)), [[[3, 6, 9, 12]] * 2]
        )

    @pytest.mark.parametrize("prior", ["base", "uniform", "linear"])
    def test_thinking_and_answers_have_priors_of_their_own(self, tmp_path, prior):
        outcomes = np.array([[[0, 0.5, 1, 1], [0, 0, 0.25, 0.5]]])
        config = load(tmp_path, "anytime", f"anytime.prior={prior}", "rollout.questions=1",
                      "rollout.group_size=2")  # fmt: skip
        method = load_method(resolve(config).method)
        batch = group_batch(config, outcomes=outcomes)
        credit = method.advantages(None, batch, method.rewards(None, batch), None)
        weights = anytime.brpo_prior(prior, jnp.array([3, 6, 9, 12]))
        np.testing.assert_allclose(
            credit.thinking, anytime.brpo_advantage(jnp.asarray(outcomes, jnp.float32), weights)
        )
        # Equal answers at a cut have no advantage over each other.
        np.testing.assert_array_equal(credit.answers, np.zeros((1, 2, 4, 4)))
        mixed = dataclasses.replace(
            batch, by_answer=jnp.zeros((1, 2, 4, 4)).at[0, 0, 1, 2].set(1.0)
        )
        answers = method.advantages(None, mixed, mixed.outcomes, None).answers
        np.testing.assert_allclose(answers[0, 0, 1], [-0.25, -0.25, 0.75, -0.25])
        config = load(tmp_path, "anytime", "anytime.answer_prior=linear", "rollout.questions=1",
                      "rollout.group_size=2")  # fmt: skip
        linear = load_method(resolve(config).method)
        again = linear.advantages(None, mixed, mixed.outcomes, None).answers
        np.testing.assert_allclose(again[0, 0, 1], 0.8 * answers[0, 0, 1], rtol=1e-5)

    def test_the_simplified_form_is_named_so_and_is_the_group_mean_within_a_budget(self, tmp_path):
        config = load(tmp_path, "anytime-simplified")
        method = load_method(resolve(config).method)
        assert "simplified" in method.name
        batch = group_batch(config)
        thinking = method.advantages(None, batch, batch.outcomes, None).thinking
        np.testing.assert_allclose(thinking.sum(1), 0.0, atol=1e-6)
