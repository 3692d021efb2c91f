"""Defines the protocol of all question sources, and builds question sets from sources.

Tables, procedural tasks, generators and user modules are sources. `questions(split)` returns the
rows of a split, and `render(row)` returns the question that the model reads. Answers are scored by
rules or by `score(answer, row)`, which returns a number in [0, 1]. The optional function
`trace(row, style)` returns a thinking text (trace) for a supervised warm-up, in one of several
styles such as short or long.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from bacr_grading import parse_reference
from bacr_jax.config import DataConfig
from bacr_jax.config.checks import NUM_LEVELS
from bacr_jax.config.derived import mixture
from bacr_jax.errors import UserError
from bacr_jax.questions.groups import (
    NO_GROUP,
    groups_from_levels,
    groups_from_solve_rate,
    read_solve_rates,
)
from bacr_jax.questions.question_set import LeftOut, QuestionSet

Split = Literal["train", "test"]
# Values of `Source.score` for a source without a scoring file: answers are graded by the grader's
# rules, or must equal the reference answer exactly.
RULES = "rules"
EXACT = "exact"
# Reasons to leave a row out of a set.
NO_QUESTION = "no question"
NO_GOLD = "no answer that could be graded"
BEYOND = "beyond its set's share of the mixture"

# Name of the training split in the id of a question.
_TRAIN = re.compile(r"\btrain\b")


# Field of `Row.metadata` with the reason to leave the row out if its question is empty.
REASON = "no_question_reason"


@dataclass(frozen=True)
class Row:
    """A row of a source: a question and its answer.

    Attributes:
      id: identifier, unique in the split.
      question: text of the question. Empty if the row can't be used.
      answer: a correct answer. None if none is known, so that only `score` can grade answers.
      metadata: other values for render, score and trace, of Python's built-in types.
      level: difficulty level from 1 (easy) to 5, or 0 if unknown.
    """

    id: str
    question: str
    answer: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    level: int = 0


def question_of(row: Row) -> str:
    """Returns the question unchanged."""
    return row.question


def no_question_reason(row: Row) -> str:
    """Returns the reason why the question of a left-out row is empty.

    The reason is read from the row's metadata. It is `NO_QUESTION` if the metadata has none.
    """
    return str(row.metadata.get(REASON, NO_QUESTION))


@dataclass(frozen=True)
class Source:
    """A source of questions, which consists of pure functions and settings for grading.

    Attributes:
      name: name of the source.
      questions: returns the rows of a split.
      render: returns the question that the model reads.
      score: RULES, EXACT, or the path of a file with a function `score(answer, row)`, which is
        called in worker processes that can be killed.
      whole: True if only a score of 1.0 is correct, and every other score is wrong.
      third_party: True if `score` belongs to a third-party package and must run in a sandbox.
      of_response: True if `score` receives the whole response instead of the answer.
      trace: returns the text between the thinking tags for a row and a style, for a supervised
        warm-up. The text is empty if the row has no trace.
      styles: names of the styles that `trace` accepts, from short to long texts.
      relative_tolerance: maximum relative error of a correct numeric answer.
      note: a remark for readers of the set's results. Empty if there is none.
    """

    name: str
    questions: Callable[[Split], Sequence[Row]]
    render: Callable[[Row], str] = question_of
    score: str = RULES
    whole: bool = False
    third_party: bool = False
    of_response: bool = False
    trace: Callable[[Row, str], str] | None = None
    styles: tuple[str, ...] = ()
    relative_tolerance: float = 0.0
    note: str = ""


def question_set(
    parts: Sequence[tuple[float, Source]], config: DataConfig, split: Split
) -> QuestionSet:
    """Builds the question set of a source, or of a weighted mixture of sources.

    The numbers of rows in a mixture are proportional to the weights. The source with the fewest
    rows relative to its weight is used in full. From every other source, rows are selected at even
    intervals.

    Args:
      parts: weight and source of each part of the mixture.

    Returns:
      The rows that can be used. The other rows are in `left_out` with their reasons.

    Raises:
      UserError: a source has no usable row, or the sources are scored in different ways.
    """
    sources = [source for _, source in parts]
    is_mixture = len(parts) > 1
    _check_same_scoring(sources)
    usable_rows = list[list[Row]]()
    left_out = list[LeftOut]()
    for index, source in enumerate(sources):
        # The prefix keeps ids unique if sources have equal ids.
        prefix = f"{index}-" if is_mixture else ""
        usable_rows.append(_usable(source, prefix, config, split, left_out))
    # Number of rows for a weight of 1.
    rows_per_weight = min(len(rows) / weight for (weight, _), rows in zip(parts, usable_rows))
    selected_rows = list[tuple[Source, Row]]()
    for (weight, source), rows in zip(parts, usable_rows):
        # The small number prevents a rounding error from removing a row.
        count = min(int(rows_per_weight * weight + 1e-9), len(rows))
        selected = set(np.linspace(0, len(rows), count, endpoint=False).astype(int).tolist())
        for index, row in enumerate(rows):
            if index in selected:
                selected_rows.append((source, row))
            else:
                left_out.append(LeftOut(row.id, BEYOND))
    first = sources[0]
    ids = [row.id for _, row in selected_rows]
    label_ids = _label_ids(usable_rows, is_mixture=is_mixture)
    levels = np.array([row.level for _, row in selected_rows], np.int32)
    return QuestionSet(
        name=" + ".join(source.name for source in sources),
        questions=[source.render(row) for source, row in selected_rows],
        answers=[row.answer or "" for _, row in selected_rows],
        levels=levels,
        groups=_groups(levels, ids, [label_ids[name] for name in ids], config, split),
        ids=ids,
        subjects=[
            source.name if is_mixture else str(row.metadata.get("subject", ""))
            for source, row in selected_rows
        ],
        rows=selected_rows,
        left_out=tuple(left_out),
        relative_tolerance=first.relative_tolerance,
        score=first.score,
        note="; ".join(dict.fromkeys(source.note for source in sources if source.note)),
    )


def _check_same_scoring(sources: Sequence[Source]) -> None:
    first = sources[0]
    for source in sources[1:]:
        if (
            source.score != first.score
            or source.whole != first.whole
            or source.relative_tolerance != first.relative_tolerance
        ):
            raise UserError(
                f"data.train: {first.name} and {source.name} can't be mixed, because their "
                "answers are scored in different ways; use sets whose answers are scored in the "
                "same way"
            )


def _usable(
    source: Source, prefix: str, config: DataConfig, split: Split, left_out: list[LeftOut]
) -> list[Row]:
    """Returns the rows that have a question and can be scored.

    Args:
      prefix: text to insert before the ids.
      left_out: list to which all other rows are appended, with the reason.
    """
    usable = []
    for source_row in source.questions(split):
        row = dataclasses.replace(source_row, id=prefix + source_row.id)
        if not row.question:
            left_out.append(LeftOut(row.id, no_question_reason(row)))
        elif not _is_gradable(row.answer, source.score, config):
            left_out.append(LeftOut(row.id, NO_GOLD))
        else:
            usable.append(row)
    if not usable:
        raise UserError(
            f"{source.name}: none of the questions in this set can be used; use another set"
        )
    return usable


def _is_gradable(answer: str | None, score: str, config: DataConfig) -> bool:
    """True if a source's `score` can grade answers against a reference answer.

    With `data.answers=verbatim`, a verifier reads the reference, which can be any text.
    """
    if score == RULES and config.answers == "parsed":
        return parse_reference(answer) is not None
    return score not in (RULES, EXACT) or bool(answer and answer.strip())


def _id_in_source(name: str, *, is_mixture: bool) -> str:
    """Removes the prefix that `question_set` puts before the ids of a mixture."""
    return name.partition("-")[2] if is_mixture else name


def _label_ids(usable_rows: Sequence[Sequence[Row]], *, is_mixture: bool) -> dict[str, str]:
    """Maps ids to the ids under which `bacr evaluate` labels the questions of a single set.

    If several sets of a mixture have the same id, its label is ambiguous. These questions are
    labeled under their ids in the mixture.
    """
    source_ids = {
        row.id: _id_in_source(row.id, is_mixture=is_mixture) for rows in usable_rows for row in rows
    }
    counts = Counter(source_ids.values())
    return {
        name: source_id if counts[source_id] == 1 else name
        for name, source_id in source_ids.items()
    }


def _groups(
    levels: Int[np.ndarray, "n"],
    ids: list[str],
    label_ids: list[str],
    config: DataConfig,
    split: Split,
) -> Int[np.ndarray, "n"]:
    """Computes the difficulty groups of questions.

    Solve rates are only measured for training questions, so test questions are always grouped by
    level. A question without a label has the group `NO_GROUP`.
    """
    if config.groups == "solve_rate" and split == "train":
        assert config.labels is not None
        rates = read_solve_rates(config.labels, ids, label_ids)
        return groups_from_solve_rate(rates, num_groups=config.num_groups)
    by_level = config.groups == "level"
    num_groups = config.num_groups if by_level else min(config.num_groups, NUM_LEVELS)
    return groups_from_levels(levels, num_groups=num_groups)


def check_labeled(questions: QuestionSet, config: DataConfig) -> None:
    """Checks that every question to train on has a label if its difficulty group depends on it.

    Call it after the questions with long prompts are excluded, because `bacr evaluate` excludes
    them too, and creates no labels for them.

    Raises:
      UserError: a question has no label. The error names a label that was probably meant for it:
        under an id that several sets of a mixture have, or of the test split.
    """
    unlabeled = np.flatnonzero(questions.groups == NO_GROUP)
    if not len(unlabeled):
        return
    assert config.labels is not None
    name = questions.ids[unlabeled[0]]
    source_id = _id_in_source(name, is_mixture=len(mixture(config.train)) > 1)
    test_id = _TRAIN.sub("test", source_id)
    is_ambiguous, is_of_test = ~np.isnan(read_solve_rates(config.labels, [source_id, test_id]))
    other_label = ""
    if is_ambiguous:
        other_label = f", but a label for {source_id!r}, which is an id in several sets"
    elif is_of_test:
        other_label = f", but a label for {test_id!r} of another split"
    raise UserError(
        f"data.labels={config.labels} has no label for {len(unlabeled):,} of {len(questions):,} "
        f"questions, the first of which is {name!r}{other_label}; create the labels again with "
        "bacr evaluate --split train --label-difficulty on this set"
    )
