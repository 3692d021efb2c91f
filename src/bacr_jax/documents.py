"""Files: those that others wrote, and ours, written so that no reader ever sees half of one.

The readers and the one atomic writer are `bacr_grading.files`, under the library's name.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bacr_grading.files import (
    LARGEST_TABLE as LARGEST_TABLE,
    NotJson as NotJson,
    check_regular as check_regular,
    expand_home as expand_home,
    is_left_over as is_left_over,
    nearest as nearest,
    parse_json as parse_json,
    parse_lines as parse_lines,
    read_file as read_file,
    read_json as read_json,
    read_object as read_object,
    replace_file as replace_file,
)
from bacr_grading.errors import UserError


def check_model_folder(path: str | Path, where: str) -> None:
    """Refuses a path at which there is no folder; `where` is the key or option that named it."""
    if not Path(path).is_dir():
        between = " " if where.startswith("-") else "="
        write = nearest(Path(path), "a Hugging Face folder")
        raise UserError(f"{where}{between}{path}: no such folder; write {write}")


def cannot_write(path: Path, error: OSError) -> UserError:
    """The refusal for a file that the system does not let us write."""
    return UserError(
        f"{path}: can't be written ({error.strerror}); make room or rights, and run the same "
        "command again"
    )


def write_atomically(path: Path, content: bytes | str | Iterable[str]) -> None:
    """`replace_file` of a run's file; UserError: no space, or no right to write there."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of indented JSON."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds one JSON line, handed to the system before this returns."""
    line = json.dumps(record, allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise cannot_write(path, error) from None


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines of a JSONL file with their records, without a last line torn by a kill."""
    if not path.exists():
        return
    check_regular(path)
    with path.open("rb") as file:
        yield from _records_of(file, path)


def _records_of(file: BinaryIO, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            text = line[:-1].decode()
            record = parse_json(text)
            if not isinstance(record, dict):
                raise ValueError
        # Bytes that are no UTF-8 and text that is no JSON are both ValueErrors.
        except ValueError:
            if not file.read(1):
                return
            raise UserError(
                f"{path}, line {number}: is not a JSON record; fix or remove the line"
            ) from None
        if type(record.get("step", 0)) is not int:
            raise UserError(
                f"{path}, line {number}: step is {json.dumps(record['step'])[:40]}, which is no "
                "whole number; fix or remove the line"
            )
        yield text, record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file; none if it is not there. A torn last line is left out."""
    return [record for _, record in _whole_lines(path)]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Replaces a JSONL file in one step."""
    write_atomically(path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in records))


def lines_until(path: Path, step: int) -> Iterator[str]:
    """Lines of a JSONL file, as they are, whose records are not of later steps."""
    return (text for text, record in _whole_lines(path) if record.get("step", 0) <= step)


def keep_until(path: Path, step: int) -> None:
    """Drops the records of later steps, and a torn last line."""
    if not path.exists():
        return
    # A long run's metrics are a hundred megabytes, of which nothing is dropped as a rule.
    kept = sum(len(text.encode()) + 1 for text in lines_until(path, step))
    if kept != path.stat().st_size:
        write_atomically(path, (f"{text}\n" for text in lines_until(path, step)))
