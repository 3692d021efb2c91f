"""Baselines of a group that weigh its traces: by their lengths, or by the path of their scores.

Both are the group's own estimate of the best constant, E |s|^2 G / E |s|^2: OPO (arXiv 2505.23585)
lets a trace's length stand for the squared norm of its score, the optimal token baseline (arXiv
2602.07078) the squared scores in the logits, added up to each token. As they are published the
trace itself is in the mean, which turns and shrinks the expected gradient in a way that no factor
undoes; without it the mean does not depend on the trace, and the gradient is unbiased.
"""

import numpy as np
from jaxtyping import Float, Int


def weighted_mean(
    values: Float[np.ndarray, "R G M"], weights: Float[np.ndarray, "R G M"], *, loo: bool
) -> Float[np.ndarray, "R G M"]:
    """Weighted mean over each group, for each of its traces.

        b_i = sum_k w_k x_k / sum_k w_k,   over all k, or over k != i

    Args:
      weights: w, at least 0.

    Returns:
      b; 0 where nothing has a weight.
    """
    group = values.shape[1]
    # Not total minus own, whose rounding would let a trace into its own baseline.
    counts = np.ones((group, group)) - (np.eye(group) if loo else 0.0)
    w = np.asarray(weights, np.float64)
    top, bottom = (np.einsum("gk,rkm->rgm", counts, x) for x in (w * values, w))
    return np.asarray(top / np.where(bottom > 0, bottom, 1.0))


def length_weights(tokens: Int[np.ndarray, "R G M"]) -> Float[np.ndarray, "R G M"]:
    """OPO's weights: sampled thinking tokens of the whole trace, in every segment."""
    lengths = np.asarray(tokens, np.float64).sum(-1, keepdims=True)
    return np.broadcast_to(lengths, tokens.shape)


def path_weights(
    energy: Float[np.ndarray, "R G M"], tokens: Int[np.ndarray, "R G M"]
) -> Float[np.ndarray, "R G M"]:
    """Weights of the optimal token baseline at the last token of each segment.

        W_is = sum_{u <= s} e_iu,   0 where the trace has no token in the segment

    e is the sum over a segment's tokens of 1 - 2 p + sum_v p(v)^2.
    """
    return np.where(tokens > 0, np.cumsum(np.asarray(energy, np.float64), -1), 0.0)
