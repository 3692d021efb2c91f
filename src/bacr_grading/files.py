"""Reads files that users or other programs wrote, and replaces files in one step.

The only JSON reader and the only atomic writer of the project. Everything read has a size limit,
and JSON is checked for values that would break a later reader. Errors are plain `OSError`s and
`ValueError`s; each caller turns them into a message with the name that the user knows.
"""

import contextlib
import difflib
import errno
import itertools
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Bytes. A tokenizer.json has 10 MB; a table of questions can be larger than any file of settings.
LARGEST_FILE = 256 << 20
LARGEST_TABLE = 8 << 30
# Levels of nesting. Settings have fewer than ten, and Python's recursion limit is about 1000.
MAX_DEPTH = 64
# A float has at most 308 digits, and Python does not print integers of more than 4300.
MAX_DIGITS = 300
# Bytes per read.
_CHUNK_BYTES = 1 << 16

_NESTING = {"[": 1, "{": 1, "]": -1, "}": -1}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_TEMPORARY_NAME = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class NotJson(ValueError):
    """A text is not JSON, or is JSON that this project does not accept."""


class DuplicateName(NotJson):
    """A table has a key or column twice, of which most readers would use only the last."""


def expand_home(path: str | Path) -> Path:
    """Returns a path with a leading ~ or ~USER replaced by the home folder.

    Raises:
      ValueError: the user does not exist.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("found no such home folder; write the path in full")
    return Path(expanded)


def nearest(path: Path, otherwise: str) -> str:
    """Suggests an existing file with a similar name in the same folder, or returns `otherwise`."""
    try:
        names = [entry.name for entry in path.absolute().parent.iterdir()]
    except OSError:
        return otherwise
    similar_names = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return str(path.with_name(similar_names[0])) if similar_names else otherwise


def read_file(path: Path, *, most: int = LARGEST_FILE) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Pipes and devices are refused without waiting for them, because they may never end.

    Raises:
      OSError: the path does not exist, is not a regular file, or has more than `most` bytes.
      ValueError: the path contains a character that no file name can have.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        _check_regular_mode(status.st_mode, path)
        if status.st_size > most:
            raise _too_large(path, most)
        # One read of the whole size is fastest. Files of /proc report size 0, so the loop reads
        # until the end of the file in any case.
        chunk_size = max(status.st_size, _CHUNK_BYTES) + 1
        chunks = []
        size = 0
        while size <= most and (chunk := file.read(chunk_size)):
            chunks.append(chunk)
            size += len(chunk)
    if size > most:
        raise _too_large(path, most)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def check_regular(path: Path) -> None:
    """Raises an error for a pipe, device or folder, for which other libraries would wait.

    Raises:
      OSError: the path does not exist or is not a regular file.
      ValueError: the path contains a character that no file name can have.
    """
    _check_regular_mode(path.stat().st_mode, path)


def _check_regular_mode(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))


def parse_json(text: str | bytes, *, table: bool = False) -> Any:
    """Parses JSON; bytes are UTF-8.

    Args:
      text: the JSON text.
      table: the text is a row of a table. NaN is accepted, because tables write it for a missing
        number, and so are halves of surrogate pairs, because readers of tables drop single fields.
        A repeated key is refused.

    Raises:
      NotJson: the text is not JSON, has more than 64 levels, or contains a number that no float
        can store, NaN, or half of a surrogate pair, which no file can store.
      DuplicateName: a row of a table has a key twice.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 at byte {error.start}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise NotJson(f"nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(
            text,
            parse_int=_parse_integer,
            parse_float=_parse_float,
            parse_constant=float if table else _refuse_constant,
            object_pairs_hook=_object_without_duplicates if table else None,
        )
    except json.JSONDecodeError as error:
        raise NotJson(f"{error.msg}: line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise NotJson("nested too deeply") from None
    if not table and _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise NotJson("holds half of a surrogate pair") from None
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        check_once([name for name, _ in pairs])
    return fields


def _depth(text: str) -> int:
    """Returns the largest number of brackets and braces that are open at the same time."""
    steps = (_NESTING.get(match.group(), 0) for match in _TOKEN.finditer(text))
    return max(itertools.accumulate(steps), default=0)


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise NotJson(f"holds a number of {len(digits):,} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise NotJson(f"holds the number {digits[:20]}, which is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"holds {name}, which is not JSON")


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises the errors of `read_file` and `parse_json`."""
    return parse_json(read_file(path))


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Raises:
      NotJson: the file contains another JSON value; also the errors of `read_json`.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise NotJson(f"found a {type(value).__name__}, not an object")
    return value


def parse_lines(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the line number and the object of every line of a JSONL table that is not blank.

    Raises:
      NotJson: a line is not a JSON object; the message contains the line number.
    """
    # str.splitlines would also split at U+2028 and others, which may occur inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        fault = ""
        try:
            row = parse_json(line, table=True)
        except DuplicateName as error:
            raise NotJson(f"line {number}: {error}") from None
        except NotJson as error:
            fault = str(error)
        else:
            if not isinstance(row, dict):
                fault = f"found {type(row).__name__}"
        if fault:
            raise NotJson(f"line {number}: {fault}; write one JSON object a line")
        yield number, row


def check_once(names: Sequence[str]) -> None:
    """Raises a `DuplicateName` if a name occurs twice."""
    if len({*names}) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise DuplicateName(f"found {name!r:.60} twice; write it once")


def replace_file(path: Path, content: bytes | str | Iterable[str]) -> None:
    """Replaces a file in one step: readers see the old content or the new one, never a mixture.

    Args:
      path: the file, which need not exist.
      content: the new content; a long text may be given in pieces.

    Raises:
      OSError: the file cannot be written. The old file stays and the temporary file is removed.
    """
    # The random part separates two commands that write the same file at the same time.
    temporary_path = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    pieces = [content] if isinstance(content, bytes | str) else content
    try:
        with temporary_path.open("wb") as file:
            file.writelines(
                piece if isinstance(piece, bytes) else piece.encode() for piece in pieces
            )
            file.flush()
            # The rename must not reach the disk before the content does.
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary_path.unlink()
        raise


def is_left_over(name: str) -> bool:
    """True if a file name is a temporary file of `replace_file`, left by a killed process."""
    return _TEMPORARY_NAME.fullmatch(name) is not None
