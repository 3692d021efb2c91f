"""The value head (Eq. 11)."""

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.model import value


def test_question_states_are_averaged_over_the_question_alone():
    hidden = jnp.arange(8.0).reshape(1, 4, 2)
    pooled = value.pool_question(hidden, jnp.array([1]), jnp.array([3]))
    np.testing.assert_allclose(pooled, [[3.0, 4.0]])  # rows (2, 3) and (4, 5)


def test_features_hold_question_budget_and_cut():
    width = value.num_features(6, conditioned=True, kind="trace_and_cut")
    features = value.value_features(
        jnp.ones((2, 6)),
        jnp.full((2, 2, 6), 2.0),
        jnp.array([8, 16]),
        jnp.array([[4, 8], [8, 16]]),
        b_max=64,
        kind="trace_and_cut",
    )
    assert features.shape == (2, 2, width)
    np.testing.assert_allclose(features[0, 0, :12], features[0, 1, :12])  # same q, same b
    assert np.abs(features[0, 0] - features[0, 1]).max() > 0.1  # another cut
    # row 0 at cut 8 and row 1 at cut 8 differ only in b
    np.testing.assert_allclose(features[0, 1, -32:], features[1, 0, -32:])


def test_the_papers_head_is_told_the_cut_alone():
    budgets, cuts = jnp.array([8, 16]), jnp.array([[4, 8], [8, 16]])
    np.testing.assert_array_equal(value.phi_budgets(budgets, cuts, kind="cut"), cuts)
    np.testing.assert_array_equal(value.phi_budgets(budgets, cuts, kind="trace")[1], [16, 16])
    features = value.value_features(jnp.ones((2, 6)), None, budgets, cuts, b_max=64, kind="cut")
    assert features.shape[-1] == value.num_features(6, conditioned=False, kind="cut")
    np.testing.assert_array_equal(features[0, 1], features[1, 0])  # cut 8 of either trace
    assert np.abs(features[0, 0] - features[0, 1]).max() > 0.1


def test_told_the_trace_alone_a_head_cannot_tell_cuts_apart():
    features = value.value_features(
        jnp.ones((1, 6)), None, jnp.array([8]), jnp.array([[4, 8]]), b_max=64, kind="trace"
    )
    assert features.shape[-1] == value.num_features(6, conditioned=False, kind="trace")
    np.testing.assert_array_equal(features[0, 0], features[0, 1])


def test_first_values_are_zero_and_unbounded_later():
    params = value.init(jax.random.key(0), num_features=5, hidden_size=8)
    features = jax.random.normal(jax.random.key(1), (2, 3, 5))
    np.testing.assert_array_equal(value.values(params, features), np.zeros((2, 3)))
    params["out"]["bias"] = jnp.array([1.3])  # (1 + lambda) r must be reachable
    np.testing.assert_allclose(value.values(params, features), 1.3, rtol=1e-6)
