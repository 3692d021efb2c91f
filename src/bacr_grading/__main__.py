"""Grades a file of answers: python -m bacr_grading --cases FILE.jsonl."""

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bacr_grading import LENIENT, Grader, VerifierGrader, documents, load_verifier
from bacr_grading.command import Parser, entry_point
from bacr_grading.errors import UserError
from bacr_grading.judge import MODES

_BATCH = 1024


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Entry point: 0, or 2 with one line on stderr when the input can't be used."""
    parser = Parser(prog="bacr grade", description=__doc__)
    add = parser.add_argument
    add(
        "--cases",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL with the fields pred and gold",
    )
    add("--out", type=Path, metavar="FILE", help="where the verdicts go (default: stdout)")
    mode_help = "strict: only a closed answer tag or box counts; lenient (default): any text"
    add("--mode", choices=MODES, default=LENIENT, help=mode_help)
    own_help = "verifier of your own, FILE.py:function; cases need the field question too"
    add("--grader", metavar="FILE.py:F", help=own_help)
    add("--workers", type=int, default=2, help="worker processes (default: 2)")
    add("--deadline", type=float, default=3.0, help="seconds for one answer (default: 3)")
    options = parser.parse_args(argv)
    inputs = filter(None, (options.cases, (options.grader or "").rpartition(":")[0]))
    if options.out and os.path.realpath(options.out) in map(os.path.realpath, inputs):
        raise UserError(f"--out {options.out}: this command reads that file; write another path")
    rows = _read(options.cases, own=options.grader is not None)
    with _opened(options) as grader:
        lines = _grade(grader, rows, options.mode)
        if options.out is None:
            sys.stdout.writelines(lines)
        # A pipe or a device gets the lines as they come, a file is replaced once all are there.
        elif os.path.exists(options.out) and not os.path.isfile(options.out):
            with open(options.out, "w", encoding="utf-8") as out:
                out.writelines(lines)
        else:
            try:
                documents.replace_file(options.out, lines)
            except OSError as error:
                raise UserError(
                    f"--out {options.out}: can't be written ({error.strerror}); write another path"
                ) from None
        print(json.dumps(grader.counters()), file=sys.stderr)
        if isinstance(grader, VerifierGrader) and grader.last_failure:
            print(f"the last answer without a score: {grader.last_failure}", file=sys.stderr)


def _opened(options: argparse.Namespace) -> Grader | VerifierGrader:
    limits = {"workers": options.workers, "deadline": options.deadline}
    if options.grader is None:
        return Grader(**limits)
    grader = VerifierGrader(load_verifier(options.grader), **limits)
    grader.check(functools.partial(print, file=sys.stderr, flush=True))
    return grader


def _read(path: Path, *, own: bool) -> list[dict[str, Any]]:
    try:
        text = documents.read_file(path, most=documents.LARGEST_TABLE).decode("utf-8-sig")
        rows = dict(documents.parse_lines(text))
    except OSError as error:
        raise UserError(f"--cases {path}: {error.strerror}; name a JSONL file") from None
    except UnicodeDecodeError as error:
        message = f"--cases {path}: not UTF-8 at byte {error.start}; name a JSONL file"
        raise UserError(message) from None
    except documents.NotJson as error:
        raise UserError(f"{path} {error}") from None
    if not rows:
        raise UserError(f"--cases {path}: no rows; write one JSON object with pred and gold a line")
    names = ("pred", "gold", "question") if own else ("pred", "gold")
    for number, row in rows.items():
        _check_row(row, f"{path} line {number}", names)
    return list(rows.values())


def _check_row(row: dict[str, Any], where: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in row:
            raise UserError(
                f"{where}: no field {name!r}, found {sorted(row)}; write {' and '.join(names)}"
            )
        if not isinstance(row[name], str):
            raise UserError(f"{where}: {name} is no string; put it in quotes")


def _grade(grader: Grader | VerifierGrader, rows: list[dict[str, Any]], mode: str) -> Iterator[str]:
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        preds, references = [row["pred"] for row in batch], [row["gold"] for row in batch]
        if isinstance(grader, VerifierGrader):
            answers = [grader.verifier.shown(pred) for pred in preds]
            if mode == LENIENT:  # Cases are usually bare answers.
                answers = [p if answer is None else answer for p, answer in zip(preds, answers)]
            verdicts = grader.score(answers, references, [row["question"] for row in batch])
        else:
            verdicts = grader.grade(preds, references, mode=mode)
        for row, verdict in enumerate(verdicts, start=start):
            yield json.dumps({"row": row} | dataclasses.asdict(verdict)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
