"""Estimates from graded samples: pass@k, maj@k, accuracy over budgets, completion, adherence.

`summary` calls these functions for every setting of an evaluation; they read no files.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.evaluation.intervals import bootstrap_intervals, rate_intervals, ratio_interval
from bacr_jax.evaluation.samples import Graded, interval, measured, number
from bacr_jax.types import NO_BUDGET, Poll

# Verdicts, or scores in [0, 1], of each problem's samples.
Verdicts = Bool[np.ndarray, "n samples"] | Float[np.ndarray, "n samples"]
# Number of each sample's answer.
Clusters = Int[np.ndarray, "n samples"]
# One estimate of each problem.
Estimates = Float[np.ndarray, "n"]


def pass_at_k(correct: Verdicts, k: int) -> Estimates:
    """Estimates the probability that at least one of k samples is correct, for each problem.

    The estimate is unbiased (arXiv 2107.03374, Eq. 1): with c correct among s samples,

        1 - C(s - c, k) / C(s, k)

    For scores in [0, 1] it is the expected best score of k samples: with x_1 <= ... <= x_s,

        sum_i x_i C(i - 1, k - 1) / C(s, k)

    Both formulas agree if all scores are 0 or 1.

    Raises:
      ValueError: k is not in [1, s].
    """
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k: found {k} for {samples} samples; write 1 to {samples}")
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

    An answer that ties with t others counts with the share 1 / (t + 1).

    Args:
      votes: samples that give the answer.
      others: samples of every other answer.
      blank: samples without an answer.
      k: samples that vote.
    """
    share = 0.0
    for drawn_votes in range(1, min(votes, k) + 1):
        ways = _ways_to_lose_or_tie(others, blank, drawn_votes, k)
        wins = float((ways / np.arange(1, len(ways) + 1)).sum())
        share += math.comb(votes, drawn_votes) * wins
    return share / math.comb(votes + sum(others) + blank, k)


