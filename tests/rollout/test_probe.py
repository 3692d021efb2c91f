"""Evidence that a server has kept older weights, from log-probabilities of the tokens it drew."""

import math

import numpy as np
import pytest

from bacr_jax.rollout.probe import (
    BOUNDS,
    CERTAIN,
    CONTEXTS,
    evidence_of_stale_weights,
    largest_difference,
    picked,
    rms_difference,
)

F32 = BOUNDS["float32"]


def evidence(theirs, ours, before, bound=F32):
    return evidence_of_stale_weights(*map(np.array, (theirs, ours, before)), bound)


def test_each_token_that_lies_on_one_side_counts_once():
    # Nearer to the older weights: ln(2 * 0.9); nearer to the newer ones: ln(2 * 0.1).
    ours, before = [-1.0] * 4, [-1.001] * 4
    theirs = [-1.001, -1.0009, -1.0, -1.0005]
    found = evidence(theirs, ours, before)
    assert found == pytest.approx(2 * math.log(1.8) + math.log(0.2))


def test_differences_below_rounding_are_no_evidence():
    assert evidence([-1.0000005], [-1.0], [-1.0000005]) == 0.0
    assert evidence([-1.0], [-1.0], [-1.0]) == 0.0


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_one_push_decides_where_an_update_is_larger_than_rounding(dtype, rounding):
    numbers = np.random.default_rng(0)
    before = -numbers.exponential(size=CONTEXTS)
    ours = before + numbers.normal(size=CONTEXTS) * 30 * rounding
    noise = numbers.normal(size=CONTEXTS) * rounding
    bound = BOUNDS[dtype]
    assert evidence_of_stale_weights(before + noise, ours, before, bound) > CERTAIN
    assert evidence_of_stale_weights(ours + noise, ours, before, bound) < -CERTAIN


def test_a_temperature_below_1_divides_rounding_errors():
    assert largest_difference("float32", 1.0) == 1e-3
    assert largest_difference("float32", 0.5) == pytest.approx(2e-3)
    assert largest_difference("bfloat16", 2.0) == 0.1


@pytest.mark.parametrize("update", [0.0, 1e-3, 2e-2])
def test_rounding_without_a_side_never_adds_up(update):
    """A right server: three roundings of one size, and updates of any size, over 3,000 pushes."""
    numbers = np.random.default_rng(1)
    noise = lambda: numbers.normal(size=CONTEXTS) * 2e-2
    largest = total = 0.0
    for _ in range(3000):
        ours = noise()
        before = numbers.normal(size=CONTEXTS) * update + noise()
        found = evidence_of_stale_weights(noise(), ours, before, BOUNDS["bfloat16"])
        total = max(total + found, 0.0)
        largest = max(largest, total)
    assert largest < CERTAIN


def test_a_score_is_picked_for_each_context():
    scores = np.array([[-1.0, -2.0], [-3.0, -4.0]])
    np.testing.assert_array_equal(picked(scores, np.array([1, 0])), [-2.0, -3.0])
    assert rms_difference(np.array([0.0, 3.0]), np.array([4.0, 0.0])) == pytest.approx(12.5**0.5)
