"""Computes reported metrics and their confidence intervals from graded samples.

The module `job` writes the metrics to results.json, and `decoder.evaluate_set` returns them to the
training loop.
"""

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
    thinking_by_verdict,
)
from bacr_jax.evaluation.samples import (
    ACCURACY_NAMES,
    GREEDY,
    SAMPLED,
    TOKENS_NAMES,
    EvalSetting,
    Graded,
    budget_key,
    measured,
    number,
)
from bacr_jax.evaluation.swap import swap_table
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.types import Poll

# Results of `dense_curve` by decoding mode.
Dense = dict[str, dict[str, Any]]
# Results of `entry_of` by decoding mode and budget. Tables and plots read them.
Summary = dict[str, dict[str, dict[str, Any]]]
# Names of means and of their confidence intervals in results.json.
_VERDICTS = (ACCURACY_NAMES, ("strict_accuracy", "strict_ci95"))
_OVER_BUDGETS = (("mean", "mean_ci95"), ("area", "area_ci95"))


def dense_curve(by_cut: Mapping[int, Graded]) -> dict[str, Any]:
    """Returns the metrics of traces that were truncated at many points, for each truncation point.

    The result is the entry `dense` in docs/metrics.md.

    Args:
      by_cut: samples by truncation point (cut), in thinking tokens. The largest cut is the budget
        of the traces.
    """
    cuts = sorted(by_cut)
    cells = [by_cut[cut] for cut in cuts]
    # All truncation points use the same problems, so they share one set of bootstrap samples.
    correct = np.column_stack([cell.correct.mean(1) for cell in cells])
    over_cuts = correct @ anytime_weights(cuts).T
    ends = rate_intervals(np.concatenate([correct, over_cuts], axis=1))
    thinking = [cell.thinking.mean(1) for cell in cells]
    total = [cell.total.mean(1) for cell in cells]
    tokens = np.column_stack([*thinking, *total])
    token_ends = bootstrap_intervals(tokens)
    curve = {}
    for i, (cut, cell) in enumerate(zip(cuts, cells)):
        token_columns = [i, len(cuts) + i]
        curve[str(cut)] = {
            **measured([ACCURACY_NAMES], correct[:, [i]], ends[[i]]),
            "strict_accuracy": number(cell.strict.mean()),
            **measured(TOKENS_NAMES, tokens[:, token_columns], token_ends[token_columns]),
            "completion_rate": number((~cell.forced).mean()),
            **_unbounded_numbers(cell),
        }
    return {
        "budget": cuts[-1],
        "curve": curve,
        **measured(_OVER_BUDGETS, over_cuts, ends[len(cuts) :]),
    }


