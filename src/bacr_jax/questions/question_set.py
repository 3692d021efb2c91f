"""The type of every set of questions: texts, gold answers, levels, groups, and what is missing."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.errors import first_of

Places = Sequence[int] | np.ndarray
_PER_QUESTION = "questions answers levels groups ids subjects rows duplicates".split()  # noqa: SIM905
# Identifiers named in a summary; the set itself keeps all.
_SHOWN = 3


@dataclass(frozen=True)
class LeftOut:
    """A row of the source that is not in the set; its reason is worded alike for all such rows."""

    id: str
    reason: str


@dataclass(frozen=True)
class QuestionSet:
    """Questions with verifiable answers; entry i of every field up to `duplicates` is question i.

    Attributes:
      levels: 1 (easy) .. 5, or 0 where the source gives none.
      groups: difficulty group, 0 (easy) .. K - 1.
      ids: identifiers, unique in the set.
      subjects: field or course, "" where the source gives none.
      rows: (source, row) of each question, as `questions.source` has them; None where a set is
        made without.
      duplicates: true for a near-duplicate of a question of `compared_with`.
      compared_with: training set in which near-duplicates were looked for; empty: in none.
      relative_tolerance, score, note: those of its sources (`questions.source.Source`).
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
            raise ValueError(f"fields of different lengths: {sorted(sizes)}")

    @property
    def graded_by(self) -> tuple[str, float]:
        """Returns what the grader depends on; sets with equal values share a grader."""
        return self.score, self.relative_tolerance

    def __len__(self) -> int:
        return len(self.questions)

    def take(self, index: Places) -> "QuestionSet":
        """The questions at these places, in this order."""
        index = np.asarray(index, np.int64)

        def pick(values: Any) -> Any:
            return values[index] if isinstance(values, np.ndarray) else [values[i] for i in index]

        taken = {name: pick(getattr(self, name)) for name in _PER_QUESTION}
        return dataclasses.replace(self, **taken)

    def without(self, index: Places, reason: str | None = None) -> "QuestionSet":
        """All but the questions at these places; with a reason they are noted in `left_out`."""
        index = np.asarray(index, np.int64)
        rest = self.take(np.delete(np.arange(len(self)), index))
        if reason is None:
            return rest
        gone = tuple(LeftOut(self.ids[i], reason) for i in index)
        return dataclasses.replace(rest, left_out=self.left_out + gone)

    def unique(self) -> "QuestionSet":
        """The questions that are no near-duplicates of training questions."""
        return self.without(np.flatnonzero(self.duplicates))

    def summary(self) -> list[str]:
        """Describes the set and the rows left out, in a few lines for a log."""
        lines = [f"{self.name}: {len(self):,} questions"]
        if self.relative_tolerance:
            lines[0] += f", numbers within {self.relative_tolerance:.0%} are right"
        if self.duplicates.any():
            near = int(self.duplicates.sum())
            lines[0] += (
                f", {near} of them near-duplicates of training questions ({len(self) - near:,} "
                "without)"
            )
        if self.note:
            lines.append(f"  {self.note}")
        for reason, count in Counter(row.reason for row in self.left_out).items():
            ids = [row.id for row in self.left_out if row.reason == reason]
            lines.append(f"  left out, {reason}: {count:,} ({first_of(ids, _SHOWN)})")
        return lines