def _ways_to_lose_or_tie(
    others: tuple[int, ...], blank: int, votes: int, k: int
) -> Float[np.ndarray, "n"]:
    """Counts the draws of k - `votes` other samples in which no other answer has more than `votes`.

    Returns:
      Entry t is the number of draws in which exactly t other answers have `votes`.
    """
    rest = k - votes
    max_tied = min(sum(count >= votes for count in others), k // votes - 1)
    # ways[t, d]: draws of d samples among the answers so far, t of which have `votes`.
    ways = np.zeros((max_tied + 1, rest + 1))
    for num_drawn in range(min(blank, rest) + 1):
        ways[0, num_drawn] = math.comb(blank, num_drawn)
    for count in others:
        extended = np.zeros_like(ways)
        for num_drawn in range(min(count, votes, rest) + 1):
            draws = math.comb(count, num_drawn) * ways[:, : rest + 1 - num_drawn]
            if num_drawn < votes:
                extended[:, num_drawn:] += draws
            else:
                extended[1:, num_drawn:] += draws[:-1]
        ways = extended
    return ways[:, rest]


def majority_at_k(answers: Clusters, correct: Verdicts, k: int) -> Estimates:
    """Estimates the probability that the most frequent answer of k samples is correct, per problem.

    The estimate is unbiased: it is the exact mean over all subsets of k samples. A tie is broken by
    chance, so it counts with the share of correct answers among the tied answers. Samples without
    an answer have no vote. A subset without an answer is wrong.

    For scores in [0, 1] it is the expected score of the most frequent answer. An answer with
    different scores has their mean.

    Args:
      answers: number of each sample's answer. Equal answers of a problem have equal numbers; -1
        marks no answer.
      correct: verdicts or scores.

    Raises:
      ValueError: k is not in [1, samples].
    """
    samples = answers.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k: found {k} for {samples} samples; write 1 to {samples}")
    shares = np.zeros(len(answers))
    for problem, (row, verdicts) in enumerate(zip(answers, correct)):
        distinct_answers, counts = np.unique(row[row >= 0], return_counts=True)
        votes = counts.tolist()
        blank = samples - sum(votes)
        for index, answer in enumerate(distinct_answers):
            score = float(verdicts[row == answer].mean())
            if not score:
                continue
            # Sorted, because problems with the same votes then share an entry of the cache.
            others = tuple(sorted(votes[:index] + votes[index + 1 :]))
            shares[problem] += score * _win_probability(votes[index], others, blank, k)
    return shares


def anytime_weights(budgets: Sequence[int]) -> Float[np.ndarray, "2 budgets"]:
    """Returns the weight of each budget's accuracy in two summaries over budgets: mean and area.

    The mean weights all budgets equally. The area is the mean height of the curve of accuracy
    against log2(budget), by the trapezoidal rule. Every doubling of the budget has the same weight
    in it, independently of the spacing of budgets.

    Args:
      budgets: rising budgets in tokens, from 1 on.

    Returns:
      Row 0 has the weights of the mean, row 1 of the area. Each row sums to 1.

    Raises:
      ValueError: the budgets do not rise, or are empty or below 1.
    """
    rising = all(low < high for low, high in itertools.pairwise(budgets))
    if not budgets or budgets[0] < 1 or not rising:
        raise ValueError(f"budgets: found {list(budgets)}; write rising numbers from 1 on")
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
    """Numbers the answers of each problem so that equal answers have equal numbers.

    Correct answers equal the reference, so all of them are one cluster. Two wrong answers are equal
    if the grader accepts one with the other as its reference, in strict mode. A wrong answer joins
    the first cluster whose first answer it equals. These are the clusters of all pairs wherever
    equality is transitive, which is nearly always (an exception: 28 % equals 28 and 0.28).

    Scores that are not booleans come from a user's verifier, which may not support such
    comparisons. Then answers are equal if their texts are equal except for white space.

    Args:
      answers: extracted answers, problems by samples; None for no answer.
      correct: verdicts or scores.
      grader: compares wrong answers.

    Returns:
      For verdicts: 0 for correct answers, 1, 2, ... for clusters of wrong answers in the order of
      first appearance. For scores: 0, 1, 2, ... for all answers. -1 for no answer.
    """
    if correct.dtype != bool:
        return _number_equal_texts(answers)
    # Distinct wrong answers of each problem that have no number yet.
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
    """Numbers each problem's first remaining answer, and the remaining answers equal to it."""
    pairs = [(numbered, rest[0], a) for numbered, rest in zip(numbers, remaining) for a in rest[1:]]
    # One call for all problems, because the grader's workers share its work.
    texts = [f"<answer>{answer}</answer>" for *_, answer in pairs]
    references = [first for _, first, _ in pairs]
    verdicts = grader.grade(texts, references, mode="strict", poll=poll)
    for numbered, rest in zip(numbers, remaining):
        numbered |= dict.fromkeys(rest[:1], cluster)
    for (numbered, _, answer), verdict in zip(pairs, verdicts):
        if verdict.correct:
            numbered[answer] = cluster


def _number_equal_texts(answers: Sequence[Sequence[str | None]]) -> Clusters:
    """Numbers answers by their texts, without regard to white space; -1 for no answer."""
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
    """Returns the mean score of the chosen answers and its interval; None if none are chosen."""
    mean_key = f"accuracy_if_{name}"
    interval_key = f"if_{name}_ci95"
    if not chosen.any():
        return {mean_key: None, interval_key: None}
    chosen_scores = np.where(chosen, correct, 0.0).mean(1)
    ends = ratio_interval(chosen_scores, chosen.mean(1))
    return {mean_key: number(correct[chosen].mean()), interval_key: interval(ends)}


def completion(graded: Graded) -> dict[str, Any]:
    """Returns the shares of thinking and answers that ended by themselves, and accuracy by ending.

    docs/evaluation.md defines each number of this function and of `adherence`.
    """
    complete = ~graded.forced
    rates = np.column_stack([complete.mean(1), graded.finished.mean(1)])
    names = (("completion_rate", "completion_ci95"), ("closed_rate", "closed_ci95"))
    return {
        **measured(names, rates, rate_intervals(rates)),
        **_accuracy_if("complete", graded.correct, complete),
        **_accuracy_if("cut", graded.correct, graded.forced),
    }


def adherence(graded: Graded) -> dict[str, Any]:
    """Compares the thinking tokens used with the budget, which a grace window may exceed."""
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
