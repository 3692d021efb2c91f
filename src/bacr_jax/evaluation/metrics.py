"""Estimates from graded samples, and how sure they are.

Samples of one problem resemble each other, so that every interval here counts problems, and takes
samples for what they add.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal


def wilson_interval(successes: float | int, trials: float | int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion: sound also near 0 and 1.

    All p with |p_hat - p| <= z sqrt(p (1 - p) / n), (Wilson 1927).

    Args:
      successes: number of successes; may be fractional, as may be the trials.
      trials: number of independent trials n, more than 0.

    Returns:
      Lower and upper end, in [0, 1].
    """
    rate, z2 = successes / trials, Z95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * np.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    # At 0 and 1 the formula gives the rate itself, but for rounding.
    return min(max(float(centre - half), 0.0), rate), max(min(float(centre + half), 1.0), rate)


def accuracy_interval(correct: Float[np.ndarray, "n samples"]) -> tuple[float, float]:
    """95 % interval of the accuracy over problems like these.

    Wilson's interval with the effective number of trials, that is the number of independent ones
    whose mean would vary as much:

        n_eff = p (1 - p) / v,   v = sum_i (x_i - p)^2 / n^2,

    x_i being the share of correct samples of problem i. One sample per problem gives n_eff = n.
    Equal shares (v = 0) give the number of samples, the most there can be; in a bootstrap over
    problems the interval would then have no width at all.

    Args:
      correct: verdicts, 0 or 1 (or a share of credit in between), problems by samples.

    Returns:
      Lower and upper end, in [0, 1].
    """
    problems, samples = correct.shape
    rates = correct.mean(1, dtype=np.float64)
    mean = float(rates.mean())
    variance = float(((rates - mean) ** 2).sum()) / problems**2
    most = float(problems * samples)
    if mean in (0.0, 1.0):
        # All right or all wrong says nothing about how alike the samples of a problem are.
        trials = float(problems)
    else:
        trials = min(mean * (1.0 - mean) / variance, most) if variance > 0.0 else most
    return wilson_interval(mean * trials, trials)


def paired_difference_interval(
    one: Float[np.ndarray, "n samples"], other: Float[np.ndarray, "n other_samples"]
) -> tuple[float, float]:
    """95 % interval of accuracy(one) - accuracy(other) on the same problems.

    The normal interval of the mean of the differences d_i, after adding two imaginary problems,
    spread evenly over the four ways in which two verdicts can turn out (Agresti and Min 2005),
    which keeps its coverage where few problems differ:

        m = sum d_i / (n + 2),   v = (sum d_i^2 + 1) / (n + 2) - m^2,   m +- z sqrt(v / (n + 2))

    Args:
      one: verdicts of one policy, problems by samples.
      other: verdicts of the other, the same problems in the same order.

    Returns:
      Lower and upper end, in [-1, 1]. It leaves out 0 where the policies differ.
    """
    differences = one.mean(1, dtype=np.float64) - other.mean(1, dtype=np.float64)
    count = len(differences) + 2
    mean = float(differences.sum()) / count
    variance = (float((differences**2).sum()) + 1.0) / count - mean**2
    half = Z95 * math.sqrt(variance / count)
    return max(mean - half, -1.0), min(mean + half, 1.0)


def pass_at_k_by_problem(correct: Bool[np.ndarray, "n samples"], k: int) -> Float[np.ndarray, "n"]:
    """Probability that at least one of k samples is correct, for each problem.

    Unbiased (arXiv 2107.03374, Eq. 1): with c correct among s samples,

        1 - C(s - c, k) / C(s, k)

    Args:
      correct: verdicts, problems by samples.
      k: 1 .. samples.

    Raises:
      ValueError: more samples asked for than there are.
    """
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k: found {k} for {samples} samples; write 1 to {samples}")
    subsets = math.comb(samples, k)
    none = [math.comb(samples - int(c), k) / subsets for c in correct.sum(1)]
    return 1.0 - np.array(none, np.float64)


def pass_at_k(correct: Bool[np.ndarray, "n samples"], k: int) -> float:
    """The mean over problems of `pass_at_k_by_problem`."""
    return float(pass_at_k_by_problem(correct, k).mean())


