"""Reads mathematics question sets, and other tables with a question and an answer column."""

import difflib
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bacr_grading import Reference, parse_reference
from bacr_grading.extract import answer_mark, is_prose, last_box
from bacr_jax.config import DataConfig
from bacr_jax.config.checks import TABLES
from bacr_jax.errors import UserError, printable
from bacr_jax.questions import source
from bacr_jax.questions.chat import (
    NO_SINGLE_TURN,
    ChatQuestion,
    check_system,
    is_chat,
    single_turn,
)
from bacr_jax.questions.published_sets import PUBLISHED_SETS
from bacr_jax.questions.source import Source, Split
from bacr_jax.questions.subsets import check_subsets
from bacr_jax.questions.tables import Record, SetNotFound, columns, read_files

# Columns of worked solutions, whose texts are answers only as `Layout.solutions` defines.
SOLUTIONS = ("solution", "Solution")
_LEVEL = re.compile(r"(?:level\s*)?([1-5])(?:\.0+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """The layout of a published set: its possible column names and its properties.

    If a field has several names, the first column that exists is used.

    Attributes:
      question: columns of the question.
      answer: columns of the gold answer. The answer of a row is the first that can be graded.
      level: columns of the difficulty level, 1 to 5.
      traces: columns of thinking texts for a supervised warm-up, keyed by the style of the text
        (such as short or long), from short to long.
      solutions: texts without a box or a last line after "####" that are answers in a column of
        `SOLUTIONS`: none, only short texts (see `_is_short`), or all texts.
      subject: columns of the field or course of a question.
      id: columns of the identifier.
      any_split: True if the set is published as a single split. A folder is then read in full for
        every split, even if all of its files are named "train".
      relative_tolerance: `Source.relative_tolerance` of the set.
      note: `Source.note` of the set.
    """

    question: tuple[str, ...] = ("problem", "question", "Problem", "Question", "prompt")
    answer: tuple[str, ...] = ("answer", "Answer", "final_answer", "ground_truth", *SOLUTIONS)
    level: tuple[str, ...] = ("level", "Level")
    traces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    solutions: Literal["none", "short", "all"] = "none"
    subject: tuple[str, ...] = ("subject", "type", "Subject", "Type")
    id: tuple[str, ...] = ("unique_id", "id", "ID", "idx")
    any_split: bool = False
    relative_tolerance: float = 0.0
    note: str = ""


LAYOUTS = {
    # openai/grade-school-math and hf://openai/gsm8k/main: question, answer ending in "#### 72".
    "gsm8k": Layout(
        question=("question", "problem"), answer=("answer",), traces={"solution": ("answer",)}
    ),
    # hendrycks/math (a folder of JSON files) and its copies: problem, level, type, solution.
    "math": Layout(traces={"solution": SOLUTIONS}),
    # openai/prm800k and hf://HuggingFaceH4/MATH-500: also subject and answer.
    "math500": Layout(
        any_split=True, note="MATH-500: 500 of MATH's 5,000 test problems, chosen by prm800k"
    ),
    # hf://HuggingFaceH4/aime_2024 (problem, answer "025"), hf://Maxwell-Jia/AIME_2024 (Problem,
    # Answer 25), hf://math-ai/aime24 (problem, solution "\boxed{25}").
    "aime24": Layout(
        any_split=True,
        note="AIME 2024: all 30 problems of both papers; the 24 of the BACR paper are no public "
        "set",
    ),
    # QwenLM/Qwen2.5-Math (problem, solution with a box, type, idx), hf://math-ai/minervamath
    # (question, answer).
    "minerva_math": Layout(
        any_split=True,
        # Answers are measured quantities, rounded to a few digits by the authors of the solutions.
        # Public evaluation code for this set (Llemma's, arXiv 2310.10631) uses 0.01.
        relative_tolerance=0.01,
        note="Minerva Math: all 272 problems of MIT OpenCourseWare (arXiv 2206.14858, OCWCourses); "
        "the 500 of the BACR paper are no public set",
    ),
}


def table_source(name: str, path: str, config: DataConfig) -> Source:
    """Returns the source of a set in a file, a folder or a dataset of the hub.

    The set is read later, when the source's function `questions` is called. This function raises a
    UserError if the set can't be read, lacks a column, or has no usable row.

    Args:
      name: a key of `LAYOUTS`, or an entry of `TABLES`.
      path: path of the set, as in `read_files`.
    """
    if not path:
        raise UserError(
            f"{name}: this data set is read from a file or folder, but no path is given; use "
            f"{name}:PATH"
        )
    layout = _layout(name, config)
    return Source(
        name=name,
        questions=lambda split: _rows_of(name, path, layout, config, split),
        trace=_trace if layout.traces else None,
        styles=tuple(layout.traces),
        relative_tolerance=layout.relative_tolerance,
        note=layout.note,
    )


def _rows_of(
    name: str, path: str, layout: Layout, config: DataConfig, split: Split
) -> list[source.Row]:
    """Returns all rows of a table. Unusable questions and answers are replaced by empty texts."""
    where = f"{name}:{path}"
    files = _read_files(path, layout, config, split, where)
    records = [record for records_of_file in files.values() for record in records_of_file]
    present = columns(records)
    question = _column(present, layout.question, where, "question", name)
    check_subsets(files, question, where)
    answers = [column for column in layout.answer if column in present]
    if not answers:
        # No answer column exists, so this call raises the error about the missing column.
        _column(present, layout.answer, where, "answer", name)
    if name in TABLES and split == "train":
        for columns_of_style in layout.traces.values():
            _column(present, columns_of_style, where, "trace", name)
    id_columns = [column for column in layout.id if column in present]
    ids = _ids(records, id_columns, f"{name}-{split}")
    asked = [_question(record.get(question)) for record in records]
    check_system([chat_question.system for chat_question, _ in asked], config, where)
    rows = []
    for row_id, record, (chat_question, reason) in zip(ids, records, asked):
        subject = _first(record, layout.subject) or ""
        traces = {
            style: _text(_first(record, style_columns))
            for style, style_columns in layout.traces.items()
        }
        row = source.Row(
            row_id,
            _text(chat_question.text),
            _answer(record, answers, layout, config),
            {"subject": printable(str(subject)), "traces": traces, **reason},
            _level(_first(record, layout.level)),
        )
        rows.append(row)
    needs_levels = split == "train" and config.groups == "level" and config.num_groups > 1
    if needs_levels and not any(row.level for row in rows):
        _check_levels_readable(records, layout, where)
    if not any(row.question and row.answer for row in rows):
        reasons = Counter(
            source.NO_GOLD if row.question else source.no_question_reason(row) for row in rows
        )
        counts = ", ".join(f"{count:,} with {reason}" for reason, count in reasons.items())
        raise UserError(
            f"{where}: none of the {len(rows):,} rows can be used ({counts}; questions are read "
            f"from the column {question!r}, and answers from {' or '.join(map(repr, answers))}); "
            "use a set whose questions have answers"
        )
    return rows


def _question(value: Any) -> tuple[ChatQuestion, dict[str, str]]:
    """Returns a question, and metadata that contains the reason if its row must be left out.

    Args:
      value: value of the question column, a text or a list of messages.
    """
    if not is_chat(value):
        return ChatQuestion(value, ""), {}
    question = single_turn(value)
    if question is None:
        return ChatQuestion("", ""), {source.REASON: NO_SINGLE_TURN}
    return question, {}


def _read_files(
    path: str, layout: Layout, config: DataConfig, split: Split, where: str
) -> dict[Path, list[Record]]:
    """Reads the files of a set. If they are missing, the error contains a download command."""
    any_split = layout.any_split
    try:
        return read_files(path, base=config.dir, split=split, any_split=any_split, where=where)
    except SetNotFound as error:
        command = how_to_get(where, config.dir)
        advice = f"; {command} gets it" if command else ""
        raise UserError(f"{error}{advice}") from None


def _check_levels_readable(records: Sequence[Record], layout: Layout, where: str) -> None:
    """Raises an error if a set has a column of difficulty levels, but no level can be parsed."""
    for record in records:
        level = _first(record, layout.level)
        if level is not None:
            raise UserError(
                f"{where}: a row has the difficulty level {level!r:.40}; use levels from 1 to 5, "
                "or set data.num_groups=1, which ignores them"
            )


def how_to_get(spec: str, folder: str) -> str:
    """Returns the command that downloads the set NAME:PATH, or "" if there is no such command."""
    name, _, path = spec.partition(":")
    splits = PUBLISHED_SETS[name].rows if name in PUBLISHED_SETS else ()
    written = [f"{name}/{split}.jsonl" for split in splits]
    return f"bacr data --prepare {folder} {name}" if path in written else ""


def _layout(name: str, config: DataConfig) -> Layout:
    if name in LAYOUTS:
        return LAYOUTS[name]
    question = Layout.question
    if config.question_column is not None:
        question = (config.question_column,)
    answer = Layout.answer
    solutions: Literal["short", "all"] = "short"
    if config.answer_column is not None:
        answer = (config.answer_column,)
        solutions = "all"
    styles = config.trace_column or ()
    if isinstance(styles, str):
        styles = (styles,)
    traces = {style: (style,) for style in styles}
    return Layout(question=question, answer=answer, traces=traces, solutions=solutions)


def _trace(row: source.Row, style: str) -> str:
    """Returns the thinking text of a row, without the final answer in a last line after "####"."""
    text: str = row.metadata["traces"][style]
    mark = answer_mark(text)
    before = text if mark is None else text[: mark.start()]
    # A mark within a line is not removed, because it can begin a step if line breaks are missing.
    is_line = not before or before.endswith("\n")
    return before.strip() if is_line else text.strip()


def _column(present: list[str], names: Sequence[str], where: str, kind: str, name: str) -> str:
    """Returns the first of several possible column names that exists in the set.

    Args:
      present: columns of the set.
      names: possible names of the column.
      where: the set, for the error message.
      kind: `question`, `answer` or `trace`.
      name: name of the set's layout.

    Raises:
      UserError: the set has no such column.
    """
    for column in names:
        if column in present:
            return column
    near = difflib.get_close_matches(names[0], present, n=1)
    suggestion = shlex.quote(near[0]) if near else "NAME"
    # Only tables without a fixed layout have config keys for columns.
    write = "set" if name in TABLES else "use jsonl:PATH with"
    raise UserError(
        f"{where}: there is no column {' or '.join(map(repr, names))} with the {kind}; the "
        f"columns are {', '.join(present) or '(none)'}; {write} data.{kind}_column={suggestion}"
    )


def _first(row: Record, names: Sequence[str]) -> Any:
    """Returns the first value of a row that is not None, or None."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    return None


def _text(value: Any) -> str:
    """Returns a value as text without surrounding blanks, or "" if it can't be a model's input."""
    if not isinstance(value, str):
        return ""
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can contain a lone surrogate, which tokenizers can't encode.
        return ""
    return value.strip()


def _answer(row: Record, names: Sequence[str], layout: Layout, config: DataConfig) -> str:
    """Returns the first usable answer of a row, or "".

    Args:
      names: columns of the answer.
    """
    if config.answers == "verbatim":
        return _verbatim(row, names)
    return _gold(row, names, layout)


def _gold(row: Record, names: Sequence[str], layout: Layout) -> str:
    """Returns the first answer of a row that can be graded, or ""."""
    for name in names:
        value = row.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        # Tables contain NaN for a missing number.
        if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value):
            value = str(value)
        text = _text(value)
        gold = parse_reference(text) if text else None
        if gold is None:
            continue
        is_marked = name not in SOLUTIONS or _has_marked_answer(text)
        if is_marked or layout.solutions == "all":
            return gold.text
        if layout.solutions == "short" and _is_short(text, gold):
            return gold.text
    return ""


