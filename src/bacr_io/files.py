"""Reads untrusted files with size limits, parses JSON strictly and writes files atomically.

Other packages use this module to read input files and to replace files. JSON is checked for values
that would break a later reader, such as NaN. Errors are plain `OSError`s and `ValueError`s. Each
caller converts them into a message that names the option or config key.
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

# Maximum file sizes in bytes. A tokenizer.json has about 10 MB. Tables of questions can be much
# larger than config files, so they have a separate limit.
LARGEST_FILE = 256 << 20
LARGEST_TABLE = 8 << 30
# Maximum nesting depth of JSON. Config files have fewer than ten levels, and Python's recursion
# limit is about 1000.
MAX_DEPTH = 64
# Maximum number of digits of a JSON integer. A float has at most about 308 digits before the
# decimal point, and Python does not print integers with more than 4300 digits.
MAX_DIGITS = 300
# Minimum number of bytes per read call.
_CHUNK_BYTES = 1 << 16

_NESTING = {"[": 1, "{": 1, "]": -1, "}": -1}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_TEMPORARY_NAME = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class NotJson(ValueError):
    """Raised if a text is not valid JSON, or contains values that this project does not accept."""


class DuplicateName(NotJson):
    """Raised if a key or column occurs twice. Most readers would silently use the last one."""


def expand_home(path: str | Path) -> Path:
    """Expands environment variables such as $HOME, and a leading ~ or ~USER, in a path.

    A dollar sign is kept if no such variable exists, but a file with this name does.

    Raises:
      ValueError: if a variable is not set or the user does not exist.
    """
    with_variables = _VARIABLE.sub(_value_of, str(path))
    expanded = os.path.expanduser(with_variables)
    if expanded.startswith("~"):
        raise ValueError("the home folder of this user does not exist; use the full path")
    unset = _VARIABLE.search(expanded)
    if unset is not None and not os.path.lexists(expanded):
        raise ValueError(
            f"the environment variable {unset.group()} is not set; set it, or use the full path"
        )
    return Path(expanded)


def _value_of(match: re.Match[str]) -> str:
    """Returns the value of a matched environment variable, or the matched text if it is unset."""
    name = match[1] or match[2]
    return os.environ.get(name, match.group())


def nearest(path: Path, otherwise: str) -> str:
    """Returns a path in the folder of the missing `path` with a similar name, or `otherwise`."""
    try:
        names = [entry.name for entry in path.absolute().parent.iterdir()]
    except OSError:
        return otherwise
    similar_names = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    if not similar_names:
        return otherwise
    return str(path.with_name(similar_names[0]))


def read_file(path: Path, *, most: int = LARGEST_FILE) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Pipes and devices are rejected without blocking, because reading them might never finish.

    Raises:
      OSError: if the path does not exist, is not a regular file, or is larger than `most` bytes.
      ValueError: if the path contains a character that is not allowed in file names.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        _check_regular_mode(status.st_mode, path)
        if status.st_size > most:
            raise _too_large(path, most)
        # Reading the whole file in one call is fastest. The loop is needed because files in /proc
        # report size 0.
        chunk_size = max(status.st_size, _CHUNK_BYTES) + 1
        chunks = []
        size = 0
        while size <= most and (chunk := file.read(chunk_size)):
            chunks.append(chunk)
            size += len(chunk)
    if size > most:
        raise _too_large(path, most)
    if len(chunks) == 1:
        return chunks[0]
    return b"".join(chunks)


def check_regular(path: Path) -> None:
    """Checks that a path is a regular file, because other libraries would block on a pipe.

    Raises:
      OSError: if the path does not exist or is not a regular file.
      ValueError: if the path contains a character that is not allowed in file names.
    """
    _check_regular_mode(path.stat().st_mode, path)


def _check_regular_mode(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))


def parse_json(text: str | bytes, *, table: bool = False) -> Any:
    """Parses JSON and rejects values that cannot be stored or that would break a later reader.

    Args:
      text: the JSON text. Bytes are decoded as UTF-8.
      table: True if the text is a row of a table (JSONL). NaN and infinities are then accepted,
        because they are used for missing numbers in tables. Unpaired surrogates are accepted too,
        because the code that reads tables handles them per field. A repeated key is an error.

    Raises:
      NotJson: if the text is not valid JSON, is nested more than 64 levels deep, or contains a
        number that does not fit into a float, NaN, an infinity or an unpaired surrogate.
      DuplicateName: if a row of a table contains a key twice.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise NotJson(f"the text is not UTF-8 at byte {error.start}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise NotJson(f"the JSON value is nested more than {MAX_DEPTH} levels deep")
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
        raise NotJson("the JSON value is nested too deeply") from None
    if not table and _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise NotJson(
                "the text contains only one half of a surrogate pair, which is not valid Unicode"
            ) from None
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        check_once([name for name, _ in pairs])
    return fields


def _depth(text: str) -> int:
    """Returns the maximum nesting depth of brackets and braces outside of strings."""
    steps = (_NESTING.get(match.group(), 0) for match in _TOKEN.finditer(text))
    return max(itertools.accumulate(steps), default=0)


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise NotJson(
            f"the text contains a number of {len(digits):,} digits, but at most {MAX_DIGITS} are "
            "supported"
        )
    return int(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise NotJson(f"the text contains the number {digits[:20]}, which is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"the text contains {name}, which JSON does not allow")


def read_json(path: Path) -> Any:
    """Reads and parses a JSON file.

    Raises:
      OSError, ValueError: for the same reasons as `read_file`.
      NotJson: for the same reasons as `parse_json`.
    """
    return parse_json(read_file(path))


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file whose top-level value is an object.

    Raises:
      NotJson: if the file contains any other JSON value, and for the same reasons as `parse_json`.
      OSError, ValueError: for the same reasons as `read_file`.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise NotJson(f"the JSON value is a {type(value).__name__} instead of an object")
    return value


def parse_lines(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parses a JSONL text and yields the line number and the object of every non-blank line.

    Raises:
      NotJson: if a line is not a JSON object. The message contains the line number.
    """
    # Do not use str.splitlines, because it also splits at characters such as U+2028, which may
    # occur inside a JSON string.
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
                fault = f"the JSON value is a {type(row).__name__}"
        if fault:
            raise NotJson(f"line {number}: {fault}; every line must be one JSON object")
        yield number, row


def check_once(names: Sequence[str]) -> None:
    """Raises `DuplicateName` if a name occurs more than once."""
    if len({*names}) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise DuplicateName(f"the name {name!r:.60} occurs twice; keep only one of them")


def replace_file(path: Path, content: bytes | str | Iterable[str]) -> None:
    """Writes a file atomically, so that readers see either the old or the new content.

    Args:
      path: the file. It does not have to exist.
      content: the new content. A long text may be passed as an iterable of strings.

    Raises:
      OSError: if the file cannot be written. The old file is kept and the temporary file is
        removed.
    """
    # The random suffix avoids conflicts between processes that write the same file at the same
    # time.
    temporary_path = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    pieces = [content] if isinstance(content, bytes | str) else content
    try:
        with temporary_path.open("wb") as file:
            file.writelines(
                piece if isinstance(piece, bytes) else piece.encode() for piece in pieces
            )
            file.flush()
            # Flush the content to disk before the rename. Otherwise a crash could leave an empty
            # file.
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary_path.unlink()
        raise


def is_left_over(name: str) -> bool:
    """True if a file name belongs to a temporary file that a killed `replace_file` left behind."""
    return _TEMPORARY_NAME.fullmatch(name) is not None
