"""95 % confidence intervals of means over problems, by the bootstrap over problems.

Samples of one problem resemble each other, so every interval counts problems, not samples. Every
number of a report is a mean over problems of one score per problem, so one set of resamples serves
all numbers. A difference of two policies on the same problems is a score too.

Scores may be verdicts (0 or 1) or any numbers in [0, 1]. Where the bootstrap has no width, a
formula for proportions replaces it. The formula is wide enough for any scores, because no score in
[0, 1] with mean p has a larger variance than p (1 - p).
"""

import functools
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

# One score of each problem per column.
Scores = Float[np.ndarray, "n s"]
# One number of each problem.
Shares = Float[np.ndarray, "n"]
# Lower and upper end of each column's interval.
Ends = Float[np.ndarray, "s 2"]

# With this many, the ends of an interval vary by about 2 % of its width between seeds.
RESAMPLES = 10_000
# Resamples that are drawn at a time, which bounds the memory.
_BLOCK = 500
# Largest number of problems whose draws are cached: 10 MB each, for up to 16 calls.
_MAX_CACHED_PROBLEMS = 1024
_ENDS = (0.025, 0.975)
Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal


def wilson_interval(successes: float | int, trials: float | int) -> tuple[float, float]:
    """Returns the 95 % Wilson score interval of a proportion, which is valid also near 0 and 1.

    It contains all p with |p_hat - p| <= z sqrt(p (1 - p) / n) (Wilson 1927).

    Args:
      successes: may be fractional.
      trials: may be fractional.
    """
    rate = successes / trials
    z2 = Z95**2
    denominator = 1 + z2 / trials
    centre = (rate + z2 / (2 * trials)) / denominator
    variance = rate * (1 - rate) / trials + z2 / (4 * trials**2)
    half = Z95 / denominator * np.sqrt(variance)
    low = max(float(centre - half), 0.0)
    high = min(float(centre + half), 1.0)
    # At rates 0 and 1 one end equals the rate, except for rounding.
    return min(low, rate), max(high, rate)


def paired_difference_interval(differences: Shares) -> tuple[float, float]:
    """Returns the 95 % interval, in [-1, 1], of a difference of accuracies on the same problems.

    It is the normal interval of the mean of the differences d_i after adding two imaginary
    problems, which are spread evenly over the four possible pairs of verdicts (Agresti and Min
    2005). It keeps its coverage where few problems differ:

        m = sum d_i / (n + 2),   v = (sum d_i^2 + 1) / (n + 2) - m^2,   m +- z sqrt(v / (n + 2))
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
    """Returns the mean of each column over n problems drawn with replacement, for each resample.

    All columns use the same draws, so paired scores stay paired.
    """
    n = len(scores)
    draws = _cached_draws if n <= _MAX_CACHED_PROBLEMS else _draws
    means = [counts @ scores / n for counts in draws(n, seed, resamples)]
    return np.concatenate(means)


def _draws(n: int, seed: int, resamples: int) -> Iterator[Int[np.ndarray, "r n"]]:
    """Yields how often each of n problems is drawn, in blocks of resamples."""
    rng = np.random.default_rng([seed, 9])
    for start in range(0, resamples, _BLOCK):
        rows = min(_BLOCK, resamples - start)
        problems = rng.integers(0, n, (rows, n))
        # Every row has its own range of numbers, so that one bincount serves all rows.
        offsets = n * np.arange(rows)[:, None]
        numbers = (problems + offsets).ravel()
        counts = np.bincount(numbers, minlength=rows * n).reshape(rows, n)
        smallest_type = np.min_scalar_type(counts.max())
        yield counts.astype(smallest_type)


@functools.lru_cache(maxsize=16)
def _cached_draws(n: int, seed: int, resamples: int) -> list[Int[np.ndarray, "r n"]]:
    """Returns `_draws` from a cache, because the sets of a report have few different sizes."""
    return list(_draws(n, seed, resamples))


def bootstrap_intervals(scores: Scores) -> Ends:
    """Returns 95 % percentile intervals of the means over problems, for each column.

    If all problems have the same score, the interval has no width.
    """
    means = resampled_means(np.asarray(scores, np.float64))
    return np.quantile(means, _ENDS, axis=0).T


def rate_intervals(scores: Scores) -> Ends:
    """Returns 95 % intervals of rates in [0, 1], for each column.

    They are `bootstrap_intervals`. For a column in which all problems have the same rate, they are
    Wilson's interval for n problems, because resampling gives no width there. (For 30 of 30 correct
    answers, Wilson's interval is 88.6 to 100 %.)
    """
    ends = bootstrap_intervals(scores)
    n = len(scores)
    equal_columns = np.ptp(scores, axis=0) == 0.0
    for column in np.flatnonzero(equal_columns):
        ends[column] = wilson_interval(float(scores[0, column]) * n, n)
    return np.clip(ends, 0.0, 1.0)


def ratio_interval(part: Shares, total: Shares) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of mean(part) / mean(total), a share within a share.

    Resamples in which mean(total) is 0 are left out. If all problems with a positive `total` have
    the same ratio, the result is Wilson's interval for their number, as in `rate_intervals`.

    Args:
      part: share of each problem's samples that count; at most `total`.
      total: share of each problem's samples that are considered; positive for some problem.
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


def difference_intervals(one: Scores, other: Scores) -> Ends:
    """Returns 95 % intervals of mean(one) - mean(other) on the same problems, for each column.

    They are the paired bootstrap. If all problems have the same difference, resampling gives no
    width, so `paired_difference_interval` is used.
    """
    differences = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    ends = bootstrap_intervals(differences)
    equal_columns = np.ptp(differences, axis=0) == 0.0
    for column in np.flatnonzero(equal_columns):
        ends[column] = paired_difference_interval(differences[:, column])
    return ends
