"""Loads question sets and tokenizes their prompts, without using a device.

The sets of a run are the training questions, the held-out questions and the evaluation sets.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bacr_jax.config import DataConfig
from bacr_jax.config.settings import TaskSettings
from bacr_jax.errors import UserError
from bacr_jax.prompts import budget_prompt, encoding
from bacr_jax.prompts.formats import PromptFormat, format_for
from bacr_jax.questions import splits
from bacr_jax.questions.groups import check_levels
from bacr_jax.questions.loaders import is_made, load_questions
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.questions.source import check_labeled
from bacr_jax.types import Prompts


@dataclass(frozen=True)
class PromptedQuestions:
    """A question set with its prompts. Entry i of each field belongs to question i.

    Attributes:
      set: the question set.
      prompts: prompts without a budget.
      budget_prompts: prompts truncated before the number of the budget, or None if prompts do not
        contain the budget.
    """

    set: QuestionSet
    prompts: Prompts
    budget_prompts: budget_prompt.BudgetPrompts | None = None

    def __len__(self) -> int:
        """Returns the number of questions."""
        return len(self.set.questions)

    def part(self, index: np.ndarray, name: str) -> "PromptedQuestions":
        """Returns the questions at the given indices as a question set with a new name."""
        part = dataclasses.replace(self.set.take(index), name=name, left_out=())
        budget_prompts = None if self.budget_prompts is None else self.budget_prompts.take(index)
        return PromptedQuestions(part, self.prompts.take(index), budget_prompts)

    def at(self, index: np.ndarray, budgets: np.ndarray) -> Prompts:
        """Returns the prompts of the given questions, including the budget if prompts contain it.

        Args:
          index: index of the question in each row of the batch.
          budgets: budget of each row in tokens, or NO_BUDGET for a prompt without budget.
        """
        without_budget = self.prompts.take(index)
        if self.budget_prompts is None:
            return without_budget
        return self.budget_prompts.at(index, budgets, without_budget)

    @property
    def longest(self) -> int:
        """Returns the length of the longest prompt in tokens, including the largest budget."""
        if self.budget_prompts is not None:
            return self.budget_prompts.longest
        return int(np.max(self.prompts.lengths, initial=0))


def _encode(
    task: TaskSettings, tokenizer: Any, questions: QuestionSet, style: PromptFormat
) -> PromptedQuestions:
    """Tokenizes the prompts of a set, and excludes questions whose prompts are too long."""
    limit = task.data.max_prompt_tokens
    reason = f"prompt over {limit} tokens"
    budget_prompts = None
    words = budget_prompt.budget_words(task.budget_text, style)
    if words:
        budget_prompts, dropped = budget_prompt.make_budget_prompts(
            tokenizer,
            questions.questions,
            style,
            words,
            largest=task.largest_budget,
            max_tokens=limit,
        )
        questions = questions.without(dropped, reason)
    prompts, dropped = encoding.encode_prompts(
        tokenizer, questions.questions, style, max_tokens=limit
    )
    # A prompt without the budget sentence is shorter, so it fits too.
    assert budget_prompts is None or not len(dropped)
    return PromptedQuestions(questions.without(dropped, reason), prompts, budget_prompts)


def _without_groups(data: DataConfig) -> DataConfig:
    """Returns the settings to load a set whose difficulty groups are not used.

    The set then needs neither levels nor labels. The file of the labels may have been moved, and
    it has no labels for the questions of other sets.
    """
    return dataclasses.replace(data, groups="level", labels=None, num_groups=1)


def load_training_texts(spec: str | Sequence[str], data: DataConfig, seed: int) -> QuestionSet:
    """Loads a training set to which evaluation questions are compared to find near-duplicates.

    The difficulty groups of the result are meaningless.

    Raises:
      UserError: If the data source is unknown or contains no usable questions.
    """
    return load_questions(spec, _without_groups(data), seed, "train")


def load_sets(
    task: TaskSettings,
    tokenizer: Any,
    *,
    split: Literal["train", "test"] = "test",
    train: QuestionSet | None = None,
    style: PromptFormat | None = None,
) -> dict[str, PromptedQuestions]:
    """Loads the evaluation sets of a run and their prompts without using a device.

    The difficulty groups of the questions are meaningless.

    Args:
      train: training set whose near-duplicates are marked in the evaluation sets, or None to skip
        this step.
      style: prompt format, or None for the format in `task.data`.

    Returns:
      The evaluation sets, keyed by their names in data.eval.
    """
    style = style or format_for(task.data)
    data = _without_groups(task.data)
    sets = {}
    for spec in data.eval:
        questions = load_questions(spec, data, task.seed, split)
        if train is not None:
            questions = splits.mark_duplicates(questions, train)
        sets[spec] = _encode(task, tokenizer, questions, style)
    return sets


def load_all_sets(
    task: TaskSettings, tokenizer: Any, style: PromptFormat
) -> tuple[PromptedQuestions, PromptedQuestions, dict[str, PromptedQuestions]]:
    """Loads the (training, held-out, evaluation) sets.

    Evaluation questions that resemble training questions are marked, unless the splits of their set
    are disjoint by construction. Held-out questions count as training questions here, because they
    are used to select a checkpoint.
    """
    data = task.data
    train = load_questions(data.train, data, task.seed, "train")
    check_levels(train.levels, data)
    tests = {}
    for spec in data.eval:
        tests[spec] = load_questions(spec, data, task.seed, "test")
    for spec, test in tests.items():
        if not is_made(spec):
            tests[spec] = splits.mark_duplicates(test, train)
    encoded_train = _encode(task, tokenizer, train, style)
    check_labeled(encoded_train.set, data)
    trained, holdout = _split(task, encoded_train, train)
    encoded_tests = {}
    for spec, test in tests.items():
        encoded_tests[spec] = _encode(task, tokenizer, test, style)
    return trained, holdout, encoded_tests


def _split(
    task: TaskSettings, encoded: PromptedQuestions, train: QuestionSet
) -> tuple[PromptedQuestions, PromptedQuestions]:
    """Returns the questions to train on and the held-out questions of a training set.

    Held-out questions are selected from the texts of the full training set, before questions with
    long prompts are excluded. All copies of a held-out text are removed from the training
    questions, and the first copy is held out.

    Args:
      encoded: the training set without questions whose prompts are too long.
      train: the full training set.

    Raises:
      UserError: If checkpoints are selected by held-out questions but no question is held out.
    """
    is_held_out = splits.held_out(train.questions, task.holdout)
    held_out_texts = {train.questions[row] for row in np.flatnonzero(is_held_out)}
    questions = encoded.set.questions
    is_removed = np.array([text in held_out_texts for text in questions], bool)
    removed = np.flatnonzero(is_removed)
    first_copies = removed[splits.first_copies([questions[row] for row in removed])]
    if task.needs_holdout and not len(first_copies):
        raise UserError(
            f"eval.holdout={task.holdout}: at most a tenth of the training questions can be held "
            f"out, but {train.name} has only {len(train)}; set eval.select to a set of data.eval, "
            "or eval.every=null"
        )
    trained = encoded.part(np.flatnonzero(~is_removed), train.name)
    # `without` records the removed questions and the reason.
    trained = dataclasses.replace(trained, set=encoded.set.without(removed, splits.REASON))
    return trained, encoded.part(first_copies, f"{train.name}, {splits.REASON}")
