"""Noise of a policy gradient at equal expected gradient, from one pool of rollouts.

A pool holds N traces of a question. The gradient that a group of G of them gives is linear in
scores g_v (the gradient of the summed log-probability of a segment, say),

    estimate = (1/G) sum_{i, v} A_iv g_iv

so that all its moments follow from the inner products of the scores, their Gram matrix, whatever
the advantages A are. Each way to make advantages (an arm) is evaluated on the same groups, taken
from the same random partitions: differences between arms are paired.

    noise = Var[estimate] / (c^2 |g|^2),   c = <E[estimate], g> / |g|^2

is the noise-to-signal ratio. Var is a trace of a covariance. A baseline that shrinks advantages
shrinks c with them, which is why the variance of advantages says nothing. Squares of expectations
are cross-products of disjoint groups and so have no bias from noise.
"""

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

# Indices of a cell's traces: random divisions into groups.
Partition = Int[np.ndarray, "P n G"]


def partitions(seed: Sequence[int], traces: int, group: int, count: int) -> Partition:
    """Random partitions (P) of a pool's N traces, or as many as groups hold, into groups of G."""
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
    """Variance of every arm's estimate over the groups of a cell, and `Noise.own` to `parts`."""
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
    # Products of a group with itself, to be left out of the products of expectations.
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
    """Moments of the estimates of all questions, by arm, added up as needed.

    Attributes:
      questions: of the entries; one has an entry for each budget.
      variance: Var of the estimate of a question, E |estimate|^2 - |E estimate|^2.
      own: |E estimate|^2, from different groups.
      shared: <E estimate, g>, with g from different groups by the reference arm.
      signal: |g|^2.
      parts: <g_v, g>, the share of each score in the signal.
      factors: E estimate = sum_v factors_v g_v, exact; not a number where an arm has none.
    """

    questions: Int[np.ndarray, "Q"]
    variance: Float[np.ndarray, "Q arms"]
    own: Float[np.ndarray, "Q arms"]
    shared: Float[np.ndarray, "Q arms"]
    signal: Float[np.ndarray, "Q"]
    parts: Float[np.ndarray, "Q V"]
    factors: Float[np.ndarray, "arms V"]

    def scale(self, weights: Float[np.ndarray, "*B Q"]) -> Float[np.ndarray, "*B arms"]:
        """Scale c from the factors that are known: exactly 1 for an unbiased arm.

            c = sum_v factors_v <g_v, g> / |g|^2

        Of an arm that has none, c is what the pool has: <E estimate, g> / |g|^2, noise and all.
        Weights say how often each question counts.
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
        """|E estimate / c - g|^2 / |g|^2, debiased: noise around 0 for an unbiased arm."""
        signal, shared = self.signal.sum(), self.shared.sum(0)
        c = shared / signal
        return self.own.sum(0) / (c**2 * signal) - 2 * shared / (c * signal) + 1

    def scaled(self, weights: Float[np.ndarray, "*B Q"]) -> Float[np.ndarray, "*B arms"]:
        """Noise at equal scale, within questions: sum_q Var_q / c^2."""
        # Where no question has a gradient there is no scale either: NaN, which tables say in words.
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(weights @ self.variance / self.scale(weights) ** 2)

    def reduction(
        self, against: int, *, costs: Float[np.ndarray, " arms"] | None = None, resamples: int
    ) -> Float[np.ndarray, "arms 3"]:
        """1 - noise / noise of another arm: estimate, and 95 % interval over questions.

        The signal cancels. Questions are drawn with replacement, each with all its traces, arms
        together. With costs of a group, in any unit, noise is compared at equal cost: an arm of
        half the cost has twice the groups.
        """
        count = len(self.signal)
        even = np.full(count, 1.0 / count)
        resampled = np.random.default_rng(0).multinomial(count, even, size=resamples)
        scaled = self.scaled(np.concatenate([np.ones((1, count)), resampled]))
        if costs is not None:
            scaled = scaled * costs
        # Resamples of questions that are all solved, or all hopeless, have no noise to compare, but
        # what rounding leaves.
        there = scaled[:, against : against + 1] > 1e-9 * scaled[0, against]
        values = np.where(there, 1.0 - scaled / np.where(there, scaled[:, [against]], 1.0), np.nan)
        with warnings.catch_warnings():
            # An arm that can't be compared in any resample has no interval either.
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
    """Noise of every arm's estimate over the groups of a pool, an entry for each of its cells.

    Args:
      groups: which traces these are (`partitions`), at least two groups each.
      reference: the arm, unbiased and of little noise, whose expectation is called g.
    """
    cells = zip(grams, advantages.swapaxes(0, 1))
    found = [_moments(gram, of_cell, groups, reference) for gram, of_cell in cells]
    variance, own, shared, parts = map(np.stack, zip(*found))
    return Noise(questions, variance, own, shared, own[:, reference], parts, factors)


def by_question(pools: Sequence[Noise]) -> Noise:
    """Sums over the entries of each question of each pool: clusters of the bootstrap."""
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
    """Var[A] / Var[returns] over all segments with tokens: what the paper plots."""
    spread = float(np.var(returns[mask]))
    return float(np.var(advantages[mask])) / spread if spread else 0.0


def squared_error(
    values: Float[np.ndarray, "Q N"], returns: Float[np.ndarray, "Q N"]
) -> tuple[float, float, float]:
    """Debiased v^2 of values V against the expectation of returns R.

        v^2 = mean_q [ (mean_i (R_i - V_i))^2 - var_i(R_i - V_i) / N ]

    With it its standard error over questions, and sigma^2 = mean_q var_i(R_i - V_i).
    """
    residual = np.asarray(returns, np.float64) - values
    spread = residual.var(1, ddof=1)
    each = residual.mean(1) ** 2 - spread / residual.shape[1]
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each))), float(spread.mean())
