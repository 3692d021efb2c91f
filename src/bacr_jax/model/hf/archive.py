"""Safetensors files of a folder: what they hold, checked before anything is read, and writing.

Needs no JAX: `bacr import` works without it.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from bacr_client import check_manifest
from bacr_jax import documents
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError, first_of
from bacr_jax.model.hf.hf_config import read_json
from bacr_jax.model.hf.names import Entry

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BUDGET_FILE = "budget.safetensors"
# Stored types, as safetensors calls them.
FLOATS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file; UserError: it can't be read."""

    def refused(error: Exception) -> UserError:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        return UserError(
            f"{path}: truncated, damaged or missing ({reason}); download the file again"
        )

    try:
        documents.check_regular(path)
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise refused(error) from None
    with file:
        try:
            yield file
        except SafetensorError as error:
            raise refused(error) from None


@dataclass(frozen=True)
class Header:
    """What a file says of one of its tensors; its type is as safetensors calls it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


# The tensors of a folder by name.
Archive = dict[str, Header]


def _index(folder: Path) -> dict[str, str]:
    """The name of each tensor's file, as an index says."""
    if not (folder / INDEX).exists():
        raise UserError(
            f"{folder}: holds neither {SINGLE} nor {INDEX}; write a folder with safetensors weights"
        )
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(x, str) for x in listed.values()):
        raise UserError(f"{folder / INDEX}: has no weight_map; download the file again")
    for file in set(listed.values()):
        # A name with a folder in it could lead to any file of the machine.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{folder / INDEX}: names {shown(file)}, which is no safetensors file of its "
                "folder; download the file again"
            )
    return listed


def check_files(folder: str | Path, *, weights: bool = True) -> None:
    """Holds a folder against its manifest, if it has one; UserError: a file is another."""
    try:
        check_manifest(Path(folder), weights=weights)
    except ValueError as error:
        raise UserError(str(error)) from None


def open_archive(folder: Path) -> Archive:
    """Reads the headers of all files of a folder."""
    if (folder / SINGLE).exists():
        return read_headers([folder / SINGLE])
    listed = _index(folder)
    archive = read_headers(folder / file for file in sorted(set(listed.values())))
    found = {name: header.file.name for name, header in archive.items()}
    wrong = sorted(name for name, file in listed.items() if found.get(name) != file)
    if wrong:
        raise UserError(
            f"{folder / INDEX}: {wrong[0]} is not in {listed[wrong[0]]}; download both again"
        )
    return archive


def read_headers(paths: Iterable[Path]) -> Archive:
    """The tensors of some files."""
    archive: Archive = {}
    for path in paths:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                piece = file.get_slice(name)
                archive[name] = Header(path, piece.get_dtype(), tuple(piece.get_shape()))
    return archive


def read_tensor(archive: Archive, name: str) -> np.ndarray:
    """All values of a tensor, fp32."""
    with opened(archive[name].file) as file:
        return np.asarray(file.get_tensor(name)).astype(np.float32)


def check_tensors(archive: Archive, entries: Sequence[Entry], folder: Path) -> None:
    """Every expected tensor is there in its shape and a float type, and nothing else is."""
    expected = {entry.name: entry for entry in entries}
    missing = [name for name in expected if name not in archive]
    if missing:
        raise UserError(
            f"{folder}: missing tensor {first_of(missing)}; write a folder with all of its shards"
        )
    extra = sorted(name for name in archive if name not in expected)
    if extra:
        raise UserError(
            f"{folder}: extra tensor {first_of(extra)}, which this model's shape does not have; "
            "write a folder whose config.json and weights belong together"
        )
    for name, entry in expected.items():
        found = archive[name]
        if found.shape != entry.shape:
            raise UserError(
                f"{folder}: {name} has the wrong shape: expected {list(entry.shape)}, found "
                f"{list(found.shape)}; config.json and weights must belong together"
            )
        if found.dtype not in FLOATS:
            raise UserError(
                f"{folder}: {name} is stored as {found.dtype}; write a folder with "
                f"one of {', '.join(FLOATS)}"
            )


# Writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor to write, whose values are fetched to the host when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Size of its values in the file."""
        return math.prod(self.shape) * np.dtype(FLOATS[self.dtype]).itemsize


def stored(params: dict[str, Any], entry: Entry, dtype: str) -> Stored:
    """A tensor of our parameters, to write in the checkpoint's orientation."""

    def fetch() -> np.ndarray:
        values = np.asarray(entry.values_in(params))
        return (values.T if entry.transposed else values).astype(FLOATS[dtype], copy=False)

    return Stored(entry.name, entry.shape, dtype, fetch)


def into_shards(tensors: Iterable[Stored], *, max_bytes: int) -> list[list[Stored]]:
    """Consecutive groups of at most `max_bytes`; a larger tensor has a group to itself."""
    shards: list[list[Stored]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def write_file(path: Path, tensors: Sequence[Stored]) -> None:
    """Writes one safetensors file, holding one tensor in host memory at a time.

    The format: header length (8 bytes, little-endian), a JSON header padded with spaces to a
    multiple of 8, then the values, row-major and little-endian.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.fetch())
            assert values.shape == tensor.shape and values.nbytes == tensor.num_bytes
            file.write(values.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def check_free(out: Path) -> None:
    """Nothing stands where a folder is to be written."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: already exists; write the name of a new folder")


def _no_room(out: Path, error: OSError) -> UserError:
    return UserError(
        f"{out}: can't write there ({error.strerror or error}); make room or rights, or write "
        "another folder"
    )


@contextlib.contextmanager
def complete_or_absent(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its name at the end, or leaves nothing."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise _no_room(out, error) from None
    try:
        yield temporary
        # mkdtemp makes private folders; a model folder is an ordinary one.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        check_free(out)
        temporary.rename(out)
    except OSError as error:
        raise _no_room(out, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
