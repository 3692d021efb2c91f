"""Which questions are asked: groups by the spread of their outcomes (paper Eq. 6)."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, PRNGKeyArray

from bacr_jax.types import Scalar


def _normalised(weights: Array, allowed: Array) -> Array:
    """Weights scaled to sum to 1 over the allowed entries; uniform over these if all are zero."""
    weights = jnp.where(allowed, weights, 0.0)
    total = jnp.sum(weights)
    uniform = allowed / jnp.maximum(jnp.sum(allowed), 1)
    return jnp.where(total > 0.0, weights / jnp.where(total > 0.0, total, 1.0), uniform)


def group_weights(
    pass_rate: Float[Array, "K"], *, epsilon: Scalar = 0.02, sizes: Num[Array, "K"] | None = None
) -> Float[Array, "K"]:
    """Probability of drawing a question from each group, paper Eq. 6 plus a floor.

        w_k ~ rho_k (1 - rho_k) + epsilon

    Without the floor a group at 0 or 1 is never drawn again, so its rate can never be seen to
    change, and with all groups there the weights are 0/0. The weight is largest at rho = 1/2; note
    that a group of half solved and half impossible problems sits there too.

    Args:
      pass_rate: rho, one per group, in [0, 1].
      epsilon: the floor, before normalising; 0 is Eq. 6 to the letter.
      sizes: number of questions per group; multiplies the weights, so that every question of
        a group, rather than every group, counts alike. Groups of size 0 get weight 0.

    Returns:
      Probabilities summing to 1; uniform over the (nonempty) groups if all weights are 0.
    """
    chex.assert_rank(pass_rate, 1)
    weights = pass_rate * (1.0 - pass_rate) + epsilon
    if sizes is None:
        return _normalised(weights, jnp.ones_like(weights, bool))
    chex.assert_equal_shape([pass_rate, sizes])
    return _normalised(weights * sizes, sizes > 0)


def sample_groups(key: PRNGKeyArray, weights: Float[Array, "K"], num: int) -> Int[Array, "num"]:
    """Draws int32 indices of groups (or problems) with the given weights, with replacement.

    Weights are nonnegative, not all zero, and need not sum to 1. Weight 0 is never drawn.
    """
    chex.assert_rank(weights, 1)
    return jax.random.categorical(key, jnp.log(weights), shape=(num,)).astype(jnp.int32)


def sample_questions(
    key: PRNGKeyArray, weights: Float[Array, "K"], group_of: Int[Array, "n"], num: int
) -> Int[Array, "num"]:
    """Draws questions: a group by weight, then one of its questions uniformly.

    Drawing is with replacement and its probabilities are not corrected for in the loss, so the
    weights shape the objective, as in the paper. A group without questions is passed over.
    """
    chex.assert_rank([weights, group_of], 1)
    sizes = jnp.bincount(group_of, length=weights.shape[0])
    group_key, member_key = jax.random.split(key)
    groups = sample_groups(group_key, _normalised(weights, sizes > 0), num)
    rank = jax.random.randint(member_key, (num,), 0, sizes[groups])
    by_group = jnp.argsort(group_of, stable=True)
    first = jnp.cumsum(sizes) - sizes
    return by_group[first[groups] + rank].astype(jnp.int32)