def numbers_of_samples(samples: int) -> list[int]:
    """Returns the values of k for pass@k and maj@k: powers of two, and `samples` itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def _unbounded_numbers(graded: Graded) -> dict[str, Any]:
    """Returns the metrics that are reported without a confidence interval."""
    return {
        "mean_forced_tokens": number(graded.forced_tokens.mean()),
        "mean_answer_tokens": number(graded.answered.mean()),
        "forced_share": number(graded.forced.mean()),
        "problems": len(graded.ids),
        "samples": graded.samples,
    }


def _slice(graded: Graded, keep: Bool[np.ndarray, "n"]) -> dict[str, Any]:
    """Returns accuracy, token counts and fraction of truncated traces of a subset of problems."""
    correct = graded.correct[keep].mean(1, keepdims=True)
    return {
        "problems": int(keep.sum()),
        **measured([ACCURACY_NAMES], correct, rate_intervals(correct)),
        "mean_thinking_tokens": number(graded.thinking[keep].mean()),
        "mean_total_tokens": number(graded.total[keep].mean()),
        "forced_share": number(graded.forced[keep].mean()),
    }


def _slices(graded: Graded, labels: np.ndarray, unknown: int | str) -> dict[str, Any]:
    """Returns accuracy and token counts of the problems with each label, except `unknown`.

    Args:
      labels: label of each problem, such as its difficulty level or subject.
      unknown: label of problems without a known level or subject.
    """
    slices = {}
    for label in np.unique(labels).tolist():
        if label != unknown:
            slices[str(label)] = _slice(graded, labels == label)
    return slices


def _rates(graded: Graded, grader: Any, ks: Sequence[int], poll: Poll) -> Float[np.ndarray, "n s"]:
    """Returns the accuracies of each problem, with shape [problems, columns].

    The columns are the lenient accuracy, the strict accuracy, and pass@k for each k. With several
    samples per problem, they are followed by maj@k for each k.
    """
    scores = [graded.correct.mean(1), graded.strict.mean(1)]
    scores += [pass_at_k(graded.correct, k) for k in ks]
    if graded.samples > 1:
        clusters = answer_clusters(graded.answers, graded.correct, grader, poll)
        scores += [majority_at_k(clusters, graded.correct, k) for k in ks]
    return np.column_stack(scores)


def entry_of(
    graded: Graded, grader: Any, duplicates: Bool[np.ndarray, "n"] | None = None, poll: Poll = None
) -> dict[str, Any]:
    """Returns all metrics of one setting (decoding mode and budget).

    docs/metrics.md defines the metrics.

    Args:
      graded: samples of the setting.
      grader: grader that determines which wrong answers are equal, for maj@k.
      duplicates: True for problems that are near-duplicates of training questions, or None if
        near-duplicates were not searched.
      poll: called regularly. It may raise an exception to stop.
    """
    ks = numbers_of_samples(graded.samples)
    rates = _rates(graded, grader, ks, poll)
    # All rates share one set of bootstrap samples.
    ends = rate_intervals(rates)
    tokens = np.column_stack([graded.thinking.mean(1), graded.total.mean(1)])

    def rate(column: int) -> dict[str, Any]:
        return measured([("value", "ci95")], rates[:, [column]], ends[[column]])

    answers = [answer for row in graded.answers for answer in row]
    entry = {
        **measured(_VERDICTS, rates[:, :2], ends[:2]),
        "disagreement": number((graded.correct != graded.strict).mean()),
        **measured(TOKENS_NAMES, tokens, bootstrap_intervals(tokens)),
        **_unbounded_numbers(graded),
        "no_answer_share": number(np.mean([answer is None for answer in answers])),
        **completion(graded),
        **thinking_by_verdict(graded),
        "adherence": adherence(graded),
        "grader_timeouts": int(graded.timed_out.sum()),
        "pass_at": {str(k): rate(2 + i) for i, k in enumerate(ks)},
        "levels": _slices(graded, graded.levels, 0),
        "subjects": _slices(graded, np.array(graded.subjects), ""),
        "paths": graded.paths,
    }
    if duplicates is not None and duplicates.any() and not duplicates.all():
        entry["without_near_duplicates"] = _slice(graded, ~duplicates)
    if graded.samples > 1:
        thinking, total = tokens.mean(0)
        entry["maj_at"] = {
            str(k): {
                **rate(2 + len(ks) + i),
                # A majority vote uses the tokens of all its k samples.
                "mean_thinking_tokens": number(k * thinking),
                "mean_total_tokens": number(k * total),
            }
            for i, k in enumerate(ks)
        }
    return entry


def anytime(by_budget: Mapping[int, Graded]) -> dict[str, Any]:
    """Returns the mean accuracy over budgets, and the area under the accuracy curve.

    `metrics.anytime_weights` defines both values.

    Args:
      by_budget: samples of the same problems by budget. Budget 0 and NO_BUDGET are skipped, because
        the area is computed on a logarithmic scale.
    """
    budgets = sorted(budget for budget in by_budget if budget > 0)
    rates = np.column_stack([by_budget[budget].correct.mean(1) for budget in budgets])
    scores = rates @ anytime_weights(budgets).T
    return {**measured(_OVER_BUDGETS, scores, rate_intervals(scores)), "budgets": budgets}


def self_consistency(
    entries: Mapping[int, Mapping[str, Any]], budgets: Sequence[int]
) -> dict[str, Any]:
    """Returns maj@k at equal budgets per sample, and at equal total budgets.

    maj@k is the accuracy of a majority vote of k samples (Self-Consistency, arXiv 2203.11171).

    Args:
      entries: results of `entry_of` for sampled settings, by budget. They may contain budgets that
        are not in `budgets`.
      budgets: reported budgets b.

    Returns:
      A dict keyed by k, then by `per_sample` or `matched_total`, then by b. `per_sample` uses k
      samples of b tokens each, which is k b tokens in total. `matched_total` uses k samples of
      floor(b / k) tokens each, which is at most b tokens in total. It is present only if these
      samples exist.
    """
    # Accuracies of majority votes, by k and by the budget of each sample.
    votes: dict[int, dict[int, dict[str, Any]]] = {}
    for budget, entry in entries.items():
        for key, vote in entry.get("maj_at", {}).items():
            k = int(key)
            votes.setdefault(k, {})[budget] = {
                "budget_each": budget,
                "budget_total": k * budget,
                **vote,
            }
    return {
        str(k): {
            "per_sample": {str(b): votes[k][b] for b in budgets if b in votes[k]},
            "matched_total": {str(b): votes[k][b // k] for b in budgets if b // k in votes[k]},
        }
        for k in sorted(votes)
        if k > 1
    }


def summarise(
    results: Mapping[EvalSetting, Graded],
    grader: Any,
    *,
    budgets: Sequence[int] | None = None,
    problems: QuestionSet | None = None,
    poll: Poll = None,
) -> dict[str, Any]:
    """Returns the metrics of one set in the format of results.json.

    Args:
      results: samples by setting (decoding mode, budget and truncation point).
      grader: grader that determines which wrong answers are equal, for maj@k.
      budgets: reported budgets, or None to report all. Settings at other budgets are used only for
        majority votes at equal total tokens.
      problems: problems of the set with marked near-duplicates, or None if near-duplicates were not
        searched.
      poll: called regularly. It may raise an exception to stop.
    """
    duplicates = None
    near_duplicates = None
    if problems is not None and problems.compared_with:
        duplicates = problems.duplicates
        near_duplicates = {"count": int(duplicates.sum()), "of": problems.compared_with}
    uncut: dict[EvalSetting, Graded] = {}
    by_pair: dict[str, dict[tuple[int, int], Graded]] = {}
    for setting, graded in results.items():
        if setting.cut is None:
            uncut[setting] = graded
        else:
            by_pair.setdefault(setting.mode, {})[setting.budget, setting.cut] = graded
    if budgets is None:
        budgets = sorted({setting.budget for setting in uncut})
    positive_budgets = [budget for budget in budgets if budget > 0]
    by_budget: Summary = {}
    graded_by_mode: dict[str, dict[int, Graded]] = {}
    sampled: dict[int, dict[str, Any]] = {}
    for setting, graded in uncut.items():
        entry = entry_of(graded, grader, duplicates, poll)
        if setting.mode == SAMPLED:
            sampled[setting.budget] = entry
        if setting.budget in budgets:
            by_budget.setdefault(setting.mode, {})[budget_key(setting.budget)] = entry
            graded_by_mode.setdefault(setting.mode, {})[setting.budget] = graded
    over_budgets = {}
    if positive_budgets:
        over_budgets = {mode: anytime(cells) for mode, cells in graded_by_mode.items()}
    return {
        "problems": len(next(iter(results.values())).ids),
        "near_duplicates": near_duplicates,
        "by_budget": by_budget,
        "anytime": over_budgets,
        **_truncated_traces(by_pair),
        "self_consistency": self_consistency(sampled, positive_budgets),
    }


def _truncated_traces(
    by_pair: Mapping[str, Mapping[tuple[int, int], Graded]],
) -> dict[str, dict[str, Any]]:
    """Returns the results of traces that were truncated at several points, by decoding mode.

    Args:
      by_pair: samples by decoding mode, then by input budget and truncation point. Traces of one
        input budget form a dense curve, and traces of several input budgets form a swap table.

    Returns:
      A dict with the entry `dense`, and the entry `swap` if there is a swap table.
    """
    dense: Dense = {}
    swap: dict[str, dict[str, Any]] = {}
    for mode, cells in by_pair.items():
        input_budgets = {budget for budget, _ in cells}
        if len(input_budgets) > 1:
            swap[mode] = swap_table(cells)
        else:
            dense[mode] = dense_curve({cut: graded for (_, cut), graded in cells.items()})
    return {"dense": dense, **({"swap": swap} if swap else {})}


def scoring_mode(modes: Mapping[str, Any]) -> str:
    """Returns the decoding mode used to select a checkpoint: greedy if evaluated, else sampled."""
    return GREEDY if GREEDY in modes else next(iter(modes))


def anytime_score(anytime: dict[str, dict[str, Any]], name: str | None) -> float | None:
    """Returns the mean accuracy of a set over budgets, or None if it was not measured.

    The accuracy is measured in the decoding mode that selects checkpoints (`scoring_mode`).
    """
    modes = anytime.get(name) if name else None
    return float(modes[scoring_mode(modes)]["mean"]) if modes else None
