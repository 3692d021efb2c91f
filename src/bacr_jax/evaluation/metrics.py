"""Estimates metrics from graded samples.

The metrics are pass@k, maj@k, aggregates of accuracy over budgets, completion rates and budget
adherence. `summary` calls these functions for every setting (decoding mode and budget) of an
evaluation. They do not access any files.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.evaluation.intervals import (
    bootstrap_intervals,
    rate_intervals,
    ratio_interval,
    weighted_mean_interval,
)
from bacr_jax.evaluation.samples import Graded, interval, measured, number
from bacr_jax.types import NO_BUDGET, Poll

# Verdicts, or scores in [0, 1], with shape [problems, samples].
Verdicts = Bool[np.ndarray, "n samples"] | Float[np.ndarray, "n samples"]
# Cluster number of each sample's answer, with shape [problems, samples].
Clusters = Int[np.ndarray, "n samples"]
# One estimate per problem.
Estimates = Float[np.ndarray, "n"]
# Largest number of samples of which every number of subsets fits into a float: C(1029, 514) is
# 1.4e308.
_MOST_COUNTED = 1029


def _check_subset_size(k: int, samples: int) -> None:
    """Raises ValueError if k is not in [1, samples]."""
    if not 1 <= k <= samples:
        raise ValueError(
            f"k: found {k}, but with {samples} samples per problem k must be at most {samples}; "
            f"use 1 to {samples}"
        )


def pass_at_k(correct: Verdicts, k: int) -> Estimates:
    """Estimates the probability that at least one of k samples is correct, for each problem.

    The estimator is unbiased (arXiv 2107.03374, Eq. 1). With c correct samples among s samples, and
    binomial coefficients C(n, k), it is

        1 - C(s - c, k) / C(s, k)

    For scores in [0, 1], it is the expected maximum score of k samples. With the scores x_i in
    ascending order, it is

        sum_i x_i C(i - 1, k - 1) / C(s, k)

    The formulas agree if all scores are 0 or 1.

    Args:
      correct: verdicts or scores, with shape [n, s].
      k: number of samples per subset.

    Returns:
      Estimates with shape [n].

    Raises:
      ValueError: if k is not in [1, s].
    """
    samples = correct.shape[1]
    _check_subset_size(k, samples)
    subsets = math.comb(samples, k)
    if correct.dtype != bool:
        weights = [math.comb(i, k - 1) / subsets for i in range(samples)]
        scores = np.sort(correct, axis=1)
        return scores @ np.array(weights)
    none_correct = []
    for num_correct in correct.sum(1):
        wrong = samples - int(num_correct)
        none_correct.append(math.comb(wrong, k) / subsets)
    return 1.0 - np.array(none_correct, np.float64)


@functools.lru_cache(maxsize=65536)
def _win_probability(votes: int, others: tuple[int, ...], blank: int, k: int) -> float:
    """Returns the probability that an answer wins a vote of k samples drawn without replacement.

    If the answer ties with t other answers, the win counts as 1 / (t + 1).

    With up to `_MOST_COUNTED` samples, subsets are counted. The numbers of subsets of more samples
    don't fit into a float. Therefore every sample is drawn independently with the same probability
    instead. Given that k samples are drawn, all subsets of k samples are equally likely for any
    probability. The probability k / (samples + 1) makes it likely that k samples are drawn.

    Args:
      votes: number of samples with this answer.
      others: number of samples of every other answer.
      blank: number of samples without an answer.
      k: number of samples that vote.
    """
    samples = votes + sum(others) + blank
    rate = None if samples <= _MOST_COUNTED else k / (samples + 1)
    vote_weights = _draw_weights(votes, rate)
    share = 0.0
    for drawn_votes in range(1, min(votes, k) + 1):
        ways = _ways_to_lose_or_tie(others, blank, drawn_votes, k, rate)
        wins = float((ways / np.arange(1, len(ways) + 1)).sum())
        share += vote_weights[drawn_votes] * wins
    return share / _draw_weights(samples, rate)[k]


@functools.lru_cache(maxsize=128)
def _draw_weights(count: int, rate: float | None) -> Sequence[float]:
    """Returns the weight of drawing d of `count` samples, for d from 0 to `count`.

    Args:
      count: number of samples.
      rate: probability with which each sample is drawn, in (0, 1). The weight is then the
        probability of d. If None, the weight is the number of choices of d samples.
    """
    if rate is None:
        return [math.comb(count, drawn) for drawn in range(count + 1)]
    # The probabilities are computed from the most probable number outwards, so that only negligible
    # probabilities underflow.
    drawn_before = np.arange(count)
    # Probability of drawing d + 1 samples, divided by the probability of drawing d samples.
    ratios = (count - drawn_before) / (drawn_before + 1) * (rate / (1 - rate))
    mode = int((count + 1) * rate)
    above = np.cumprod(ratios[mode:])
    below = np.cumprod(1 / ratios[:mode][::-1])[::-1]
    relative = np.concatenate([below, [1.0], above])
    return [float(weight) for weight in relative / relative.sum()]


def _ways_to_lose_or_tie(
    others: tuple[int, ...], blank: int, votes: int, k: int, rate: float | None
) -> Float[np.ndarray, "n"]:
    """Weighs the choices of k - `votes` other samples in which no other answer exceeds `votes`.

    Args:
      others: number of samples of every other answer.
      blank: number of samples without an answer.
      votes: number of samples with the answer that is tested.
      k: number of samples that vote.
      rate: see `_draw_weights`.

    Returns:
      An array whose entry t is the total weight of the choices in which exactly t other answers
      have `votes` votes.
    """
    rest = k - votes
    max_tied = min(sum(count >= votes for count in others), k // votes - 1)
    # The loop below adds the distinct answers one after the other. ways[t, d] is the weight of the
    # choices of d samples among the answers so far such that exactly t answers get `votes` samples.
    ways = np.zeros((max_tied + 1, rest + 1))
    for num_drawn, weight in enumerate(_draw_weights(blank, rate)[: rest + 1]):
        ways[0, num_drawn] = weight
    for count in others:
        extended = np.zeros_like(ways)
        weights = _draw_weights(count, rate)[: min(votes, rest) + 1]
        for num_drawn, weight in enumerate(weights):
            draws = weight * ways[:, : rest + 1 - num_drawn]
            if num_drawn < votes:
                extended[:, num_drawn:] += draws
            else:
                extended[1:, num_drawn:] += draws[:-1]
        ways = extended
    return ways[:, rest]


def majority_at_k(answers: Clusters, correct: Verdicts, k: int) -> Estimates:
    """Estimates the probability that the majority answer of k samples is correct (maj@k).

    The estimator is unbiased, because it is the exact mean over all subsets of k samples. Ties are
    broken at random, so a tie counts as the share of correct answers among the tied answers.
    Samples without an answer do not vote. A subset without any answer counts as wrong.

    For scores in [0, 1], it is the expected score of the majority answer. If the samples of an
    answer have different scores, their mean is used.

    Args:
      answers: cluster number of each sample's answer, with shape [n, samples]. Equal answers to a
        problem have equal numbers, and -1 marks a missing answer.
      correct: verdicts or scores, with shape [n, samples].
      k: number of samples that vote.

    Returns:
      Estimates with shape [n].

    Raises:
      ValueError: if k is not in [1, samples].
    """
    samples = answers.shape[1]
    _check_subset_size(k, samples)
    shares = np.zeros(len(answers))
    for problem, (row, verdicts) in enumerate(zip(answers, correct)):
        distinct_answers, counts = np.unique(row[row >= 0], return_counts=True)
        votes = counts.tolist()
        blank = samples - sum(votes)
        for index, answer in enumerate(distinct_answers):
            score = float(verdicts[row == answer].mean())
            if not score:
                continue
            # Sorted, so that problems with the same vote counts share a cache entry.
            others = tuple(sorted(votes[:index] + votes[index + 1 :]))
            shares[problem] += score * _win_probability(votes[index], others, blank, k)
    return shares


def anytime_weights(budgets: Sequence[int]) -> Float[np.ndarray, "2 budgets"]:
    """Returns the weight of each budget's accuracy in two aggregates: the mean and the area.

    The mean weights all budgets equally. The area is the mean height of the curve of accuracy over
    log2(budget), computed with the trapezoidal rule. In the area, every doubling of the budget has
    the same weight, regardless of the spacing of the budgets.

    Args:
      budgets: budgets in tokens, in ascending order. Each budget is at least 1.

    Returns:
      Weights with shape [2, budgets]. Row 0 contains the weights of the mean and row 1 the weights
      of the area. Each row sums to 1.

    Raises:
      ValueError: if the budgets are empty, not in ascending order, or less than 1.
    """
    rising = all(low < high for low, high in itertools.pairwise(budgets))
    if not budgets or budgets[0] < 1 or not rising:
        raise ValueError(
            f"budgets: found {list(budgets)}; pass at least one budget, in increasing order and "
            "above 0"
        )
    count = len(budgets)
    mean = np.full(count, 1.0 / count)
    if count == 1:
        return np.stack([mean, mean])
    positions = np.log2(np.asarray(budgets, np.float64))
    gaps = np.diff(positions)
    gap_after = np.append(gaps, 0.0)
    gap_before = np.append(0.0, gaps)
    area = (gap_after + gap_before) / (2.0 * gaps.sum())
    return np.stack([mean, area])


def answer_clusters(
    answers: Sequence[Sequence[str | None]], correct: Verdicts, grader: Any, poll: Poll = None
) -> Clusters:
    """Numbers the answers of each problem such that equal answers have equal numbers.

    Correct answers all equal the reference, so they form one cluster. Two wrong answers are equal
    if the grader accepts one of them with the other as the reference, in strict mode. Each wrong
    answer is assigned to the first cluster whose first answer it equals. If equality is transitive,
    this gives the same clusters as comparing all pairs. Equality is nearly always transitive. An
    exception is 28 %, which equals both 28 and 0.28.

    Scores that are not booleans come from a user's verifier, which may not support such
    comparisons. In this case, answers are equal if their texts are equal up to whitespace.

    Args:
      answers: extracted answer of each sample by problem, or None for a missing answer.
      correct: verdicts or scores, with shape [n, samples].
      grader: grader that compares wrong answers.
      poll: called regularly. It may raise an exception to stop.

    Returns:
      Cluster numbers with shape [n, samples]. With verdicts, correct answers have number 0, and
      clusters of wrong answers have numbers 1, 2, ... in order of first appearance. With scores,
      all clusters have numbers 0, 1, 2, ... Missing answers have number -1.
    """
    if correct.dtype != bool:
        return _number_equal_texts(answers)
    # Distinct wrong answers of each problem that have not been assigned a number.
    remaining: list[list[str]] = []
    for row, verdicts in zip(answers, correct):
        wrong = [answer for answer, right in zip(row, verdicts) if answer is not None and not right]
        remaining.append(list(dict.fromkeys(wrong)))
    numbers: list[dict[str | None, int]] = [{None: -1} for _ in remaining]
    cluster = 0
    while any(remaining):
        cluster += 1
        _number_cluster(cluster, numbers, remaining, grader, poll)
        remaining = [
            [answer for answer in rest if answer not in numbered]
            for numbered, rest in zip(numbers, remaining)
        ]
    clusters = [
        [0 if right else numbered[answer] for answer, right in zip(row, verdicts)]
        for row, verdicts, numbered in zip(answers, correct, numbers)
    ]
    return np.array(clusters).reshape(correct.shape)


def _number_cluster(
    cluster: int,
    numbers: Sequence[dict[str | None, int]],
    remaining: Sequence[Sequence[str]],
    grader: Any,
    poll: Poll,
) -> None:
    """Assigns `cluster` to each problem's first remaining answer and to all answers equal to it."""
    pairs = [(numbered, rest[0], a) for numbered, rest in zip(numbers, remaining) for a in rest[1:]]
    # Grade the answers of all problems in one call, so that the grader's workers share the
    # load.
    texts = [f"<answer>{answer}</answer>" for *_, answer in pairs]
    references = [first for _, first, _ in pairs]
    verdicts = grader.grade(texts, references, mode="strict", poll=poll)
    for numbered, rest in zip(numbers, remaining):
        numbered |= dict.fromkeys(rest[:1], cluster)
    for (numbered, _, answer), verdict in zip(pairs, verdicts):
        if verdict.correct:
            numbered[answer] = cluster


