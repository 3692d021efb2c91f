"""Reads JSON and JSONL files, and writes files atomically.

An atomic write replaces the file in one step, so that other processes never read a partial file.
The functions that read and replace files are re-exported from `bacr_io.files`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bacr_io.errors import UserError
from bacr_io.files import (
    LARGEST_TABLE as LARGEST_TABLE,
)
from bacr_io.files import (
    NotJson as NotJson,
)
from bacr_io.files import (
    check_regular as check_regular,
)
from bacr_io.files import (
    expand_home as expand_home,
)
from bacr_io.files import (
    is_left_over as is_left_over,
)
from bacr_io.files import (
    nearest as nearest,
)
from bacr_io.files import (
    parse_json as parse_json,
)
from bacr_io.files import (
    parse_lines as parse_lines,
)
from bacr_io.files import (
    read_file as read_file,
)
from bacr_io.files import (
    read_json as read_json,
)
from bacr_io.files import (
    read_object as read_object,
)
from bacr_io.files import (
    replace_file as replace_file,
)


def check_model_folder(path: str | Path, where: str) -> None:
    """Checks that the folder of a model exists.

    Args:
      path: path of the folder.
      where: the config key or command-line option that contains the path, for the error message.

    Raises:
      UserError: if `path` is not a folder.
    """
    if not Path(path).is_dir():
        between = " " if where.startswith("-") else "="
        write = nearest(Path(path), "a Hugging Face folder")
        raise UserError(f"{where}{between}{path}: there is no such folder; use {write}")


def cannot_write(path: Path, error: OSError) -> UserError:
    """Returns the UserError for a file that can't be written."""
    return UserError(
        f"{path}: the file can't be written ({error.strerror}); free disk space or change the "
        "permissions, and run the same command again"
    )


def write_atomically(path: Path, content: bytes | str | Iterable[str]) -> None:
    """Writes content to a file atomically, replacing an existing file.

    Raises:
      UserError: if the file can't be written, for example because the disk is full or permission
        is denied.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_json(path: Path, value: Any) -> None:
    """Serializes a value as indented JSON and writes it to a file atomically."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends a record to a JSONL file and flushes the file to the operating system.

    Raises:
      UserError: if the file can't be written.
    """
    line = json.dumps(record, allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise cannot_write(path, error) from None


def _complete_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line of a JSONL file, without its line break, and the parsed record.

    An incomplete last line is skipped, because the process that wrote the line was interrupted. A
    missing file yields nothing.

    Raises:
      UserError: if another line is malformed, or if the `step` of a record is not an integer.
    """
    if not path.exists():
        return
    check_regular(path)
    with path.open("rb") as file:
        yield from _records_of(file, path)


def _records_of(file: BinaryIO, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines and records of an open JSONL file, as `_complete_lines` describes."""
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            text = line[:-1].decode()
            record = parse_json(text)
            if not isinstance(record, dict):
                raise ValueError
        # Invalid UTF-8 and malformed JSON both raise a ValueError.
        except ValueError:
            if not file.read(1):
                return
            raise UserError(
                f"{path}, line {number} is not a JSON object; correct or delete this line"
            ) from None
        if type(record.get("step", 0)) is not int:
            raise UserError(
                f"{path}, line {number}: `step` is {json.dumps(record['step'])[:40]}, but must be "
                "a whole number; correct or delete this line"
            )
        yield text, record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a JSONL file, or [] if the file is missing.

    An incomplete last line is skipped.
    """
    return [record for _, record in _complete_lines(path)]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes records to a JSONL file atomically, replacing an existing file."""
    write_atomically(path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in records))


def lines_until(path: Path, step: int) -> Iterator[str]:
    """Yields the lines of a JSONL file, unchanged, whose records have a `step` of at most `step`.

    Records without a `step` are included.
    """
    return (text for text, record in _complete_lines(path) if record.get("step", 0) <= step)


def keep_until(path: Path, step: int) -> None:
    """Removes the records whose `step` is greater than `step` from a JSONL file.

    An incomplete last line is removed too. Records without a `step` are kept. Nothing happens if
    the file is missing.
    """
    if not path.exists():
        return
    # The metrics of a long run can be a hundred megabytes in size, and usually no record has to be
    # removed. Therefore the file is only rewritten if its size would change.
    remaining_size = sum(len(text.encode()) + 1 for text in lines_until(path, step))
    if remaining_size != path.stat().st_size:
        write_atomically(path, (f"{text}\n" for text in lines_until(path, step)))
