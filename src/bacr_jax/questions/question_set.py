"""Defines `QuestionSet`: questions with gold answers, difficulty levels and difficulty groups."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.errors import first_of

Indices = Sequence[int] | np.ndarray
# Fields with an entry for each question.
_PER_QUESTION = (
    "questions",
    "answers",
    "levels",
    "groups",
    "ids",
    "subjects",
    "rows",
    "duplicates",
)
# The summary of rows that were left out names at most this many row ids for each reason.
_SHOWN = 3


@dataclass(frozen=True)
class LeftOut:
    """A row of a source that is not in the set.

    Attributes:
      id: identifier of the row.
      reason: why the row was left out. Rows with the same reason have the same text.
    """

    id: str
    reason: str


@dataclass(frozen=True)
class QuestionSet:
    """Questions with verifiable answers.

    Entry i of every field up to `duplicates` belongs to question i.

    Attributes:
      name: name of the set.
      questions: texts that the model reads.
      answers: gold answers. A text is empty if only a scoring function can grade the answer.
      levels: difficulty levels from 1 (easy) to 5, or 0 if unknown.
      groups: difficulty groups from 0 (easiest) to K - 1, or `groups.NO_GROUP` without a label.
      ids: identifiers, unique in the set.
      subjects: field or course of each question. Empty if unknown.
      rows: (source, row) of each question (`questions.source`), or None for a set that was built
        without sources.
      duplicates: True for a near-duplicate of a question of the set `compared_with`.
      compared_with: name of the training set that was searched for near-duplicates. Empty if none.
      left_out: rows of the sources that are not in the set.
      relative_tolerance: maximum relative error of a correct numeric answer.
      score: how answers are scored: by the rules of the grader ("rules"), by exact comparison
        ("exact"), or by a file with a scoring function (`Source.score`).
      note: remarks of the sources for readers of the set's results. Empty if there are none.
    """

    name: str
    questions: list[str]
    answers: list[str]
    levels: Int[np.ndarray, "n"]
    groups: Int[np.ndarray, "n"]
    ids: list[str]
    subjects: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    duplicates: Bool[np.ndarray, "n"] = field(default_factory=lambda: np.zeros(0, bool))
    compared_with: str = ""
    left_out: tuple[LeftOut, ...] = ()
    relative_tolerance: float = 0.0
    score: str = "rules"
    note: str = ""

    def __post_init__(self) -> None:
        size = len(self.questions)
        if not self.subjects:
            object.__setattr__(self, "subjects", [""] * size)
        if not self.rows:
            object.__setattr__(self, "rows", [None] * size)
        if not len(self.duplicates):
            object.__setattr__(self, "duplicates", np.zeros(size, bool))
        sizes = {len(getattr(self, name)) for name in _PER_QUESTION}
        if len(sizes) != 1:
            raise ValueError(f"fields have different lengths: {sorted(sizes)}")

    @property
    def graded_by(self) -> tuple[str, float]:
        """Returns (score, relative_tolerance). Sets with equal values share a grader."""
        return self.score, self.relative_tolerance

    def __len__(self) -> int:
        return len(self.questions)

    def take(self, index: Indices) -> "QuestionSet":
        """Returns the questions with these indices, in this order."""
        index = np.asarray(index, np.int64)
        taken: dict[str, Any] = {}
        for name in _PER_QUESTION:
            values = getattr(self, name)
            if isinstance(values, np.ndarray):
                taken[name] = values[index]
            else:
                taken[name] = [values[i] for i in index]
        return dataclasses.replace(self, **taken)

    def without(self, index: Indices, reason: str | None = None) -> "QuestionSet":
        """Returns all questions except those with these indices.

        Args:
          reason: reason with which the removed questions are added to `left_out`. If None, they are
            not added.
        """
        index = np.asarray(index, np.int64)
        rest = self.take(np.delete(np.arange(len(self)), index))
        if reason is None:
            return rest
        removed = tuple(LeftOut(self.ids[i], reason) for i in index)
        return dataclasses.replace(rest, left_out=self.left_out + removed)

    def unique(self) -> "QuestionSet":
        """Returns the questions that are not near-duplicates of training questions."""
        return self.without(np.flatnonzero(self.duplicates))

    def summary(self) -> list[str]:
        """Returns log lines that describe the set and the rows left out."""
        headline = f"{self.name}: {len(self):,} questions"
        if self.relative_tolerance:
            headline += f", numbers within {self.relative_tolerance:.0%} are right"
        num_near = int(self.duplicates.sum())
        if num_near:
            num_others = len(self) - num_near
            headline += (
                f", {num_near} of them near-duplicates of training questions ({num_others:,} "
                "without)"
            )
        lines = [headline]
        if self.note:
            lines.append(f"  {self.note}")
        for reason, count in Counter(row.reason for row in self.left_out).items():
            ids = [row.id for row in self.left_out if row.reason == reason]
            lines.append(f"  left out, {reason}: {count:,} ({first_of(ids, _SHOWN)})")
        return lines
