import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax import curriculum
from bacr_jax.curriculum import difficulty


def test_evidence_adds_up_over_repeated_problems_and_fades():
    posterior = difficulty.init_difficulty(3)
    record = jax.jit(difficulty.record_attempts)
    posterior = record(
        posterior, jnp.array([0, 2, 0]), jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    )
    np.testing.assert_allclose(posterior.a, [4, 1, 1])
    np.testing.assert_allclose(posterior.b, [2, 1, 3])
    faded = record(posterior, jnp.array([1]), jnp.array([[1.0, 0.0]]), decay=0.5)
    np.testing.assert_allclose(faded.a, [2.5, 2, 1])
    np.testing.assert_allclose(faded.b, [1.5, 2, 2])


def test_without_attempts_every_rate_is_one_half():
    posterior = difficulty.init_difficulty(5)
    rate = difficulty.smoothed_pass_rate(posterior, jnp.arange(5.0), bandwidth=0.5)
    np.testing.assert_allclose(rate, np.full(5, 0.5))


def test_the_first_attempts_are_not_averaged_with_one_half():
    posterior = difficulty.record_attempts(
        difficulty.init_difficulty(2), jnp.array([0]), jnp.array([[0.0] * 8]), decay=0.5
    )
    rate = difficulty.smoothed_pass_rate(posterior, jnp.array([0.0, 100.0]), bandwidth=2.0)
    # Neighbourhood (0 + 1) / (8 + 2), worth two attempts; nothing is known near the other.
    np.testing.assert_allclose(rate, [2 * 0.1 / 10, 0.5], rtol=1e-5)


def test_a_narrow_kernel_by_hand():
    # Problems 0 and 1 share a coordinate: 3 of 4 there. Problem 2 sits far away: 0 of 2.
    posterior = difficulty.DifficultyPosterior(
        a=jnp.array([4.0, 1.0, 1.0]), b=jnp.array([1.0, 2.0, 3.0])
    )
    rate = difficulty.smoothed_pass_rate(
        posterior, jnp.array([0.0, 0.0, 100.0]), bandwidth=2.0, strength=2.0
    )
    near, far = 4 / 6, 1 / 4
    np.testing.assert_allclose(rate, [(2 * near + 3) / 5, (2 * near) / 3, (2 * far) / 4], rtol=1e-5)


def test_untried_problems_learn_from_their_neighbours_and_follow_difficulty():
    rng = np.random.default_rng(0)
    coordinate = np.linspace(0.0, 1.0, 400)
    true_rate = 1.0 - coordinate
    tried = rng.permutation(400)[:200]
    outcomes = (rng.uniform(size=(200, 8)) < true_rate[tried][:, None]).astype(np.float32)
    posterior = difficulty.record_attempts(
        difficulty.init_difficulty(400), jnp.asarray(tried), jnp.asarray(outcomes)
    )
    rate = np.asarray(
        difficulty.smoothed_pass_rate(posterior, jnp.asarray(coordinate), bandwidth=0.05)
    )
    untried = np.setdiff1d(np.arange(400), tried)
    assert np.abs(rate[untried] - true_rate[untried]).mean() < 0.05
    assert np.abs(rate[untried] - true_rate[untried]).max() < 0.15


def test_a_single_level_of_difficulty_is_no_special_case():
    posterior = difficulty.init_difficulty(3)
    rate = difficulty.smoothed_pass_rate(posterior, jnp.zeros(3), bandwidth=0.5)
    assert np.isfinite(rate).all()


def test_problem_rates_take_the_place_of_group_rates_in_the_schedule():
    posterior = difficulty.record_attempts(
        difficulty.init_difficulty(6), jnp.arange(6),
        jnp.array([[1.0] * 8] * 3 + [[0.0] * 8] * 3), decay=1.0,
    )  # fmt: skip
    rate = difficulty.smoothed_pass_rate(posterior, jnp.arange(6.0), bandwidth=0.5)
    mu = curriculum.budget_mean(rate, 1500.0, alpha=0.6, beta=0.3, b_min=256, b_max=4096)
    index = curriculum.sample_groups(jax.random.key(0), curriculum.group_weights(rate), 200)
    budgets = curriculum.sample_budgets(
        jax.random.key(1), mu, index, sigma=100.0, b_min=256, b_max=4096, num_rollouts=4
    )
    solved = np.asarray(index) < 3
    assert budgets.shape == (200, 4)
    assert np.asarray(budgets)[solved].mean() < np.asarray(budgets)[~solved].mean() - 500
