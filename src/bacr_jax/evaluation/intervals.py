"""How sure an average over problems is: the bootstrap, which draws the problems again.

Every number of a report is a mean over problems of one score per problem, so that one set of
resamples serves all of them, and a difference of two policies on the same problems is a score too.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from bacr_jax.evaluation.metrics import paired_difference_interval, wilson_interval

# The ends of a 95 % interval then vary by about 2 % of its width from one seed to another.
RESAMPLES = 10_000
_BLOCK = 500
_ENDS = (0.025, 0.975)


def resampled_means(
    scores: Float[np.ndarray, "n s"], *, seed: int = 0, resamples: int = RESAMPLES
) -> Float[np.ndarray, "r s"]:
    """Means over n problems drawn from the n with replacement, again and again.

    All columns see the same draws: what is paired stays paired.

    Args:
      scores: one row per problem, one column per statistic.
      seed: of the draws.
      resamples: number of draws r.
    """
    n = len(scores)
    rng = np.random.default_rng([seed, 9])
    found = np.empty((resamples, scores.shape[1]))
    for start in range(0, resamples, _BLOCK):
        rows = min(_BLOCK, resamples - start)
        drawn = rng.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        found[start : start + rows] = counts @ scores / n
    return found


def bootstrap_intervals(
    scores: Float[np.ndarray, "n s"], *, seed: int = 0
) -> Float[np.ndarray, "s 2"]:
    """95 % percentile intervals of the means over problems, for each column.

    Args:
      scores: one row per problem, one column per statistic.
      seed: of the draws.

    Returns:
      Lower and upper ends. They coincide where all problems score alike.
    """
    means = resampled_means(np.asarray(scores, np.float64), seed=seed)
    return np.quantile(means, _ENDS, axis=0).T


def rate_intervals(scores: Float[np.ndarray, "n s"], *, seed: int = 0) -> Float[np.ndarray, "s 2"]:
    """The same for rates, which also have a width where all problems score alike.

    Resampling can't show there what other problems would give; Wilson's interval for n problems
    can (for 30 of 30 right it says 88.6 to 100 %).

    Args:
      scores: shares in [0, 1], one row per problem, one column per statistic.
      seed: of the draws.

    Returns:
      Lower and upper ends, in [0, 1].
    """
    ends = bootstrap_intervals(scores, seed=seed)
    n = len(scores)
    for column in np.flatnonzero(np.ptp(scores, axis=0) == 0.0):
        ends[column] = wilson_interval(float(scores[0, column]) * n, n)
    return np.clip(ends, 0.0, 1.0)


def difference_intervals(
    one: Float[np.ndarray, "n s"], other: Float[np.ndarray, "n s"], *, seed: int = 0
) -> Float[np.ndarray, "s 2"]:
    """95 % intervals of mean(one) - mean(other) on the same problems: the paired bootstrap.

    Where every problem has the same difference, resampling shows nothing, and the normal interval
    with two imaginary problems stands in (`paired_difference_interval`).

    Args:
      one: rates of one policy, one row per problem, one column per statistic.
      other: those of the other, the same problems in the same order.
      seed: of the draws.
    """
    differences = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    ends = bootstrap_intervals(differences, seed=seed)
    for column in np.flatnonzero(np.ptp(differences, axis=0) == 0.0):
        ends[column] = paired_difference_interval(one[:, [column]], other[:, [column]])
    return ends


def columns(scores: Sequence[np.ndarray]) -> Float[np.ndarray, "n s"]:
    """Scores per problem, side by side."""
    return np.stack([np.asarray(score, np.float64) for score in scores], axis=1)
