"""Continuous difficulty: a pass rate per problem instead of per group (an extension).

The paper's schedule needs problems sorted into K groups and names continuous difficulty as future
work. Here each problem keeps a Beta posterior over its pass rate, and problems near each other on
some difficulty coordinate (a level, an initial solve rate, the length of a reference solution)
lend each other evidence. The rates take the place of the groups' in the functions of `curriculum`:

    rho     = smoothed_pass_rate(posterior, coordinate, bandwidth=.5)     # [n]
    index   = sample_groups(key, group_weights(rho), Q)                   # problems, directly
    mu      = budget_mean(rho, mu0, alpha=.6, beta=.3, b_min=256, b_max=4096)
    budgets = sample_budgets(key, mu, index, ...)
    posterior = record_attempts(posterior, index, correct, decay=.99)
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.types import pytree

Scalar = int | float | Array


@pytree
class DifficultyPosterior:
    """Beta(a, b) posterior over the pass rate of each of n problems.

    Attributes:
      a: 1 + remembered successes.
      b: 1 + remembered failures.
    """

    a: Float[Array, "n"]
    b: Float[Array, "n"]


def init_difficulty(num_problems: int) -> DifficultyPosterior:
    """Beta(1, 1), the uniform distribution, for every problem.

    Args:
      num_problems: n.

    Returns:
      The posterior before any attempt.
    """
    return DifficultyPosterior(a=jnp.ones(num_problems), b=jnp.ones(num_problems))


def record_attempts(
    posterior: DifficultyPosterior,
    problem: Int[Array, "Q"],
    correct: Float[Array, "Q G"],
    *,
    decay: Scalar = 1.0,
) -> DifficultyPosterior:
    """Adds a batch of outcomes, after fading the older ones.

        a <- 1 + d (a - 1) + successes,   b <- 1 + d (b - 1) + failures

    Fading applies to all problems at every call, since the policy that made the old attempts is
    gone whether or not a problem was drawn again.

    Args:
      posterior: the posterior so far.
      problem: index of each question of the batch in [0, n); repeats add up.
      correct: outcomes in [0, 1] of the G rollouts.
      decay: d in (0, 1]; 1 forgets nothing.

    Returns:
      The new posterior.
    """
    chex.assert_rank([problem, correct], [1, 2])
    n = posterior.a.shape[0]
    wins = jax.ops.segment_sum(jnp.sum(correct, axis=1), problem, n)
    losses = jax.ops.segment_sum(jnp.sum(1.0 - correct, axis=1), problem, n)
    return DifficultyPosterior(
        a=1.0 + decay * (posterior.a - 1.0) + wins, b=1.0 + decay * (posterior.b - 1.0) + losses
    )


def smoothed_pass_rate(
    posterior: DifficultyPosterior,
    coordinate: Float[Array, "n"],
    *,
    bandwidth: Scalar,
    strength: Scalar = 2.0,
    num_bins: int = 64,
) -> Float[Array, "n"]:
    """Pass rate of each problem, shrunk towards that of problems of similar difficulty.

        m(x)  = (1 + sum_j K(x - x_j) wins_j) / (2 + sum_j K(x - x_j) attempts_j)
        rho_i = (s m(x_i) + wins_i) / (s + attempts_i)

    with a Gaussian kernel K. A problem that was never drawn has the rate of its neighbourhood; one
    that was drawn often has its own. Attempts are binned along the coordinate first, so the cost
    is n + num_bins^2 rather than n^2.

    Args:
      posterior: attempts so far.
      coordinate: difficulty of each problem, any scale.
      bandwidth: standard deviation of K, in units of the coordinate; above the bin width,
        (max - min) / (num_bins - 1), or neighbourhoods become bins.
      strength: s, attempts that the neighbourhood is worth.
      num_bins: resolution along the coordinate.

    Returns:
      rho in (0, 1).
    """
    chex.assert_rank(coordinate, 1)
    chex.assert_equal_shape([posterior.a, posterior.b, coordinate])
    wins, attempts = posterior.a - 1.0, posterior.a + posterior.b - 2.0
    grid = jnp.linspace(jnp.min(coordinate), jnp.max(coordinate), num_bins)
    spacing = jnp.maximum(grid[1] - grid[0], jnp.finfo(jnp.float32).tiny)
    nearest = jnp.round((coordinate - grid[0]) / spacing).astype(jnp.int32)
    nearest = jnp.clip(nearest, 0, num_bins - 1)
    binned = jax.ops.segment_sum(jnp.stack([wins, attempts], axis=1), nearest, num_bins)
    kernel = jnp.exp(-0.5 * jnp.square((grid[:, None] - grid[None, :]) / bandwidth))
    near_wins, near_attempts = jnp.matmul(kernel, binned, precision="highest").T
    neighbourhood = ((1.0 + near_wins) / (2.0 + near_attempts))[nearest]
    return (strength * neighbourhood + wins) / (strength + attempts)
