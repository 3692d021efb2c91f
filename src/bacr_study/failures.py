"""Counts the runs of a study whose policy became worse during training.

A mean over seeds can hide a training run that ruined its policy. `results` calls this module to
count such runs for every arm, and `tables` shows the counts. A run is compared with the policy that
it started from; arms are not compared with each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bacr_jax.evaluation.decline import (
    ACCURACY,
    CLOSED,
    SHOWN_LEVEL,
    accuracy_declined,
    closed_answers_declined,
)
from bacr_jax.evaluation.samples import GREEDY
from bacr_study.cells import Cell, Grid
from bacr_study.spec import Study, Task, Variant
from bacr_study.statistics import clopper_pearson_interval, sign_test_p

# Measure of cells that do not contain the share of closed answers (`closed_rate`): the fraction of
# responses in which the grader found an answer.
FOUND = "answers found"


class Change(NamedTuple):
    """A measure at one budget, before and after a training run.

    Attributes:
      budget: thinking budget in tokens, as a string.
      measure: `ACCURACY`, `CLOSED` (the fraction of answers that ended with a closing tag or an end
        token) or `FOUND`.
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
    loss of closed answers, or of answers found, is shown if it counts as a failure.

    Args:
      cell: the cell of the trained run.
      before: the cell of the untrained policy, evaluated on the same problems.
      name: the evaluation set.
      mode: the decoding mode.

    Yields:
      The changes of the accuracy and of a second measure at each budget. The second measure is the
      fraction of closed answers if both cells contain it, and otherwise the fraction of answers
      found. Budgets that are missing in either cell are skipped.
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
        yield _answer_change(budget, entry, after, problems)


def _answer_change(
    budget: str, before: Mapping[str, Any], after: Mapping[str, Any], problems: int
) -> Change:
    """Returns the change of the closed answers, or of the answers found if these are not stored."""
    if "closed_rate" in before and "closed_rate" in after:
        measure = CLOSED
        share_before = before["closed_rate"]
        share_after = after["closed_rate"]
    else:
        measure = FOUND
        share_before = 1.0 - before["no_answer_share"]
        share_after = 1.0 - after["no_answer_share"]
    declined = closed_answers_declined(share_before, share_after, problems)
    return Change(
        budget=budget,
        measure=measure,
        before=share_before,
        after=share_after,
        failed=declined,
        shown=declined,
    )


def worst_change(changes: Iterable[Change]) -> Change:
    """Returns the largest loss over the budgets and measures of a run.

    A loss of closed answers, or of answers found, is only considered if it counts as a failure.

    Args:
      changes: the changes that `changes_of` yields; at least one.
    """
    losses = [change for change in changes if change.measure == ACCURACY or change.failed]
    return min(losses, key=_gain)


def _gain(change: Change) -> float:
    """Returns the value after training minus the value before training."""
    return change.after - change.before


def shares_warmup(study: Study, task: Task) -> bool:
    """True if the runs of all seeds on a task start from the same warm-up (`warmup.seed`)."""
    return "warmup.seed" in task.set or "warmup.seed" in study.set


def policy_before(run: Cell, untrained: Sequence[Cell], *, shared_warmup: bool) -> Cell | None:
    """Returns the results of the policy that a run started from, or None if they do not exist.

    Results from the same machine are preferred, because the same warm-up gives another policy on
    another kind of processor.

    Args:
      run: the cell of the trained run.
      untrained: cells of policies before training, on the same task.
      shared_warmup: True if all seeds start from the same policy (`shares_warmup`). A run without a
        counterpart of the same seed then started from the policy of another cell on the same
        problems.
    """
    counterparts = [cell for cell in untrained if cell.seed == run.seed]
    if shared_warmup:
        digest = run.problems_digest
        counterparts += [cell for cell in untrained if cell.problems_digest == digest]
    if not counterparts:
        return None
    # `max` returns the first maximum, so a counterpart of the same seed comes first.
    return max(counterparts, key=lambda cell: _on_same_machine(run, cell))


def _on_same_machine(first: Cell, second: Cell) -> bool:
    """True if the results of two cells are from the same kind of machine."""
    return first.provenance.get("machine") == second.provenance.get("machine")


def failure_rates(grid: Grid, task: Task) -> dict[str, Any]:
    """Counts the failed runs of every arm (a method with its settings) on a task.

    A trained run is compared with the run of the arm `Study.before` with the same seed, which
    contains the results of the policy before training. If the task sets `warmup.seed`, all seeds
    start from the same policy, so a run without a counterpart of the same seed is compared with the
    first run of `Study.before` on the same problems. A run from the same machine is preferred. Runs
    without a comparison, or without greedy answers to the main set, are not counted.

    Returns:
      A record for each variant with at least one such run:
        runs, failed: the number of runs, and how many of them failed.
        other_machine: the number of runs that are compared with a policy on another machine.
        shown: the number of runs with a shown loss.
        low, high: the Clopper-Pearson interval of the failure probability.
        failures: records with `seed`, `budget`, `measure`, `before` and `after`.
        worst: the record of the largest loss over all runs, budgets and measures
          (`worst_change`).
        measures: the names of the compared measures.
      The dictionary is empty if the study does not specify `before`.
    """
    rates: dict[str, Any] = {}
    if not grid.study.before:
        return rates
    untrained = grid.of(task.id, Variant(grid.study.before))
    shared_warmup = shares_warmup(grid.study, task)
    for variant in grid.variants(task.id):
        changes_by_seed: dict[int, list[Change]] = {}
        other_machine = 0
        for cell in grid.of(task.id, variant):
            before = policy_before(cell, untrained, shared_warmup=shared_warmup)
            if cell.steps == 0 or before is None:
                continue
            changes = list(changes_of(cell, before, task.main))
            if changes:
                changes_by_seed[cell.seed] = changes
                other_machine += not _on_same_machine(cell, before)
        if changes_by_seed:
            rates[variant.key] = _rate(changes_by_seed, other_machine)
    return rates


def _rate(changes_by_seed: Mapping[int, Sequence[Change]], other_machine: int) -> dict[str, Any]:
    """Returns an arm's record of `failure_rates`.

    Args:
      changes_by_seed: for each run of the arm, its changes. None of them is empty.
      other_machine: number of runs that are compared with a policy on another machine.
    """
    failures = [
        _record(seed, change)
        for seed, changes in changes_by_seed.items()
        for change in changes
        if change.failed
    ]
    failed = len({record["seed"] for record in failures})
    worst_by_seed = {seed: worst_change(changes) for seed, changes in changes_by_seed.items()}
    worst_seed = min(worst_by_seed, key=lambda seed: _gain(worst_by_seed[seed]))
    measures = {change.measure for changes in changes_by_seed.values() for change in changes}
    low, high = clopper_pearson_interval(failed, len(changes_by_seed))
    return {
        "runs": len(changes_by_seed),
        "failed": failed,
        "other_machine": other_machine,
        "shown": sum(any(change.shown for change in of) for of in changes_by_seed.values()),
        "low": low,
        "high": high,
        "failures": failures,
        "worst": _record(worst_seed, worst_by_seed[worst_seed]),
        "measures": sorted(measures),
    }


def _record(seed: int, change: Change) -> dict[str, Any]:
    """Converts the change of a run at one budget to a JSON object for results.json."""
    return {
        "seed": seed,
        "budget": change.budget,
        "measure": change.measure,
        "before": change.before,
        "after": change.after,
    }
