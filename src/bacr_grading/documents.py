"""Files that others wrote: read up to a limit, and JSON without what breaks its readers later.

The one reader of JSON, and the one writer that replaces a file. What is refused are plain
`OSError`s and `ValueError`s, which each caller puts into a line with the name that the file has
there.
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

# A tokenizer.json has 10 MB; a table of questions can be larger than any file of settings.
LARGEST_FILE = 256 << 20
LARGEST_TABLE = 8 << 30
# Nobody nests settings deeper; a reader that calls itself ends at about 1000.
MAX_DEPTH = 64
# Past 308 digits a number is no float, past 4300 Python refuses to print it.
MAX_DIGITS = 300
# Bytes read at a time.
_PIECE = 1 << 16

_NESTING = {"[": 1, "{": 1, "]": -1, "}": -1}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_LEFT_OVER = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class NotJson(ValueError):
    """What is wrong with a text that should be JSON, in a few words."""


class Repeated(NotJson):
    """A key or column that stands twice in a table, of which readers see the last one only."""


def expand_home(path: str | Path) -> Path:
    """Returns a path with a leading ~ or ~USER replaced by the home folder.

    Raises:
      ValueError: there is no such user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("found no such home folder; write the path in full")
    return Path(expanded)


def nearest(path: Path, otherwise: str) -> str:
    """What may be meant by the path of nothing: the name most like it there, else `otherwise`."""
    try:
        names = [entry.name for entry in path.absolute().parent.iterdir()]
    except OSError:
        return otherwise
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return str(path.with_name(close[0])) if close else otherwise


def read_file(path: Path, *, most: int = LARGEST_FILE) -> bytes:
    """The content of a regular file; a pipe or a device, which may never end, is refused unopened.

    Raises:
      OSError: no such file, no file, or one of more than `most` bytes.
      ValueError: a name that no file can have.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))
        # A read of so many bytes makes room for all of them, and a file of /proc has no size.
        pieces, size = [], 0
        while size <= most and (piece := file.read(max(found.st_size, _PIECE) + 1)):
            pieces.append(piece)
            size += len(piece)
    if size > most:
        raise OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def check_regular(path: Path) -> None:
    """Refuses what another library would wait for when it opens it: a pipe, a device, a folder.

    Raises:
      OSError: no such file, or no regular one.
      ValueError: a name that no file can have.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))


def parse_json(text: str | bytes, *, table: bool = False) -> Any:
    """Reads JSON; bytes are UTF-8.

    `table`: rows of a table, whose readers leave single fields out: lets NaN through, which tables
    write for a missing number, and halves of surrogate pairs, which no file can hold; no key that
    stands twice (`Repeated`).

    NotJson: no JSON, or JSON with more than 64 levels, numbers that no float can hold, NaN or
      halves of surrogate pairs.
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
            parse_int=_whole,
            parse_float=_number,
            parse_constant=float if table else _refuse,
            object_pairs_hook=_once if table else None,
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


def read_json(path: Path) -> Any:
    """`parse_json` of `read_file`, and raises what they do."""
    return parse_json(read_file(path))


def read_object(path: Path) -> dict[str, Any]:
    """`read_json` of a file that holds an object; NotJson: it holds something else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise NotJson(f"found a {type(value).__name__}, not an object")
    return value


def parse_lines(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a table in JSONL by their lines' numbers; NotJson: says which line is none."""
    # Not splitlines: a JSON string may hold the other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, table=True)
            fault = "" if isinstance(row, dict) else f"found {type(row).__name__}"
        except Repeated as error:
            raise NotJson(f"line {number}: {error}") from None
        except NotJson as error:
            fault = str(error)
        if fault:
            raise NotJson(f"line {number}: {fault}; write one JSON object a line")
        yield number, row


def check_once(names: Sequence[str]) -> None:
    """Refuses names of which one stands twice, as `Repeated`."""
    if len({*names}) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise Repeated(f"found {name!r:.60} twice; write it once")


def _once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(fields)) < len(fields):
        check_once([name for name, _ in fields])
    return found


def _depth(text: str) -> int:
    steps = (_NESTING.get(match.group(), 0) for match in _TOKEN.finditer(text))
    return max(itertools.accumulate(steps), default=0)


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise NotJson(f"holds a number of {len(digits):,} digits")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise NotJson(f"holds the number {digits[:20]}, which is too large")
    return number


def _refuse(name: str) -> NoReturn:
    raise NotJson(f"holds {name}, which is no JSON")


def replace_file(path: Path, content: bytes | str | Iterable[str]) -> None:
    """Replaces a file in one step: a reader sees the old content or the new one, never half.

    A long text may come in pieces. Where it can't be written, the old one stays, and nothing else.
    """
    # One of its own: another command may be writing the same file.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    pieces = [content] if isinstance(content, bytes | str) else content
    try:
        with temporary.open("wb") as file:
            file.writelines(p if isinstance(p, bytes) else p.encode() for p in pieces)
            file.flush()
            # The name must not reach the disk before the content does.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def is_left_over(name: str) -> bool:
    """Whether a file is one that `replace_file` was writing when its process was killed."""
    return _LEFT_OVER.fullmatch(name) is not None
