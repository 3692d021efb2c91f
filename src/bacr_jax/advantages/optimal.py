"""The baseline with the least gradient noise: mean returns, weighted by squared score norms.

The best constant baseline of a segment is not the mean return but

    b* = E |s|^2 G / E |s|^2,   s the score of the segment's tokens, G their return

(Weaver and Tao 2001, arXiv 1301.2315; Greensmith et al. 2004; for language models OPO, arXiv
2505.23585). If a policy is sure of most tokens, nearly all of its squared score is in the few
traces with improbable tokens, and their returns differ from the average. Two numbers per segment
move V towards b*. They come from earlier batches, so the gradient stays unbiased. The exception is
`advantage.score_uniform` with a baseline that reads the group's returns: its mean over the batch
contains each trace's return with weight 1 / traces.

No gradient has to be taken: a token drawn with probability p has a score of at least 1 - p in its
logit, and p comes with the rollout.

`token_baseline` is the same idea for a group and a position instead of a running regression (the
optimal token baseline, arXiv 2602.07078); it includes the trace's return.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.advantages.group import rloo_advantage
from bacr_jax.masked import at_least_float32

# Added to the diagonal, relative to its mean, because equal expected returns determine one slope.
_RIDGE = 1e-3
# Weight, in traces, of the prior that the baseline is right: one trace for each of the two slopes.
_PRIOR_TRACES = 2.0


def segment_surprise(
    logprobs: Float[Array, "B T"], sampled: Int[Array, "B"], cuts: Int[Array, "B M"]
) -> Float[Array, "B M"]:
    """Returns the sum of (1 - p)^2 over the tokens of each segment.

    The sum is a proxy for the squared norm of the segment's score. p is the token's probability.

    Args:
      logprobs: log-probabilities of the sampled thinking tokens.
      sampled: number of tokens of each row; later entries are not read.
      cuts: ends of the segments, in tokens. A segment past the end of its row is empty.
    """
    chex.assert_rank([logprobs, cuts], 2)
    squares = jnp.square(1.0 - jnp.exp(logprobs))
    position = jnp.arange(logprobs.shape[1])
    is_sampled = (position < sampled[:, None])[:, None]
    is_before_cut = position < cuts[..., None]
    up_to_cut = is_sampled & is_before_cut
    up_to_previous_cut = jnp.pad(up_to_cut[:, :-1], ((0, 0), (1, 0), (0, 0)))
    in_segment = up_to_cut & ~up_to_previous_cut
    return jnp.where(in_segment, squares[:, None], 0.0).sum(-1)


def _regressors(expected: Float[Array, "Q G M"]) -> Float[Array, "Q G M 2"]:
    """Returns the regressors x = (1, expected return)."""
    return jnp.stack([jnp.ones_like(expected), expected], -1)


def optimal_moments(
    credit: Float[Array, "Q G M"], expected: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"]
) -> tuple[Float[Array, "M 2 2"], Float[Array, "M 2"], Float[Array, "M"]]:
    """Returns the moments of the weighted regression of credit on x = (1, expected return).

    Args:
      credit: A, return minus baseline of each segment (`thinking_credit`).
      expected: return that this baseline expects.
      surprise: weights w (`segment_surprise`).

    Returns:
      mean w x x^T, mean w x A, and (mean w^2) / N over the batch's N traces, per segment. Over
      training steps, average the first two with weights a_i and sum the last with a_i^2.
    """
    chex.assert_equal_shape([credit, expected, surprise])
    x = _regressors(expected)
    num_traces = credit[..., 0].size

    def weighted_mean(subscripts: str, y: Array) -> Array:
        return jnp.einsum(subscripts, surprise, x, y, precision="highest") / num_traces

    spread = jnp.mean(jnp.square(surprise), axis=(0, 1)) / num_traces
    square = weighted_mean("qgm,qgmi,qgmj->mij", x)
    product = weighted_mean("qgm,qgmi,qgm->mi", credit)
    return square, product, spread


def effective_traces(square: Float[Array, "M 2 2"], spread: Float[Array, "M"]) -> Float[Array, "M"]:
    """Returns Kish's effective number of traces behind each segment's slopes.

        (sum a w)^2 / sum (a w)^2,   a the weight of a trace's batch, w the weight of the trace

    Args:
      square: E w x x^T (`optimal_moments`); its first entry is E w.
      spread: sum of a^2 w^2 (`optimal_moments`).

    Returns:
      The number per segment; 0 before the first batch.
    """
    square = at_least_float32(square)
    spread = at_least_float32(spread)
    squared_weight = jnp.square(square[:, 0, 0])
    return squared_weight / jnp.maximum(spread, jnp.finfo(jnp.float32).tiny)


def optimal_slopes(
    square: Float[Array, "M 2 2"], product: Float[Array, "M 2"], effective: Float[Array, "M"]
) -> Float[Array, "M 2"]:
    """Solves for the offset and slope of every segment from `optimal_moments`.

        (E[w x x^T] + ridge I)^-1 E[w x A],   ridge = (1e-3 + 2 / n) tr E[w x x^T] / 2

    n is the effective number of traces. If n is small, as heavy weights make it after one batch,
    the slopes stay near 0, which leaves the baseline unchanged.

    Args:
      square: E w x x^T.
      product: E w x A.
      effective: n (`effective_traces`).

    Returns:
      Offset and slope; 0 before the first batch.
    """
    chex.assert_shape(square, (*product.shape, 2))
    square = at_least_float32(square)
    product = at_least_float32(product)
    effective = at_least_float32(effective)

    share = _RIDGE + _PRIOR_TRACES / jnp.maximum(effective, 1e-6)
    ridge = share * jnp.trace(square, axis1=-2, axis2=-1) / 2.0
    identity = jnp.eye(2, dtype=square.dtype)
    regularised = square + jnp.maximum(ridge, 1e-12)[:, None, None] * identity

    # Cramer's rule for the symmetric matrix [[a, b], [b, d]].
    a = regularised[:, 0, 0]
    b = regularised[:, 0, 1]
    d = regularised[:, 1, 1]
    first = product[:, 0]
    second = product[:, 1]
    offset_numerator = d * first - b * second
    slope_numerator = a * second - b * first
    determinant = a * d - b * b
    return jnp.stack([offset_numerator, slope_numerator], -1) / determinant[:, None]


def optimal_shift(
    expected: Float[Array, "Q G M"], slopes: Float[Array, "M 2"]
) -> Float[Array, "Q G M"]:
    """Returns the shift of the baseline, k_s0 + k_s1 V_s; its gradient is stopped.

    Args:
      expected: V, the return that the baseline expects.
      slopes: k, from earlier batches (`optimal_slopes`).
    """
    shift = jnp.einsum("qgmi,mi->qgm", _regressors(expected), slopes, precision="highest")
    return jax.lax.stop_gradient(shift)


def token_baseline(
    returns: Float[Array, "Q G T"], path: Float[Array, "Q G T"]
) -> Float[Array, "Q one T"]:
    """Returns the optimal token baseline (arXiv 2602.07078), one number per group and position.

        B_t = sum_i W_it G_it / sum_i W_it,   W_it = sum_{u <= t} (1 - 2 p_iu + sum_v p_iu(v)^2)

    The sums over i include every trace of the group that has a token at t, also the trace that
    the baseline is subtracted from.

    Args:
      returns: G, the return of each token's segment.
      path: W, squared norms of the scores in the logits, summed up to each token; 0 if a trace
        has no token.

    Returns:
      B; 0 if no trace of the group has a weight at t.
    """
    chex.assert_equal_shape([returns, path])
    returns = at_least_float32(returns)
    path = at_least_float32(path)
    total_weight = path.sum(1, keepdims=True)
    weighted_returns = (path * returns).sum(1, keepdims=True)
    return weighted_returns / jnp.maximum(total_weight, 1e-12)


def score_statistics(
    returns: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"]
) -> dict[str, Float[Array, ""]]:
    """Measures how much a batch would gain from weighing returns by scores.

        predicted_saving = sum_s kappa_s^2 / F_s / sum_s H_s,
        kappa = E w e,  F = E w,  H = E w e^2,  e = G minus the other traces' mean

    The predicted saving is the share of gradient noise that the best constant saves against the
    mean (docs/theory.md). It leaves out the squared norm of the gradient and does not depend on
    the method's baseline.

    Args:
      returns: G, one per segment.
      surprise: w (`segment_surprise`).

    Returns:
      `predicted_saving`; `cv`, the standard deviation of w divided by its mean; `correlation` of w
      and G; `effective_traces` of the batch. The last three are means over segments, weighted by
      each segment's share of w.
    """
    chex.assert_equal_shape([returns, surprise])
    group_size = returns.shape[1]
    num_traces = surprise[..., 0].size
    tiny = jnp.finfo(jnp.float32).tiny
    # A group of one has no other traces, so its error is 0.
    error = rloo_advantage(returns) if group_size > 1 else jnp.zeros_like(returns)

    weight = _mean_over_traces(surprise)
    weighted_error = _mean_over_traces(surprise * error)
    weighted_square_error = _mean_over_traces(surprise * jnp.square(error))
    square = _mean_over_traces(jnp.square(surprise))
    share = weight / jnp.maximum(weight.sum(), tiny)

    saved_noise = (jnp.square(weighted_error) / jnp.maximum(weight, tiny)).sum()
    total_noise = jnp.maximum(weighted_square_error.sum(), tiny)
    variance = jnp.maximum(square - jnp.square(weight), 0.0)
    cv = jnp.sqrt(variance) / jnp.maximum(weight, tiny)
    deviations = jnp.std(returns, axis=(0, 1)) * jnp.std(surprise, axis=(0, 1))
    covariance = _mean_over_traces(surprise * returns) - weight * _mean_over_traces(returns)
    effective = num_traces * jnp.square(weight) / jnp.maximum(square, tiny)
    return {
        "predicted_saving": saved_noise / total_noise,
        "cv": (share * cv).sum(),
        "correlation": (share * covariance / jnp.maximum(deviations, 1e-12)).sum(),
        "effective_traces": (share * effective).sum(),
    }


def _mean_over_traces(x: Float[Array, "Q G M"]) -> Float[Array, "M"]:
    return jnp.mean(x, axis=(0, 1))
