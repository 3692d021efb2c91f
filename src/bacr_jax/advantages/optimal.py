"""The baseline with the least gradient noise: what traces return, weighted by their scores.

For one constant baseline of a segment the best number is not the mean return but

    b* = E |s|^2 G / E |s|^2,   s the score of the segment's tokens, G their return,

(Weaver and Tao 2001, arXiv 1301.2315; Greensmith et al. 2004; for language models OPO, arXiv
2505.23585). A policy that is sure of most tokens has nearly all of its squared score in the few
traces that did something improbable, and these do not return what the average trace does. Here V
is moved towards b* by two numbers for each segment, which come from earlier batches, so that the
gradient stays unbiased (but for `advantage.score_uniform`, whose mean over the batch holds each
trace's own return where the baseline reads the group's: 1 / traces of it). No gradient has to be
taken for it: a token drawn with probability p has a score of at least 1 - p in its own logit, and p
comes with the rollout.

`token_baseline` is the same idea for a group and a position instead of a running regression (the
optimal token baseline, arXiv 2602.07078); it holds the trace's own return.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.advantages.group import rloo_advantage
from bacr_jax.masked import at_least_float32

# Added to the diagonal, relative to its mean: of returns that are all alike one slope is enough.
_RIDGE = 1e-3
# Traces that "the baseline is right as it is" counts as: one for each of the two slopes.
_PRIOR_TRACES = 2.0


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
    credit: Float[Array, "Q G M"], expected: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"]
) -> tuple[Float[Array, "M 2 2"], Float[Array, "M 2"], Float[Array, "M"]]:
    """Moments of the weighted regression of a segment's credit on (1, its expected return).

    Args:
      credit: return less its baseline, one per segment (`thinking_credit`).
      expected: the return that this baseline expects.
      surprise: weights w (`segment_surprise`).

    Returns:
      mean w x x^T, mean w x A, and (mean w^2) / N over the batch's N traces, per segment. Over
      steps the first two are averaged with weights a_i, the last is summed with a_i^2.
    """
    chex.assert_equal_shape([credit, expected, surprise])
    x = _regressors(expected)
    rows = credit[..., 0].size

    def mean(which: str, y: Array) -> Array:
        return jnp.einsum(which, surprise, x, y, precision="highest") / rows

    spread = jnp.mean(jnp.square(surprise), axis=(0, 1)) / rows
    return mean("qgm,qgmi,qgmj->mij", x), mean("qgm,qgmi,qgm->mi", credit), spread


def effective_traces(square: Float[Array, "M 2 2"], spread: Float[Array, "M"]) -> Float[Array, "M"]:
    """Kish's effective number of traces behind each segment's slopes.

        (sum a w)^2 / sum (a w)^2,   a the weight of a trace's batch, w its own

    Args:
      square: E w x x^T (`optimal_moments`); its first entry is E w.
      spread: sum of a^2 w^2, likewise.

    Returns:
      0 where nothing was seen.
    """
    square, spread = at_least_float32(square), at_least_float32(spread)
    return jnp.square(square[:, 0, 0]) / jnp.maximum(spread, jnp.finfo(jnp.float32).tiny)


def optimal_slopes(
    square: Float[Array, "M 2 2"], product: Float[Array, "M 2"], effective: Float[Array, "M"]
) -> Float[Array, "M 2"]:
    """Offset and slope of every segment from `optimal_moments`; 0 where nothing is known.

        (E[w x x^T] + ridge I)^-1 E[w x A],   ridge = (1e-3 + 2 / n) tr E[w x x^T] / 2

    with n the effective number of traces: of few, which is what heavy weights leave of one batch,
    the slopes stay near 0, where the baseline is as it was.

    Args:
      square: E w x x^T.
      product: E w x A.
      effective: n (`effective_traces`).
    """
    chex.assert_shape(square, (*product.shape, 2))
    square, product, effective = map(at_least_float32, (square, product, effective))
    share = _RIDGE + _PRIOR_TRACES / jnp.maximum(effective, 1e-6)
    ridge = share * jnp.trace(square, axis1=-2, axis2=-1) / 2.0
    settled = square + jnp.maximum(ridge, 1e-12)[:, None, None] * jnp.eye(2, dtype=square.dtype)
    a, b, d = settled[:, 0, 0], settled[:, 0, 1], settled[:, 1, 1]
    first, second = product[:, 0], product[:, 1]
    solved = jnp.stack([d * first - b * second, a * second - b * first], -1)
    return solved / (a * d - b * b)[:, None]


def optimal_shift(
    expected: Float[Array, "Q G M"], slopes: Float[Array, "M 2"]
) -> Float[Array, "Q G M"]:
    """How far the baseline moves: k_s0 + k_s1 V_s.

    Args:
      expected: V, the return that the baseline expects.
      slopes: k, of earlier batches (`optimal_slopes`).
    """
    moved = jnp.einsum("qgmi,mi->qgm", _regressors(expected), slopes, precision="highest")
    return jax.lax.stop_gradient(moved)


def token_baseline(
    returns: Float[Array, "Q G T"], path: Float[Array, "Q G T"]
) -> Float[Array, "Q one T"]:
    """The optimal token baseline (arXiv 2602.07078): one number for each group and position.

        B_t = sum_i W_it G_it / sum_i W_it,   W_it = sum_{u <= t} (1 - 2 p_iu + sum_v p_iu(v)^2)

    over the traces of the group that have a token at t, the trace itself among them.

    Args:
      returns: G, what each token's segment is paid.
      path: W, squared norms of the scores in the logits, summed up to each token; 0 where a trace
        has no token.

    Returns:
      B; 0 where no trace of the group has a weight.
    """
    chex.assert_equal_shape([returns, path])
    returns, path = at_least_float32(returns), at_least_float32(path)
    total = path.sum(1, keepdims=True)
    return (path * returns).sum(1, keepdims=True) / jnp.maximum(total, 1e-12)


def score_statistics(
    returns: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"]
) -> dict[str, Float[Array, ""]]:
    """What a batch says of weighing returns by scores, whatever the method subtracts.

        predicted_saving = sum_s kappa_s^2 / F_s / sum_s H_s,
        kappa = E w e,  F = E w,  H = E w e^2,  e = G less the other traces' mean

    the share of gradient noise that the best constant saves against the mean (docs/theory.md; the
    squared norm of the gradient itself is left out).

    Args:
      returns: G, one per segment.
      surprise: w (`segment_surprise`).

    Returns:
      `predicted_saving`; `cv`, the deviation of w over its mean; `correlation` of w and G;
      `effective_traces` of the batch. The last three are means over segments by their share of w.
    """
    chex.assert_equal_shape([returns, surprise])
    mean = lambda x: jnp.mean(x, axis=(0, 1))
    # A trace without others has no mean to differ from.
    error = rloo_advantage(returns) if returns.shape[1] > 1 else jnp.zeros_like(returns)
    f, kappa, h = mean(surprise), mean(surprise * error), mean(surprise * jnp.square(error))
    tiny = jnp.finfo(jnp.float32).tiny
    share = f / jnp.maximum(f.sum(), tiny)
    square = mean(jnp.square(surprise))
    cv = jnp.sqrt(jnp.maximum(square - jnp.square(f), 0.0)) / jnp.maximum(f, tiny)
    spread = jnp.std(returns, axis=(0, 1)) * jnp.std(surprise, axis=(0, 1))
    covariance = mean(surprise * returns) - f * mean(returns)
    effective = surprise[..., 0].size * jnp.square(f) / jnp.maximum(square, tiny)
    return {
        "predicted_saving": (jnp.square(kappa) / jnp.maximum(f, tiny)).sum()
        / jnp.maximum(h.sum(), tiny),
        "cv": (share * cv).sum(),
        "correlation": (share * covariance / jnp.maximum(spread, 1e-12)).sum(),
        "effective_traces": (share * effective).sum(),
    }
