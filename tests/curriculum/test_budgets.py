import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from bacr_jax import curriculum

# Without the runtime type checks that tests run with, whose annotations would refuse first.
unchecked = inspect.unwrap


class TestStages:
    """The largest budget of a step."""

    @pytest.mark.parametrize(
        ("step", "limit"), [(0, 4000), (33, 4000), (34, 3000), (66, 3000), (67, 2000), (99, 2000)]
    )
    def test_hundred_steps_have_three_stages_of_a_third_each(self, step, limit):
        stages = (1.0, 0.75, 0.5)
        assert curriculum.stage_limit(stages, step=step, total_steps=100, b_max=4000) == limit

    def test_fewer_steps_than_stages_skip_some(self):
        limits = [
            curriculum.stage_limit((1.0, 0.5, 0.25), step=step, total_steps=2, b_max=8)
            for step in range(2)
        ]
        assert limits == [8, 4]

    def test_a_stage_has_at_least_one_token(self):
        assert curriculum.stage_limit((0.01,), step=0, total_steps=1, b_max=8) == 1

    @pytest.mark.parametrize(("share", "limit"), [(0.55, 5), (0.45, 4)])
    def test_a_limit_is_rounded_to_the_nearest_token(self, share, limit):
        # The shares of 9 tokens are 4.95 and 4.05 tokens.
        assert curriculum.stage_limit((share,), step=0, total_steps=1, b_max=9) == limit


class TestBudgets:
    GROUP = jnp.array([0, 1, 2, 1])

    def sample(self, assign="independent", *, group=GROUP, num_rollouts=8, sigma=512.0, seed=0):
        mu = jnp.array([300.0, 1500.0, 9000.0])
        return np.asarray(
            curriculum.sample_budgets(
                jax.random.key(seed), mu, group, sigma=sigma, b_min=256, b_max=4096,
                num_rollouts=num_rollouts, assign=assign,
            )
        )  # fmt: skip

    @pytest.mark.parametrize("assign", ["independent", "shared", "stratified"])
    def test_every_assignment_has_the_distribution_of_eq4(self, assign):
        group = jnp.full(4000, 1)
        budgets = self.sample(assign, group=group, num_rollouts=3)
        law = scipy.stats.truncnorm((256 - 1500) / 512, (4096 - 1500) / 512, 1500, 512)
        for rollout in range(3):
            # Undo the rounding so that the law is continuous again.
            jitter = np.random.default_rng(rollout).uniform(-0.5, 0.5, 4000)
            assert scipy.stats.kstest(budgets[:, rollout] + jitter, law.cdf).pvalue > 1e-4

    def test_whole_tokens_inside_the_range_even_when_mu_is_far_outside(self):
        budgets = self.sample(group=jnp.full(2000, 2))
        assert budgets.dtype == np.int32
        assert budgets.max() == 4096
        assert budgets.min() >= 256
        assert len(np.unique(budgets)) > 50

    def test_each_group_has_its_own_location_and_scale(self):
        group = jnp.repeat(jnp.arange(3), 500)
        budgets = self.sample(group=group, sigma=jnp.array([1.0, 200.0, 1.0]))
        by_group = budgets.reshape(3, -1)
        assert set(np.unique(by_group[0])) <= set(range(294, 307))
        assert 150 < by_group[1].std() < 250
        assert (by_group[2] == 4096).mean() > 0.9

    def test_shared_gives_one_budget_per_question(self):
        budgets = self.sample("shared")
        assert (budgets == budgets[:, :1]).all()
        assert len(np.unique(budgets[:, 0])) > 1

    def test_stratified_puts_one_rollout_in_each_quantile_range(self):
        budgets = np.asarray(
            curriculum.uniform_budgets(
                jax.random.key(0), b_min=0, b_max=799, shape=(300, 8), assign="stratified"
            )
        )
        strata = budgets // 100
        np.testing.assert_array_equal(np.sort(strata, axis=1), np.tile(np.arange(8), (300, 1)))
        assert scipy.stats.chisquare(np.bincount(strata[:, 0], minlength=8)).pvalue > 1e-4

    def test_uniform_budgets_cover_the_range_evenly(self):
        budgets = curriculum.uniform_budgets(jax.random.key(1), b_min=5, b_max=8, shape=(500, 8))
        counts = np.bincount(np.asarray(budgets).ravel(), minlength=10)
        assert counts[:5].sum() == counts[9:].sum() == 0
        assert scipy.stats.chisquare(counts[5:9]).pvalue > 1e-4

    def test_choices_are_drawn_equally_often_and_nothing_else(self):
        choices = jnp.array([8, 16, 24, 32])
        budgets = curriculum.choice_budgets(jax.random.key(1), choices, shape=(500, 8))
        found, counts = np.unique(np.asarray(budgets), return_counts=True)
        np.testing.assert_array_equal(found, choices)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4

    def test_stratified_choices_give_every_question_each_budget_alike(self):
        choices = jnp.array([3, 5, 100])
        budgets = curriculum.choice_budgets(
            jax.random.key(0), choices, shape=(50, 6), assign="stratified"
        )
        in_order = np.sort(budgets, axis=1)
        np.testing.assert_array_equal(in_order, np.tile([3, 3, 5, 5, 100, 100], (50, 1)))

    @pytest.mark.parametrize("array", [jnp.array, np.array, list])
    @pytest.mark.parametrize("jit", [jax.jit, lambda function: function])
    def test_arrays_of_any_kind_give_the_same_budgets_of_jax(self, array, jit):
        choices = array([8, 16, 32])
        mu = array([8.0, 24.0])
        group = array([0, 1])
        limits = {"sigma": 4.0, "b_min": 4, "b_max": 32, "num_rollouts": 3}

        def sample(choices, mu, group):
            key = jax.random.key(0)
            chosen = jit(lambda key: curriculum.choice_budgets(key, choices, shape=(2, 3)))(key)
            sampled = jit(lambda key: curriculum.sample_budgets(key, mu, group, **limits))(key)
            return chosen, sampled

        found = sample(choices, mu, group)
        want = sample(jnp.array(choices), jnp.array(mu), jnp.array(group))
        for budgets, expected in zip(found, want):
            assert isinstance(budgets, jax.Array) and budgets.dtype == jnp.int32
            np.testing.assert_array_equal(budgets, expected)

    def test_fixed_budgets(self):
        np.testing.assert_array_equal(curriculum.fixed_budgets(7, shape=(2, 3)), np.full((2, 3), 7))

    def test_same_key_same_budgets_other_key_other_budgets(self):
        np.testing.assert_array_equal(self.sample(seed=3), self.sample(seed=3))
        assert (self.sample(seed=3) != self.sample(seed=4)).any()

    def test_unknown_assignment_is_refused(self):
        with pytest.raises(ValueError, match="assigned independent, shared or stratified"):
            unchecked(curriculum.uniform_budgets)(
                jax.random.key(0), b_min=1, b_max=2, shape=(1, 1), assign="sorted"
            )
