"""Baselines that no method trains with: of a segment's history, weighted means, regressions.

A baseline of segment s may be made of its predicted return, of what the other traces of the group
have shown, and of the trace's own earlier answers. None of these depends on the segment's own
tokens, given what comes before them, so the gradient is unbiased for any slopes of earlier batches.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from bacr_jax.methods.method import PerCut

# A number for each segment of each trace of each group, on the host.
PerSegment = Num[np.ndarray, "R G M"]


def before(x: PerSegment | PerCut, steps: int = 1) -> PerSegment:
    """Its entry so many cuts before the segment's own; 0 where there is none.

    Of outcomes r less predictions p, made without this trace's r, it is the surprise x_s =
    r_{s-1} - p_{s-1}. A segment's own tokens come after that cut: x_s may enter their baseline.
    """
    return np.pad(x, ((0, 0), (0, 0), (steps, 0)))[..., : x.shape[-1]]


def history_moments(credit: PerCut, surprise: PerCut) -> tuple[Float[Array, "M"], ...]:
    """Mean x A and mean x^2 of credit A and surprise x, whose ratio is the slope of A on x.

    Average both over steps.
    """
    return jnp.mean(credit * surprise, axis=(0, 1)), jnp.mean(jnp.square(surprise), axis=(0, 1))


def history_advantage(credit: PerCut, surprise: PerCut, slope: Float[Array, "M"]) -> PerCut:
    """Advantage against a value that has also seen the trace's previous outcome.

        A_s - k_s x_s,   k_s = E[x_s A_s] / E[x_s^2]

    It is the linear form of a value V(q, b, b_j, r_{<j}), an extension of the paper's V(q, b):
    where outcomes persist along a trace, the previous one predicts most of what is to come. The
    slope must come from earlier batches for the gradient to stay unbiased.
    """
    return credit - slope * surprise


def weighted_mean(values: PerSegment, weights: PerSegment, *, loo: bool) -> PerSegment:
    """Weighted mean over each group, for each of its traces.

        b_i = sum_k w_k x_k / sum_k w_k,   over all k, or over k != i

    It is 0 where nothing has a weight. `loo`: leave the trace itself out.

    Weights are lengths of traces, or paths of their scores. Both make the mean the group's own
    estimate of the best constant, E |s|^2 G / E |s|^2: OPO (arXiv 2505.23585) lets a trace's length
    stand for the squared norm of its score, the optimal token baseline (arXiv 2602.07078) the
    squared scores in the logits, added up to each token. As they are published the trace itself is
    in the mean, which turns and shrinks the expected gradient in a way that no factor undoes;
    without it the mean does not depend on the trace, and the gradient is unbiased.
    """
    group = values.shape[1]
    # Not total minus own, whose rounding would let a trace into its own baseline.
    counts = np.ones((group, group)) - (np.eye(group) if loo else 0.0)
    w = np.asarray(weights, np.float64)
    top, bottom = (np.einsum("gk,rkm->rgm", counts, x) for x in (w * values, w))
    return np.asarray(top / np.where(bottom > 0, bottom, 1.0))


def length_weights(tokens: PerSegment) -> PerSegment:
    """OPO's weights: sampled thinking tokens of the whole trace, in every segment."""
    lengths = np.asarray(tokens, np.float64).sum(-1, keepdims=True)
    return np.broadcast_to(lengths, tokens.shape)


def path_weights(energy: PerSegment, tokens: PerSegment) -> PerSegment:
    """Weights of the optimal token baseline at the last token of each segment.

        W_is = sum_{u <= s} e_iu,   0 where the trace has no token in the segment

    e is the sum over a segment's tokens of 1 - 2 p + sum_v p(v)^2.
    """
    return np.where(tokens > 0, np.cumsum(np.asarray(energy, np.float64), -1), 0.0)


# Added to the diagonal, relative to its mean: earlier answers are nearly collinear.
_RIDGE = 1e-3


def to_go(x: Float[np.ndarray, "*batch M"]) -> Float[np.ndarray, "*batch M"]:
    """sum_{k >= s} x_k, in the precision that x has."""
    return np.flip(np.cumsum(np.flip(x, -1), -1), -1)


def others_mean(x: PerSegment) -> PerSegment:
    """Mean over the rest of the group; 0 in a group of one."""
    return (x.sum(1, keepdims=True) - x) / max(x.shape[1] - 1, 1)


def regressors(
    outcomes: PerSegment,
    predicted: PerSegment,
    weights: Float[np.ndarray, "M"],
    features: Sequence[str],
) -> tuple[PerSegment, Float[np.ndarray, "R G M F"]]:
    """Residual return of each segment, and what may explain it.

        sum_{k >= s} u_k (r_k - p_k)

    Args:
      weights: u, total weight of each outcome in the objective.
      features: names of what may explain it, an entry per segment each. `previous` and `earlier`
        are surprises one and two cuts before the segment, `first` that of the first cut where it is
        at least three cuts back, `doubt` 4 p (1 - p) of the cut before: how open its outcome was.
        `interior` is V (1 - V) of the predicted return as a share of the most there is to get: 0
        where it can't be lower, and where it can't be higher.
    """
    surprise = np.asarray(outcomes - predicted, np.float64)
    residual, given = to_go(weights * surprise), np.asarray(predicted, np.float64)
    expected = to_go(weights * given)
    # A value head is not bound to the range of its targets.
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
    """Slopes of every segment, with which regressors add up to its expected residual return.

    Weighted least squares for each segment, without an intercept. Weights stand for the squared
    norm of each entry's score, with which the noise of a gradient weighs errors.
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
