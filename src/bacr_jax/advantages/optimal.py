"""Computes the minimum-variance baseline: the expected return, weighted by squared score norms.

A segment is the thinking between two truncation points (cuts). The constant baseline of a segment
that minimizes the variance of the gradient is not the mean return but

    b* = E |s|^2 G / E |s|^2

where s is the score of the segment's tokens (the gradient of their log-probability) and G is their
return (Weaver and Tao 2001, arXiv 1301.2315; Greensmith et al. 2004; OPO for language models, arXiv
2505.23585). If a policy is confident about most tokens, nearly all of the squared score norm is in
the few traces with improbable tokens, whose returns differ from the average.

A regression with two coefficients per segment moves the baseline V towards b*. The coefficients are
estimated from earlier batches, so the gradient stays unbiased. The exception is
`advantage.same_shift_for_batch` with a baseline that depends on the returns of the group: each of N
traces then contributes its return, with weight 1 / N, to the mean shift that is applied to it.

No backward pass is needed to estimate |s|^2. The score of a token sampled with probability p has
the entry 1 - p for the logit of that token, and p is known from the rollout.

`token_baseline` applies the same idea per group and position instead of fitting a running
regression (the optimal token baseline, arXiv 2602.07078). It includes the return of the trace from
which it is subtracted.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.advantages.group import rloo_advantage
from bacr_jax.masked import at_least_float32

# Ridge added to the diagonal, relative to its mean. Without it, the system is singular if all
# expected returns are equal.
_RIDGE = 1e-3
# Strength of the ridge, as a number of traces: one for each of the two coefficients. The ridge
# pulls the coefficients towards 0, their value if the baseline is already optimal.
_PRIOR_TRACES = 2.0


def segment_score_norm_proxy(
    logprobs: Float[Array, "B T"], sampled: Int[Array, "B"], cuts: Int[Array, "B M"]
) -> Float[Array, "B M"]:
    """Computes the sum of (1 - p)^2 over the tokens of each segment.

    A segment is the thinking between two truncation points (cuts). p is the probability of the
    sampled token. The sum is a proxy for the squared norm of the segment's score, the gradient of
    its log-probability.

    Args:
      logprobs: log-probabilities of the sampled thinking tokens, in nats.
      sampled: number of sampled tokens of each trace. Later entries are ignored.
      cuts: end of each segment, in tokens. A segment past the end of its trace is empty.
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
    """Stacks the regressors x = (1, expected return) on a new last axis."""
    return jnp.stack([jnp.ones_like(expected), expected], -1)


def optimal_moments(
    credit: Float[Array, "Q G M"],
    expected: Float[Array, "Q G M"],
    score_norm_proxy: Float[Array, "Q G M"],
) -> tuple[Float[Array, "M 2 2"], Float[Array, "M 2"], Float[Array, "M"]]:
    """Computes the moments of a weighted regression of advantages on x = (1, expected return).

    The moments are means over traces, from which `optimal_slopes` computes the coefficients.

    Args:
      credit: advantage A of each segment, its return minus its baseline (`thinking_credit`).
      expected: the return predicted by the baseline.
      score_norm_proxy: regression weights w (`segment_score_norm_proxy`).

    Returns:
      For each segment: mean w x x^T, mean w x A, and (mean w^2) / N, over the N traces of the
      batch. To accumulate batches i with weights a_i, weight the first two by a_i and the third by
      a_i^2, and sum over i.
    """
    chex.assert_equal_shape([credit, expected, score_norm_proxy])
    x = _regressors(expected)
    num_traces = credit[..., 0].size

    def weighted_mean(subscripts: str, y: Array) -> Array:
        return jnp.einsum(subscripts, score_norm_proxy, x, y, precision="highest") / num_traces

    spread = jnp.mean(jnp.square(score_norm_proxy), axis=(0, 1)) / num_traces
    square = weighted_mean("qgm,qgmi,qgmj->mij", x)
    product = weighted_mean("qgm,qgmi,qgm->mi", credit)
    return square, product, spread


def effective_traces(square: Float[Array, "M 2 2"], spread: Float[Array, "M"]) -> Float[Array, "M"]:
    """Computes Kish's effective sample size of each segment's regression, in traces.

        (sum a w)^2 / sum (a w)^2

    The sums run over all traces of earlier batches. w is the regression weight of a trace, and a is
    the weight of its batch divided by the number of traces in the batch.

    Args:
      square: E w x x^T (`optimal_moments`). Its first entry is E w, the sum of a w.
      spread: sum of a^2 w^2 (`optimal_moments`).

    Returns:
      Effective number of traces per segment. It is 0 before the first batch.
    """
    square = at_least_float32(square)
    spread = at_least_float32(spread)
    squared_weight = jnp.square(square[:, 0, 0])
    return squared_weight / jnp.maximum(spread, jnp.finfo(jnp.float32).tiny)


