"""The baseline with the least gradient noise: what traces return, weighted by their scores.

For one constant baseline of a segment the best number is not the mean return but

    b* = E |s|^2 G / E |s|^2,   s the score of the segment's tokens, G their return,

(Weaver and Tao 2001, arXiv 1301.2315; Greensmith et al. 2004; for language models OPO, arXiv
2505.23585). A policy that is sure of most tokens has nearly all of its squared score in the few
traces that did something improbable, and these do not return what the average trace does. Here V
is moved towards b* by two numbers for each segment, which come from earlier batches, so that the
gradient stays unbiased. No gradient has to be taken for it: a token drawn with probability p has a
score of at least 1 - p in its own logit, and p comes with the rollout.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Added to the diagonal, relative to its mean: of returns that are all alike one slope is enough.
_RIDGE = 1e-3


def segment_surprise(
    logprobs: Float[Array, "B T"], sampled: Int[Array, "B"], cuts: Int[Array, "B M"]
) -> Float[Array, "B M"]:
    """How improbable the tokens of each segment were: sum over them of (1 - p)^2.

    It stands for the squared norm of the segment's score.

    Args:
      logprobs: of the sampled thinking tokens.
      sampled: how many each row has; what stands after them is not read.
      cuts: ends of the segments, in tokens; a segment past the row's own end is empty.
    """
    chex.assert_rank([logprobs, cuts], 2)
    each = jnp.square(1.0 - jnp.exp(logprobs))
    place = jnp.arange(logprobs.shape[1])
    within = (place < sampled[:, None])[:, None] & (place < cuts[..., None])
    before = jnp.pad(within[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return jnp.where(within & ~before, each[:, None], 0.0).sum(-1)


def _regressors(expected: Float[Array, "Q G M"]) -> Float[Array, "Q G M 2"]:
    return jnp.stack([jnp.ones_like(expected), expected], -1)


def optimal_moments(
    credit: Float[Array, "Q G M"],
    expected: Float[Array, "Q G M"],
    surprise: Float[Array, "Q G M"],
) -> tuple[Float[Array, "M 2 2"], Float[Array, "M 2"]]:
    """Moments of the weighted regression of a segment's credit on (1, its expected return).

    Args:
      credit: return less its baseline, one per segment (`thinking_credit`).
      expected: the return that this baseline expects.
      surprise: weights (`segment_surprise`).

    Returns:
      mean w x x^T and mean w x A, per segment. Average both over steps.
    """
    chex.assert_equal_shape([credit, expected, surprise])
    x = _regressors(expected)
    rows = credit[..., 0].size
    mean = lambda which, y: jnp.einsum(which, surprise, x, y, precision="highest") / rows
    return mean("qgm,qgmi,qgmj->mij", x), mean("qgm,qgmi,qgm->mi", credit)


def optimal_slopes(square: Float[Array, "M 2 2"], product: Float[Array, "M 2"]) -> Array:
    """Offset and slope of every segment, [M, 2], from `optimal_moments`; 0 where nothing is known.

    (E[w x x^T] + ridge I)^-1 E[w x A], the ridge a thousandth of the mean diagonal.
    """
    chex.assert_shape(square, (*product.shape, 2))
    ridge = _RIDGE * jnp.trace(square, axis1=-2, axis2=-1) / 2.0
    settled = square + jnp.maximum(ridge, 1e-12)[:, None, None] * jnp.eye(2, dtype=square.dtype)
    a, b, d = settled[:, 0, 0], settled[:, 0, 1], settled[:, 1, 1]
    first, second = product[:, 0], product[:, 1]
    solved = jnp.stack([d * first - b * second, a * second - b * first], -1)
    return solved / (a * d - b * b)[:, None]


def optimal_advantage(
    credit: Float[Array, "Q G M"], expected: Float[Array, "Q G M"], slopes: Float[Array, "M 2"]
) -> Float[Array, "Q G M"]:
    """Advantage against a baseline moved to where scores want it.

        A_s - (k_s0 + k_s1 V_s)

    Args:
      credit: A = G - V, one per segment.
      expected: V, the return that the baseline expects.
      slopes: k, of earlier batches (`optimal_slopes`).

    Returns:
      Advantages per segment.
    """
    chex.assert_equal_shape([credit, expected])
    moved = jnp.einsum("qgmi,mi->qgm", _regressors(expected), slopes, precision="highest")
    return credit - jax.lax.stop_gradient(moved)
