"""How sure an average over problems is: the bootstrap, which draws the problems again.

Samples of one problem resemble each other, so that every interval counts problems. Every number of
a report is a mean over problems of one score per problem, so that one set of resamples serves all
of them, and a difference of two policies on the same problems is a score too.

Nothing here takes an answer to be right or wrong: scores between 0 and 1 serve as well. Where a
formula of a proportion stands in, it is wide enough for them, since no score in [0, 1] with mean p
has a larger variance than p (1 - p).
"""

import functools
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

# The ends of a 95 % interval then vary by about 2 % of its width from one seed to another.
RESAMPLES = 10_000
_BLOCK = 500
# Most problems whose draws are kept: 10 MB, up to sixteen times.
_KEPT = 1024
_ENDS = (0.025, 0.975)
Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal


def wilson_interval(successes: float | int, trials: float | int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion: sound also near 0 and 1.

    All p with |p_hat - p| <= z sqrt(p (1 - p) / n), (Wilson 1927). Numbers may be fractional.
    """
    rate, z2 = successes / trials, Z95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * np.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    # At 0 and 1 the formula gives the rate itself, but for rounding.
    return min(max(float(centre - half), 0.0), rate), max(min(float(centre + half), 1.0), rate)


def paired_difference_interval(differences: Float[np.ndarray, "n"]) -> tuple[float, float]:
    """95 % interval, in [-1, 1], of a difference of accuracies on the same problems.

    The normal interval of the mean of the differences d_i, after adding two imaginary problems,
    spread evenly over the four ways in which two verdicts can turn out (Agresti and Min 2005),
    which keeps its coverage where few problems differ:

        m = sum d_i / (n + 2),   v = (sum d_i^2 + 1) / (n + 2) - m^2,   m +- z sqrt(v / (n + 2))
    """
    count = len(differences) + 2
    mean = float(differences.sum()) / count
    variance = (float((differences**2).sum()) + 1.0) / count - mean**2
    half = Z95 * math.sqrt(variance / count)
    return max(mean - half, -1.0), min(mean + half, 1.0)


def resampled_means(
    scores: Float[np.ndarray, "n s"], *, seed: int = 0, resamples: int = RESAMPLES
) -> Float[np.ndarray, "r s"]:
    """Means over n problems drawn from the n with replacement, again and again.

    All columns see the same draws: what is paired stays paired.
    """
    n = len(scores)
    blocks = _kept_draws(n, seed, resamples) if n <= _KEPT else _draws(n, seed, resamples)
    return np.concatenate([counts @ scores / n for counts in blocks])


def _draws(n: int, seed: int, resamples: int) -> Iterator[Int[np.ndarray, "r n"]]:
    """How often each of n problems is drawn, in blocks of resamples."""
    rng = np.random.default_rng([seed, 9])
    for start in range(0, resamples, _BLOCK):
        rows = min(_BLOCK, resamples - start)
        drawn = rng.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        yield counts.astype(np.min_scalar_type(counts.max()))


@functools.lru_cache(maxsize=16)
def _kept_draws(n: int, seed: int, resamples: int) -> list[Int[np.ndarray, "r n"]]:
    """The same, kept: a report draws from the same numbers of problems again and again."""
    return list(_draws(n, seed, resamples))


def bootstrap_intervals(scores: Float[np.ndarray, "n s"]) -> Float[np.ndarray, "s 2"]:
    """95 % percentile intervals of the means over problems, for each column.

    Their ends coincide where all problems score alike.
    """
    means = resampled_means(np.asarray(scores, np.float64))
    return np.quantile(means, _ENDS, axis=0).T


def rate_intervals(scores: Float[np.ndarray, "n s"]) -> Float[np.ndarray, "s 2"]:
    """The same for rates, which also have a width where all problems score alike.

    Resampling can't show there what other problems would give; Wilson's interval for n problems
    can (for 30 of 30 right it says 88.6 to 100 %).
    """
    ends = bootstrap_intervals(scores)
    n = len(scores)
    for column in np.flatnonzero(np.ptp(scores, axis=0) == 0.0):
        ends[column] = wilson_interval(float(scores[0, column]) * n, n)
    return np.clip(ends, 0.0, 1.0)


def ratio_interval(
    part: Float[np.ndarray, "n"], whole: Float[np.ndarray, "n"]
) -> tuple[float, float]:
    """95 % interval of mean(part) / mean(whole), a share of a share, over problems drawn again.

    Draws without any of the whole are left out. Where every problem that has some of the whole has
    the same ratio, Wilson's interval for their number stands in, as in `rate_intervals`.

    Args:
      part: share of each problem's samples that count; at most `whole`.
      whole: share of each problem's samples that are looked at, some of them more than 0.
    """
    some = whole > 0
    ratios = part[some] / whole[some]
    if np.ptp(ratios) == 0.0:
        return wilson_interval(float(ratios[0]) * len(ratios), len(ratios))
    means = resampled_means(np.column_stack([part, whole]))
    means = means[means[:, 1] > 0]
    low, high = np.quantile(means[:, 0] / means[:, 1], _ENDS)
    return max(float(low), 0.0), min(float(high), 1.0)


def difference_intervals(
    one: Float[np.ndarray, "n s"], other: Float[np.ndarray, "n s"]
) -> Float[np.ndarray, "s 2"]:
    """95 % intervals of mean(one) - mean(other) on the same problems: the paired bootstrap.

    Where every problem has the same difference, resampling shows nothing, and the normal interval
    with two imaginary problems stands in (`paired_difference_interval`).
    """
    differences = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    ends = bootstrap_intervals(differences)
    for column in np.flatnonzero(np.ptp(differences, axis=0) == 0.0):
        ends[column] = paired_difference_interval(differences[:, column])
    return ends
