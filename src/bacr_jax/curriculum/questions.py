"""Draws questions; difficulty groups are weighted by the spread of outcomes (paper Eq. 6)."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, PRNGKeyArray

from bacr_jax.types import Scalar


def _normalised(weights: Array, allowed: Array) -> Array:
    """Scales weights to sum to 1 over the allowed entries; uniform over these if all are zero."""
    weights = jnp.where(allowed, weights, 0.0)
    total = jnp.sum(weights)
    has_weight = total > 0.0
    divisor = jnp.where(has_weight, total, 1.0)
    uniform = allowed / jnp.maximum(jnp.sum(allowed), 1)
    return jnp.where(has_weight, weights / divisor, uniform)


def group_weights(
    pass_rate: Float[Array, "K"], *, epsilon: Scalar = 0.02, sizes: Num[Array, "K"] | None = None
) -> Float[Array, "K"]:
    """Returns the probability of drawing a question from each group (paper Eq. 6 plus a floor).

        w_k ~ rho_k (1 - rho_k) + epsilon

    Without the floor, a group with pass rate 0 or 1 is never drawn again, so a change of its rate
    is never measured. If all rates are 0 or 1, the weights are 0/0. The weight is largest at
    rho = 1/2. A group of half solved and half impossible problems also has that rate.

    Args:
      pass_rate: rho, one per group, in [0, 1].
      epsilon: the floor, before normalising; 0 is Eq. 6 to the letter.
      sizes: number of questions per group. If given, it multiplies the weights, so that equally
        hard questions, instead of equally hard groups, have equal weight. A group of size 0 gets
        weight 0.

    Returns:
      Probabilities summing to 1; uniform over the (nonempty) groups if all weights are 0.
    """
    chex.assert_rank(pass_rate, 1)
    weights = pass_rate * (1.0 - pass_rate) + epsilon
    if sizes is None:
        all_groups = jnp.ones_like(weights, bool)
        return _normalised(weights, all_groups)
    chex.assert_equal_shape([pass_rate, sizes])
    return _normalised(weights * sizes, sizes > 0)


def sample_groups(key: PRNGKeyArray, weights: Float[Array, "K"], num: int) -> Int[Array, "num"]:
    """Draws int32 indices of groups (or problems) with the given weights, with replacement.

    Args:
      weights: nonnegative, not all zero; they need not sum to 1. An index of weight 0 is never
        drawn.
    """
    chex.assert_rank(weights, 1)
    return jax.random.categorical(key, jnp.log(weights), shape=(num,)).astype(jnp.int32)


def sample_questions(
    key: PRNGKeyArray, weights: Float[Array, "K"], group_of: Int[Array, "n"], num: int
) -> Int[Array, "num"]:
    """Draws questions with replacement: a group by weight, then one of its questions uniformly.

    The loss does not correct for the probabilities, so the weights shape the objective, as in the
    paper.

    Args:
      weights: weight of each group. A group without questions is never drawn.
      group_of: group of each question.
      num: number of draws.

    Returns:
      Indices of questions, int32.
    """
    chex.assert_rank([weights, group_of], 1)
    sizes = jnp.bincount(group_of, length=weights.shape[0])
    group_key, member_key = jax.random.split(key)
    probabilities = _normalised(weights, sizes > 0)
    groups = sample_groups(group_key, probabilities, num)
    rank_in_group = jax.random.randint(member_key, (num,), 0, sizes[groups])

    questions_by_group = jnp.argsort(group_of, stable=True)
    first_of_group = jnp.cumsum(sizes) - sizes
    position = first_of_group[groups] + rank_in_group
    return questions_by_group[position].astype(jnp.int32)
