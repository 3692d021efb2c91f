"""Reads the rows of question sets from JSONL, JSON, CSV and Parquet.

A set is a file, a folder, or a dataset of the Hugging Face hub. Parquet files and the hub require
the packages of the extra `hub`. The other formats only require NumPy.
"""

import csv
import importlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_io.files import DuplicateName, check_once
from bacr_jax.config.paths import expand_path
from bacr_jax.errors import UserError, first_of, reason_of
from bacr_jax.files import (
    LARGEST_TABLE,
    NotJson,
    expand_home,
    nearest,
    parse_json,
    parse_lines,
    read_file,
)

Record = dict[str, Any]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
HUB = "hf://"
# Words in the path of a file that name its split, for example data/train-00000-of-00001.parquet on
# the hub.
SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev"),
}
_HUB_NAME = re.compile(
    r"hf://(?:datasets/)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<inside>.+))?"
)
# End of the name of a file that contains one of several parts of a table, such as
# train-00000-of-00002 or train-00000-of-00002-0f1e2d3c.
_PART = re.compile(r"(?P<index>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]+)?$")


# Maps Arrow's 16-bit and 32-bit floats to NumPy types. Converted to a double, a 32-bit 0.1 would be
# written as 0.10000000149011612.
_SHORT_FLOATS: dict[str, Any] = {
    "halffloat": np.float16,
    "float": np.float32,
}


class SetNotFound(UserError):
    """Raised if the file or folder of a set does not exist, or the hub does not have it.

    Attributes:
      what: what is missing, without the name of the set and the advice in the full message.
    """

    def __init__(self, where: str, what: str, advice: str):
        super().__init__(f"{where}: {what}; {advice}")
        self.what = what


def read_rows(path: str, *, base: str, split: str, any_split: bool, where: str) -> list[Record]:
    """Reads the rows of a set, ordered by file name, then by line.

    The arguments and the errors are the same as for `read_files`.
    """
    files = read_files(path, base=base, split=split, any_split=any_split, where=where)
    return [row for rows in files.values() for row in rows]


def read_files(
    path: str, *, base: str, split: str, any_split: bool, where: str
) -> dict[Path, list[Record]]:
    """Reads the rows of a set, grouped by file.

    Args:
      path: a file or a folder, relative to `base` unless absolute, or
        hf://OWNER/NAME[@REVISION][/PATH].
      base: folder of relative paths.
      split: "train" or "test", which selects the files of a folder. It is ignored if `path` is a
        file.
      any_split: True if the set is published as a single split. All files are then read, even if
        their names contain the name of another split.
      where: name of the set in error messages.

    Returns:
      Rows by file, ordered by file name. The paths are relative to `path` if it is a folder.

    Raises:
      SetNotFound: the set does not exist.
      UserError: a file is malformed, or the set has no rows.
    """
    local = find(path, base=base, where=where)
    is_folder = local.is_dir()
    files = _files_of_split(local, split, any_split, where) if is_folder else [local]
    rows = {file: _read(file, where) for file in files}
    if not any(rows.values()):
        names = [str(file.relative_to(local)) if is_folder else file.name for file in files]
        raise UserError(
            f"{where}: {first_of(names, 3)} contains no rows; use a file with at least one question"
        )
    if not is_folder:
        return rows
    return {file.relative_to(local): file_rows for file, file_rows in rows.items()}


def find(path: str, *, base: str, where: str) -> Path:
    """Returns the file or folder of a set, and downloads a dataset of the hub if needed.

    Raises:
      SetNotFound: the file or folder does not exist.
      UserError: the path can't be a set, for example because it is a socket.
    """
    try:
        path = expand_path(path)
        folder = expand_home(base)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    local = _download(path, where) if path.startswith(HUB) else folder / path
    if local.is_dir() or local.is_file():
        return local
    if local.exists() or local.is_symlink():
        raise UserError(f"{where}: {str(local)!r} is not a regular file; use another path")
    suggestion = nearest(local, "a path, or hf://OWNER/NAME for a dataset of the hub")
    raise SetNotFound(where, f"there is no file or folder {str(local)!r}", f"use {suggestion}")


