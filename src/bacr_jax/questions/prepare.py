"""Writes the folder of question sets that the configs read, from public sources or from copies."""

import contextlib
import hashlib
import json
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from bacr_jax import files
from bacr_jax.config import DataConfig
from bacr_jax.errors import UserError
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.math_sets import LAYOUTS
from bacr_jax.questions.published_sets import PUBLISHED_SETS, PublishedSet, fingerprint
from bacr_jax.questions.source import Split
from bacr_jax.questions.tables import HUB, SUFFIXES, Record, read_rows

# File next to the sets that records the source of each file.
RECORD = "sources.json"
# Maximum size of an unpacked archive in bytes, more than all of these sets together have.
MOST_UNPACKED = 4 << 30


def prepare(directory: Path, names: Sequence[str], origin: Path | None = None) -> Iterator[str]:
    """Writes DIRECTORY/NAME/{train,test}.jsonl of each set, and their sources to sources.json.

    Args:
      directory: folder to write to, created if missing. Existing sets are not overwritten.
      names: keys of `PUBLISHED_SETS`. If empty, all sets are prepared.
      origin: a folder or an archive with copies of the sets, or None for the hub.

    Yields:
      A log line about each set, with the reason if the set can't be read and is left out.

    Raises:
      UserError: a set in `names` was left out, or all sets were left out.
    """
    unknown = [name for name in names if name not in PUBLISHED_SETS]
    if unknown:
        raise UserError(
            f"--prepare: {unknown[0]!r} is not one of the sets that can be prepared; use some of "
            f"{', '.join(PUBLISHED_SETS)}"
        )
    requested = list(names or PUBLISHED_SETS)
    left_out = []
    with _folder_of(origin) as folder:
        for name in requested:
            try:
                yield _prepare_set(directory, name, folder, alone=len(requested) == 1)
            except UserError as error:
                left_out.append(name)
                yield f"{name}: left out: {error}"
    if left_out and (names or left_out == requested):
        raise UserError(
            f"--prepare: could not get {', '.join(left_out)}; pass --from with a folder or an "
            "archive that contains them, or leave them out"
        )


class _SplitFile(NamedTuple):
    """A file that `prepare` is going to write.

    Attributes:
      split: split of the set, "train" or "test".
      source: path or hub address of the rows.
      num_rows: number of rows.
      path: path of the file.
      text: content of the file.
    """

    split: Split
    source: str
    num_rows: int
    path: Path
    text: str


def _prepare_set(directory: Path, name: str, folder: Path | None, *, alone: bool) -> str:
    """Writes the files of a set and records their sources.

    Args:
      directory: folder of all sets.
      name: key of `PUBLISHED_SETS`.
      folder: folder with copies of sets, or None for the hub.
      alone: True if no other set is prepared, so that `folder` itself can be the copy of the set.

    Returns:
      A log line about the set.
    """
    published = PUBLISHED_SETS[name]
    record = _read_record(directory)
    # All splits are checked before any file is written.
    split_files = list[_SplitFile]()
    for split in get_args(Split):
        if split not in published.rows:
            continue
        source = published.hub
        if folder is not None:
            source = _find_split(folder, published, split, alone=alone)
        rows = _read_split(name, published, source, split)
        if rows is not None:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            path = directory / name / f"{split}.jsonl"
            _check_writable(path, text)
            split_files.append(_SplitFile(split, source, len(rows), path, text))
    counts = []
    for file in split_files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(file.path, file.text)
        entry, remark = _described(file.path, name, published, file.split, file.num_rows)
        counts.append(f"{file.num_rows:,} {file.split} rows{remark}")
        is_from_hub = file.source.startswith(HUB)
        record[f"{name}/{file.split}.jsonl"] = {
            "from": file.source if is_from_hub else f"a copy of {published.hub}",
            "licence": published.licence,
            **entry,
        }
    directory.mkdir(parents=True, exist_ok=True)
    record_text = json.dumps(record, indent=2, ensure_ascii=False)
    files.replace_file(directory / RECORD, f"{record_text}\n")
    return f"{name}: {' and '.join(counts)}; {published.licence}"


