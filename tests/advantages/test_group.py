import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bacr_jax import advantages

unchecked = inspect.unwrap
reward_arrays = hnp.arrays(
    np.float32,
    st.sampled_from([(2, 2), (1, 4), (3, 5)]),  # each new shape is a compilation
    elements=st.sampled_from([-0.3, 0.0, 0.1, 0.7, 1.0, 1.3]),
)


BASELINES = (advantages.grpo_advantage, advantages.rloo_advantage, advantages.group_advantage)


class TestGroupBaselines:
    R = jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0])

    def test_grpo_by_hand(self):
        # mean 1/2, unbiased deviation sqrt(2/7)
        want = np.where(self.R == 1, 1, -1) * 0.5 / np.sqrt(2 / 7)
        np.testing.assert_allclose(advantages.grpo_advantage(self.R, axis=0), want, rtol=1e-5)

    def test_rewards_apart_are_normalised_in_their_group_and_then_in_the_batch(self):
        # Columns: correct, brief. In units of deviations: group 1 has (1, -1) / sqrt(2) in both,
        # group 2 none in the first, where all are equal, and (-1, 1) / sqrt(2) in the second.
        scores = jnp.array([[[1.0, 1.0], [0.0, 0.5]], [[1.0, 0.0], [1.0, 0.1]]])
        got = advantages.decoupled_advantage(scores, jnp.array([0.75, 0.25]))
        # Weighed and added up: (1, -1, -1/4, 1/4) / sqrt(2), whose mean is 0 and whose deviation
        # is sqrt((2 + 2/16) / 2 / 3).
        want = np.array([[1.0, -1.0], [-0.25, 0.25]]) / np.sqrt(2) / np.sqrt(17 / 48)
        np.testing.assert_allclose(got, want, rtol=1e-4)
        # Added up first, both groups count alike, whatever varies in them.
        summed = advantages.grpo_advantage(scores @ jnp.array([0.75, 0.25]))
        np.testing.assert_allclose(abs(summed), np.full((2, 2), 1 / np.sqrt(2)), rtol=1e-3)

    def test_the_group_mean_form_by_hand(self):
        np.testing.assert_allclose(advantages.group_advantage(self.R, axis=0), self.R - 0.5)

    def test_rloo_by_hand(self):
        got = advantages.rloo_advantage(jnp.array([[1.0, 0.0, 0.5]]))
        np.testing.assert_allclose(got, [[0.75, -0.75, 0.0]], atol=1e-7)

    @settings(max_examples=50)
    @given(reward_arrays)
    def test_rloo_is_the_scaled_group_mean_form_and_the_leave_one_out_difference(self, r):
        n = r.shape[-1]
        rloo = np.asarray(advantages.rloo_advantage(jnp.asarray(r)))
        scaled = n / (n - 1) * np.asarray(advantages.group_advantage(jnp.asarray(r)))
        direct = r - (r.sum(-1, keepdims=True) - r) / (n - 1)
        np.testing.assert_allclose(rloo, scaled, atol=1e-6)
        np.testing.assert_allclose(rloo, direct, atol=1e-5)

    @pytest.mark.parametrize("size", [2, 3, 6, 7])
    def test_equal_rewards_give_exactly_zero(self, size):
        r = jnp.full((3, size), 0.1)
        for advantage in BASELINES:
            np.testing.assert_array_equal(advantage(r), np.zeros((3, size)))

    @pytest.mark.parametrize("advantage", BASELINES)
    @pytest.mark.parametrize(
        ("shape", "axis"), [((3, 1), 1), ((3, 1, 4), 1), ((3, 0), 1), ((1,), 0)]
    )
    def test_groups_of_one_are_refused_when_they_are_traced(self, advantage, shape, axis):
        rewards = jnp.full(shape, 0.7)
        with pytest.raises(
            ValueError, match=f"the groups on axis {axis} have [01] members .* at least two"
        ):
            jax.eval_shape(lambda r: advantage(r, axis=axis), rewards)

    @pytest.mark.parametrize("advantage", BASELINES)
    def test_rewards_without_an_axis_of_groups_are_refused(self, advantage):
        with pytest.raises(
            ValueError, match=r"shape \(8,\) and therefore no group axis 1; .*`axis`"
        ):
            advantage(self.R)

    @pytest.mark.parametrize("advantage", BASELINES)
    def test_the_group_is_the_second_axis_unless_it_is_named(self, advantage):
        """As in the library's rewards [Q, G, M]: one question and cut after another, by loops."""
        r = jax.random.uniform(jax.random.key(0), (2, 5, 3))
        by_cut = [[advantage(r[q, :, m], axis=0) for m in range(3)] for q in range(2)]
        expected = np.moveaxis(np.array(by_cut), 1, 2)
        np.testing.assert_allclose(advantage(r), expected, atol=1e-6)
        np.testing.assert_allclose(advantage(r, axis=-2), expected, atol=1e-6)
        turned = advantage(jnp.swapaxes(r, 1, 2), axis=2)
        np.testing.assert_allclose(jnp.swapaxes(turned, 1, 2), expected, atol=1e-6)

    def test_gradients_into_rewards_are_stopped(self):
        for advantage in BASELINES:
            gradient = jax.grad(lambda r, f=advantage: jnp.sum(f(r, axis=0) ** 2))(self.R)
            np.testing.assert_array_equal(gradient, np.zeros(8))


def test_other_questions_mean_by_hand():
    rewards = jnp.array(
        [[[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]]
    )
    # Sums 3, 1 and 4; two other questions of four rewards each.
    np.testing.assert_allclose(advantages.other_questions_mean(rewards), [5 / 8, 7 / 8, 4 / 8])
    np.testing.assert_array_equal(advantages.other_questions_mean(rewards[:1]), [0.0])


@settings(max_examples=30)
@given(st.integers(0, 3), st.floats(-1e6, 1e6, width=32))
def test_no_reward_of_a_question_is_in_its_other_questions_mean(question, offset):
    rewards = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), jnp.float32)
    other = rewards.at[question].add(offset)
    before, after = (advantages.other_questions_mean(x)[question] for x in (rewards, other))
    assert float(before) == float(after)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        # Each of these would broadcast, or sum over another axis.
        (advantages.other_questions_mean, [(2, 3)]),
        (advantages.other_questions_mean, [(2, 3, 4, 2)]),
        (advantages.others_mean, [(3,)]),
        (advantages.decoupled_advantage, [(2, 3, 2), (1,)]),
        (advantages.decoupled_advantage, [(2, 3, 2), ()]),
        (advantages.decoupled_advantage, [(2, 3, 2), (3, 2)]),
        (advantages.decoupled_advantage, [(2, 3), (3,)]),
    ],
)
def test_arrays_of_another_shape_are_refused_when_they_are_traced(function, shapes):
    arrays = [jnp.ones(shape) for shape in shapes]
    with pytest.raises(AssertionError, match="shape|rank|dimension"):
        jax.eval_shape(unchecked(function), *arrays)


def test_the_scale_of_a_group_needs_an_axis_of_traces():
    scale = unchecked(advantages.advantage_scale)
    with pytest.raises(AssertionError, match="shape"):
        scale(jnp.array([1.0, 3.0]), mode="group", floor=0.1)
    np.testing.assert_allclose(scale(jnp.array([1.0, 3.0]), mode="batch_rms", floor=0.1), 5**0.5)
