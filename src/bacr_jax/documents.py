"""Reads files, and writes files atomically, so that a reader never sees a partial file.

Re-exports the readers and the atomic writer of `bacr_grading.files`.
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
    """Raises a UserError if `path` is not a folder; `where` is the key or option with the path."""
    if not Path(path).is_dir():
        between = " " if where.startswith("-") else "="
        write = nearest(Path(path), "a Hugging Face folder")
        raise UserError(f"{where}{between}{path}: no such folder; write {write}")


def cannot_write(path: Path, error: OSError) -> UserError:
    """Returns the error for a file that can't be written."""
    return UserError(
        f"{path}: can't be written ({error.strerror}); make room or rights, and run the same "
        "command again"
    )


def write_atomically(path: Path, content: bytes | str | Iterable[str]) -> None:
    """Replaces a file atomically; raises a UserError without space or permission."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_json(path: Path, value: Any) -> None:
    """Writes a value atomically as indented JSON."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends a record as a JSON line, and flushes it to the operating system."""
    line = json.dumps(record, allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise cannot_write(path, error) from None


def _complete_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines of a JSONL file with their records, except for an incomplete last line."""
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
        # Invalid UTF-8 and invalid JSON both raise ValueError.
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
    """Returns the records of a JSONL file without an incomplete last line; [] if it is missing."""
    return [record for _, record in _complete_lines(path)]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Replaces a JSONL file in one step."""
    write_atomically(path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in records))


def lines_until(path: Path, step: int) -> Iterator[str]:
    """Returns the unchanged lines of a JSONL file with records up to `step`."""
    return (text for text, record in _complete_lines(path) if record.get("step", 0) <= step)


def keep_until(path: Path, step: int) -> None:
    """Removes records of later steps and an incomplete last line from a JSONL file."""
    if not path.exists():
        return
    # Compares sizes first, because the metrics of a long run have a hundred megabytes and usually
    # nothing is removed.
    remaining_size = sum(len(text.encode()) + 1 for text in lines_until(path, step))
    if remaining_size != path.stat().st_size:
        write_atomically(path, (f"{text}\n" for text in lines_until(path, step)))