def _number_equal_texts(answers: Sequence[Sequence[str | None]]) -> Clusters:
    """Assigns equal numbers to texts that are equal up to whitespace, and -1 to missing answers."""
    rows = []
    for row in answers:
        texts = [None if text is None else " ".join(text.split()) for text in row]
        numbers: dict[str | None, int] = {None: -1}
        rows.append([numbers.setdefault(text, len(numbers) - 1) for text in texts])
    return np.array(rows, np.int64)


_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


def _accuracy_if(
    name: str, correct: np.ndarray, chosen: Bool[np.ndarray, "n samples"]
) -> dict[str, Any]:
    """Returns the mean score of the selected answers and its 95 % interval.

    Both are None if no answer is selected.
    """
    mean_key = f"accuracy_if_{name}"
    interval_key = f"if_{name}_ci95"
    if not chosen.any():
        return {mean_key: None, interval_key: None}
    chosen_scores = np.where(chosen, correct, 0.0).mean(1)
    ends = ratio_interval(chosen_scores, chosen.mean(1))
    return {mean_key: number(correct[chosen].mean()), interval_key: interval(ends)}


def completion(graded: Graded) -> dict[str, Any]:
    """Returns the fractions of traces and answers that ended naturally, and accuracy by ending.

    An end is natural if it was not forced by the budget or by the maximum length. docs/metrics.md
    defines each value.
    """
    complete = ~graded.forced
    rates = np.column_stack([complete.mean(1), graded.finished.mean(1)])
    names = (("completion_rate", "completion_ci95"), ("closed_rate", "closed_ci95"))
    return {
        **measured(names, rates, rate_intervals(rates)),
        **_accuracy_if("complete", graded.correct, complete),
        **_accuracy_if("cut", graded.correct, graded.forced),
    }


