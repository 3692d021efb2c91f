"""Means and differences of arms over seeds and problems, with intervals and tests.

A seed stands for a whole training run, so that an average over seeds has as many independent
observations as there are seeds. A difference of two arms has two sources of chance that cross: the
seeds, which trained both arms, and the problems, which all runs answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import stdtr, stdtrit

OVER_SEEDS = "seeds"
OVER_PROBLEMS = "problems"
OVER_BOTH = "seeds and problems"
NO_SPREAD = "none"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
      mean: in the unit of the values.
      low: lower end of the 95 % interval; None: one value, and nothing else is known.
      high: upper end.
      seeds: number of values.
      basis: what the interval's chance is: `OVER_SEEDS`, `OVER_PROBLEMS` or `NO_SPREAD`.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    basis: str = OVER_SEEDS


@dataclass(frozen=True)
class Contrast:
    """A difference of arms, with its test against 0.

    Attributes:
      difference: mean over seeds and problems.
      low: lower end of the 95 % interval.
      high: upper end.
      p: two-sided.
      standard_error: of the difference.
      df: degrees of freedom of the t distribution.
      seeds: number of seeds.
      problems: number of problems; 1 where only means over problems are known.
      basis: `OVER_BOTH`, or `OVER_PROBLEMS` with one seed, or `OVER_SEEDS` with `problems` 1.
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


def mean_interval(values: Sequence[float | int]) -> Estimate:
    """Mean and 95 % t interval, mean +- t_{.975, S - 1} s / sqrt(S), over S seeds.

    Args:
      values: one per seed, at least one.
    """
    array = np.asarray(values, np.float64)
    mean, seeds = float(array.mean()), len(array)
    if seeds == 1:
        return Estimate(mean, None, None, 1, NO_SPREAD)
    half = float(stdtrit(seeds - 1, 0.975) * array.std(ddof=1)) / math.sqrt(seeds)
    return Estimate(mean, mean - half, mean + half, seeds)


def mean_squares(values: Float[np.ndarray, "seeds problems"]) -> tuple[float, float, float]:
    """Mean squares of a two-way table without replication: of seeds, of problems, of the rest.

    With S seeds, P problems, row means y_s., column means y_.p and the mean y:

        MS_seed = P sum_s (y_s. - y)^2 / (S - 1),   MS_problem = S sum_p (y_.p - y)^2 / (P - 1),
        MS_rest = sum_sp (y_sp - y_s. - y_.p + y)^2 / ((S - 1) (P - 1))

    Args:
      values: at least 2 by 2.
    """
    seeds, problems = values.shape
    mean, rows, columns = values.mean(), values.mean(1), values.mean(0)
    rest = values - rows[:, None] - columns + mean
    return (
        float(problems * ((rows - mean) ** 2).sum() / (seeds - 1)),
        float(seeds * ((columns - mean) ** 2).sum() / (problems - 1)),
        float((rest**2).sum() / ((seeds - 1) * (problems - 1))),
    )


def crossed_test(differences: Float[np.ndarray, "seeds problems"]) -> Contrast | None:
    """Test of a mean difference against 0 over seeds and problems, as crossed random effects.

    The model is d_sp = delta + a_s + b_p + e_sp, all three random. From the mean squares,

        Var(mean) = (MS_seed + MS_problem - MS_rest) / (S P),

    at least MS_seed / (S P) and MS_problem / (S P), which no negative component may lower, and at
    least 1 / (P + 2)^2, the variance that two imaginary problems leave where all problems agree
    (Agresti and Min 2005). Degrees of freedom are Satterthwaite's (1946),

        df = (S P Var)^2 / (MS_seed^2 / (S - 1) + MS_problem^2 / (P - 1)
             + MS_rest^2 / ((S - 1) (P - 1))).

    With one seed only problems vary, with one problem (means over problems) only seeds: both are
    ordinary t tests.

    Args:
      differences: of two arms, averaged over the samples of a problem, in [-1, 1]; or another
        contrast of arms.

    Returns:
      The contrast; None with one seed and one problem.
    """
    values = np.asarray(differences, np.float64)
    seeds, problems = values.shape
    if values.size == 1:
        return None
    if seeds == 1 or problems == 1:
        count = values.size
        variance, df = float(values.var(ddof=1)) / count, float(count - 1)
        basis = OVER_PROBLEMS if seeds == 1 else OVER_SEEDS
    else:
        of_seeds, of_problems, rest = mean_squares(values)
        total = max(of_seeds + of_problems - rest, of_seeds, of_problems)
        terms = of_seeds**2 / (seeds - 1) + of_problems**2 / (problems - 1)
        terms += rest**2 / ((seeds - 1) * (problems - 1))
        variance, basis = total / values.size, OVER_BOTH
        df = total**2 / terms if terms > 0 else float(problems - 1)
    floor = 1.0 / (problems + 2) ** 2 if problems > 1 else 0.0
    if variance < floor:
        variance, df = floor, float(problems - 1)
    return _contrast(values, math.sqrt(variance), df, basis)


def _contrast(values: np.ndarray, error: float, df: float, basis: str) -> Contrast:
    mean, (seeds, problems) = float(values.mean()), values.shape
    half = float(stdtrit(df, 0.975)) * error
    if error > 0:
        p = min(2.0 * float(stdtr(df, -abs(mean) / error)), 1.0)
    else:
        # Means of seeds that do not vary at all.
        p = 1.0 if mean == 0 else 0.0
    return Contrast(mean, mean - half, mean + half, p, error, df, seeds, problems, basis)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values of a family of tests (Holm 1979).

    With the m values in rising order, the i-th becomes max over j <= i of min(1, (m - j + 1) p_j).

    Args:
      p_values: of all tests of the family.

    Returns:
      Adjusted values, in the order given. Those below .05 differ with a chance of at most 5 % that
      any of the family is a false one.
    """
    values = np.asarray(p_values, np.float64)
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(np.minimum(factors * values[order], 1.0))
    return adjusted.tolist()
