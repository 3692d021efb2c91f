"""Estimates from graded samples: pass@k, maj@k, and accuracy over a range of budgets."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.evaluation.intervals import bootstrap_intervals, rate_intervals, ratio_interval
from bacr_jax.evaluation.samples import Graded, interval, measured, number
from bacr_jax.types import NO_BUDGET, Poll

Verdicts = Bool[np.ndarray, "n samples"] | Float[np.ndarray, "n samples"]


def pass_at_k(correct: Verdicts, k: int) -> Float[np.ndarray, "n"]:
    """Probability that at least one of k samples is correct, for each problem.

    Unbiased (arXiv 2107.03374, Eq. 1): with c correct among s samples,

        1 - C(s - c, k) / C(s, k)

    Of scores in [0, 1] it is the expected best score of k samples, which is the same for scores
    that are all 0 or 1: with the scores x_1 <= ... <= x_s,

        sum_i x_i C(i - 1, k - 1) / C(s, k)
    """
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k: found {k} for {samples} samples; write 1 to {samples}")
    subsets = math.comb(samples, k)
    if correct.dtype != bool:
        best = np.array([math.comb(i, k - 1) / subsets for i in range(samples)])
        return np.sort(correct, axis=1) @ best
    none = [math.comb(samples - int(c), k) / subsets for c in correct.sum(1)]
    return 1.0 - np.array(none, np.float64)


@functools.lru_cache(maxsize=65536)
def _wins_at_k(own: int, others: tuple[int, ...], blank: int, k: int) -> float:
    """Probability that an answer which `own` samples give wins the vote of k, drawn without return.

    For every number v of its votes, and every other answer in turn, `ways[t, d]` counts the ways to
    draw d of the other samples such that no answer has more than v, and t have v; of a tie of t + 1
    it wins that share.
    """
    share = 0.0
    for v in range(1, min(own, k) + 1):
        rest, tied = k - v, min(sum(c >= v for c in others), k // v - 1)
        ways = np.zeros((tied + 1, rest + 1))
        for d in range(min(blank, rest) + 1):
            ways[0, d] = math.comb(blank, d)
        for count in others:
            new = np.zeros_like(ways)
            for j in range(min(count, v, rest) + 1):
                drawn = math.comb(count, j) * ways[:, : rest + 1 - j]
                if j < v:
                    new[:, j:] += drawn
                else:
                    new[1:, j:] += drawn[:-1]
            ways = new
        won = float((ways[:, rest] / np.arange(1, tied + 2)).sum())
        share += math.comb(own, v) * won
    return share / math.comb(own + sum(others) + blank, k)


def majority_at_k(
    answers: Int[np.ndarray, "n samples"], correct: Verdicts, k: int
) -> Float[np.ndarray, "n"]:
    """Probability that the most frequent answer of k samples is correct, for each problem.

    Unbiased: the mean over all subsets of k of the samples, counted and not drawn. A tie is broken
    by chance, so that it counts with the share of right answers among those tied. Samples without
    an answer have no vote; a subset without any is wrong.

    Of scores in [0, 1] it is the expected score of the most frequent answer: an answer that got
    several scores has their mean.

    Args:
      answers: number of the answer each sample gives, equal answers having equal numbers (within a
        problem); -1 for no answer.
      correct: verdicts or scores.
    """
    samples = answers.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k: found {k} for {samples} samples; write 1 to {samples}")
    shares = np.zeros(len(answers))
    for place, (row, verdicts) in enumerate(zip(answers, correct)):
        given, counts = np.unique(row[row >= 0], return_counts=True)
        votes = counts.tolist()
        for index, answer in enumerate(given):
            # In an order in which problems whose votes fall alike are found again.
            others = tuple(sorted(votes[:index] + votes[index + 1 :]))
            if score := float(verdicts[row == answer].mean()):
                blank = samples - sum(votes)
                shares[place] += score * _wins_at_k(votes[index], others, blank, k)
    return shares


def anytime_weights(budgets: Sequence[int]) -> Float[np.ndarray, "2 budgets"]:
    """Weight of the accuracy at each budget in two numbers that sum up a range of budgets.

    The mean is plain. The area is the mean height of the curve of accuracy against log2(budget), by
    trapezoids: every doubling of the budget counts alike, however the budgets are spaced.

    Returns:
      Rows mean and area, each summing to 1.
    """
    if not budgets or budgets[0] < 1 or any(b <= a for a, b in zip(budgets, budgets[1:])):
        raise ValueError(f"budgets: found {list(budgets)}; write rising numbers from 1 on")
    mean = np.full(len(budgets), 1.0 / len(budgets))
    if len(budgets) == 1:
        return np.stack([mean, mean])
    gaps = np.diff(np.log2(np.asarray(budgets, np.float64)))
    area = (np.append(gaps, 0.0) + np.append(0.0, gaps)) / (2.0 * gaps.sum())
    return np.stack([mean, area])


def answer_clusters(
    answers: Sequence[Sequence[str | None]], correct: Verdicts, grader: Any, poll: Poll = None
) -> Int[np.ndarray, "n samples"]:
    """Numbers equal answers equally, within each problem.

    Right answers equal the reference and so one another. Wrong answers are equal when the grader,
    in its strict mode, takes one for the other. Each joins the first cluster whose first answer it
    equals: the clusters of all pairs where equality is transitive, as it nearly always is (28 % is
    28 and 0.28). A verifier of one's own may not be asked that: under scores, answers are equal
    when they are written alike, blanks aside.

    Returns:
      0 for right answers, 1, 2, ... for wrong ones in the order of their first appearance, -1 for
      no answer. Under scores, 0, 1, 2, ... for all of them.
    """
    if correct.dtype != bool:
        return _written_alike(answers)
    left = [
        list(dict.fromkeys(a for a, c in zip(row, right) if a is not None and not c))
        for row, right in zip(answers, correct)
    ]
    numbers: list[dict[str | None, int]] = [{None: -1} for _ in left]
    cluster = 0
    while any(left):
        cluster += 1
        # All problems in one call, which the grader's workers share.
        pairs = [(known, rest[0], a) for known, rest in zip(numbers, left) for a in rest[1:]]
        texts = [f"<answer>{answer}</answer>" for *_, answer in pairs]
        verdicts = grader.grade(texts, [first for _, first, _ in pairs], mode="strict", poll=poll)
        for known, rest in zip(numbers, left):
            known |= dict.fromkeys(rest[:1], cluster)
        for (known, _, answer), verdict in zip(pairs, verdicts):
            if verdict.correct:
                known[answer] = cluster
        left = [[a for a in rest if a not in known] for known, rest in zip(numbers, left)]
    rows = zip(answers, correct, numbers)
    found = [[0 if c else known[a] for a, c in zip(row, right)] for row, right, known in rows]
    return np.array(found).reshape(correct.shape)


def _written_alike(answers: Sequence[Sequence[str | None]]) -> Int[np.ndarray, "n samples"]:
    rows = []
    for row in answers:
        texts = [None if text is None else " ".join(text.split()) for text in row]
        names: dict[str | None, int] = {None: -1}
        rows.append([names.setdefault(text, len(names) - 1) for text in texts])
    return np.array(rows, np.int64)


_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


def _accuracy_if(
    name: str, correct: np.ndarray, chosen: Bool[np.ndarray, "n samples"]
) -> dict[str, Any]:
    """Mean score among some answers, with its interval; None where there are none of them."""
    mean, ends = None, None
    if chosen.any():
        mean = number(correct[chosen].mean())
        ends = interval(ratio_interval(np.where(chosen, correct, 0.0).mean(1), chosen.mean(1)))
    return {f"accuracy_if_{name}": mean, f"if_{name}_ci95": ends}


def completion(graded: Graded) -> dict[str, Any]:
    """How many traces and answers came to an end, and accuracy among these traces and the others.

    docs/evaluation.md says what each number is, as of `adherence`.
    """
    complete = ~graded.forced
    rates = np.column_stack([complete.mean(1), graded.finished.mean(1)])
    names = ("completion_rate", "completion_ci95"), ("closed_rate", "closed_ci95")
    return {
        **measured(names, rates, rate_intervals(rates)),
        **_accuracy_if("complete", graded.correct, complete),
        **_accuracy_if("cut", graded.correct, graded.forced),
    }


def adherence(graded: Graded) -> dict[str, Any]:
    """Thinking tokens used against those requested, which a grace window lets them exceed."""
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