def _files_of_split(folder: Path, split: str, any_split: bool, where: str) -> list[Path]:
    """Returns the files of a split: all files whose path contains a word such as "train".

    If no path contains a word for any split, all files are returned. If `any_split` is True and all
    paths name the same split, all files are returned too.

    Raises:
      UserError: if the folder contains no tables, tables of other splits only, or only some parts
        of a table.
    """
    files = sorted(_table_files(folder))
    if not files:
        raise UserError(
            f"{where}: the folder {str(folder)!r} contains no file that ends in "
            f"{', '.join(SUFFIXES)}; use the path of a file or folder with questions"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    if split in by_split:
        _check_complete(by_split[split], folder, where)
        return by_split[split]
    if len(by_split) == 1 and (any_split or "" in by_split):
        _check_complete(files, folder, where)
        return files
    names = ", ".join(f"the split {name}" if name else "no split" for name in by_split)
    raise UserError(
        f"{where}: the folder {str(folder)!r} has files of {names}, but none of the split "
        f"{split}; use the path of a single file"
    )


def _table_files(folder: Path) -> Iterator[Path]:
    """Yields the files with a known suffix in a folder. Hidden files and folders are skipped."""
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if file.suffix.lower() in SUFFIXES and not is_hidden:
            yield file


def _check_complete(files: Sequence[Path], folder: Path, where: str) -> None:
    """Checks that all parts of each table exist if the names of its files contain their number.

    Parts are missing if a download was interrupted. Without a network connection, the hub's client
    returns the folder of such a download without an error.

    Raises:
      UserError: if a part is missing.
    """
    indices: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in files:
        match = _PART.search(file.stem)
        if match is not None:
            name = file.stem[: match.start()]
            pattern = file.with_name(f"{name}*-of-{match['count']}*{file.suffix}")
            key = (str(pattern.relative_to(folder)), int(match["count"]))
            indices[key].add(int(match["index"]))
    for (pattern_text, count), present in indices.items():
        if len(present) < count:
            raise UserError(
                f"{where}: the folder {str(folder)!r} contains only {len(present):,} of the "
                f"{count:,} files {pattern_text}; download the missing files, or use the path of a "
                "single file"
            )


def _split_of(path: Path) -> str:
    """Returns the split whose name occurs in a path, or an empty string if there is none.

    The name of the file has priority over the names of its folders, and the name of a folder over
    the names of the folders that contain it.
    """
    for part in reversed(path.parts):
        words = set(re.split(r"[^a-z]+", part.lower()))
        for name, spellings in SPLITS.items():
            if not words.isdisjoint(spellings):
                return name
    return ""


def _download(path: str, where: str) -> Path:
    """Downloads a dataset of the hub unless the local cache contains all of its files."""
    match = _HUB_NAME.fullmatch(path)
    if match is None:
        raise UserError(
            f"{where}: {path!r} is not the name of a dataset on the hub; use hf://OWNER/NAME or "
            "hf://OWNER/NAME/FOLDER"
        )
    import huggingface_hub

    inside = (match["inside"] or "").strip("/")
    if Path(inside).suffix.lower() in SUFFIXES:
        patterns = [inside]
    else:
        prefix = f"{inside}/" if inside else ""
        patterns = [f"{prefix}*{suffix}" for suffix in SUFFIXES]
    try:
        root = huggingface_hub.snapshot_download(
            match["repo"],
            repo_type="dataset",
            revision=match["revision"],
            allow_patterns=patterns,
        )
    # The hub's client raises errors of several libraries: no network, unknown name, missing
    # permission, full disk.
    except Exception as error:
        raise SetNotFound(
            where,
            f"{match['repo']!r} can't be downloaded from the hub ({reason_of(error)})",
            "check the name and the network, or use the path of a downloaded copy",
        ) from None
    return Path(root) / inside


def _read(file: Path, where: str) -> list[Record]:
    """Reads the rows of a file. Its suffix determines the format."""
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
            f"{where}: {str(file)!r} can't be read ({error.strerror or error}); use another path"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: {file.name} is not valid UTF-8 at byte {error.start}; save the file as "
            "UTF-8 text"
        ) from None
    except DuplicateName as error:
        raise UserError(f"{where}: {file.name}: {error}") from None
    except NotJson as error:
        raise UserError(f"{where}: {file.name} {error}") from None