@functools.lru_cache(maxsize=65536)
def _vote_of_k(counts: tuple[int, ...], right: tuple[bool, ...], blank: int, k: int) -> float:
    """Probability that the vote of k samples drawn without replacement is right.

    For every number v of votes that can win, and every answer in turn, `ways[t, u, d]` counts the
    ways to draw d samples such that no answer has more than v, t have v, and u of these are right.
    """
    total = math.comb(blank + sum(counts), k)
    share = 0.0
    for v in range(1, min(max(counts, default=0), k) + 1):
        tied = min(sum(c >= v for c in counts), k // v)
        tied_right = min(sum(c >= v and r for c, r in zip(counts, right)), tied)
        ways = np.zeros((tied + 1, tied_right + 1, k + 1))
        for d in range(min(blank, k) + 1):
            ways[0, 0, d] = math.comb(blank, d)
        for count, is_right in zip(counts, right):
            new = np.zeros_like(ways)
            for j in range(min(count, v, k) + 1):
                drawn = math.comb(count, j) * ways[..., : k + 1 - j]
                if j < v:
                    new[..., j:] += drawn
                elif is_right:
                    new[1:, 1:, j:] += drawn[:-1, :-1]
                else:
                    new[1:, :, j:] += drawn[:-1]
            ways = new
        t = np.arange(1, tied + 1)[:, None]
        u = np.arange(tied_right + 1)[None, :]
        share += float((ways[1:, :, k] * (u / t)).sum()) / total
    return share


def majority_at_k_by_problem(
    answers: Int[np.ndarray, "n samples"], correct: Bool[np.ndarray, "n samples"], k: int
) -> Float[np.ndarray, "n"]:
    """Probability that the most frequent answer of k samples is correct, for each problem.

    Unbiased: the mean over all subsets of k of the samples, counted and not drawn. A tie is broken
    by chance, so that it counts with the share of right answers among those tied. Samples without
    an answer have no vote; a subset without any is wrong.

    Args:
      answers: number of the answer each sample gives, equal answers having equal numbers (within a
        problem); -1 for no answer.
      correct: verdicts, equal for equal answers.
      k: 1 .. samples.

    Raises:
      ValueError: more samples asked for than there are, or an answer with both verdicts.
    """
    samples = answers.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k: found {k} for {samples} samples; write 1 to {samples}")
    shares = []
    for row, verdicts in zip(answers, correct):
        given = np.unique(row[row >= 0])
        right = [bool(verdicts[row == answer][0]) for answer in given]
        if any((verdicts[row == a] != r).any() for a, r in zip(given, right)):
            raise ValueError("one answer is both right and wrong; write equal verdicts for it")
        counts = [int((row == answer).sum()) for answer in given]
        # Problems whose votes fall alike have equal shares: in this order they are found again.
        ballot = sorted(zip(counts, right), reverse=True)
        tallies, verdict = tuple(c for c, _ in ballot), tuple(r for _, r in ballot)
        shares.append(_vote_of_k(tallies, verdict, int((row < 0).sum()), k))
    return np.array(shares, np.float64)


def majority_at_k(
    answers: Int[np.ndarray, "n samples"], correct: Bool[np.ndarray, "n samples"], k: int
) -> float:
    """The mean over problems of `majority_at_k_by_problem`."""
    return float(majority_at_k_by_problem(answers, correct, k).mean())


def anytime_weights(budgets: Sequence[int]) -> Float[np.ndarray, "2 budgets"]:
    """Weight of the accuracy at each budget in the two numbers of `AnytimeAccuracy`.

    Args:
      budgets: rising thinking budgets, in tokens.

    Returns:
      Rows mean and area, each summing to 1.

    Raises:
      ValueError: no budgets, or budgets that do not rise.
    """
    if not budgets:
        raise ValueError("budgets: found none; write rising numbers from 1 on")
    if budgets[0] < 1 or any(b <= a for a, b in zip(budgets, budgets[1:])):
        raise ValueError(f"budgets: found {list(budgets)}; write rising numbers from 1 on")
    mean = np.full(len(budgets), 1.0 / len(budgets))
    if len(budgets) == 1:
        return np.stack([mean, mean])
    gaps = np.diff(np.log2(np.asarray(budgets, np.float64)))
    area = (np.append(gaps, 0.0) + np.append(0.0, gaps)) / (2.0 * gaps.sum())
    return np.stack([mean, area])


class AnytimeAccuracy(NamedTuple):
    """Accuracy over a range of budgets in one number.

    Attributes:
      mean: plain mean over the budgets.
      area: mean height of the curve of accuracy against log2(budget), by trapezoids: every doubling
        of the budget counts alike, however the budgets are spaced.
    """

    mean: float
    area: float


def anytime_accuracy(budgets: Sequence[int], accuracies: Sequence[float]) -> AnytimeAccuracy:
    """Summarises accuracy by budget.

    Args:
      budgets: rising thinking budgets, in tokens.
      accuracies: accuracy at each.

    Raises:
      ValueError: no budgets, lengths that differ, or budgets that do not rise.
    """
    if len(budgets) != len(accuracies):
        raise ValueError(f"found {len(budgets)} budgets and {len(accuracies)} accuracies")
    mean, area = anytime_weights(budgets) @ np.asarray(accuracies, np.float64)
    return AnytimeAccuracy(float(mean), float(area))
