import jax.numpy as jnp
import numpy as np

from research.variance import control_variates as history

R = jnp.array([[[1.0, 0.0, 1.0]]])
P = jnp.array([[[0.4, 0.5, 0.6]]])


def test_a_segment_knows_how_the_answer_before_it_surprised():
    np.testing.assert_allclose(history.before(R - P), [[[0.0, 0.6, -0.5]]], rtol=1e-6)


def test_the_part_of_the_credit_that_the_surprise_foretold_is_taken_out():
    credit, surprise = jnp.array([[[0.3, 0.6, -0.25]]]), history.before(R - P)
    both, square = history.history_moments(credit, surprise)
    np.testing.assert_allclose(both, [0.0, 0.36, 0.125], rtol=1e-6)
    np.testing.assert_allclose(square, [0.0, 0.36, 0.25], rtol=1e-6)
    left = history.history_advantage(credit, surprise, jnp.array([0.0, 1.0, 0.5]))
    np.testing.assert_allclose(left, [[[0.3, 0.0, 0.0]]], atol=1e-6)
