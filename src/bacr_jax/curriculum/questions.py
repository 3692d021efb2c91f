"""Samples questions, with difficulty groups weighted by the variance of their outcomes (Eq. 6)."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, PRNGKeyArray

from bacr_jax.static_arguments import static_arguments
from bacr_jax.types import Scalar


def _normalised(weights: Array, allowed: Array) -> Array:
    """Normalizes weights to sum to 1 over the allowed entries.

    If all allowed weights are zero, the result is uniform over the allowed entries.
    """
    weights = jnp.where(allowed, weights, 0.0)
    total = jnp.sum(weights)
    has_weight = total > 0.0
    divisor = jnp.where(has_weight, total, 1.0)
    uniform = allowed / jnp.maximum(jnp.sum(allowed), 1)
    return jnp.where(has_weight, weights / divisor, uniform)


def group_weights(
    pass_rate: Float[Array, "K"], *, epsilon: Scalar = 0.02, sizes: Num[Array, "K"] | None = None
) -> Float[Array, "K"]:
    """Computes the probability of sampling a question from each group (paper Eq. 6 plus a floor).

        w_k ~ rho_k (1 - rho_k) + epsilon

    Without the floor epsilon, a group with pass rate 0 or 1 would never be sampled again, so a
    change of its pass rate could not be observed. If all pass rates were 0 or 1, the normalized
    weights would be 0/0. The weight is largest at rho = 1/2. Note that a group in which half of the
    problems are solved and half are impossible also has this pass rate.

    Args:
      pass_rate: pass rate rho of each group, in [0, 1].
      epsilon: floor of the weights before normalization. A value of 0 is Eq. 6 exactly as in the
        paper.
      sizes: number of questions per group. If specified, the weights are multiplied by the sizes,
        so that equally hard questions have equal probability, rather than equally hard groups.
        Empty groups get weight 0.

    Returns:
      Probabilities that sum to 1. They are uniform over the (nonempty) groups if all weights are 0.
    """
    chex.assert_rank(pass_rate, 1)
    weights = pass_rate * (1.0 - pass_rate) + epsilon
    if sizes is None:
        all_groups = jnp.ones_like(weights, bool)
        return _normalised(weights, all_groups)
    chex.assert_equal_shape([pass_rate, sizes])
    return _normalised(weights * sizes, sizes > 0)


@static_arguments("num")
def sample_groups(key: PRNGKeyArray, weights: Float[Array, "K"], num: int) -> Int[Array, "num"]:
    """Samples int32 indices of groups (or problems) by weight, with replacement.

    Args:
      weights: nonnegative weights, not all zero. They do not have to sum to 1. Indices with weight
        0 are never sampled.
    """
    chex.assert_rank(weights, 1)
    return jax.random.categorical(key, jnp.log(weights), shape=(num,)).astype(jnp.int32)


@static_arguments("num")
def sample_questions(
    key: PRNGKeyArray, weights: Float[Array, "K"], group_of: Int[Array, "n"], num: int
) -> Int[Array, "num"]:
    """Samples questions with replacement: a group by weight, then a question uniformly from it.

    The loss does not correct for the sampling probabilities, so the weights change the objective,
    as in the paper.

    Args:
      weights: weight of each group. Groups without questions are never sampled.
      group_of: group of each question.
      num: number of samples.

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
