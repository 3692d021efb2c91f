"""Collects information about a study's runs that is not part of their stored results (cells).

This covers a few config keys of each arm (a method with its settings), and the problems in
generated data sets. The module also checks, before a run, that it can be evaluated afterwards.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from bacr_jax.config import DataConfig, ModelConfig
from bacr_jax.config.derived import HOLDOUT, selection_set
from bacr_jax.errors import UserError
from bacr_jax.evaluation.job_checks import fits_alone, positions_of_model
from bacr_jax.evaluation.samples import subset
from bacr_jax.methods.published import given_by
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.missing import without_missing
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.runs import setup
from bacr_jax.training.checks import with_local_model
from bacr_study.cells import Cell, ids_digest
from bacr_study.items import budget_list
from bacr_study.plan import PlannedRun
from bacr_study.spec import Evaluation, Study, Task

# Data sets that are generated rather than read from files. They may contain duplicate problems.
_GENERATED = ("ledger",)
# Config keys that the tables show for each arm.
SHOWN = (
    "train.minibatches",
    "loss.entropy_coef",
    "optimizer.learning_rate",
)


@dataclass(frozen=True)
class Problems:
    """The problems of a generated evaluation set. Several rows may contain the same problem.

    Attributes:
      levels: difficulty level of each row.
      digest: digest of the row ids (`cells.ids_digest`).
      counts: numbers of rows and of distinct problems, in total and per level.
    """

    levels: Int[np.ndarray, "n"]
    digest: str
    counts: Mapping[str, Any]

    def are_of(self, cell: Cell, name: str) -> bool:
        """True if the stored results `cell` were measured on exactly these problems."""
        levels = cell.levels(name)
        if levels is None or not np.array_equal(levels, self.levels):
            return False
        return cell.problems_digest.get(name) == self.digest


@dataclass(frozen=True)
class Configured:
    """Information about a study that is not part of the stored results of its runs.

    Attributes:
      settings: the values of the config keys in `SHOWN`, by task and variant key.
      problems: the problems of generated data sets, by task and evaluation set.
      held_out: the result of `held_out_budgets`.
    """

    settings: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    problems: Mapping[tuple[str, str], Problems] = field(default_factory=dict)
    held_out: Mapping[tuple[str, str], Sequence[int]] = field(default_factory=dict)


def configured(study: Study, runs: Sequence[PlannedRun]) -> Configured:
    """Collects the settings and the generated problems from a study's planned runs."""
    settings = {}
    run_of_task = {}
    for run in runs:
        values = {key: given_by(run.config, key) for key in SHOWN}
        for variant in (run.variant, *study.vote_numbers(run.variant)):
            settings[run.task, variant.key] = values
        run_of_task[run.task] = run
    problems = {}
    for run in run_of_task.values():
        for name, problems_of_set in _problems(study, run).items():
            problems[run.task, name] = problems_of_set
    return Configured(settings, problems, held_out_budgets(runs))


def held_out_budgets(runs: Sequence[PlannedRun]) -> dict[tuple[str, str], list[int]]:
    """Returns the budgets over which held-out accuracy during training is averaged.

    The config key `eval.budgets` contains these budgets. They can differ from the task's budgets,
    over which tables average the accuracy of finished runs.

    Returns:
      The positive budgets by task and variant key. Runs without training, and runs that do not
      measure held-out accuracy during training, are left out.
    """
    budgets = {}
    for run in runs:
        evaluation = run.config.eval
        is_trained = run.config.train.steps != 0
        if is_trained and selection_set(evaluation, run.config.data) == HOLDOUT:
            positive_budgets = [budget for budget in evaluation.budgets if budget > 0]
            if positive_budgets:
                budgets[run.task, run.variant.key] = positive_budgets
    return budgets


