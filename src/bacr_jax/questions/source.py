"""One protocol for all questions: tables, procedural tasks, generators, files of one's own.

A source says `questions(split)`, rows; `render(row)`, what the model reads; `score(answer, row)`,
a number in [0, 1]; and for a warm-up perhaps `trace(row, style)`, a way to the answer.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from bacr_jax.config import DataConfig
from bacr_jax.config.checks import NUM_LEVELS
from bacr_jax.errors import UserError
from bacr_jax.questions.groups import groups_from_levels, groups_from_solve_rate, read_solve_rates
from bacr_jax.questions.question_set import LeftOut, QuestionSet

Split = Literal["train", "test"]
# How answers are scored where no file says it: by the grader's rules, or letter for letter.
RULES = "rules"
EXACT = "exact"
# Reasons to leave a row out.
NO_QUESTION = "no question"
NO_GOLD = "no answer that could be graded"
BEYOND = "beyond its set's share of the mixture"


@dataclass(frozen=True)
class Row:
    """A question.

    Attributes:
      id: unique in its split.
      answer: a right one; None: none is known, and only a score can tell.
      metadata: what render, score and trace need besides; values of Python's own types.
      level: 1 (easy) .. 5, or 0 if unknown.
    """

    id: str
    question: str
    answer: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    level: int = 0


def question_of(row: Row) -> str:
    """Returns the question unchanged."""
    return row.question


@dataclass(frozen=True)
class Source:
    """A source of questions, made of pure functions.

    Attributes:
      score: RULES, EXACT, or the file whose `score(answer, row)` is asked, in processes that can be
        killed.
      whole: an answer is right at a score of 1.0, and else wrong.
      third_party: `score` is a package's, and runs confined.
      trace: (row, style) -> text between the thinking's tags, for a supervised warm-up; "": the
        row has none.
      styles: those that `trace` knows, from short to long.
      relative_tolerance: largest relative error of a numeric answer.
      note: what a reader of its results should know.
    """

    name: str
    questions: Callable[[Split], Sequence[Row]]
    render: Callable[[Row], str] = question_of
    score: str = RULES
    whole: bool = False
    third_party: bool = False
    trace: Callable[[Row, str], str] | None = None
    styles: tuple[str, ...] = ()
    relative_tolerance: float = 0.0
    note: str = ""


def question_set(
    parts: Sequence[tuple[float, Source]], config: DataConfig, split: Split
) -> QuestionSet:
    """The questions of a source, or of several mixed by weight, that can be asked and scored.

    A mixture holds as many rows of each source as its weight allows, evenly spaced among them; of
    the one that is scarcest for its weight all.
    """
    sources = [source for _, source in parts]
    if len({(s.score, s.whole, s.relative_tolerance) for s in sources}) > 1:
        raise UserError(
            f"data: {sources[0].name} and {sources[1].name} are scored in different ways and can't "
            "be mixed; write sets of one kind"
        )
    prefixes = [f"{place}-" if len(parts) > 1 else "" for place in range(len(parts))]
    asked: list[tuple[Source, Row]] = []
    left_out: list[LeftOut] = []
    usable = [_usable(*both, split, left_out) for both in zip(sources, prefixes)]
    share = min(len(rows) / weight for (weight, _), rows in zip(parts, usable))
    for (weight, source), rows in zip(parts, usable):
        count = min(int(share * weight + 1e-9), len(rows))
        chosen = {*np.linspace(0, len(rows), count, endpoint=False).astype(int).tolist()}
        asked += [(source, row) for i, row in enumerate(rows) if i in chosen]
        left_out += [LeftOut(row.id, BEYOND) for i, row in enumerate(rows) if i not in chosen]
    first = sources[0]
    ids = [row.id for _, row in asked]
    levels = np.array([row.level for _, row in asked], np.int32)
    return QuestionSet(
        name=" + ".join(source.name for source in sources),
        questions=[source.render(row) for source, row in asked],
        answers=[row.answer or "" for _, row in asked],
        levels=levels,
        groups=_groups(levels, ids, config, split),
        ids=ids,
        subjects=[
            source.name if len(parts) > 1 else str(row.metadata.get("subject", ""))
            for source, row in asked
        ],
        rows=asked,
        left_out=tuple(left_out),
        relative_tolerance=first.relative_tolerance,
        score=first.score,
        note="; ".join(dict.fromkeys(source.note for source in sources if source.note)),
    )


def _usable(source: Source, prefix: str, split: Split, left_out: list[LeftOut]) -> list[Row]:
    """The rows that can be asked and scored, with ids after the prefix; notes the others."""
    rows = [dataclasses.replace(row, id=prefix + row.id) for row in source.questions(split)]
    any_answer = source.score not in (RULES, EXACT)
    reasons = [
        NO_QUESTION if not row.question else "" if row.answer or any_answer else NO_GOLD
        for row in rows
    ]
    left_out += [LeftOut(row.id, reason) for row, reason in zip(rows, reasons) if reason]
    kept = [row for row, reason in zip(rows, reasons) if not reason]
    if not kept:
        raise UserError(f"{source.name}: found no question that can be asked; write another set")
    return kept


def _groups(
    levels: Int[np.ndarray, "n"], ids: list[str], config: DataConfig, split: Split
) -> Int[np.ndarray, "n"]:
    """Groups of the training questions; of test questions, only their levels are known."""
    if config.groups == "solve_rate" and split == "train":
        assert config.labels is not None
        rates = read_solve_rates(config.labels, ids)
        return groups_from_solve_rate(rates, num_groups=config.num_groups)
    by_level = config.groups == "level"
    num_groups = config.num_groups if by_level else min(config.num_groups, NUM_LEVELS)
    return groups_from_levels(levels, num_groups=num_groups)