def thinking_by_verdict(graded: Graded) -> dict[str, Any]:
    """Returns the mean thinking tokens of right and of wrong answers, with their 95 % intervals.

    A mean and its interval are None if there is no such answer. An answer with a score s between 0
    and 1 counts as right with weight s, and as wrong with weight 1 - s.
    """
    right = graded.correct.astype(np.float64)
    entries: dict[str, Any] = {}
    for name, weights in (("right", right), ("wrong", 1.0 - right)):
        mean = None
        ends = None
        if weights.any():
            sums = (weights * graded.thinking).sum(1)
            totals = weights.sum(1)
            mean = number(sums.sum() / totals.sum())
            ends = interval(weighted_mean_interval(sums, totals))
        entries |= {f"thinking_if_{name}": mean, f"thinking_{name}_ci95": ends}
    return entries


def adherence(graded: Graded) -> dict[str, Any]:
    """Compares the number of thinking tokens with the budget.

    Thinking may exceed the budget by a grace window. docs/metrics.md defines each value.
    """
    used = graded.thinking
    requested = None if graded.budget == NO_BUDGET else graded.budget
    excess = np.zeros_like(used) if requested is None else np.maximum(used - requested, 0)
    ratio: dict[str, Any] = {"ratio": None, "ratio_ci95": None}
    if requested:
        ratios = used.mean(1, keepdims=True) / requested
        ratio = measured([("ratio", "ratio_ci95")], ratios, bootstrap_intervals(ratios))
    return {
        "requested": requested,
        "used": number(used.mean()),
        **ratio,
        "quantiles": {name: number(np.quantile(used, q)) for name, q in _QUANTILES.items()},
        "over_share": number((excess > 0).mean()),
        "mean_excess": number(excess.mean()),
    }