def _has_marked_answer(text: str) -> bool:
    """True if a solution marks its answer by a box, or by "####" in the last line."""
    return last_box(text) is not None or answer_mark(text) is not None


def _is_short(text: str, gold: Reference) -> bool:
    """True if a text is one number, expression or word, and not a worked solution.

    Args:
      gold: the answer in the text.
    """
    return "\n" not in text and (gold.kind == "number" or not is_prose(gold.text))


def _verbatim(row: Record, names: Sequence[str]) -> str:
    """Returns the first answer of a row that is not blank as unchanged text, or "".

    Lists and objects become JSON.
    """
    for name in names:
        value = row.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            continue
        text = value if value is None or isinstance(value, str) else json.dumps(value)
        if _text(text):
            return str(text)
    return ""


def _level(value: Any) -> int:
    match = _LEVEL.fullmatch(str(value).strip())
    return int(match[1]) if match else 0


def _ids(rows: Sequence[Record], names: Sequence[str], prefix: str) -> list[str]:
    """Returns an id for each row.

    Args:
      rows: the rows of a table.
      names: columns that may contain ids. The first column with a unique id in every row is used.
      prefix: if no column has unique ids, the ids are PREFIX-0, PREFIX-1 and so on.
    """
    for name in names:
        ids = [printable(str(row[name])) for row in rows if row.get(name) is not None]
        if len(ids) == len(rows) == len(set(ids)):
            return ids
    return [f"{prefix}-{index}" for index in range(len(rows))]
