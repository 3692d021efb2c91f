"""Rows of JSONL, JSON, CSV and Parquet files: one file, a folder, or a dataset of the hub.

Needs nothing but NumPy, except that Parquet and the hub need the extra `hub`.
"""

import csv
import importlib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bacr_grading.files import DuplicateName, check_once
from bacr_jax.documents import LARGEST_TABLE, NotJson, nearest, parse_json, parse_lines, read_file
from bacr_jax.errors import UserError, first_of, reason_of

Record = dict[str, Any]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
HUB = "hf://"
# Words in a file's path that name a split; the hub writes data/train-00000-of-00001.parquet.
SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev"),
}
_HUB_NAME = re.compile(
    r"hf://(?:datasets/)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<inside>.+))?"
)


# Arrow's names of floats that a double would write with more digits than they have.
_SHORT: dict[str, Any] = {"halffloat": np.float16, "float": np.float32}


class NotThere(UserError):
    """A set that can't be had: no file is there, or the hub does not give it.

    `what` was found instead, without the set's name and without advice.
    """

    def __init__(self, where: str, what: str, advice: str):
        super().__init__(f"{where}: {what}; {advice}")
        self.what = what


def read_rows(path: str, *, base: str, split: str, any_split: bool, where: str) -> list[Record]:
    """Rows of a set, in the order of its files (by name) and of the lines in them.

    Arguments and errors are those of `read_files`.
    """
    files = read_files(path, base=base, split=split, any_split=any_split, where=where)
    return [row for rows in files.values() for row in rows]


def read_files(
    path: str, *, base: str, split: str, any_split: bool, where: str
) -> dict[Path, list[Record]]:
    """Rows of a set by their files, in the order of the names and of the lines.

    A file's path is relative to the folder, if the set is one.

    Args:
      path: a file, a folder (both from `base` if relative), or hf://OWNER/NAME[@REVISION][/PLACE].
      split: "train" or "test": which files of a folder are meant. A file is taken as it is.
      any_split: the set is published as one piece, whatever its files call that piece.
    """
    local = find(path, base=base, where=where)
    files = _files_of(local, split, any_split, where) if local.is_dir() else [local]
    rows = {file: _read(file, where) for file in files}
    if not any(rows.values()):
        raise UserError(f"{where}: found no row in {_names(files, local)}; write a set with rows")
    if not local.is_dir():
        return rows
    return {file.relative_to(local): found for file, found in rows.items()}


def find(path: str, *, base: str, where: str) -> Path:
    """The file or folder of a set, from the hub where it lies there; NotThere: there is none."""
    local = _download(path, where) if path.startswith(HUB) else _local(path, base, where)
    if not local.is_dir() and not local.is_file():
        if local.exists() or local.is_symlink():
            raise UserError(f"{where}: {str(local)!r} is no regular file; write another path")
        write = nearest(local, "a path, or hf://OWNER/NAME for a dataset of the hub")
        raise NotThere(where, f"no file or folder {str(local)!r}", f"write {write}")
    return local


def _local(path: str, base: str, where: str) -> Path:
    try:
        return Path(base) / Path(path).expanduser()
    # It is raised for ~NAME where nobody is called so.
    except RuntimeError:
        raise UserError(f"{where}: found no such home folder; write the path in full") from None


def _names(files: list[Path], root: Path) -> str:
    inside = root.is_dir()
    return first_of([str(file.relative_to(root)) if inside else file.name for file in files], 3)


