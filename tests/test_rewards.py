import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bacr_jax import rewards

unchecked = inspect.unwrap
outcomes = hnp.arrays(
    np.float32,
    st.sampled_from([(2, 1), (1, 4), (3, 5)]),  # each new shape is a compilation
    elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)


class TestCuts:
    def test_quarters_rounded_up(self):
        cuts = rewards.cut_points(jnp.array([[4096, 7], [1, 3]]), num_cuts=4)
        np.testing.assert_array_equal(
            cuts, [[[1024, 2048, 3072, 4096], [2, 4, 6, 7]], [[1, 1, 1, 1], [1, 2, 3, 3]]]
        )

    @settings(max_examples=50)
    @given(st.integers(1, 100_000), st.integers(1, 12))
    def test_are_ordered_positive_and_end_at_the_budget(self, budget, num_cuts):
        cuts = np.asarray(rewards.cut_points(jnp.array([budget]), num_cuts=num_cuts))[0]
        assert cuts[-1] == budget
        assert cuts[0] >= 1
        assert (np.diff(cuts) >= 0).all()
        np.testing.assert_array_equal(
            cuts, [-(-j * budget // num_cuts) for j in range(1, num_cuts + 1)]
        )

    @pytest.mark.parametrize(
        "length, source",
        [(9, [0, 1, 2, 3]), (7, [0, 1, 2, 3]), (6, [0, 1, 2, 2]), (5, [0, 1, 2, 2]),
         (4, [0, 1, 1, 1]), (1, [0, 0, 0, 0]), (0, [0, 0, 0, 0])],
    )  # fmt: skip
    def test_cuts_past_the_natural_end_share_one_answer(self, length, source):
        cuts = jnp.array([[2, 4, 6, 7]])
        got = rewards.distinct_cuts(cuts, jnp.array([length]))
        np.testing.assert_array_equal(got, [source])

    def test_random_cuts_are_uniform_below_the_budget_and_end_at_it(self):
        budgets = jnp.tile(jnp.array([10, 1]), (4000, 1))
        cuts = np.asarray(rewards.random_cut_points(jax.random.key(0), budgets, num_cuts=3))
        assert (np.diff(cuts, axis=-1) >= 0).all()
        np.testing.assert_array_equal(cuts[..., -1], budgets)
        np.testing.assert_array_equal(cuts[:, 1], 1)
        # Each of 1..10 with probability 1/10, within four standard deviations.
        counts = np.bincount(cuts[:, 0, :2].ravel(), minlength=11)[1:]
        assert np.abs(counts - 800).max() < 4 * np.sqrt(800 * 0.9)

    @pytest.mark.parametrize("array", [jnp.array, np.array])
    @pytest.mark.parametrize(
        ("cuts", "source"), [([1, 1, 2, 2], [0, 0, 2, 2]), ([3, 1, 3, 1], [0, 1, 0, 1])]
    )
    def test_repeated_cuts_share_one_answer(self, cuts, source, array):
        got = rewards.distinct_cuts(array([cuts]), array([9]))
        np.testing.assert_array_equal(got, [source])
        assert isinstance(got, type(array([cuts])))

    @settings(max_examples=50)
    @given(st.integers(1, 50), st.integers(0, 60), st.integers(1, 6))
    def test_reused_outcomes_make_no_progress(self, budget, length, num_cuts):
        cuts = rewards.cut_points(jnp.array([budget]), num_cuts=num_cuts)
        source = rewards.distinct_cuts(cuts, jnp.array([length]))
        fresh = jnp.arange(1.0, num_cuts + 1)[None]
        delta = np.asarray(rewards.progress(jnp.take_along_axis(fresh, source, axis=-1)))
        reached = np.minimum(np.asarray(cuts), length)
        np.testing.assert_array_equal(delta[:, 1:] == 0, np.diff(reached, axis=-1) == 0)


class TestCutWeights:
    @pytest.mark.parametrize(
        "kind, want",
        [("uniform", [0.25] * 4), ("final_heavy", [0.1, 0.1, 0.1, 0.7]),
         ("last", [0, 0, 0, 1]), ((0.4, 0.3, 0.2, 0.1), [0.4, 0.3, 0.2, 0.1]),
         (np.array([0.4, 0.3, 0.2, 0.1]), [0.4, 0.3, 0.2, 0.1])],
    )  # fmt: skip
    def test_values(self, kind, want):
        np.testing.assert_allclose(rewards.cut_weights(kind, 4), want, rtol=1e-6)

    @pytest.mark.parametrize("kind", ["uniform", "final_heavy", "last"])
    @pytest.mark.parametrize("num_cuts", [1, 2, 8])
    def test_sum_to_one_for_any_number_of_cuts(self, kind, num_cuts):
        weights = rewards.cut_weights(kind, num_cuts)
        assert weights.shape == (num_cuts,)
        np.testing.assert_allclose(jnp.sum(weights), 1.0, rtol=1e-6)

    @pytest.mark.parametrize(
        "kind",
        [(0.5, 0.5), (0.5, 0.5, 0.5, 0.5), (-0.1, 0.1, 0.5, 0.5), (np.nan, 0.0, 0.5, 0.5)],
    )
    def test_nonsense_is_refused_with_what_to_write(self, kind):
        with pytest.raises(ValueError, match="must be 4 numbers of at least 0 that sum to 1"):
            rewards.cut_weights(kind, 4)

    def test_an_unknown_name_is_no_weight(self):
        with pytest.raises(ValueError, match="must be uniform, final_heavy .*, but are 'first'"):
            rewards.cut_weights("first", 4)


class TestDenseReward:
    def test_eq7_and_eq8_by_hand(self):
        r = jnp.array([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.5, 0.5]])
        np.testing.assert_array_equal(rewards.progress(r), [[0, 1, -1, 1], [1, 0, -0.5, 0]])
        np.testing.assert_allclose(
            rewards.dense_reward(r, coefficient=0.3),
            [[0.0, 1.3, -0.3, 1.3], [1.3, 1.0, 0.35, 0.5]], rtol=1e-6,
        )  # fmt: skip

    @pytest.mark.parametrize("dtype", [bool, np.uint8, np.int32, np.float32])
    @pytest.mark.parametrize("array", [np.array, jnp.array])
    def test_a_lost_answer_counts_as_negative_in_every_type_of_number(self, array, dtype):
        r = array([[1, 0, 1, 1]], dtype)
        np.testing.assert_array_equal(rewards.progress(r), [[1, -1, 1, 0]])
        want = [[1.3, -0.3, 1.3, 1.0]]
        np.testing.assert_allclose(rewards.dense_reward(r, coefficient=0.3), want, rtol=1e-6)
        jitted = jax.jit(rewards.dense_reward)(r, coefficient=0.3)
        np.testing.assert_allclose(jitted, want, rtol=1e-6)

    def test_eq9_does_not_tell_early_improvement_from_flip_flopping(self):
        r = jnp.array([[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]])
        dense = rewards.dense_reward(r, coefficient=0.3)
        total = dense @ rewards.cut_weights("uniform", 4)
        np.testing.assert_allclose(total, [0.575, 0.575], rtol=1e-6)

    @settings(max_examples=50)
    @given(outcomes, st.floats(0, 2))
    def test_uniform_progress_telescopes_to_the_last_outcome(self, r, coefficient):
        cuts = r.shape[-1]
        dense = rewards.dense_reward(jnp.asarray(r), coefficient=coefficient)
        total = dense @ rewards.cut_weights("uniform", cuts)
        want = r.mean(-1) + coefficient / cuts * r[:, -1]
        np.testing.assert_allclose(total, want, rtol=1e-5, atol=1e-6)

    @settings(max_examples=50)
    @given(outcomes, st.floats(0, 2), st.integers(0, 2**31))
    def test_with_any_weights_outcomes_enter_with_their_coefficients(self, r, coefficient, seed):
        weights = jnp.asarray(np.random.default_rng(seed).dirichlet(np.ones(r.shape[-1])))
        dense = rewards.dense_reward(jnp.asarray(r), coefficient=coefficient)
        u = rewards.outcome_coefficients(weights, coefficient=coefficient)
        np.testing.assert_allclose(dense @ weights, r @ np.asarray(u), rtol=1e-4, atol=1e-5)

    def test_final_heavy_weights_with_the_papers_lambda_punish_a_right_answer_at_the_third_cut(
        self,
    ):
        weights = rewards.cut_weights("final_heavy", 4)
        u = rewards.outcome_coefficients(weights, coefficient=0.3)
        np.testing.assert_allclose(u, [0.1, 0.1, -0.08, 0.91], atol=1e-6)
        assert rewards.outcome_coefficients(weights, coefficient=0.16)[2] > 0.0
        assert rewards.outcome_coefficients(weights, coefficient=0.17)[2] < 0.0

    def test_uniform_weights_give_one_over_m_and_more_for_the_last_answer(self):
        u = rewards.outcome_coefficients(jnp.full(4, 0.25), coefficient=0.3)
        np.testing.assert_allclose(u, [0.25, 0.25, 0.25, 0.325], rtol=1e-6)

    def test_numpys_numbers_stay_numpys_and_are_the_same(self):
        r = np.array([[0.0, 0.5, 1.0], [1.0, 0.25, 0.25]])
        shares = rewards.cut_shares("final_heavy", 3)
        pairs = (
            (shares, rewards.cut_weights("final_heavy", 3)),
            (
                rewards.dense_reward(r, coefficient=0.3),
                rewards.dense_reward(jnp.asarray(r), coefficient=0.3),
            ),
            (
                rewards.outcome_coefficients(shares, coefficient=0.3),
                rewards.outcome_coefficients(jnp.asarray(shares), coefficient=0.3),
            ),
        )
        for here, there in pairs:
            assert isinstance(here, np.ndarray) and isinstance(there, jax.Array)
            np.testing.assert_allclose(here, there, rtol=1e-6)

    def test_compiles_and_maps(self):
        def total(r):
            dense = rewards.dense_reward(r, coefficient=0.3)
            return dense @ rewards.cut_weights("uniform", 4)

        r = jnp.array([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
        np.testing.assert_allclose(jax.jit(jax.vmap(total))(r), total(r), rtol=1e-6)


@pytest.mark.parametrize("array", [jnp.ones, np.ones])
@pytest.mark.parametrize("shape", [(), (3,), (2,), (2, 1), (2, 3, 4)])
def test_cuts_need_one_length_and_one_budget_for_each_trace(shape, array):
    """Lengths of another shape than [2, 3] would broadcast against the cuts [2, 3, 4]."""
    cuts = array((2, 3, 4), np.int32)
    right = array((2, 3), np.int32)
    wrong = array(shape, np.int32)
    calls = [
        (rewards.with_grace, (cuts, wrong, 1)),
        (rewards.distinct_cuts, (cuts, wrong)),
        (rewards.cuts_of_trace, (cuts, wrong, right)),
        (rewards.cuts_of_trace, (cuts, right, wrong)),
    ]
    for function, arguments in calls:
        with pytest.raises(AssertionError, match="shape"):
            unchecked(function)(*arguments)


def test_coefficients_are_of_one_list_of_weights():
    with pytest.raises(AssertionError, match="rank"):
        unchecked(rewards.outcome_coefficients)(jnp.ones((1, 4)), coefficient=0.3)
