"""Credit moved by score weights: least squares by hand, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from methods_world import credit_of, load

RUNNING = [
    *("advantage.baseline=constant", "advantage.normalise=none", "advantage.score_weighted=true"),
    *("cuts.count=1", "cuts.weights=last", "reward.dense=false"),
]


def test_the_baseline_moves_to_where_earlier_batches_wanted_it(tmp_path):
    own = ["advantage.baseline=value", "advantage.normalise=none"]
    plain = load(tmp_path, "bacr-full", *own)
    moved = load(tmp_path, "bacr-full", *own, "advantage.score_weighted=true")
    _, _, _, _, want, _ = credit_of(plain)
    method, batch, _, rewards, first, state = credit_of(moved)
    np.testing.assert_array_equal(first.thinking, want.thinking)  # nothing is known yet
    values = jnp.asarray(np.random.default_rng(1).random(batch.outcomes.shape), jnp.float32)
    second = method.advantages(state, batch, rewards, values)
    # By hand: least squares on (1, V), weighted by surprise, two of Kish's traces for "as it is".
    returns, w = np.asarray(first.returns), np.asarray(batch.score_norm_proxy)
    for m in range(w.shape[-1]):
        x = np.stack([np.ones(w[..., m].size), (returns - first.thinking)[..., m].ravel()], -1)
        one, credit = w[..., m].ravel(), np.asarray(first.thinking)[..., m].ravel()
        square = np.einsum("n,ni,nj->ij", one, x, x) / len(one)
        traces = one.sum() ** 2 / np.square(one).sum()
        ridge = (1e-3 + 2 / traces) * np.trace(square) / 2 * np.eye(2)
        k = np.linalg.solve(square + ridge, x.T @ (one * credit) / len(one))
        moved = np.asarray(second.thinking)[..., m].ravel()
        np.testing.assert_allclose(moved, credit - x @ k, atol=2e-4)
    np.testing.assert_array_equal(second.answers, want.answers)
    np.testing.assert_allclose(second.baseline, second.returns - second.thinking, rtol=1e-6)


def test_a_uniform_shift_is_the_mean_of_what_the_weights_move_by(tmp_path):
    own = ["advantage.normalise=none", "advantage.score_weighted=true"]
    shaped = load(tmp_path, "bacr-full", *own)
    uniform = load(tmp_path, "bacr-full", *own, "advantage.same_shift_for_batch=true")
    _, batch, _, rewards, first, state = credit_of(shaped)
    values = jnp.asarray(np.random.default_rng(1).random(batch.outcomes.shape), jnp.float32)
    of_shape = load_method(resolve(shaped).method).advantages(state, batch, rewards, values)
    flat = load_method(resolve(uniform).method).advantages(state, batch, rewards, values)
    plain = load(tmp_path, "bacr-full", own[0])
    unmoved = load_method(resolve(plain).method).advantages(state, batch, rewards, values)
    moved = np.asarray(unmoved.thinking - flat.thinking)
    np.testing.assert_allclose(moved, np.broadcast_to(moved[:1, :1], moved.shape), atol=1e-6)
    np.testing.assert_allclose(
        flat.thinking.mean((0, 1)), of_shape.thinking.mean((0, 1)), atol=1e-6
    )
    assert np.ptp(np.asarray(unmoved.thinking - of_shape.thinking), axis=(0, 1)).min() > 1e-3


def test_a_constant_weighted_by_scores_is_the_weighted_mean(tmp_path):
    own = ["advantage.baseline=constant", "advantage.normalise=none", "cuts.count=1"]
    own += ["cuts.weights=last", "reward.dense=false", "advantage.score_weighted=true"]
    config = load(tmp_path, "bacr-full", *own)
    method, batch, state, rewards, *_ = credit_of(config)
    update = jax.jit(lambda state: method.update(state, batch, rewards, None))
    for _ in range(200):
        state = update(state)
    credit = method.advantages(state, batch, rewards, None)
    w, r = np.asarray(batch.score_norm_proxy), np.asarray(rewards)
    best = (w * r).sum() / w.sum()
    # The prior's two traces against 19 batches of effective ones: within a hundredth.
    np.testing.assert_allclose(credit.thinking, r - best, atol=0.01 * abs(r.mean() - best) + 1e-4)


@pytest.mark.parametrize(("offset", "baseline"), [(0.4, 1.0), (-1.4, 0.0), (0.04, 0.94)])
def test_a_running_number_stays_within_what_can_be_returned(tmp_path, offset, baseline):
    method, batch, state, rewards, *_ = credit_of(load(tmp_path, "bacr-full", *RUNNING))
    # Weights of 1 on the offset alone; one part in two thousand is the ridge's.
    state |= {
        "reward_mean": jnp.array([0.9]), "reward_seen": jnp.array(1.0),
        "optimal_square": jnp.array([[[1.0, 0.0], [0.0, 0.0]]]),
        "optimal_product": jnp.array([[offset, 0.0]]), "optimal_spread": jnp.array([1e-9]),
    }  # fmt: skip
    credit = method.advantages(state, batch, rewards, None)
    np.testing.assert_allclose(rewards - credit.thinking, np.full((4, 4, 1), baseline), atol=1e-3)
    np.testing.assert_allclose(rewards - credit.answers, np.full((4, 4, 1), 0.9), atol=1e-6)
