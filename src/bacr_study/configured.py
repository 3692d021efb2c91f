"""A study as its results are made: what its file and its configs say that its cells don't."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from bacr_jax.evaluation.samples import subset
from bacr_jax.methods.published import given_by
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.question_set import QuestionSet
from bacr_study.cells import Cell, ids_digest
from bacr_study.plan import PlannedRun
from bacr_study.spec import Study

# Sets that are made, and may hold a problem more than once; those that are read have no such rows.
_MADE = ("ledger",)
# What tables say of an arm's config, by its key.
SHOWN = ("train.minibatches", "loss.entropy_coef", "optimizer.learning_rate")


@dataclass(frozen=True)
class Problems:
    """Rows of a set; `counts` has all and the distinct ones, in all and by level."""

    levels: Int[np.ndarray, "n"]
    digest: str
    counts: Mapping[str, Any]

    def are_of(self, cell: Cell, name: str) -> bool:
        """Whether a cell's rows are these."""
        levels = cell.levels(name)
        same = levels is not None and np.array_equal(levels, self.levels)
        return same and cell.problems_digest.get(name) == self.digest


@dataclass(frozen=True)
class Configured:
    """What is known beside the cells.

    Attributes:
      settings: by task and key of a variant: the values of `SHOWN`.
      problems: by task and set, where the set is made and not read.
    """

    settings: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    problems: Mapping[tuple[str, str], Problems] = field(default_factory=dict)


def configured(study: Study, runs: Sequence[PlannedRun]) -> Configured:
    """What a study's planned runs say."""
    settings, problems = {}, {}
    for run in runs:
        shown = {key: given_by(run.config, key) for key in SHOWN}
        for variant in (run.variant, *study.votes_over(run.variant)):
            settings[run.task, variant.key] = shown
    for run in {run.task: run for run in runs}.values():
        for name, found in _problems(study, run).items():
            problems[run.task, name] = found
    return Configured(settings, problems)


def _problems(study: Study, run: PlannedRun) -> dict[str, Problems]:
    """Problems of the made sets of a task, and of their hard levels."""
    task, how = study.task(run.task), study.evaluation
    found = {}
    for name in task.data or run.config.data.eval:
        if name.partition(":")[0] not in _MADE:
            continue
        questions = load_questions(name, run.config.data, how.seed, "test")
        asked = questions.take(subset(len(questions), how.size, how.seed))
        found[name] = _counted(asked)
        if task.hard_levels:
            hard = asked.take(np.flatnonzero(np.isin(asked.levels, task.hard_levels)))
            found[task.hard_set(name)] = _counted(hard)
    return found


def _counted(asked: QuestionSet) -> Problems:
    of = lambda questions: {"rows": len(questions), "distinct_problems": len(set(questions))}
    questions, levels = np.array(asked.questions), asked.levels
    by_level = {str(n): of(questions[levels == n].tolist()) for n in np.unique(levels)}
    return Problems(levels, ids_digest(asked.ids), {**of(asked.questions), "levels": by_level})


def with_sets(study: Study, runs: Sequence[PlannedRun]) -> Study:
    """The study with the sets that its tasks are shown on."""
    own = {run.task: run.config.data.eval for run in runs}
    tasks = []
    for task in study.tasks:
        main = (task.data or own[task.id])[0]
        hard = main if "hard" in study.views else ""
        if task.hard_levels:
            hard = task.hard_set(main)
        tasks.append(dataclasses.replace(task, main=main, hard=hard))
    return dataclasses.replace(study, tasks=tuple(tasks))
