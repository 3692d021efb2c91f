"""From graded samples to the numbers of a report, with their intervals."""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.data.question_set import QuestionSet
from bacr_jax.evaluation.answer_clusters import vote_numbers
from bacr_jax.evaluation.intervals import bootstrap_intervals, columns, rate_intervals
from bacr_jax.evaluation.metrics import (
    AnytimeAccuracy,
    anytime_weights,
    majority_at_k_by_problem,
    pass_at_k_by_problem,
)
from bacr_jax.evaluation.samples import SAMPLED, EvalSetting, Sample

# {mode: {budget: entry}}; what tables and pictures read.
Summary = dict[str, dict[str, dict[str, Any]]]
# Beyond these digits, sums depend on the order in which a machine takes them.
_DIGITS = 10


@dataclass(frozen=True)
class Graded:
    """The samples of a cell, problems by samples.

    Attributes:
      ids: identifier of each problem.
      levels: of each problem.
      subjects: of each problem.
      correct: lenient verdicts.
      strict: strict verdicts.
      thinking: thinking tokens.
      total: thinking, forced and answer tokens.
      forced: the budget ended the thinking.
      timed_out: the grader's deadline passed.
      answers: extracted answers, None where there is none.
      paths: how many verdicts each path decided.
    """

    ids: list[str]
    levels: Int[np.ndarray, "n"]
    subjects: list[str]
    correct: Bool[np.ndarray, "n samples"]
    strict: Bool[np.ndarray, "n samples"]
    thinking: Int[np.ndarray, "n samples"]
    total: Int[np.ndarray, "n samples"]
    forced: Bool[np.ndarray, "n samples"]
    timed_out: Bool[np.ndarray, "n samples"]
    answers: list[list[str | None]]
    paths: dict[str, int]

    @property
    def samples(self) -> int:
        """Answers per problem."""
        return self.correct.shape[1]


def graded(samples: Sequence[Sample], cell: EvalSetting) -> Graded:
    """Collects the samples of a cell, given problem by problem."""
    heads = samples[:: cell.samples]

    def table(values: Sequence[Any], kind: type) -> np.ndarray:
        return np.array(values, kind).reshape(len(heads), cell.samples)

    answers = [sample.extracted for sample in samples]
    return Graded(
        ids=[sample.id for sample in heads],
        levels=np.array([sample.level for sample in heads], np.int64),
        subjects=[sample.subject for sample in heads],
        correct=table([sample.correct for sample in samples], bool),
        strict=table([sample.strict for sample in samples], bool),
        thinking=table([sample.thinking_tokens for sample in samples], np.int64),
        total=table([sample.total_tokens for sample in samples], np.int64),
        forced=table([sample.closed_by == "budget" for sample in samples], bool),
        timed_out=table([sample.timed_out for sample in samples], bool),
        answers=[answers[i : i + cell.samples] for i in range(0, len(answers), cell.samples)],
        paths=dict(sorted(collections.Counter(sample.path for sample in samples).items())),
    )


def number(value: Any) -> float:
    """A number for a report: the same on every run of the same samples."""
    return round(float(value), _DIGITS)


def interval(ends: Float[np.ndarray, "2"]) -> list[float]:
    """Two of them."""
    return [number(end) for end in ends]