def held_out_warnings(task: Task, held_out: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yields a warning if held-out accuracy is averaged over other budgets than the task's.

    Args:
      task: the task.
      held_out: the different entries of `held_out_budgets` for the task.
    """
    evaluated = tuple(budget for budget in task.budgets if budget > 0)
    others = [budget_list(budgets) for budgets in held_out if tuple(budgets) != evaluated]
    if others:
        yield (
            f"{task.label}: held-out accuracy during training is a mean over the budgets "
            f"{' or '.join(others)} (eval.budgets), but the tables have the budgets "
            f"{budget_list(task.budgets)}"
        )


def _problems(study: Study, run: PlannedRun) -> dict[str, Problems]:
    """Returns the generated evaluation sets of a run's task, by name.

    If the task has hard levels, the problems at these levels are included as separate sets.
    """
    task = study.task(run.task)
    by_set = {}
    for name in task.data or run.config.data.eval:
        if name.partition(":")[0] not in _GENERATED:
            continue
        evaluated = _evaluated_questions(name, run.config.data, study.evaluation)
        by_set[name] = _counted(evaluated)
        if task.hard_levels:
            is_hard = np.isin(evaluated.levels, task.hard_levels)
            hard = evaluated.take(np.flatnonzero(is_hard))
            by_set[task.hard_set(name)] = _counted(hard)
    return by_set


def _evaluated_questions(name: str, data: DataConfig, evaluation: Evaluation) -> QuestionSet:
    """Loads the questions of a set on which finished runs are evaluated."""
    questions = load_questions(name, data, evaluation.seed, "test")
    rows = subset(len(questions), evaluation.size, evaluation.seed)
    return questions.take(rows)


def check_evaluation(study: Study, run: PlannedRun) -> None:
    """Checks, before a run is trained, that its evaluation will find what it needs.

    The sets of `tasks.ID.data` can be read, no budget of the task alone exceeds the positions of
    the model, and there are problems of the task's hard levels.

    Raises:
      UserError: if one of these conditions is not met.
    """
    task = study.task(run.task)
    for name in task.data:
        try:
            load_questions(name, run.config.data, study.evaluation.seed, "test")
        except UserError as error:
            raise UserError(f"tasks.{task.id}.data: {error}") from None
    config = run.config
    _check_positions(task, config.data, config.model, config.budget.grace)
    check_hard_levels(study, run)


def _check_positions(task: Task, data: DataConfig, model: ModelConfig, grace: int) -> None:
    """Raises UserError if the largest budget of a task exceeds the positions of its model.

    Args:
      grace: tokens by which a trace may exceed its budget.
    """
    model = with_local_model(model, download=False)
    tokenizer = setup.run_tokenizer(data, model)
    positions = positions_of_model(model, tokenizer)
    largest = max(task.budgets)
    if not fits_alone(largest, grace, positions):
        raise UserError(
            f"tasks.{task.id}.budgets: found {largest}, but the model has only {positions} "
            "positions for prompt, thinking and answer together; use smaller budgets"
        )


def check_hard_levels(study: Study, run: PlannedRun) -> None:
    """Checks that a run will be evaluated on problems of its task's hard levels, if it has any.

    One set with such problems is enough. If the study has the view `hard`, it must be the first
    set, because the view shows no other set.

    Raises:
      UserError: if there are no such problems, or if a set cannot be read.
    """
    task = study.task(run.task)
    if not task.hard_levels:
        return
    data = run.config.data
    names = task.data
    if not names:
        data, _ = without_missing(data, run.config.eval)
        names = data.eval
    if "hard" in study.views:
        names = names[:1]
    levels: set[int] = set()
    for name in names:
        questions = _evaluated_questions(name, data, study.evaluation)
        levels.update(questions.levels.tolist())
    if not levels.isdisjoint(task.hard_levels):
        return
    # Problems without a level have the level 0.
    numbers = ", ".join(str(level) for level in sorted(levels) if level)
    description = f"levels {numbers}" if numbers else "no levels"
    raise UserError(
        f"tasks.{task.id}.hard_levels: found {list(task.hard_levels)}, but the evaluated problems "
        f"of {', '.join(names)} have {description}; use levels that they have, set "
        f"tasks.{task.id}.data to a set with these levels first, or leave hard_levels out"
    )


def _counted(question_set: QuestionSet) -> Problems:
    """Returns the levels, the digest and the counts of the problems in a question set."""
    questions = np.array(question_set.questions)
    levels = question_set.levels
    by_level = {}
    for level in np.unique(levels):
        of_level = questions[levels == level].tolist()
        by_level[str(level)] = _row_counts(of_level)
    counts = {
        **_row_counts(question_set.questions),
        "levels": by_level,
    }
    return Problems(levels, ids_digest(question_set.ids), counts)


def _row_counts(questions: Sequence[str]) -> dict[str, int]:
    """Returns the number of rows and the number of distinct problems in a list of questions."""
    return {
        "rows": len(questions),
        "distinct_problems": len(set(questions)),
    }


def with_sets(study: Study, runs: Sequence[PlannedRun]) -> Study:
    """Returns the study with the fields `main` and `hard` of each task filled in.

    The main evaluation set is the first one in the task's `data`, or in its config if `data` is
    empty.
    """
    sets_of_config = {run.task: run.config.data.eval for run in runs}
    tasks = []
    for task in study.tasks:
        sets = task.data or sets_of_config[task.id]
        main = sets[0]
        if task.hard_levels:
            hard = task.hard_set(main)
        elif "hard" in study.views:
            hard = main
        else:
            hard = ""
        tasks.append(dataclasses.replace(task, main=main, hard=hard))
    return dataclasses.replace(study, tasks=tuple(tasks))
