"""Computes 95 % confidence intervals of means over problems, with the bootstrap over problems.

Samples of the same problem are correlated, so problems are resampled instead of samples. Every
reported value is a mean over problems of one score per problem, so the same resamples are used for
all values. The difference between two policies on the same problem is also such a score.

Scores may be verdicts (0 or 1) or any numbers in [0, 1]. If the bootstrap interval has zero width,
it is replaced by the interval of a formula for proportions (Wilson, or Agresti and Min). The
formula is conservative for any score in [0, 1], because a score with mean p has a variance of at
most p (1 - p).
"""

import functools
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

# Scores with shape [problems, columns]. Each column has one score per problem.
Scores = Float[np.ndarray, "n s"]
# One number per problem, with shape [problems].
Shares = Float[np.ndarray, "n"]
# Lower and upper bound of the interval of each column, with shape [columns, 2].
Ends = Float[np.ndarray, "s 2"]

# Number of bootstrap resamples. With this number, the bounds of an interval vary between seeds by
# about 2 % of its width.
RESAMPLES = 10_000
# Number of resamples drawn at a time, which limits the memory use.
_BLOCK = 500
# Maximum number of problems for which the draws are cached. Each of up to 16 cache entries takes 10
# MB.
_MAX_CACHED_PROBLEMS = 1024
_ENDS = (0.025, 0.975)
Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal


def wilson_interval(successes: float | int, trials: float | int) -> tuple[float, float]:
    """Returns the 95 % Wilson score interval of a proportion. It is also valid near 0 and 1.

    The interval contains all p with |p_hat - p| <= z sqrt(p (1 - p) / n) (Wilson 1927), where p_hat
    is the observed rate, n the number of trials, and z the 97.5 % quantile of the normal
    distribution.

    Args:
      successes: number of successes, which may be fractional.
      trials: number of trials, which may be fractional.
    """
    rate = successes / trials
    z2 = Z95**2
    denominator = 1 + z2 / trials
    centre = (rate + z2 / (2 * trials)) / denominator
    variance = rate * (1 - rate) / trials + z2 / (4 * trials**2)
    half = Z95 / denominator * np.sqrt(variance)
    low = max(float(centre - half), 0.0)
    high = min(float(centre + half), 1.0)
    # For rates of 0 and 1, one bound equals the rate except for rounding errors.
    return min(low, rate), max(high, rate)


def paired_difference_interval(differences: Shares) -> tuple[float, float]:
    """Returns the 95 % interval of an accuracy difference on the same problems, in [-1, 1].

    This is the normal interval of the mean difference after adding two pseudo-problems, which are
    spread evenly over the four possible pairs of verdicts (Agresti and Min 2005). Its coverage
    remains correct if only few problems differ. With the difference d_i of problem i, n problems,
    and the 97.5 % quantile z of the normal distribution:

        m = sum d_i / (n + 2),   v = (sum d_i^2 + 1) / (n + 2) - m^2,   m +- z sqrt(v / (n + 2))

    Args:
      differences: difference of each problem, with shape [n].
    """
    count = len(differences) + 2
    mean = float(differences.sum()) / count
    squares = float((differences**2).sum()) + 1.0
    variance = squares / count - mean**2
    half = Z95 * math.sqrt(variance / count)
    return max(mean - half, -1.0), min(mean + half, 1.0)


def resampled_means(
    scores: Scores, *, seed: int = 0, resamples: int = RESAMPLES
) -> Float[np.ndarray, "r s"]:
    """Computes the column means of bootstrap resamples of the problems.

    Every resample draws n problems with replacement. All columns use the same draws, so paired
    scores stay paired.

    Args:
      scores: scores of n problems, with shape [n, columns].
      seed: random seed.
      resamples: number of resamples.

    Returns:
      Means with shape [resamples, columns].
    """
    n = len(scores)
    draws = _cached_draws if n <= _MAX_CACHED_PROBLEMS else _draws
    means = [counts @ scores / n for counts in draws(n, seed, resamples)]
    return np.concatenate(means)


