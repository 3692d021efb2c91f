"""Reads the mathematics sets, and tables with a question and an answer column."""

import difflib
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bacr_grading import parse_reference
from bacr_grading.extract import last_box
from bacr_jax.config import DataConfig
from bacr_jax.config.checks import TABLES
from bacr_jax.errors import UserError, printable
from bacr_jax.questions import source
from bacr_jax.questions.published_sets import PUBLISHED_SETS
from bacr_jax.questions.source import Source, Split
from bacr_jax.questions.subsets import check_subsets
from bacr_jax.questions.tables import Record, SetNotFound, columns, read_files

# Columns that hold a worked solution: only a box or a "####" line in them is an answer.
SOLUTIONS = ("solution", "Solution")
_LEVEL = re.compile(r"(?:level\s*)?([1-5])(?:\.0+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """Column names of a set; of several names, the first that exists is used.

    Attributes:
      answer: columns of the gold answer; the first that can be graded in a row is its answer.
      level: columns of the level, 1 to 5.
      traces: columns of ways to the answer, by the style they are taught as, from short to long.
      any_split: published as one piece, so a folder with only "train" files is that piece.
      relative_tolerance, note: those of the set's `Source`.
    """

    question: tuple[str, ...] = ("problem", "question", "Problem", "Question")
    answer: tuple[str, ...] = ("answer", "Answer", "final_answer", *SOLUTIONS)
    level: tuple[str, ...] = ("level", "Level")
    traces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
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
        # Answers are measured quantities, rounded to a few digits by whoever wrote the solution;
        # public evaluation code for this set (Llemma's, arXiv 2310.10631) names 0.01.
        relative_tolerance=0.01,
        note="Minerva Math: all 272 problems of MIT OpenCourseWare (arXiv 2206.14858, OCWCourses); "
        "the 500 of the BACR paper are no public set",
    ),
}


def table_source(name: str, path: str, config: DataConfig) -> Source:
    """The set of a file, a folder or the hub; `name` is a key of `LAYOUTS`, or one of `TABLES`.

    `questions` raises UserError for nothing readable there, a missing column, or no usable row.
    """
    if not path:
        raise UserError(f"{name}: found no path; write {name}:PATH")
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
    """Returns every row of a table, with an empty question or answer if it has no usable one."""
    where = f"{name}:{path}"
    try:
        files = read_files(
            path, base=config.dir, split=split, any_split=layout.any_split, where=where
        )
    except SetNotFound as error:
        command = how_to_get(where, config.dir)
        raise UserError(f"{error}; {command} gets it" if command else str(error)) from None
    rows = [row for found in files.values() for row in found]
    present = columns(rows)
    question = _column(present, layout.question, where, "question", name)
    check_subsets(files, question, where)
    answers = [column for column in layout.answer if column in present]
    if not answers:
        _column(present, layout.answer, where, "answer", name)
    if name in TABLES and split == "train":
        for columns_of_style in layout.traces.values():
            _column(present, columns_of_style, where, "trace", name)
    ids = _ids(rows, [column for column in layout.id if column in present], f"{name}-{split}")
    read = _verbatim if config.answers == "verbatim" else _gold
    found = [
        source.Row(
            ids[i],
            _text(row.get(question)),
            read(row, answers),
            {
                "subject": printable(str(_first(row, layout.subject) or "")),
                "traces": {s: _text(_first(row, names)) for s, names in layout.traces.items()},
            },
            _level(_first(row, layout.level)),
        )
        for i, row in enumerate(rows)
    ]
    said = [level for row in rows if (level := _first(row, layout.level)) is not None]
    grouped = split == "train" and config.groups == "level" and config.num_groups > 1
    if grouped and said and not any(row.level for row in found):
        raise UserError(f"{where}: found level {said[0]!r:.40}; write 1-5, or data.num_groups=1")
    if not any(row.question and row.answer for row in found):
        bad = Counter(source.NO_GOLD if row.question else source.NO_QUESTION for row in found)
        reasons = ", ".join(f"{count:,} with {reason}" for reason, count in bad.items())
        raise UserError(
            f"{where}: none of its {len(rows):,} rows can be used ({reasons}, columns {question!r} "
            f"and {' or '.join(map(repr, answers))}); write a set with answers"
        )
    return found


def how_to_get(spec: str, folder: str) -> str:
    """Returns the command that downloads the set NAME:PATH; empty if no command does."""
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
    if config.answer_column is not None:
        answer = (config.answer_column,)
    styles = config.trace_column or ()
    traces = {style: (style,) for style in ([styles] if isinstance(styles, str) else styles)}
    return Layout(question=question, answer=answer, traces=traces)


def _trace(row: source.Row, style: str) -> str:
    """A way to the answer as its column holds it; of one with a "####" line what is before that."""
    return row.metadata["traces"][style].partition("####")[0].strip()


def _column(found: list[str], wanted: Sequence[str], where: str, kind: str, name: str) -> str:
    for column in wanted:
        if column in found:
            return column
    near = difflib.get_close_matches(wanted[0], found, n=1)
    advice = f"data.{kind}_column={shlex.quote(near[0]) if near else 'NAME'}"
    advice = f"write {advice}" if name in TABLES else f"write jsonl:PATH with {advice}"
    raise UserError(
        f"{where}: no {kind} column {' or '.join(map(repr, wanted))}, found the columns "
        f"{', '.join(found) or '(none)'}; {advice}"
    )


def _first(row: Record, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(value: Any) -> str:
    """A text that can be shown to a model, "" for anything else."""
    if not isinstance(value, str):
        return ""
    try:
        value.encode()
    except UnicodeEncodeError:
        # A lone surrogate, which JSON can write and no tokenizer can read.
        return ""
    return value.strip()


def _gold(row: Record, names: Sequence[str]) -> str:
    """Returns the first answer of a row that can be graded, or ""."""
    for name in names:
        value = row.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        # Tables write a missing number as NaN.
        if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value):
            value = str(value)
        text = _text(value)
        if name in SOLUTIONS and last_box(text) is None and "####" not in text:
            continue
        gold = parse_reference(text) if text else None
        if gold is not None:
            return gold.text
    return ""


def _verbatim(row: Record, names: Sequence[str]) -> str:
    """Returns the first non-empty answer of a row, lists and objects as JSON, or ""."""
    for name in names:
        value = row.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            continue
        text = value if value is None or isinstance(value, str) else json.dumps(value)
        if _text(text):
            return _text(text)
    return ""


def _level(value: Any) -> int:
    match = _LEVEL.fullmatch(str(value).strip())
    return int(match[1]) if match else 0


def _ids(rows: Sequence[Record], names: Sequence[str], prefix: str) -> list[str]:
    """Returns the source's identifiers if complete and unique, else numbers of rows."""
    for name in names:
        own = [printable(str(row[name])) for row in rows if row.get(name) is not None]
        if len(own) == len(rows) == len(set(own)):
            return own
    return [f"{prefix}-{index}" for index in range(len(rows))]