def _read_json(text: str, file: Path, where: str) -> list[Record]:
    """Parses a JSON list of rows (objects), or a single row.

    JSONL is accepted too, because some sets use it in files with the suffix .json.
    """
    try:
        content = parse_json(text, table=True)
    except DuplicateName:
        raise
    except NotJson:
        return [row for _, row in parse_lines(text)]
    rows = content if isinstance(content, list) else [content]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(
                f"{where}: entry {number} of {file.name} is of the type {type(row).__name__}, but "
                "every entry must be a JSON object; use a list of objects"
            )
    return rows


def _read_csv(text: str, file: Path, where: str) -> list[Record]:
    """Parses a table with a header line, separated by commas or, in a .tsv file, by tabs."""
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(LARGEST_TABLE)
    # Do not use splitlines, because it also splits at characters that do not end a line in CSV.
    lines = io.StringIO(text, newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        line = reader.reader.line_num
        raise UserError(
            f"{where}: {file.name} line {line}: {error}; use a CSV file with a header line"
        ) from None
    check_once(reader.fieldnames or ())
    for number, row in enumerate(rows, start=1):
        # DictReader stores additional fields under the key None, and None for missing fields.
        if None in row or None in row.values():
            raise UserError(
                f"{where}: row {number} of {file.name} has more or fewer fields than the header "
                "line; put texts that contain commas in quotes"
            )
    return rows


def _read_parquet(file: Path, where: str) -> list[Record]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(
            f"{where}: a Parquet file needs pyarrow, which is not installed; run pip install -e "
            '".[hub]" in a clone of the repository'
        ) from None
    try:
        # Do not use read_table, because it adds columns for parts of the path such as level=1/.
        table = parquet.ParquetFile(file).read()
    # Depending on the damage, pyarrow raises its own errors or OSError.
    except Exception as error:
        raise UserError(
            f"{where}: {file.name} is not a readable Parquet file ({reason_of(error)}); use "
            "another path"
        ) from None
    check_once(table.column_names)
    cells = [_column_cells(column, pyarrow) for column in table.columns]
    return [dict(zip(table.column_names, row)) for row in zip(*cells)]


def _column_cells(column: Any, pyarrow: Any) -> list[Any]:
    """Returns the cells of an Arrow column as values that JSON can represent.

    A column that Python's types can't represent is converted to text. If the conversion fails too,
    all of its cells are None.
    """
    for arrow_type in (column.type, pyarrow.string(), pyarrow.binary()):
        try:
            cells = column.cast(arrow_type).to_pylist()
        except MemoryError:
            raise
        # Nanoseconds, years after 9999 and texts that are not UTF-8 raise different errors.
        except Exception:
            continue
        return [_to_json_value(cell, arrow_type) for cell in cells]
    return [None] * len(column)


def _to_json_value(cell: Any, arrow_type: Any) -> Any:
    """Converts a cell to a value that JSON can represent.

    Decimals, dates and bytes are converted to text. Bytes that are not UTF-8 are converted to None.
    A 16-bit or 32-bit float is converted to the double with the fewest digits that rounds to it,
    such as 0.1 instead of 0.10000000149.

    Args:
      cell: value of the cell in Python's types.
      arrow_type: Arrow type of the cell.
    """
    arrow_type = getattr(arrow_type, "storage_type", arrow_type)
    if isinstance(cell, dict):
        return {
            name: _to_json_value(value, arrow_type.field(name).type) for name, value in cell.items()
        }
    # Lists and dictionary-encoded columns have the type of their values.
    arrow_type = getattr(arrow_type, "value_type", arrow_type)
    if isinstance(cell, list | tuple):
        return [_to_json_value(value, arrow_type) for value in cell]
    if isinstance(cell, bytes):
        try:
            return cell.decode()
        except UnicodeDecodeError:
            return None
    if isinstance(cell, float):
        float_type = _SHORT_FLOATS.get(str(arrow_type), float)
        return float(str(float_type(cell)))
    if cell is None or isinstance(cell, str | int):
        return cell
    return str(cell)


def columns(rows: Iterable[Record]) -> list[str]:
    """Returns the names of the columns, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))
