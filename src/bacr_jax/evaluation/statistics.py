"""Intervals for accuracies."""

import numpy as np
from jaxtyping import Float

Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion: sound also near 0 and 1."""
    rate, z2 = successes / trials, Z95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * np.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    return max(float(centre - half), 0.0), min(float(centre + half), 1.0)


def accuracy_interval(
    correct: Float[np.ndarray, "n samples"], *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of the mean accuracy over problems.

    One sample per problem: Wilson. Several: a bootstrap over problems, since the samples of a
    problem are not independent of each other.

    Args:
      correct: verdicts, 0 or 1, problems by samples.
      resamples: bootstrap resamples.
      seed: of the bootstrap.
    """
    problems, samples = correct.shape
    if samples == 1:
        return wilson_interval(float(correct.sum()), problems)
    rates = correct.mean(1)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, problems, (resamples, problems))
    low, high = np.quantile(rates[drawn].mean(1), [0.025, 0.975])
    return float(low), float(high)
