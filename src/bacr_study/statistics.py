"""Means and differences of arms over seeds and problems, with intervals and tests.

A seed stands for a whole training run, so that an average over seeds has as many independent
observations as there are seeds. A difference of two arms has two sources of chance that cross: the
seeds, which trained both arms, and the problems, which all runs answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import betaincinv, stdtr, stdtrit

OVER_SEEDS = "seeds"
OVER_PROBLEMS = "problems"
OVER_BOTH = "seeds and problems"
NO_SPREAD = "none"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
      low: lower end of the 95 % interval; None: one value, and nothing else is known.
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
      problems: 1 where only means over problems are known.
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
    """Mean and 95 % t interval, mean +- t_{.975, S - 1} s / sqrt(S), over S seeds."""
    array = np.asarray(values, np.float64)
    mean, seeds = float(array.mean()), len(array)
    if seeds == 1:
        return Estimate(mean, None, None, 1, NO_SPREAD)
    half = float(stdtrit(seeds - 1, 0.975) * array.std(ddof=1)) / math.sqrt(seeds)
    return Estimate(mean, mean - half, mean + half, seeds)


def clopper_pearson_interval(events: int, trials: int) -> tuple[float, float]:
    """Returns the exact 95 % interval of a probability (Clopper and Pearson 1934).

    The ends are quantiles of beta distributions. With k events in n trials:

        low  = B(.025; k, n - k + 1), and 0 if k = 0
        high = B(.975; k + 1, n - k), and 1 if k = n

    Args:
      events: k, from 0 to `trials`.
      trials: n, at least 1.
    """
    low = float(betaincinv(events, trials - events + 1, 0.025)) if events else 0.0
    high = float(betaincinv(events + 1, trials - events, 0.975)) if events < trials else 1.0
    return low, high


def variance_parts(values: Float[np.ndarray, "s n"]) -> tuple[float, float, float]:
    """Variances that a mean has from its seeds, its problems, and from the rest, which both hold.

    With S seeds, P problems, row means y_s., column means y_.p and the mean y:

        seeds     sum_s (y_s. - y)^2 / (S (S - 1))
        problems  sum_p (y_.p - y)^2 / (P (P - 1))
        rest      sum_sp (y_sp - y_s. - y_.p + y)^2 / (S (S - 1) P (P - 1))

    They are the mean squares of a two-way table without replication, over S P.
    """
    seeds, problems = values.shape
    rows, columns, mean = values.mean(1), values.mean(0), values.mean()
    rest = values - rows[:, None] - columns + mean
    of_seeds, of_problems = seeds * (seeds - 1), problems * (problems - 1)
    return (
        float(((rows - mean) ** 2).sum() / of_seeds),
        float(((columns - mean) ** 2).sum() / of_problems),
        float((rest**2).sum() / (of_seeds * of_problems)),
    )


def crossed_test(differences: Float[np.ndarray, "s n"]) -> Contrast | None:
    """Test of a mean difference against 0 over seeds and problems, as crossed random effects.

    The model is d_sp = delta + a_s + b_p + e_sp, all three random. From `variance_parts`,

        Var(mean) = V_seed + V_problem - V_rest,

    at least V_seed and V_problem, which no negative component may lower, and at least
    1 / (P + 2)^2, the variance that two imaginary problems leave where all problems agree (Agresti
    and Min 2005). Degrees of freedom are Satterthwaite's (1946),

        df = Var^2 / (V_seed^2 / (S - 1) + V_problem^2 / f + V_rest^2 / ((S - 1) f)),   f = P - 1.

    With one seed only problems vary, with one problem (means over problems) only seeds: both are
    ordinary t tests.

    Args:
      differences: of two arms, averaged over the samples of a problem, in [-1, 1]; or another
        contrast of arms.

    None with one seed and one problem.
    """
    values = np.asarray(differences, np.float64)
    seeds, problems = values.shape
    if values.size == 1:
        return None
    freedom = float(problems - 1)
    if 1 in values.shape:
        variance, df = float(values.var(ddof=1)) / values.size, float(values.size - 1)
        basis = OVER_SEEDS if problems == 1 else OVER_PROBLEMS
    else:
        of_seeds, of_problems, rest = variance_parts(values)
        variance, basis = max(of_seeds + of_problems - rest, of_seeds, of_problems), OVER_BOTH
        terms = of_seeds**2 / (seeds - 1) + of_problems**2 / freedom
        terms += rest**2 / ((seeds - 1) * freedom)
        df = variance**2 / terms if terms > 0 else freedom
    floor = 1.0 / (problems + 2) ** 2 if problems > 1 else 0.0
    if variance < floor:
        variance, df = floor, freedom
    error, mean = math.sqrt(variance), float(values.mean())
    half = float(stdtrit(df, 0.975)) * error
    p = two_sided(mean, error, df)
    return Contrast(mean, mean - half, mean + half, p, error, df, seeds, problems, basis)


def two_sided(difference: float, error: float, df: float) -> float:
    """P(|T| >= |difference| / error) of Student's t; without any spread 1 if equal, 0 if not."""
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    return min(2.0 * float(stdtr(df, -abs(difference) / error)), 1.0)


def rounded(value: Any, digits: int) -> Any:
    """The value with every float in it at so many significant digits; None for what is no number.

    Arrays and tuples become lists.
    """
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [rounded(item, digits) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values of a family of tests (Holm 1979).

    With the m values in rising order, the i-th becomes max over j <= i of min(1, (m - j + 1) p_j).
    Those below .05 differ with a chance of at most 5 % that any of the family is a false one.
    """
    values = np.asarray(p_values, np.float64)
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(np.minimum(factors * values[order], 1.0))
    return adjusted.tolist()
