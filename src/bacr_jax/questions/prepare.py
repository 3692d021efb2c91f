"""The folder that the configs read, made from the public sources or from a copy of them."""

import contextlib
import hashlib
import json
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from bacr_jax import documents
from bacr_jax.config import DataConfig
from bacr_jax.errors import UserError
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.math_sets import LAYOUTS
from bacr_jax.questions.published_sets import PUBLISHED_SETS, PublishedSet, fingerprint
from bacr_jax.questions.source import Split
from bacr_jax.questions.tables import HUB, SUFFIXES, Record, read_rows

# Where each file came from, beside the sets.
RECORD = "sources.json"
# An archive that unpacks to more is none of these sets.
MOST_UNPACKED = 4 << 30


def prepare(directory: Path, names: Sequence[str], origin: Path | None = None) -> Iterator[str]:
    """Writes DIRECTORY/NAME/{train,test}.jsonl, and where they came from in sources.json.

    Args:
      directory: made if it is not there; sets that are there already are not written over.
      names: keys of `PUBLISHED_SETS`; none: all, and those that can't be had are left out with a
        line.
      origin: a folder or an archive that holds copies of the sets; None: the hub.
    """
    unknown = [name for name in names if name not in PUBLISHED_SETS]
    if unknown:
        raise UserError(
            f"--prepare: no set {unknown[0]!r}; write some of {', '.join(PUBLISHED_SETS)}"
        )
    chosen = list(names or PUBLISHED_SETS)
    missing = []
    with _folder_of(origin) as folder:
        for name in chosen:
            try:
                yield _prepare_set(directory, name, folder, alone=len(chosen) == 1)
            except UserError as error:
                missing.append(name)
                yield f"{name}: left out: {error}"
    if missing and (names or len(missing) == len(chosen)):
        raise UserError(
            f"--prepare: could not get {', '.join(missing)}; write --from with a folder or an "
            "archive that holds them, or leave them out"
        )


def _prepare_set(directory: Path, name: str, folder: Path | None, *, alone: bool) -> str:
    """Writes one set; the line that says so."""
    source = PUBLISHED_SETS[name]
    record = _read_record(directory)
    found, said = {}, []
    for split in get_args(Split):
        if split in source.rows:
            place = source.hub if folder is None else _place(folder, source, split, alone=alone)
            rows = _rows(name, source, place, split)
            if rows is not None:
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                path = directory / name / f"{split}.jsonl"
                _check_unlike(path, text)
                found[split] = (place, rows, path, text)
    for split, (place, rows, path, text) in found.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        documents.replace_file(path, text)
        entry, known = _described(path, name, source, split, len(rows))
        said.append(f"{len(rows):,} {split} rows{known}")
        came_from = place if place.startswith(HUB) else f"a copy of {source.hub}"
        record[f"{name}/{split}.jsonl"] = {"from": came_from, "licence": source.licence} | entry
    directory.mkdir(parents=True, exist_ok=True)
    documents.replace_file(
        directory / RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    )
    return f"{name}: {' and '.join(said)}; {source.licence}"


def _rows(name: str, source: PublishedSet, place: str, split: str) -> list[Record] | None:
    """Rows of a split, as many as it has; None where a part that no config reads is not there."""
    try:
        rows = read_rows(
            place, base=".", split=split, any_split=LAYOUTS[name].any_split, where=name
        )
    except UserError:
        # MATH's own test problems, of which the configs read MATH-500.
        if name == "math" and split == "test":
            return None
        raise
    if len(rows) != source.rows[split]:
        raise UserError(
            f"{name}: found {len(rows):,} {split} rows in {place}, and the set has "
            f"{source.rows[split]:,}; write a place that holds the whole set and nothing else"
        )
    return rows


def _described(
    path: Path, name: str, source: PublishedSet, split: Split, rows: int
) -> tuple[dict[str, Any], str]:
    """Returns a written file's entry in the record, and a remark about its fingerprint."""
    questions = load_questions(f"{name}:{path.resolve()}", DataConfig(), 0, split)
    digest = fingerprint(questions.questions, questions.answers)
    expected = source.fingerprints.get(split)
    known = "" if expected is None else ", of the known texts"
    if expected not in (None, digest):
        known = f", whose texts differ from those known here (fingerprint {digest}, not {expected})"
    entry = {
        "rows": rows,
        "usable": len(questions),
        "fingerprint": digest,
        "as_known": None if expected is None else digest == expected,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    return entry, known


def _place(folder: Path, source: PublishedSet, split: str, *, alone: bool) -> str:
    """Finds a split in a folder: NAME/SPLIT.jsonl (or another suffix), else the folder NAME."""
    named = sorted(
        path
        for depth in ("*", "*/*", "*/*/*")
        for path in folder.glob(depth)
        if path.is_dir() and path.name in source.folders
    )
    if folder.name in source.folders or (alone and not named):
        named.insert(0, folder)
    for place in named:
        for path in (place / f"{split}{suffix}" for suffix in SUFFIXES):
            if path.is_file():
                return str(path.resolve())
    if not named:
        raise UserError(
            f"{folder} holds no folder {' or '.join(source.folders)}; write --from with the "
            "folder above it"
        )
    return str(named[0].resolve())


@contextlib.contextmanager
def _folder_of(origin: Path | None) -> Iterator[Path | None]:
    """The folder of `--from`; an archive is unpacked for as long as it is read."""
    if origin is None or origin.is_dir():
        yield origin
        return
    if not origin.is_file():
        raise UserError(f"--from {origin}: no such folder or archive; write another path")
    with tempfile.TemporaryDirectory() as unpacked:
        _unpack(origin, Path(unpacked))
        yield Path(unpacked)


def _unpack(archive: Path, into: Path) -> None:
    try:
        if tarfile.is_tarfile(archive):
            with tarfile.open(archive) as tar:
                _check_size(archive, sum(member.size for member in tar.getmembers()))
                # Refuses links and places outside the folder.
                tar.extractall(into, filter="data")
        elif zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                _check_size(archive, sum(member.file_size for member in zipped.infolist()))
                zipped.extractall(into)
        else:
            raise UserError(f"--from {archive}: neither tar nor zip; write a folder or an archive")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(
            f"--from {archive}: can't be unpacked ({error}); write another copy"
        ) from None


def _check_size(archive: Path, size: int) -> None:
    if size > MOST_UNPACKED:
        raise UserError(
            f"--from {archive}: unpacks to {size:,} bytes, more than all sets together have; write "
            "an archive of the sets alone"
        )


def _read_record(directory: Path) -> dict[str, Any]:
    """Reads the record of the existing files; empty if there is no record."""
    path = directory / RECORD
    if not path.exists():
        return {}
    try:
        return documents.read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error}); take it away") from None


def _check_unlike(path: Path, text: str) -> None:
    """Refuses a text that no file can hold, and a file that is there with another text."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        row = text.count("\n", 0, error.start) + 1
        raise UserError(
            f"{path.parent.name}: {path.stem} row {row} holds half of a surrogate pair; write a "
            "place that holds a whole copy"
        ) from None
    if path.exists() and path.read_bytes() != content:
        raise UserError(
            f"{path}: is there already and holds something else; take it away, or write another "
            "folder"
        )