def _draws(n: int, seed: int, resamples: int) -> Iterator[Int[np.ndarray, "r n"]]:
    """Yields how often each of n problems is drawn in each resample, in blocks of resamples."""
    rng = np.random.default_rng([seed, 9])
    for start in range(0, resamples, _BLOCK):
        rows = min(_BLOCK, resamples - start)
        problems = rng.integers(0, n, (rows, n))
        # Offset each row to a separate range of numbers, so that one call of bincount
        # counts all rows.
        offsets = n * np.arange(rows)[:, None]
        numbers = (problems + offsets).ravel()
        counts = np.bincount(numbers, minlength=rows * n).reshape(rows, n)
        smallest_type = np.min_scalar_type(counts.max())
        yield counts.astype(smallest_type)


@functools.lru_cache(maxsize=16)
def _cached_draws(n: int, seed: int, resamples: int) -> list[Int[np.ndarray, "r n"]]:
    """Returns `_draws` from a cache, because the sets of a report have only few different sizes."""
    return list(_draws(n, seed, resamples))


def bootstrap_intervals(scores: Scores) -> Ends:
    """Returns the 95 % percentile interval of each column's mean over problems.

    The interval has zero width if all problems have the same score.
    """
    means = resampled_means(np.asarray(scores, np.float64))
    return np.quantile(means, _ENDS, axis=0).T


def percentile_interval(values: Shares) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of bootstrap values of a statistic."""
    low, high = np.quantile(values, _ENDS)
    return float(low), float(high)


def rate_intervals(scores: Scores) -> Ends:
    """Returns the 95 % interval of each column's mean, for rates in [0, 1].

    The intervals are computed by `bootstrap_intervals`. If all problems have the same rate in a
    column, the bootstrap interval has zero width, so the Wilson interval for n problems is used
    instead. (For 30 correct answers out of 30, the Wilson interval is 88.6 to 100 %.)
    """
    ends = bootstrap_intervals(scores)
    n = len(scores)
    equal_columns = np.ptp(scores, axis=0) == 0.0
    for column in np.flatnonzero(equal_columns):
        ends[column] = wilson_interval(float(scores[0, column]) * n, n)
    return np.clip(ends, 0.0, 1.0)


def ratio_interval(part: Shares, total: Shares) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of mean(part) / mean(total).

    Resamples with mean(total) = 0 are excluded. If all problems with a positive `total` have the
    same ratio, the Wilson interval for the number of these problems is returned, as in
    `rate_intervals`.

    Args:
      part: fraction of each problem's samples that count for the numerator, with shape [n]. It is
        at most `total`.
      total: fraction of each problem's samples that count for the denominator, with shape [n]. It
        must be positive for at least one problem.
    """
    positive = total > 0
    ratios = part[positive] / total[positive]
    if np.ptp(ratios) == 0.0:
        count = len(ratios)
        return wilson_interval(float(ratios[0]) * count, count)
    scores = np.column_stack([part, total])
    part_means, total_means = resampled_means(scores).T
    positive = total_means > 0
    ratios = part_means[positive] / total_means[positive]
    low, high = np.quantile(ratios, _ENDS)
    return max(float(low), 0.0), min(float(high), 1.0)


def weighted_mean_interval(sums: Scores, weights: Scores) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of a weighted mean, sum(sums) / sum(weights).

    Resamples with a total weight of 0 are excluded.

    Args:
      sums: weighted sum of the values of each problem's samples, with shape [n].
      weights: total weight of each problem's samples, with shape [n]. It must be positive for at
        least one problem.
    """
    scores = np.column_stack([sums, weights])
    sum_means, weight_means = resampled_means(scores).T
    positive = weight_means > 0
    low, high = np.quantile(sum_means[positive] / weight_means[positive], _ENDS)
    return float(low), float(high)


def difference_intervals(one: Scores, other: Scores) -> Ends:
    """Returns the 95 % interval of mean(one) - mean(other) on the same problems, by column.

    The intervals are computed by a paired bootstrap. If all problems have the same difference, the
    bootstrap interval has zero width, so `paired_difference_interval` is used instead.
    """
    differences = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    ends = bootstrap_intervals(differences)
    equal_columns = np.ptp(differences, axis=0) == 0.0
    for column in np.flatnonzero(equal_columns):
        ends[column] = paired_difference_interval(differences[:, column])
    return ends
