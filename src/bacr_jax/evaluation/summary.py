"""From graded samples to the numbers of a report, with their intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from bacr_jax.evaluation.intervals import bootstrap_intervals, rate_intervals
from bacr_jax.evaluation.metrics import (
    adherence,
    answer_clusters,
    anytime_weights,
    completion,
    majority_at_k,
    pass_at_k,
)
from bacr_jax.evaluation.samples import (
    GREEDY,
    SAMPLED,
    EvalSetting,
    Graded,
    budget_key,
    measured,
    number,
)
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.types import Poll

# {mode: curve}, as `dense_curve` gives it.
Dense = dict[str, dict[str, Any]]
# {mode: {budget: entry}}; what tables and pictures read.
Summary = dict[str, dict[str, dict[str, Any]]]
# What means and their intervals are called.
_VERDICTS = ("accuracy", "ci95"), ("strict_accuracy", "strict_ci95")
_TOKENS = ("mean_thinking_tokens", "thinking_ci95"), ("mean_total_tokens", "total_ci95")
_OVER_BUDGETS = ("mean", "mean_ci95"), ("area", "area_ci95")


def dense_curve(by_cut: Mapping[int, Graded]) -> dict[str, Any]:
    """The numbers of the same traces at every cut, named as docs/metrics.md says (`dense`).

    Args:
      by_cut: their samples by thinking tokens kept; the largest is the budget that was told.
    """
    cuts = sorted(by_cut)
    cells = [by_cut[cut] for cut in cuts]
    column = lambda name: [getattr(cell, name).mean(1) for cell in cells]
    # One set of resamples serves all cuts of the same problems.
    correct = np.column_stack(column("correct"))
    over = correct @ anytime_weights(cuts).T
    ends = rate_intervals(np.concatenate([correct, over], axis=1))
    tokens = np.column_stack([*column("thinking"), *column("total")])
    token_ends, count = bootstrap_intervals(tokens), len(cuts)
    curve = {}
    for i, (cut, cell) in enumerate(zip(cuts, cells)):
        both = [i, count + i]
        curve[str(cut)] = {
            **measured(_VERDICTS[:1], correct[:, [i]], ends[[i]]),
            "strict_accuracy": number(cell.strict.mean()),
            **measured(_TOKENS, tokens[:, both], token_ends[both]),
            "completion_rate": number((~cell.forced).mean()),
            **_plain(cell),
        }
    return {"told": cuts[-1], "curve": curve, **measured(_OVER_BUDGETS, over, ends[count:])}


def numbers_of_samples(samples: int) -> list[int]:
    """The k for which pass@k and maj@k are given: powers of two, and all samples."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def _plain(graded: Graded) -> dict[str, Any]:
    """Numbers of a setting without intervals."""
    return {
        "mean_forced_tokens": number(graded.forced_tokens.mean()),
        "mean_answer_tokens": number(graded.answered.mean()),
        "forced_share": number(graded.forced.mean()),
        "problems": len(graded.ids),
        "samples": graded.samples,
    }


def _slice(graded: Graded, keep: Bool[np.ndarray, "n"]) -> dict[str, Any]:
    """Accuracy and tokens of some of the problems."""
    correct = graded.correct[keep].mean(1, keepdims=True)
    return {
        "problems": int(keep.sum()),
        **measured(_VERDICTS[:1], correct, rate_intervals(correct)),
        "mean_thinking_tokens": number(graded.thinking[keep].mean()),
        "mean_total_tokens": number(graded.total[keep].mean()),
        "forced_share": number(graded.forced[keep].mean()),
    }


def _slices(graded: Graded, labels: np.ndarray, unknown: int | str) -> dict[str, Any]:
    """`_slice` of the problems of each label that is known."""
    known = [label for label in np.unique(labels).tolist() if label != unknown]
    return {str(label): _slice(graded, labels == label) for label in known}


def _rates(graded: Graded, grader: Any, ks: Sequence[int], poll: Poll) -> Float[np.ndarray, "n s"]:
    """Of each problem: lenient and strict accuracy, pass@k by k, and maj@k by k if it is voted."""
    scores = [graded.correct.mean(1), graded.strict.mean(1)]
    scores += [pass_at_k(graded.correct, k) for k in ks]
    if graded.samples > 1:
        clusters = answer_clusters(graded.answers, graded.correct, grader, poll)
        scores += [majority_at_k(clusters, graded.correct, k) for k in ks]
    return np.column_stack(scores)


