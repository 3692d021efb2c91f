"""Baselines that only the variance study uses: earlier outcomes, weighted means, and regressions.

The baseline of segment s may depend on its predicted return, on the other traces of the group, and
on the trace's earlier answers. Given the preceding tokens, none of these depends on the tokens of
the segment itself. The gradient is therefore unbiased for any slopes from earlier batches.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from bacr_jax.methods.method import PerCut

# NumPy array with a number for each segment of each trace of each group.
PerSegment = Num[np.ndarray, "R G M"]


def before(x: PerSegment | PerCut, steps: int = 1) -> PerSegment:
    """Shifts an array by `steps` cuts, so that entry s contains x_{s - steps}. Pads with 0.

    If x contains outcomes r minus predictions p that were made without this trace's r, the result
    is the surprise x_s = r_{s-1} - p_{s-1}. The tokens of segment s come after cut s - 1, so x_s
    may be used in their baseline.
    """
    return np.pad(x, ((0, 0), (0, 0), (steps, 0)))[..., : x.shape[-1]]


def history_moments(credit: PerCut, surprise: PerCut) -> tuple[Float[Array, "M"], ...]:
    """Returns mean x A and mean x^2 for credit A and surprise x.

    Their ratio is the regression slope of A on x. Average both moments over steps before dividing.
    """
    return jnp.mean(credit * surprise, axis=(0, 1)), jnp.mean(jnp.square(surprise), axis=(0, 1))


def history_advantage(credit: PerCut, surprise: PerCut, slope: Float[Array, "M"]) -> PerCut:
    """Computes the advantage for a value that also depends on the trace's previous outcome.

        A_s - k_s x_s,   k_s = E[x_s A_s] / E[x_s^2]

    This is the linear form of a value V(q, b, b_j, r_{<j}), an extension of the paper's V(q, b). If
    outcomes persist along a trace, the previous outcome predicts most of the later ones. The
    gradient is only unbiased if the slope comes from earlier batches.
    """
    return credit - slope * surprise


def weighted_mean(values: PerSegment, weights: PerSegment, *, loo: bool) -> PerSegment:
    """Computes the weighted mean of each group, for each of its traces.

        b_i = sum_k w_k x_k / sum_k w_k,   over all k, or over k != i

    The mean is 0 if all weights are 0.

    With suitable weights, the mean is an estimate of the best constant baseline from the group,
    E |s|^2 G / E |s|^2. OPO (arXiv 2505.23585) uses the length of a trace as a proxy for the
    squared norm of its score. The optimal token baseline (arXiv 2602.07078) uses the squared norms
    of the scores in the logits, summed up to each token. In both publications the mean includes the
    trace itself. This changes the direction and the length of the expected gradient, which no
    scalar factor can correct. Without the trace itself, the gradient is unbiased.

    Args:
      values: x.
      weights: w.
      loo: True to exclude the trace itself from its mean.
    """
    group = values.shape[1]
    # Does not subtract the trace from the total, because the rounding error would depend on it.
    counts = np.ones((group, group)) - (np.eye(group) if loo else 0.0)
    w = np.asarray(weights, np.float64)
    top, bottom = (np.einsum("gk,rkm->rgm", counts, x) for x in (w * values, w))
    return np.asarray(top / np.where(bottom > 0, bottom, 1.0))


def length_weights(tokens: PerSegment) -> PerSegment:
    """Returns OPO's weights: for every segment, the trace's total number of thinking tokens."""
    lengths = np.asarray(tokens, np.float64).sum(-1, keepdims=True)
    return np.broadcast_to(lengths, tokens.shape)


def path_weights(energy: PerSegment, tokens: PerSegment) -> PerSegment:
    """Returns the weights of the optimal token baseline at the last token of each segment.

        W_is = sum_{u <= s} e_iu,   or 0 if the trace has no token in the segment

    e is the sum of 1 - 2 p + sum_v p(v)^2 over the tokens of a segment.
    """
    return np.where(tokens > 0, np.cumsum(np.asarray(energy, np.float64), -1), 0.0)


# Ridge regularization relative to the mean of the diagonal, because the outcomes of earlier answers
# are nearly collinear.
_RIDGE = 1e-3


def to_go(x: Float[np.ndarray, "*batch M"]) -> Float[np.ndarray, "*batch M"]:
    """Returns sum_{k >= s} x_k in the dtype of x."""
    return np.flip(np.cumsum(np.flip(x, -1), -1), -1)


def others_mean(x: PerSegment) -> PerSegment:
    """Returns the mean over the other traces of the group, or 0 for a group of one trace."""
    return (x.sum(1, keepdims=True) - x) / max(x.shape[1] - 1, 1)


def regressors(
    outcomes: PerSegment,
    predicted: PerSegment,
    weights: Float[np.ndarray, "M"],
    features: Sequence[str],
) -> tuple[PerSegment, Float[np.ndarray, "R G M F"]]:
    """Returns the residual return of each segment, and the features to regress it on.

        sum_{k >= s} u_k (r_k - p_k)

    Args:
      outcomes: r.
      predicted: p.
      weights: u, the total weight of each outcome in the objective.
      features: names of the features. `previous` and `earlier` are the surprises one and two cuts
        before the segment. `first` is the surprise of the first cut, if it is at least three cuts
        back. `doubt` is 4 p (1 - p) at the previous cut, the uncertainty of its outcome. `interior`
        is V (1 - V), where V is the predicted return divided by the maximum return. It is 0 if the
        predicted return is minimal or maximal.
    """
    surprise = np.asarray(outcomes - predicted, np.float64)
    residual, given = to_go(weights * surprise), np.asarray(predicted, np.float64)
    expected = to_go(weights * given)
    # Clips the prediction, because a value head can leave the range of its targets.
    scaled = np.clip(expected / to_go(weights * np.ones_like(given)), 0.0, 1.0)
    p, previous = np.clip(before(given), 0.0, 1.0), before(surprise)
    first = np.zeros_like(surprise)
    first[..., 3:] = surprise[..., :1]
    doubt, interior, others = 4.0 * p * (1.0 - p), scaled * (1.0 - scaled), others_mean(residual)
    known = {
        "level": np.ones_like(residual),
        "value": expected,
        "interior": interior,
        "interior_tilt": interior * (1.0 - 2.0 * scaled),
        "previous": previous,
        "earlier": before(surprise, 2),
        "first": first,
        "doubt": doubt,
        "previous_doubt": previous * doubt,
        "others": others,
        "others_previous": others_mean(previous),
        "previous_others": previous * others,
    }
    return residual, np.stack([known[name] for name in features], -1)


def fitted_slopes(
    given: Float[np.ndarray, "R G M F"], residual: PerSegment, weights: PerSegment
) -> Float[np.ndarray, "M F"]:
    """Fits the slopes of the features to the residual return of each segment.

    This is weighted least squares for each segment, without an intercept. The weights are proxies
    for the squared norm of each entry's score, because the gradient noise weights errors by it.
    """
    slopes = []
    for s in range(residual.shape[-1]):
        x = given[..., s, :].reshape(-1, given.shape[-1])
        weight = np.asarray(weights[..., s], np.float64).reshape(-1, 1)
        square = (x * weight).T @ x
        ridge = _RIDGE * max(np.trace(square) / len(square), 1e-12)
        right = (x * weight).T @ residual[..., s].reshape(-1)
        slopes.append(np.linalg.solve(square + ridge * np.eye(len(square)), right))
    return np.stack(slopes)