def numbers_of_samples(samples: int) -> list[int]:
    """The k for which pass@k and maj@k are given: powers of two, and all samples."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def _slices(found: Graded, keep: Bool[np.ndarray, "n"]) -> dict[str, Any]:
    """Accuracy and tokens of some of the problems."""
    correct = found.correct[keep].mean(1)
    ends = rate_intervals(correct[:, None])[0]
    return {
        "problems": int(keep.sum()),
        "accuracy": number(correct.mean()),
        "ci95": interval(ends),
        "mean_thinking_tokens": number(found.thinking[keep].mean()),
        "mean_total_tokens": number(found.total[keep].mean()),
        "forced_share": number(found.forced[keep].mean()),
    }


def _by_level(found: Graded) -> dict[str, Any]:
    known = sorted(set(found.levels.tolist()) - {0})
    return {str(level): _slices(found, found.levels == level) for level in known}


def _by_subject(found: Graded) -> dict[str, Any]:
    names = np.array(found.subjects)
    return {name: _slices(found, names == name) for name in sorted(set(found.subjects) - {""})}


def entry_of(
    found: Graded, grader: Any, duplicates: Bool[np.ndarray, "n"] | None = None
) -> dict[str, Any]:
    """Every number of one cell.

    Args:
      found: its samples.
      grader: decides which wrong answers are the same, for maj@k.
      duplicates: problems that are near-duplicates of training questions; None: not looked for.

    Returns:
      accuracy (the mean over all samples: avg@k), its 95 % interval ci95, the same for the strict
      verdicts, disagreement (share of samples that the two judge differently), mean tokens, shares
      of forced thinking and of samples without an answer, pass_at and maj_at by k, levels,
      subjects, and what decided the verdicts. If some problems are near-duplicates and some are
      not, without_near_duplicates holds accuracy and tokens of those that are not.
    """
    samples = found.samples
    ks = numbers_of_samples(samples)
    votes = vote_numbers(found.answers, found.correct, grader) if samples > 1 else None
    scores = [found.correct.mean(1), found.strict.mean(1)]
    scores += [pass_at_k_by_problem(found.correct, k) for k in ks]
    if votes is not None:
        scores += [majority_at_k_by_problem(votes, found.correct, k) for k in ks]
    rates = columns(scores)
    ends, means = rate_intervals(rates), rates.mean(0)
    tokens = columns([found.thinking.mean(1), found.total.mean(1)])
    token_ends, (thinking, total) = bootstrap_intervals(tokens), tokens.mean(0)
    unanswered = [answer is None for row in found.answers for answer in row]
    value = lambda i: {"value": number(means[i]), "ci95": interval(ends[i])}
    entry = {
        "accuracy": number(means[0]),
        "ci95": interval(ends[0]),
        "strict_accuracy": number(means[1]),
        "strict_ci95": interval(ends[1]),
        "disagreement": number((found.correct != found.strict).mean()),
        "mean_thinking_tokens": number(thinking),
        "thinking_ci95": interval(token_ends[0]),
        "mean_total_tokens": number(total),
        "total_ci95": interval(token_ends[1]),
        "forced_share": number(found.forced.mean()),
        "no_answer_share": number(np.mean(unanswered)),
        "grader_timeouts": int(found.timed_out.sum()),
        "problems": len(found.ids),
        "samples": samples,
        "pass_at": {str(k): value(2 + i) for i, k in enumerate(ks)},
        "levels": _by_level(found),
        "subjects": _by_subject(found),
        "paths": found.paths,
    }
    if duplicates is not None and duplicates.any() and not duplicates.all():
        entry["without_near_duplicates"] = _slices(found, ~duplicates)
    if votes is not None:
        entry["maj_at"] = {
            str(k): {
                **value(2 + len(ks) + i),
                # A vote costs what its k samples cost together.
                "mean_thinking_tokens": number(k * thinking),
                "mean_total_tokens": number(k * total),
            }
            for i, k in enumerate(ks)
        }
    return entry


def anytime(cells: Mapping[int, Graded]) -> dict[str, Any]:
    """Accuracy over all budgets in one number, two ways (`statistics.anytime_accuracy`).

    Args:
      cells: samples by budget, of the same problems.

    Returns:
      mean and area with their intervals, and the budgets.
    """
    budgets = sorted(cells)
    rates = columns([cells[budget].correct.mean(1) for budget in budgets])
    scores = rates @ anytime_weights(budgets).T
    ends = rate_intervals(scores)
    found = AnytimeAccuracy(*scores.mean(0))
    return {
        "mean": number(found.mean),
        "mean_ci95": interval(ends[0]),
        "area": number(found.area),
        "area_ci95": interval(ends[1]),
        "budgets": budgets,
    }


def self_consistency(
    entries: Mapping[int, Mapping[str, Any]], budgets: Sequence[int]
) -> dict[str, Any]:
    """Self-Consistency (arXiv 2203.11171) at equal tokens for each sample, and in all.

    Args:
      entries: `entry_of` sampled cells by budget; there may be more than `budgets`.
      budgets: those that the report is about.

    Returns:
      By k, then by accounting, then by budget b: per_sample has k samples of b tokens each, k b in
      all; matched_total has k samples of floor(b / k) tokens, b in all, where these were drawn.
    """

    def row(each: int, k: int) -> dict[str, Any]:
        vote = entries[each]["maj_at"][str(k)]
        return {"budget_each": each, "budget_total": k * each, **vote}

    found: dict[str, Any] = {}
    for k in sorted({int(k) for entry in entries.values() for k in entry.get("maj_at", {})}):
        drawn = {b for b, entry in entries.items() if str(k) in entry.get("maj_at", {})}
        if k > 1:
            found[str(k)] = {
                "per_sample": {str(b): row(b, k) for b in budgets if b in drawn},
                "matched_total": {str(b): row(b // k, k) for b in budgets if b // k in drawn},
            }
    return found


def summarise(
    cells: Mapping[EvalSetting, Graded],
    grader: Any,
    *,
    budgets: Sequence[int] | None = None,
    problems: QuestionSet | None = None,
) -> dict[str, Any]:
    """The numbers of one set.

    Args:
      cells: samples of every cell, all of the same problems.
      grader: decides which wrong answers are the same.
      budgets: those that the report is about; other cells only serve votes at equal total tokens.
      problems: the problems of the cells, for their near-duplicates of training questions.

    Returns:
      problems; near_duplicates (how many, and of which training set; None where none was looked
      for); by_budget (a `Summary`); anytime by mode; self_consistency.
    """
    marked, near = None, None
    if problems is not None and problems.compared_with:
        marked = problems.duplicates
        near = {"count": int(marked.sum()), "of": problems.compared_with}
    entries = {cell: entry_of(found, grader, marked) for cell, found in cells.items()}
    chosen = sorted({cell.budget for cell in cells}) if budgets is None else list(budgets)
    by_budget: Summary = {}
    for cell, entry in entries.items():
        if cell.budget in chosen:
            by_budget.setdefault(cell.mode, {})[str(cell.budget)] = entry
    sampled = {cell.budget: entry for cell, entry in entries.items() if cell.mode == SAMPLED}
    return {
        "problems": len(next(iter(cells.values())).ids),
        "near_duplicates": near,
        "by_budget": by_budget,
        "anytime": {
            mode: anytime(
                {c.budget: f for c, f in cells.items() if c.mode == mode and c.budget in chosen}
            )
            for mode in by_budget
        },
        "self_consistency": self_consistency(sampled, chosen),
    }