def optimal_slopes(
    square: Float[Array, "M 2 2"], product: Float[Array, "M 2"], effective: Float[Array, "M"]
) -> Float[Array, "M 2"]:
    """Solves the ridge regression of each segment for its two coefficients, offset and slope.

        (E[w x x^T] + ridge I)^-1 E[w x A],   ridge = (1e-3 + 2 / n) tr E[w x x^T] / 2

    w, x and A are defined in `optimal_moments`, tr is the trace of a matrix, and n is the effective
    number of traces. If n is small, for example because a few large weights dominate the first
    batch, the coefficients stay close to 0 and the baseline is almost unchanged.

    Args:
      square: E w x x^T (`optimal_moments`).
      product: E w x A (`optimal_moments`).
      effective: n (`effective_traces`).

    Returns:
      Offset and slope per segment. Both are 0 before the first batch.
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
    """Computes the shift that moves the baseline V_s of each segment s towards the optimum.

    The shift is k_s0 + k_s1 V_s. Gradients through the shift are stopped.

    Args:
      expected: V, the return predicted by the baseline.
      slopes: coefficients k, estimated from earlier batches (`optimal_slopes`).
    """
    shift = jnp.einsum("qgmi,mi->qgm", _regressors(expected), slopes, precision="highest")
    return jax.lax.stop_gradient(shift)


def token_baseline(
    returns: Float[Array, "Q G T"], path: Float[Array, "Q G T"]
) -> Float[Array, "Q one T"]:
    """Computes the optimal token baseline per group and position (arXiv 2602.07078).

        B_t = sum_i W_it G_it / sum_i W_it,   W_it = sum_{u <= t} (1 - 2 p_iu + sum_v p_iu(v)^2)

    p_iu(v) is the probability of vocabulary entry v at position u of trace i, and p_iu is the
    probability of the sampled token. The sums over i run over all traces of the group that have a
    token at position t, including the trace from which the baseline is subtracted.

    Args:
      returns: G, the return of the segment that contains each token.
      path: W, the squared norm of the score with respect to the logits, accumulated up to each
        token. It is 0 after the last token of a trace.

    Returns:
      B, or 0 at positions where no trace of the group has a weight.
    """
    chex.assert_equal_shape([returns, path])
    returns = at_least_float32(returns)
    path = at_least_float32(path)
    total_weight = path.sum(1, keepdims=True)
    weighted_returns = (path * returns).sum(1, keepdims=True)
    return weighted_returns / jnp.maximum(total_weight, 1e-12)


def score_statistics(
    returns: Float[Array, "Q G M"], score_norm_proxy: Float[Array, "Q G M"]
) -> dict[str, Float[Array, ""]]:
    """Estimates how much weighting returns by score norms would reduce gradient noise.

        predicted_saving = sum_s kappa_s^2 / F_s / sum_s H_s,
        kappa = E w e,  F = E w,  H = E w e^2,  e = G - mean return of the other traces

    E is the mean over traces, in each segment s. The predicted saving is the fraction of gradient
    variance that the optimal constant baseline saves relative to the mean baseline
    (docs/theory.md). It neglects the squared norm of the gradient and does not depend on the
    baseline of the method.

    Args:
      returns: return G of each segment.
      score_norm_proxy: weights w (`segment_score_norm_proxy`).

    Returns:
      Scalars by name:

      * `predicted_saving`: as defined above.
      * `cv`: standard deviation of w divided by its mean.
      * `correlation`: correlation of w and G.
      * `effective_traces`: effective number of traces in the batch.

      The last three are averaged over segments, weighted by the share of each segment in w.
    """
    chex.assert_equal_shape([returns, score_norm_proxy])
    group_size = returns.shape[1]
    num_traces = score_norm_proxy[..., 0].size
    tiny = jnp.finfo(jnp.float32).tiny
    # A group of one has no other traces, so its error is defined as 0.
    error = rloo_advantage(returns) if group_size > 1 else jnp.zeros_like(returns)

    weight = _mean_over_traces(score_norm_proxy)
    weighted_error = _mean_over_traces(score_norm_proxy * error)
    weighted_square_error = _mean_over_traces(score_norm_proxy * jnp.square(error))
    square = _mean_over_traces(jnp.square(score_norm_proxy))
    share = weight / jnp.maximum(weight.sum(), tiny)

    saved_noise = (jnp.square(weighted_error) / jnp.maximum(weight, tiny)).sum()
    total_noise = jnp.maximum(weighted_square_error.sum(), tiny)
    variance = jnp.maximum(square - jnp.square(weight), 0.0)
    cv = jnp.sqrt(variance) / jnp.maximum(weight, tiny)
    deviations = jnp.std(returns, axis=(0, 1)) * jnp.std(score_norm_proxy, axis=(0, 1))
    covariance = _mean_over_traces(score_norm_proxy * returns) - weight * _mean_over_traces(returns)
    effective = num_traces * jnp.square(weight) / jnp.maximum(square, tiny)
    return {
        "predicted_saving": saved_noise / total_noise,
        "cv": (share * cv).sum(),
        "correlation": (share * covariance / jnp.maximum(deviations, 1e-12)).sum(),
        "effective_traces": (share * effective).sum(),
    }


def _mean_over_traces(x: Float[Array, "Q G M"]) -> Float[Array, "M"]:
    return jnp.mean(x, axis=(0, 1))