def _files_of(folder: Path, split: str, any_split: bool, where: str) -> list[Path]:
    """The files of a split: those whose path says so, all where no path says anything."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise UserError(
            f"{where}: found no file in {str(folder)!r} that ends in {', '.join(SUFFIXES)}; write "
            "the path of the set"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        words = set(re.split(r"[^a-z]+", str(file.relative_to(folder)).lower()))
        kind = next((name for name, spellings in SPLITS.items() if words & {*spellings}), "")
        by_split.setdefault(kind, []).append(file)
    if split in by_split:
        return by_split[split]
    if len(by_split) == 1 and (any_split or "" in by_split):
        return files
    found = ", ".join(name or "files without a split" for name in by_split)
    raise UserError(
        f"{where}: found {found} in {str(folder)!r}, but no {split} files; write the path of a file"
    )


def _module(name: str, where: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"{where}: {what} needs {name}, which is not installed; write pip install "
            '-e ".[hub]" in a clone'
        ) from None


def _download(path: str, where: str) -> Path:
    """A dataset of the hub, from the local cache where it is complete."""
    match = _HUB_NAME.fullmatch(path)
    if match is None:
        raise UserError(f"{where}: found {path!r}; write hf://OWNER/NAME or hf://OWNER/NAME/FOLDER")
    hub = _module("huggingface_hub", where, "a dataset of the hub")
    inside = (match["inside"] or "").strip("/")
    if Path(inside).suffix.lower() in SUFFIXES:
        patterns = [inside]
    else:
        patterns = [f"{inside}/*{suffix}" if inside else f"*{suffix}" for suffix in SUFFIXES]
    try:
        root = hub.snapshot_download(
            match["repo"], repo_type="dataset", revision=match["revision"], allow_patterns=patterns
        )
    # Its errors come from several libraries: no network, no such name, no permission, a full disk.
    except Exception as error:
        raise NotThere(
            where,
            f"can't get {match['repo']!r} from the hub ({reason_of(error)})",
            "check the name and the network, or write the path of a downloaded copy",
        ) from None
    return Path(root) / inside


def _read(file: Path, where: str) -> list[Record]:
    suffix = file.suffix.lower()
    try:
        if suffix == ".parquet":
            return _read_parquet(file, where)
        text = read_file(file, most=LARGEST_TABLE).decode("utf-8-sig")
        if suffix in (".csv", ".tsv"):
            return _read_csv(text, file, where)
        if suffix == ".json":
            return _read_json(text, file, where)
        return [row for _, row in parse_lines(text)]
    except OSError as error:
        raise UserError(
            f"{where}: can't read {str(file)!r} ({error.strerror or error}); write another path"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: {file.name} is not UTF-8 at byte {error.start}; write a text file in UTF-8"
        ) from None
    except DuplicateName as error:
        raise UserError(f"{where}: {file.name}: {error}") from None
    except NotJson as error:
        raise UserError(f"{where}: {file.name} {error}") from None


def _read_json(text: str, file: Path, where: str) -> list[Record]:
    """A list of objects, one object (a row), or, under the wrong name, one object a line."""
    try:
        found = parse_json(text, table=True)
    except DuplicateName:
        raise
    except NotJson:
        return [row for _, row in parse_lines(text)]
    rows = found if isinstance(found, list) else [found]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(
                f"{where}: {file.name} entry {number}: found {type(row).__name__}; write a list of "
                "objects"
            )
    return rows


def _read_csv(text: str, file: Path, where: str) -> list[Record]:
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(LARGEST_TABLE)
    # Not splitlines: a field may hold the other characters that it takes for line ends.
    lines = io.StringIO(text, newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        line = reader.reader.line_num
        raise UserError(
            f"{where}: {file.name} line {line}: {error}; write a CSV with a header line"
        ) from None
    check_once(reader.fieldnames or ())
    for number, row in enumerate(rows, start=1):
        # The reader files what a row has too much under None, and what it lacks as None.
        if None in row or None in row.values():
            raise UserError(
                f"{where}: {file.name} row {number}: has not as many fields as the header; put "
                "texts with commas in quotes"
            )
    return rows


def _read_parquet(file: Path, where: str) -> list[Record]:
    pyarrow = _module("pyarrow", where, "a Parquet file")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        # Not read_table, which would take words of the path (level=1/) for columns.
        table = parquet.ParquetFile(file).read()
    # Damaged files raise its own classes and plain OSError, depending on where the damage is.
    except Exception as error:
        raise UserError(
            f"{where}: {file.name} is no Parquet file that can be read ({reason_of(error)}); "
            "write another path"
        ) from None
    check_once(table.column_names)
    cells = [_cells(column, pyarrow) for column in table.columns]
    return [dict(zip(table.column_names, row)) for row in zip(*cells)]


def _cells(column: Any, pyarrow: Any) -> list[Any]:
    """Cells of an Arrow column, as text where Python can't hold them, or else as None."""
    for kind in (column.type, pyarrow.string(), pyarrow.binary()):
        try:
            cells = column.cast(kind).to_pylist()
        except MemoryError:
            raise
        # Nanoseconds, years past 9999, texts that are not UTF-8: each raises what it likes.
        except Exception:
            continue
        return [_plain(cell, kind) for cell in cells]
    return [None] * len(column)


def _plain(cell: Any, kind: Any) -> Any:
    """A cell of an Arrow type as JSON has it: decimals, dates and bytes as text, None for no text.

    Short floats are as they are written, not with a double's digits.
    """
    kind = getattr(kind, "storage_type", kind)
    if isinstance(cell, dict):
        return {name: _plain(one, kind.field(name).type) for name, one in cell.items()}
    # The type of what is in a list, or behind the numbers of a dictionary.
    kind = getattr(kind, "value_type", kind)
    if isinstance(cell, list | tuple):
        return [_plain(one, kind) for one in cell]
    if isinstance(cell, bytes):
        try:
            return cell.decode()
        except UnicodeDecodeError:
            return None
    if isinstance(cell, float):
        return float(str(_SHORT.get(str(kind), float)(cell)))
    return cell if cell is None or isinstance(cell, str | int) else str(cell)


def columns(rows: Iterable[Record]) -> list[str]:
    """Names of the columns, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))
