"""Computes means and differences of arms over seeds and problems, with intervals and tests.

Each seed is one complete training run, so a mean over seeds has as many independent observations as
there are seeds. A difference between two arms has two crossed sources of randomness: the seeds,
with which both arms were trained, and the problems, which all runs answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import betaincinv, stdtr, stdtrit
from scipy.stats import binomtest

OVER_SEEDS = "seeds"
OVER_PROBLEMS = "problems"
OVER_BOTH = "seeds and problems"
NO_SPREAD = "none"
# Family-wise error rate: the probability that at least one test or interval of a family is wrong.
LEVEL = 0.05


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval.

    Attributes:
      mean: the mean.
      low: lower end of the 95 % interval; None if it is unknown.
      high: upper end of the 95 % interval; None if it is unknown.
      seeds: number of seeds.
      basis: the randomness that the interval covers: `OVER_SEEDS`, `OVER_PROBLEMS`, or `NO_SPREAD`
        if the interval is unknown.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    basis: str = OVER_SEEDS


@dataclass(frozen=True)
class Contrast:
    """A difference in accuracy between methods, with its 95 % interval and its test against 0.

    Attributes:
      difference: the difference.
      low: lower end of the 95 % interval.
      high: upper end of the 95 % interval.
      p: two-sided p-value.
      standard_error: standard error of the difference.
      df: degrees of freedom of the t distribution.
      seeds: number of seeds.
      problems: number of problems; 1 if only means over problems are available.
      basis: the randomness that the interval covers: `OVER_BOTH`, `OVER_PROBLEMS` if there is one
        seed, or `OVER_SEEDS` if `problems` is 1.
      sign_flip: two-sided p-value of the sign-flip test over seeds (`sign_flip_p`); None if there
        is one seed, or too many.
    """

    difference: float
    low: float
    high: float
    p: float
    standard_error: float
    df: float
    seeds: int
    problems: int
    basis: str
    sign_flip: float | None = None


def mean_interval(values: Sequence[float | int]) -> Estimate:
    """Computes the mean and its 95 % t interval, mean +- t_{.975, S - 1} s / sqrt(S).

    Args:
      values: one value for each of the S seeds. With a single seed the interval is unknown.
    """
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    seeds = len(array)
    if seeds == 1:
        return Estimate(mean, None, None, 1, NO_SPREAD)
    quantile = stdtrit(seeds - 1, 0.975)
    half_width = float(quantile * array.std(ddof=1)) / math.sqrt(seeds)
    return Estimate(mean, mean - half_width, mean + half_width, seeds)


def clopper_pearson_interval(events: int, trials: int) -> tuple[float, float]:
    """Computes the exact 95 % interval of a probability (Clopper and Pearson 1934).

    The ends of the interval are quantiles of beta distributions. For k events in n trials:

        low  = B(.025; k, n - k + 1), and 0 if k = 0
        high = B(.975; k + 1, n - k), and 1 if k = n

    Args:
      events: k, from 0 to `trials`.
      trials: n, at least 1.
    """
    low = 0.0
    high = 1.0
    if events > 0:
        low = float(betaincinv(events, trials - events + 1, 0.025))
    if events < trials:
        high = float(betaincinv(events + 1, trials - events, 0.975))
    return low, high


def variance_parts(values: Float[np.ndarray, "s n"]) -> tuple[float, float, float]:
    """Computes the parts of a mean's variance that come from seeds, from problems, and the rest.

    For S seeds, P problems, row means y_s., column means y_.p and overall mean y:

        seeds     sum_s (y_s. - y)^2 / (S (S - 1))
        problems  sum_p (y_.p - y)^2 / (P (P - 1))
        rest      sum_sp (y_sp - y_s. - y_.p + y)^2 / (S (S - 1) P (P - 1))

    These are the mean squares of a two-way table without replication, divided by S P. The parts of
    seeds and of problems both include the rest.

    Args:
      values: one value per seed and problem, with at least two seeds and two problems.
    """
    seeds, problems = values.shape
    seed_means = values.mean(1)
    problem_means = values.mean(0)
    mean = values.mean()
    residuals = values - seed_means[:, None] - problem_means + mean
    seed_divisor = seeds * (seeds - 1)
    problem_divisor = problems * (problems - 1)
    seed_squares = ((seed_means - mean) ** 2).sum()
    problem_squares = ((problem_means - mean) ** 2).sum()
    residual_squares = (residuals**2).sum()
    return (
        float(seed_squares / seed_divisor),
        float(problem_squares / problem_divisor),
        float(residual_squares / (seed_divisor * problem_divisor)),
    )


def crossed_test(differences: Float[np.ndarray, "s n"]) -> Contrast | None:
    """Tests a mean difference against 0, with seeds and problems as crossed random effects.

    The model is d_sp = delta + a_s + b_p + e_sp, where the last three terms are random. Using the
    parts computed by `variance_parts`,

        Var(mean) = V_seed + V_problem - V_rest.

    Two lower bounds apply. The variance is at least V_seed and V_problem, because a negative
    variance component must not reduce it. It is also at least 1 / (P + 2)^2, the variance that two
    imaginary problems leave if all problems agree (Agresti and Min 2005). The degrees of freedom
    are Satterthwaite's (1946),

        df = Var^2 / (V_seed^2 / (S - 1) + V_problem^2 / f + V_rest^2 / ((S - 1) f)),   f = P - 1.

    With one seed only the problems vary, and with one problem (when only means over problems are
    available) only the seeds vary. Both cases reduce to an ordinary t test.

    Args:
      differences: difference of two arms for each seed and problem, averaged over the samples of
        the problem, in [-1, 1]; or any other contrast of arms.

    Returns:
      The contrast, or None if there is only one seed and one problem.
    """
    values = np.asarray(differences, np.float64)
    seeds, problems = values.shape
    if values.size == 1:
        return None
    if seeds == 1 or problems == 1:
        variance = float(values.var(ddof=1)) / values.size
        df = float(values.size - 1)
        basis = OVER_SEEDS if problems == 1 else OVER_PROBLEMS
    else:
        variance, df = _crossed_variance(values)
        basis = OVER_BOTH
    least_variance = 1.0 / (problems + 2) ** 2 if problems > 1 else 0.0
    if variance < least_variance:
        variance = least_variance
        df = float(problems - 1)
    error = math.sqrt(variance)
    mean = float(values.mean())
    half_width = float(stdtrit(df, 0.975)) * error
    return Contrast(
        difference=mean,
        low=mean - half_width,
        high=mean + half_width,
        p=two_sided(mean, error, df),
        standard_error=error,
        df=df,
        seeds=seeds,
        problems=problems,
        basis=basis,
        sign_flip=sign_flip_p(values.mean(1)),
    )


# Maximum number n of seeds of a sign-flip test, because the test enumerates all 2^n combinations of
# signs.
_MOST_FLIPPED = 16


def sign_flip_p(differences: Float[np.ndarray, "n"]) -> float | None:
    """Returns the two-sided p-value of the exact sign-flip test of a mean difference against 0.

    If the difference of each seed is symmetric about 0, all 2^S combinations of signs are equally
    probable. The p-value is the share of combinations whose mean is at least as far from 0 as the
    observed mean. It assumes no normal distribution, so it is reported next to the t test if there
    are few seeds. With S seeds it is at least 2 / 2^S.

    Args:
      differences: difference of two arms for each of the S seeds.

    Returns:
      The p-value, or None for one seed or for more than 16.
    """
    seeds = len(differences)
    if not 2 <= seeds <= _MOST_FLIPPED:
        return None
    numbers = np.arange(2**seeds)
    bits = numbers[:, None] >> np.arange(seeds) & 1
    signs = 1.0 - 2.0 * bits
    means = np.abs(signs @ differences)
    # Rounding errors must not exclude combinations with an equal mean.
    tolerance = 1e-12 * np.abs(differences).sum()
    return float((means >= abs(differences.sum()) - tolerance).mean())


def sign_test_p(before: Float[np.ndarray, "n"], after: Float[np.ndarray, "n"]) -> float:
    """Returns the one-sided p-value of the exact sign test for a loss on the same problems.

    If training changed nothing, each problem whose fraction of correct samples differs is lost or
    won with probability 1/2. The p-value is the probability of at least as many lost problems.

    Args:
      before: fraction of correct samples of each of the n problems before training, in [0, 1].
      after: the same after training.

    Returns:
      The p-value, in [0, 1]. It is 1 if no problem changed.
    """
    lost = int((after < before).sum())
    changed = int((after != before).sum())
    if changed == 0:
        return 1.0
    return float(binomtest(lost, changed, alternative="greater").pvalue)


def _crossed_variance(values: Float[np.ndarray, "s n"]) -> tuple[float, float]:
    """Returns the variance of the mean and its degrees of freedom, as defined in `crossed_test`."""
    seeds, problems = values.shape
    seed_freedom = seeds - 1
    problem_freedom = float(problems - 1)
    of_seeds, of_problems, rest = variance_parts(values)
    variance = max(of_seeds + of_problems - rest, of_seeds, of_problems)
    terms = of_seeds**2 / seed_freedom + of_problems**2 / problem_freedom
    terms += rest**2 / (seed_freedom * problem_freedom)
    if terms == 0:
        return variance, problem_freedom
    return variance, variance**2 / terms


def two_sided(difference: float, error: float, df: float) -> float:
    """Returns the two-sided p-value of a difference, P(|T| >= |difference| / error).

    If `error` is 0, the p-value is 1 for a difference of 0 and 0 otherwise.

    Args:
      difference: the difference.
      error: standard error of the difference.
      df: degrees of freedom of Student's t distribution.
    """
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    tail = float(stdtr(df, -abs(difference) / error))
    return min(2.0 * tail, 1.0)


def rounded(value: Any, digits: int) -> Any:
    """Rounds every float in a nested value to a number of significant digits.

    NaN and infinity are replaced by None; arrays and tuples are converted to lists.
    """
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [rounded(item, digits) for item in value]
    if isinstance(value, float | np.floating):
        if not math.isfinite(value):
            return None
        return float(f"{value:.{digits}g}")
    return value


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns Holm's adjusted p-values for a family of tests (Holm 1979), in the given order.

    With the m values sorted in increasing order, the i-th one becomes max over j <= i of min(1, (m
    - j + 1) p_j). If every test with an adjusted p-value below .05 is called significant, the
    probability of at least one false positive in the family is at most 5 %.
    """
    values = np.asarray(p_values, np.float64)
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    scaled = np.minimum(factors * values[order], 1.0)
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted.tolist()


def simultaneous_interval(
    difference: float, error: float, df: float, tests: int
) -> tuple[float, float]:
    """Returns Bonferroni's simultaneous 95 % interval of one of several differences.

    Each of m intervals has the level 1 - .05 / m, so the probability that all of them contain their
    true differences is at least 95 %, however the differences depend on each other:

        difference +- t_{1 - .05 / (2 m), df} error

    The interval excludes 0 if and only if m p < .05. Holm's adjusted p-values can be below .05 for
    more differences. Intervals that match Holm's test are not used, because they bound a
    significant difference only by 0.

    Args:
      difference: the difference.
      error: standard error of the difference.
      df: degrees of freedom of Student's t distribution.
      tests: m, the number of differences in the family.
    """
    half_width = float(stdtrit(df, 1.0 - LEVEL / (2 * tests))) * error
    return difference - half_width, difference + half_width
