"""Grades a file of answers: python -m bacr_grading --cases FILE.jsonl."""

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bacr_grading import LENIENT, Grader, VerifierGrader, load_verifier
from bacr_grading.judge import MODES
from bacr_io import files
from bacr_io.command import Parser, entry_point
from bacr_io.errors import UserError

_BATCH = 1024


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Grades all cases, writes one verdict per line and prints the counters to stderr."""
    options = _options(argv)
    rows = _read_cases(options.cases, with_questions=options.grader is not None)
    with _open_grader(options) as grader:
        _write_lines(options.out, _grade(grader, rows, options.mode))
        print(json.dumps(grader.counters()), file=sys.stderr)
        if isinstance(grader, VerifierGrader) and grader.last_failure:
            print(f"the last answer without a score: {grader.last_failure}", file=sys.stderr)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bacr grade", description=__doc__)
    add = parser.add_argument
    add(
        "--cases",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL with the fields pred and gold",
    )
    add("--out", type=Path, metavar="FILE", help="file for the verdicts (default: stdout)")
    add(
        "--mode",
        choices=MODES,
        default=LENIENT,
        help="strict: only a closed answer tag or box counts; lenient (default): any text",
    )
    add(
        "--grader",
        type=Path,
        metavar="FILE.py:F",
        help="your verifier, FILE.py:function; cases need the field question too",
    )
    add("--workers", type=int, default=2, help="worker processes (default: 2)")
    add("--deadline", type=float, default=3.0, help="seconds for one answer (default: 3)")
    options = parser.parse_args(argv)
    if options.out:
        verifier_path = ""
        if options.grader is not None:
            verifier_path, _, _ = str(options.grader).rpartition(":")
        inputs = [os.path.realpath(path) for path in (options.cases, verifier_path) if path]
        if os.path.realpath(options.out) in inputs:
            raise UserError(
                f"--out {options.out}: this file is also an input of the command, and writing it "
                "would overwrite the input; use another path"
            )
    return options


def _open_grader(options: argparse.Namespace) -> Grader | VerifierGrader:
    if options.grader is None:
        return Grader(workers=options.workers, deadline=options.deadline)
    verifier = load_verifier(str(options.grader))
    grader = VerifierGrader(
        verifier,
        workers=options.workers,
        deadline=options.deadline,
    )
    grader.check(functools.partial(print, file=sys.stderr, flush=True))
    return grader


def _write_lines(path: Path | None, lines: Iterable[str]) -> None:
    """Writes lines to stdout if `path` is None, otherwise to a file, pipe or device.

    A regular file is written atomically.
    """
    if path is None:
        sys.stdout.writelines(lines)
    elif os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as out:
            out.writelines(lines)
    else:
        try:
            files.replace_file(path, lines)
        except OSError as error:
            raise UserError(
                f"--out {path}: the file can't be written ({error.strerror}); use another path"
            ) from None


def _read_cases(path: Path, *, with_questions: bool) -> list[dict[str, Any]]:
    """Reads the cases from a JSONL file and checks their fields.

    Raises:
      UserError: if the file cannot be read, is empty, or contains an invalid row.
    """
    try:
        text = files.read_file(path, most=files.LARGEST_TABLE).decode("utf-8-sig")
        rows = dict(files.parse_lines(text))
    except OSError as error:
        raise UserError(
            f"--cases {path}: the file can't be read ({error.strerror}); use the path of a JSONL "
            "file"
        ) from None
    except UnicodeDecodeError as error:
        message = (
            f"--cases {path}: byte {error.start} of the file is not UTF-8; save the file as UTF-8 "
            "text"
        )
        raise UserError(message) from None
    except files.NotJson as error:
        raise UserError(f"{path} {error}") from None
    if not rows:
        raise UserError(
            f"--cases {path}: the file is empty; write one JSON object with the fields 'pred' and "
            "'gold' per line"
        )
    names = ("pred", "gold", "question") if with_questions else ("pred", "gold")
    for number, row in rows.items():
        _check_row(row, f"{path} line {number}", names)
    return list(rows.values())


def _check_row(row: dict[str, Any], where: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in row:
            raise UserError(
                f"{where}: the field {name!r} is missing (the fields of this line are "
                f"{sorted(row)}); every line must have the fields {' and '.join(names)}"
            )
        if not isinstance(row[name], str):
            raise UserError(
                f"{where}: the value of the field {name!r} is not a string; put it in quotes"
            )


def _grade(grader: Grader | VerifierGrader, rows: list[dict[str, Any]], mode: str) -> Iterator[str]:
    """Yields one JSON line per case, with the verdict and the zero-based number of the case."""
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        preds = [row["pred"] for row in batch]
        references = [row["gold"] for row in batch]
        if isinstance(grader, VerifierGrader):
            answers = [_answer(grader, pred, mode) for pred in preds]
            questions = [row["question"] for row in batch]
            verdicts = grader.score(answers, references, questions)
        else:
            verdicts = grader.grade(preds, references, mode=mode)
        for row, verdict in enumerate(verdicts, start=start):
            yield json.dumps({"row": row} | dataclasses.asdict(verdict)) + "\n"


def _answer(grader: VerifierGrader, pred: str, mode: str) -> str | None:
    """Extracts the answer from a model output, for a user's verifier.

    In the lenient mode, an output without a tag or box is itself the answer.
    """
    answer = grader.verifier.graded_text(pred)
    if answer is None and mode == LENIENT:
        return pred
    return answer


if __name__ == "__main__":
    sys.exit(main())
