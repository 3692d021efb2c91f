"""Computes the noise of policy gradients, at equal expected gradient, from a pool of rollouts.

A pool contains N traces per question. The gradient estimate from a group of G traces is linear in
the scores g_iv, such as the gradient of the summed log-probability of segment v of trace i:

    estimate = (1/G) sum_{i, v} A_iv g_iv

All moments of the estimate can therefore be computed from the inner products of the scores (their
Gram matrix), for any advantages A. Each way to compute advantages (an arm) is evaluated on the same
groups from the same random partitions, so differences between arms are paired. The noise-to-signal
ratio is

    noise = Var[estimate] / (c^2 |g|^2),   c = <E[estimate], g> / |g|^2

where Var is the trace of the covariance. A baseline that scales down the advantages also scales
down c. For this reason the variance of the advantages is not a measure of the noise. Squared
expectations are estimated by products of disjoint groups, so noise does not bias them.
"""

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

# Random partitions of the traces of a cell into groups: indices of traces.
Partition = Int[np.ndarray, "P n G"]


def partitions(seed: Sequence[int], traces: int, group: int, count: int) -> Partition:
    """Returns random partitions of the traces of a cell into groups of equal size.

    If the number of traces is not a multiple of the group size, the remaining traces are left out.

    Args:
      seed: seed of the random numbers.
      traces: number of traces N.
      group: group size G.
      count: number of partitions P.
    """
    rng = np.random.default_rng(seed)
    whole = traces // group
    order = np.stack([rng.permutation(traces)[: whole * group] for _ in range(count)])
    return order.reshape(count, whole, group)