def _read_split(name: str, published: PublishedSet, source: str, split: str) -> list[Record] | None:
    """Reads the rows of a split and checks their number.

    Returns:
      The rows, or None if MATH's test split is missing. This split is optional, because the configs
      evaluate MATH-500.

    Raises:
      UserError: the split is missing, or has another number of rows than the published one.
    """
    any_split = LAYOUTS[name].any_split
    try:
        rows = read_rows(source, base=".", split=split, any_split=any_split, where=name)
    except UserError:
        if name == "math" and split == "test":
            return None
        raise
    expected = published.rows[split]
    if len(rows) != expected:
        raise UserError(
            f"{name}: found {len(rows):,} {split} rows in {source}, but the set has {expected:,}; "
            "use a path that contains the complete set and nothing else"
        )
    return rows


def _described(
    path: Path, name: str, source: PublishedSet, split: Split, rows: int
) -> tuple[dict[str, Any], str]:
    """Returns a file's entry in sources.json, and a remark about its fingerprint for the log."""
    questions = load_questions(f"{name}:{path.resolve()}", DataConfig(), 0, split)
    digest = fingerprint(questions.questions, questions.answers)
    expected = source.fingerprints.get(split)
    if expected is None:
        remark = ""
    elif expected == digest:
        remark = ", of the known texts"
    else:
        remark = (
            f", whose texts differ from those known here (fingerprint {digest}, not {expected})"
        )
    entry = {
        "rows": rows,
        "usable": len(questions),
        "fingerprint": digest,
        "as_known": None if expected is None else digest == expected,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    return entry, remark


def _find_split(folder: Path, published: PublishedSet, split: str, *, alone: bool) -> str:
    """Finds a split of a set in a folder with copies.

    Args:
      folder: folder with copies. The set's folder can be up to three levels below.
      split: split to find.
      alone: True to use `folder` itself if it contains no folder with the name of the set.

    Returns:
      Path of the file for the split (such as SET/train.jsonl) if it exists, else of the set's
      folder.
    """
    candidates = list[Path]()
    for pattern in ("*", "*/*", "*/*/*"):
        for path in folder.glob(pattern):
            if path.is_dir() and path.name in published.folders:
                candidates.append(path)
    candidates.sort()
    if folder.name in published.folders or (alone and not candidates):
        candidates.insert(0, folder)
    if not candidates:
        raise UserError(
            f"{folder} contains no folder with the name {' or '.join(published.folders)}; pass "
            "--from with the folder that contains it"
        )
    for candidate in candidates:
        for suffix in SUFFIXES:
            path = candidate / f"{split}{suffix}"
            if path.is_file():
                return str(path.resolve())
    return str(candidates[0].resolve())


@contextlib.contextmanager
def _folder_of(origin: Path | None) -> Iterator[Path | None]:
    """Yields the folder given by `--from`. An archive is unpacked into a temporary folder."""
    if origin is None or origin.is_dir():
        yield origin
        return
    if not origin.is_file():
        raise UserError(f"--from {origin}: there is no such folder or archive; use another path")
    with tempfile.TemporaryDirectory() as unpacked:
        _unpack(origin, Path(unpacked))
        yield Path(unpacked)


def _unpack(archive: Path, into: Path) -> None:
    try:
        if tarfile.is_tarfile(archive):
            with tarfile.open(archive) as tar:
                _check_size(archive, sum(member.size for member in tar.getmembers()))
                # The filter refuses links and paths outside the folder.
                tar.extractall(into, filter="data")
        elif zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                _check_size(archive, sum(member.file_size for member in zipped.infolist()))
                zipped.extractall(into)
        else:
            raise UserError(
                f"--from {archive} is neither a tar nor a zip file; pass a folder or an archive"
            )
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"--from {archive} can't be unpacked ({error}); use another copy") from None


def _check_size(archive: Path, size: int) -> None:
    if size > MOST_UNPACKED:
        raise UserError(
            f"--from {archive} unpacks to {size:,} bytes, more than all sets together have; use "
            "an archive that contains only the sets"
        )


def _read_record(directory: Path) -> dict[str, Any]:
    """Returns the content of sources.json, or an empty dictionary if it does not exist."""
    path = directory / RECORD
    if not path.exists():
        return {}
    try:
        return files.read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}, which records where the prepared sets came from, is damaged ({error}); "
            "delete this file"
        ) from None


def _check_writable(path: Path, text: str) -> None:
    """Checks that a text is valid Unicode, and that `path` has no different content yet."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        row = text.count("\n", 0, error.start) + 1
        raise UserError(
            f"{path.parent.name}: row {row} of the split {path.stem} contains half of a Unicode "
            "surrogate pair, so the source is damaged; use the path of another copy"
        ) from None
    if path.exists() and path.read_bytes() != content:
        raise UserError(
            f"{path} already exists with other content; remove it, or use another folder"
        )