def entry_of(
    graded: Graded, grader: Any, duplicates: Bool[np.ndarray, "n"] | None = None, poll: Poll = None
) -> dict[str, Any]:
    """Every number of one setting; docs/metrics.md says what each is.

    Args:
      grader: decides which wrong answers are the same, for maj@k.
      duplicates: problems that are near-duplicates of training questions; None: not looked for.
    """
    ks = numbers_of_samples(graded.samples)
    rates = _rates(graded, grader, ks, poll)  # one set of resamples serves all of them
    ends = rate_intervals(rates)
    tokens = np.column_stack([graded.thinking.mean(1), graded.total.mean(1)])
    thinking, total = tokens.mean(0)
    value = lambda i: measured([("value", "ci95")], rates[:, [i]], ends[[i]])
    entry = {
        **measured(_VERDICTS, rates[:, :2], ends[:2]),
        "disagreement": number((graded.correct != graded.strict).mean()),
        **measured(_TOKENS, tokens, bootstrap_intervals(tokens)),
        **_plain(graded),
        "no_answer_share": number(np.mean([one is None for row in graded.answers for one in row])),
        **completion(graded),
        "adherence": adherence(graded),
        "grader_timeouts": int(graded.timed_out.sum()),
        "pass_at": {str(k): value(2 + i) for i, k in enumerate(ks)},
        "levels": _slices(graded, graded.levels, 0),
        "subjects": _slices(graded, np.array(graded.subjects), ""),
        "paths": graded.paths,
    }
    if duplicates is not None and duplicates.any() and not duplicates.all():
        entry["without_near_duplicates"] = _slice(graded, ~duplicates)
    if graded.samples > 1:
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


def anytime(by_budget: Mapping[int, Graded]) -> dict[str, Any]:
    """Accuracy over all budgets in one number, two ways (`metrics.anytime_weights`).

    Args:
      by_budget: samples by budget, of the same problems; 0 and no budget have no place on the
        scale and are left out.
    """
    budgets = sorted(budget for budget in by_budget if budget > 0)
    rates = np.column_stack([by_budget[budget].correct.mean(1) for budget in budgets])
    scores = rates @ anytime_weights(budgets).T
    return {**measured(_OVER_BUDGETS, scores, rate_intervals(scores)), "budgets": budgets}


def self_consistency(
    entries: Mapping[int, Mapping[str, Any]], budgets: Sequence[int]
) -> dict[str, Any]:
    """Self-Consistency (arXiv 2203.11171) at equal tokens for each sample, and in all.

    Args:
      entries: `entry_of` sampled settings by budget; there may be more than `budgets`.

    Returns:
      By k, then by accounting, then by budget b: per_sample has k samples of b tokens each, k b in
      all; matched_total has k samples of floor(b / k) tokens, b in all, where these were drawn.
    """

    def row(each: int, k: int) -> dict[str, Any]:
        vote = entries[each]["maj_at"][str(k)]
        return {"budget_each": each, "budget_total": k * each, **vote}

    votes: dict[str, Any] = {}
    for k in sorted({int(k) for entry in entries.values() for k in entry.get("maj_at", {})}):
        drawn = {b for b, entry in entries.items() if str(k) in entry.get("maj_at", {})}
        if k > 1:
            votes[str(k)] = {
                "per_sample": {str(b): row(b, k) for b in budgets if b in drawn},
                "matched_total": {str(b): row(b // k, k) for b in budgets if b // k in drawn},
            }
    return votes


def summarise(
    results: Mapping[EvalSetting, Graded],
    grader: Any,
    *,
    budgets: Sequence[int] | None = None,
    problems: QuestionSet | None = None,
    poll: Poll = None,
) -> dict[str, Any]:
    """The numbers of one set, as results.json has them.

    Args:
      budgets: those that the report is about; other settings only serve votes at equal total
        tokens.
    """
    duplicates, near = None, None
    if problems is not None and problems.compared_with:
        duplicates = problems.duplicates
        near = {"count": int(duplicates.sum()), "of": problems.compared_with}
    told, by_cut = dict[EvalSetting, Graded](), dict[str, dict[int, Graded]]()
    for setting, one in results.items():
        if setting.cut is None:
            told[setting] = one
        else:
            by_cut.setdefault(setting.mode, {})[setting.cut] = one
    entries = {setting: entry_of(one, grader, duplicates, poll) for setting, one in told.items()}
    chosen = sorted({setting.budget for setting in told}) if budgets is None else list(budgets)
    by_budget: Summary = {}
    for setting, entry in entries.items():
        if setting.budget in chosen:
            by_budget.setdefault(setting.mode, {})[budget_key(setting.budget)] = entry
    return {
        "problems": len(next(iter(results.values())).ids),
        "near_duplicates": near,
        "by_budget": by_budget,
        "anytime": {
            mode: anytime(
                {s.budget: g for s, g in told.items() if s.mode == mode and s.budget in chosen}
            )
            for mode in by_budget
            if any(budget > 0 for budget in chosen)
        },
        "dense": {mode: dense_curve(cells) for mode, cells in by_cut.items()},
        "self_consistency": self_consistency(
            {setting.budget: e for setting, e in entries.items() if setting.mode == SAMPLED},
            [budget for budget in chosen if budget > 0],
        ),
    }


def scoring_mode(modes: Mapping[str, Any]) -> str:
    """Returns the decoding whose mean chooses a checkpoint: greedy if it was measured."""
    return GREEDY if GREEDY in modes else next(iter(modes))


def anytime_score(anytime: dict[str, dict[str, Any]], name: str | None) -> float | None:
    """A set's mean accuracy over budgets, greedy where that was measured; None: not evaluated."""
    modes = anytime.get(name) if name else None
    return float(modes[scoring_mode(modes)]["mean"]) if modes else None