def _moments(
    gram: Float[np.ndarray, "N V N V"],
    advantages: Float[np.ndarray, "arms P n G V"],
    groups: Partition,
    reference: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the moments of every arm's estimate over the groups of a cell.

    These are the attributes `variance`, `own`, `shared` and `parts` of `Noise`.
    """
    arms, count, n, group, parts = advantages.shape
    dense, width = gram.shape[0] * parts, group * parts
    matrix = np.asarray(gram, np.float64).reshape(dense, dense)
    weights = np.zeros((arms, count, gram.shape[0], parts))
    place = np.arange(count)[:, None, None]
    weights[:, place, groups] = advantages / group
    flat = weights.reshape(arms, count, dense)
    by_part = weights[reference][:, None] * np.eye(parts)[:, None]
    by_part = by_part.reshape(count, parts, dense)
    image = flat @ matrix
    # Products of a group with itself, which are excluded from the products of expectations.
    inside = np.asarray(gram, np.float64)[groups[..., :, None], :, groups[..., None, :], :]
    inside = np.moveaxis(inside, -2, 3).reshape(count, n, width, width)
    given = (advantages / group).reshape(arms, count, n, width)
    of_reference = np.einsum("pnxy,pny->pnx", inside, given[reference])
    squares = np.einsum("apnx,pnxy,apny->a", given, inside, given, optimize=True)
    with_reference = np.einsum("apnx,pnx->a", given, of_reference)
    split = (given[reference] * of_reference).reshape(count, n, group, parts).sum((0, 1, 2))
    pairs = count * n * (n - 1)
    own = ((image * flat).sum((1, 2)) - squares) / pairs
    shared = ((flat * image[reference]).sum((1, 2)) - with_reference) / pairs
    of_parts = (np.einsum("pvx,px->v", by_part, image[reference]) - split) / pairs
    return squares / (count * n) - own, own, shared, of_parts


@dataclasses.dataclass(frozen=True)
class Noise:
    """Moments of the gradient estimates of every arm, for each question.

    Attributes:
      questions: question of each entry. A question can have an entry for each budget.
      variance: variance of the estimate, E |estimate|^2 - |E estimate|^2.
      own: |E estimate|^2, from products of different groups.
      shared: <E estimate, g>, where g is the estimate of the reference arm on different groups.
      signal: |g|^2.
      parts: <g_v, g>, the contribution of each score to the signal.
      factors: exact factors in E estimate = sum_v factors_v g_v, or NaN for arms without them.
    """

    questions: Int[np.ndarray, "Q"]
    variance: Float[np.ndarray, "Q arms"]
    own: Float[np.ndarray, "Q arms"]
    shared: Float[np.ndarray, "Q arms"]
    signal: Float[np.ndarray, "Q"]
    parts: Float[np.ndarray, "Q V"]
    factors: Float[np.ndarray, "arms V"]

    def scale(self, weights: Float[np.ndarray, "*B Q"]) -> Float[np.ndarray, "*B arms"]:
        """Returns the scale c of each arm, computed from its exact factors.

            c = sum_v factors_v <g_v, g> / |g|^2

        It is exactly 1 for an unbiased arm. For an arm without exact factors, c is estimated from
        the pool as <E estimate, g> / |g|^2, which is noisy.

        Args:
          weights: number of times that each question counts.
        """
        unbiased = (self.factors == self.factors[:, :1]).all(1)
        parts = weights @ self.parts
        total = parts.sum(-1, keepdims=True)
        mixed = (parts / np.where(total == 0, 1.0, total)) @ self.factors.T
        exact = np.where(unbiased, self.factors[:, 0], mixed)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (weights @ self.shared) / (weights @ self.signal)[..., None]
        return np.where(np.isnan(self.factors).any(1), found, exact)

    def bias(self) -> Float[np.ndarray, " arms"]:
        """Returns |E estimate / c - g|^2 / |g|^2, debiased. Its expectation is 0 if unbiased."""
        signal, shared = self.signal.sum(), self.shared.sum(0)
        c = shared / signal
        return self.own.sum(0) / (c**2 * signal) - 2 * shared / (c * signal) + 1

    def scaled(self, weights: Float[np.ndarray, "*B Q"]) -> Float[np.ndarray, "*B arms"]:
        """Returns the noise at equal scale, summed over questions: sum_q Var_q / c^2."""
        # If no question has a gradient, the scale is undefined and the result is NaN. Tables print
        # a text instead.
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(weights @ self.variance / self.scale(weights) ** 2)

    def reduction(
        self, against: int, *, costs: Float[np.ndarray, " arms"] | None = None, resamples: int
    ) -> Float[np.ndarray, "arms 3"]:
        """Computes the relative noise reduction of each arm, 1 - noise / (noise of another arm).

        The signal cancels in this ratio. The confidence interval comes from a bootstrap over
        questions: questions are sampled with replacement, with all their traces, and the sample is
        the same for all arms.

        Args:
          against: index of the other arm.
          costs: cost of a group for each arm, in any unit. If set, noise is compared at equal cost:
            an arm with half the cost can have twice as many groups.
          resamples: number of bootstrap samples.

        Returns:
          The estimate, and the lower and upper end of its 95 % interval.
        """
        count = len(self.signal)
        even = np.full(count, 1.0 / count)
        resampled = np.random.default_rng(0).multinomial(count, even, size=resamples)
        scaled = self.scaled(np.concatenate([np.ones((1, count)), resampled]))
        if costs is not None:
            scaled = scaled * costs
        # If all questions of a resample are always or never solved, its noise is only a rounding
        # error and can't be compared.
        there = scaled[:, against : against + 1] > 1e-9 * scaled[0, against]
        values = np.where(there, 1.0 - scaled / np.where(there, scaled[:, [against]], 1.0), np.nan)
        with warnings.catch_warnings():
            # The interval of an arm that can't be compared in any resample is NaN.
            warnings.filterwarnings("ignore", "All-NaN slice|invalid value", RuntimeWarning)
            low, high = np.nanquantile(values[1:], [0.025, 0.975], axis=0)
        return np.stack([values[0], low, high], axis=-1)


def measured(
    questions: Int[np.ndarray, "Q"],
    grams: Float[np.ndarray, "Q N V N V"],
    advantages: Float[np.ndarray, "arms Q P n G V"],
    groups: Partition,
    reference: int,
    factors: Float[np.ndarray, "arms V"],
) -> Noise:
    """Measures the noise of every arm over the groups of a pool, with one entry per cell.

    Args:
      questions: question of each cell.
      grams: Gram matrices of the scores of each cell.
      advantages: advantages that each arm assigns to the scores.
      groups: partitions of each cell into at least two groups (`partitions`).
      reference: index of an unbiased arm with low noise, whose expectation defines g.
      factors: exact factors of each arm (`Noise.factors`).
    """
    cells = zip(grams, advantages.swapaxes(0, 1))
    found = [_moments(gram, of_cell, groups, reference) for gram, of_cell in cells]
    variance, own, shared, parts = map(np.stack, zip(*found))
    return Noise(questions, variance, own, shared, own[:, reference], parts, factors)


def by_question(pools: Sequence[Noise]) -> Noise:
    """Sums the entries of each question in each pool, which are the clusters of the bootstrap."""
    clusters = [1_000_000 * number + pool.questions for number, pool in enumerate(pools)]
    questions, place = np.unique(np.concatenate(clusters), return_inverse=True)

    def added(name: str) -> np.ndarray:
        entries = np.concatenate([getattr(pool, name) for pool in pools])
        total = np.zeros((len(questions), *entries.shape[1:]))
        np.add.at(total, place, entries)
        return total

    names = ("variance", "own", "shared", "signal", "parts")
    sums = {name: added(name) for name in names}
    return dataclasses.replace(pools[0], questions=questions, **sums)


def advantage_variance(
    advantages: Float[np.ndarray, "*batch M"],
    returns: Float[np.ndarray, "*batch M"],
    mask: Bool[np.ndarray, "*batch M"],
) -> float:
    """Returns Var[A] / Var[returns] over all segments with tokens, as plotted in the paper."""
    spread = float(np.var(returns[mask]))
    return float(np.var(advantages[mask])) / spread if spread else 0.0


def squared_error(
    values: Float[np.ndarray, "Q N"], returns: Float[np.ndarray, "Q N"]
) -> tuple[float, float, float]:
    """Estimates the squared error v^2 of values V against the expected returns R, without bias.

        v^2 = mean_q [ (mean_i (R_i - V_i))^2 - var_i(R_i - V_i) / N ]

    Returns:
      v^2, its standard error over questions, and sigma^2 = mean_q var_i(R_i - V_i).
    """
    residual = np.asarray(returns, np.float64) - values
    spread = residual.var(1, ddof=1)
    each = residual.mean(1) ** 2 - spread / residual.shape[1]
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each))), float(spread.mean())
