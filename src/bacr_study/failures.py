"""Counts the runs of a study whose policy became worse during training.

A mean over seeds can hide a training run that ruined its policy. `results` calls this module to
count such runs for every arm, and `tables` shows the counts. A run is compared with the policy that
it started from; arms are not compared with each other.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bacr_jax.evaluation.decline import (
    ACCURACY,
    CLOSED,
    accuracy_declined,
    closed_answers_declined,
)
from bacr_jax.evaluation.samples import GREEDY
from bacr_study.cells import Cell, Grid
from bacr_study.spec import Task, Variant
from bacr_study.statistics import clopper_pearson_interval, sign_test_p

# Significance level at which a run's loss of accuracy is called shown, over all of its budgets.
SHOWN_LEVEL = 0.025


class Change(NamedTuple):
    """A measure at one budget, before and after a training run.

    Attributes:
      budget: thinking budget in tokens, as a string.
      measure: `ACCURACY`, or `CLOSED` for the fraction of responses in which the grader found an
        answer.
      before: the value for the policy that the run started from, in [0, 1].
      after: the value for the trained policy, in [0, 1].
      failed: True if the change counts as a failure of the run.
      shown: True if sampling error does not explain the loss (see `changes_of`).
    """

    budget: str
    measure: str
    before: float
    after: float
    failed: bool
    shown: bool


def changes_of(cell: Cell, before: Cell, name: str, mode: str = GREEDY) -> Iterator[Change]:
    """Compares a trained run with the policy that it started from at each budget.

    `bacr_jax.evaluation.decline` defines which changes count as a failure. Its intervals ignore the
    sampling error of the trained policy, so a policy that training does not change also fails in
    about one of ten comparisons at each budget. A loss of accuracy is therefore called shown only
    if a one-sided exact sign test over the problems has p < `SHOWN_LEVEL` / number of budgets. A
    loss of closed answers is shown if it counts as a failure.

    Args:
      cell: the cell of the trained run.
      before: the cell of the untrained policy, evaluated on the same problems.
      name: the evaluation set.
      mode: the decoding mode.

    Yields:
      The change of the accuracy and of the fraction of closed answers at each budget. Budgets that
      are missing in either cell are skipped.
    """
    by_budget = cell.sets.get(name, {}).get(mode, {})
    for budget, after in by_budget.items():
        entry = before.entry(name, mode, budget)
        verdicts = before.rates(name, mode, budget)
        verdicts_after = cell.rates(name, mode, budget)
        if entry is None or verdicts is None or verdicts_after is None:
            continue
        problems = len(verdicts)
        accuracy_before = entry["accuracy"]
        accuracy_after = after["accuracy"]
        yield Change(
            budget=budget,
            measure=ACCURACY,
            before=accuracy_before,
            after=accuracy_after,
            failed=accuracy_declined(accuracy_before, accuracy_after, problems),
            shown=sign_test_p(verdicts, verdicts_after) < SHOWN_LEVEL / len(by_budget),
        )
        closed_before = 1.0 - entry["no_answer_share"]
        closed_after = 1.0 - after["no_answer_share"]
        stopped_closing = closed_answers_declined(closed_before, closed_after, problems)
        yield Change(
            budget=budget,
            measure=CLOSED,
            before=closed_before,
            after=closed_after,
            failed=stopped_closing,
            shown=stopped_closing,
        )


def _policy_before(run: Cell, untrained: Sequence[Cell], task: Task) -> Cell | None:
    """Returns the results of the policy that a run started from, or None if they do not exist."""
    for cell in untrained:
        if cell.seed == run.seed:
            return cell
    if "warmup.seed" not in task.set:
        return None
    for cell in untrained:
        if cell.problems_digest == run.problems_digest:
            return cell
    return None


def failure_rates(grid: Grid, task: Task) -> dict[str, Any]:
    """Counts the failed runs of every arm (a method with its settings) on a task.

    A trained run is compared with the run of the arm `Study.before` with the same seed, which
    contains the results of the policy before training. If the task sets `warmup.seed`, all seeds
    start from the same policy, so a run without a counterpart of the same seed is compared with the
    first run of `Study.before` on the same problems. Runs without a comparison are not counted.

    Returns:
      A record for each variant with at least one such run:
        runs, failed: the number of runs, and how many of them failed.
        shown: the number of runs with a shown loss.
        low, high: the Clopper-Pearson interval of the failure probability.
        failures: records with `seed`, `budget`, `measure`, `before` and `after`.
        worst: the record of the largest loss of accuracy over all runs and budgets.
      The dictionary is empty if the study does not specify `before`.
    """
    rates: dict[str, Any] = {}
    if not grid.study.before:
        return rates
    untrained = grid.of(task.id, Variant(grid.study.before))
    for variant in grid.variants(task.id):
        runs = []
        changes: list[Any] = []
        for cell in grid.of(task.id, variant):
            before = _policy_before(cell, untrained, task)
            if cell.steps == 0 or before is None:
                continue
            runs.append(cell)
            changes.extend((cell.seed, change) for change in changes_of(cell, before, task.main))
        if not changes:
            continue
        failures = [(seed, change) for seed, change in changes if change.failed]
        failed = len({seed for seed, _ in failures})
        shown = len({seed for seed, change in changes if change.shown})
        low, high = clopper_pearson_interval(failed, len(runs))
        accuracies = [pair for pair in changes if pair[1].measure == ACCURACY]
        worst = min(accuracies, key=lambda pair: pair[1].after - pair[1].before)
        rates[variant.key] = {
            "runs": len(runs),
            "failed": failed,
            "shown": shown,
            "low": low,
            "high": high,
            "failures": [_record(*pair) for pair in failures],
            "worst": _record(*worst),
        }
    return rates


def _record(seed: int, change: Change) -> dict[str, Any]:
    """Converts the change of a run at one budget to a JSON object for results.json."""
    return {
        "seed": seed,
        "budget": change.budget,
        "measure": change.measure,
        "before": change.before,
        "after": change.after,
    }
