"""Reads, checks and writes the safetensors files of a folder.

Headers are checked before any values are read. The module does not import JAX, because
`bacr import` works without it.
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

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUDGET_FILE = "budget.safetensors"
# Supported types by their names in safetensors.
FLOATS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file; raises UserError if it can't be read."""
    try:
        documents.check_regular(path)
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    with file:
        try:
            yield file
        except SafetensorError as error:
            raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    """Builds the error for a safetensors file that can't be read."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return UserError(f"{path}: truncated, damaged or missing ({reason}); download the file again")


@dataclass(frozen=True)
class Header:
    """A file's description of one of its tensors.

    Attributes:
      file: file that contains the tensor.
      dtype: type by its name in safetensors, such as BF16.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


# The tensors of a folder by name.
Archive = dict[str, Header]


def _read_index(folder: Path) -> dict[str, str]:
    """Reads the file name of each tensor from the index of a sharded folder.

    Raises:
      UserError: the index is missing or malformed, or contains the name of a file elsewhere.
    """
    if not (folder / INDEX).exists():
        raise UserError(
            f"{folder}: holds neither {SINGLE} nor {INDEX}; write a folder with safetensors weights"
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise UserError(f"{folder / INDEX}: has no weight_map; download the file again")
    for file in set(weight_map.values()):
        # A name with a folder in it could be the path of any file of the machine.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{folder / INDEX}: names {shown(file)}, which is no safetensors file of its "
                "folder; download the file again"
            )
    return weight_map


def check_files(folder: str | Path, *, weights: bool = True) -> None:
    """Compares a folder with its manifest, if it has one; raises UserError if a file differs."""
    try:
        check_manifest(Path(folder), weights=weights)
    except ValueError as error:
        raise UserError(str(error)) from None


def open_archive(folder: Path) -> Archive:
    """Reads the headers of all weight files of a folder.

    Raises:
      UserError: a file can't be read, or does not contain a tensor that the index lists for it.
    """
    if (folder / SINGLE).exists():
        return read_headers([folder / SINGLE])
    weight_map = _read_index(folder)
    archive = read_headers(folder / file for file in sorted(set(weight_map.values())))
    for name, file in sorted(weight_map.items()):
        if name not in archive or archive[name].file.name != file:
            raise UserError(f"{folder / INDEX}: {name} is not in {file}; download both again")
    return archive


def read_headers(paths: Iterable[Path]) -> Archive:
    """Reads the headers of all tensors in some files."""
    archive: Archive = {}
    for path in paths:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                piece = file.get_slice(name)
                archive[name] = Header(path, piece.get_dtype(), tuple(piece.get_shape()))
    return archive


def read_tensor(archive: Archive, name: str) -> np.ndarray:
    """Reads all values of a tensor as fp32."""
    with opened(archive[name].file) as file:
        return np.asarray(file.get_tensor(name)).astype(np.float32)


def check_tensors(archive: Archive, entries: Sequence[Entry], folder: Path) -> None:
    """Checks that a folder has exactly the expected tensors, with their shapes and float types.

    Raises:
      UserError: a tensor is missing, unexpected, or has another shape or type.
    """
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
        header = archive[name]
        if header.shape != entry.shape:
            raise UserError(
                f"{folder}: {name} has the wrong shape: expected {list(entry.shape)}, found "
                f"{list(header.shape)}; config.json and weights must belong together"
            )
        if header.dtype not in FLOATS:
            raise UserError(
                f"{folder}: {name} is stored as {header.dtype}; write a folder with "
                f"one of {', '.join(FLOATS)}"
            )


# Writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor to write, whose values are fetched to the host only when it is written.

    Attributes:
      dtype: type in the file by its name in safetensors.
      fetch: returns the values in that type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Returns the size of the values in the file."""
        return math.prod(self.shape) * np.dtype(FLOATS[self.dtype]).itemsize


def stored(params: dict[str, Any], entry: Entry, dtype: str) -> Stored:
    """Describes a tensor of our parameters for writing in the checkpoint's orientation.

    Args:
      dtype: type in the file by its name in safetensors.
    """

    def fetch() -> np.ndarray:
        values = np.asarray(entry.values_in(params))
        if entry.transposed:
            values = values.T
        return values.astype(FLOATS[dtype], copy=False)

    return Stored(entry.name, entry.shape, dtype, fetch)


def into_shards(tensors: Iterable[Stored], *, max_bytes: int) -> list[list[Stored]]:
    """Groups consecutive tensors into shards of at most `max_bytes`.

    A tensor larger than `max_bytes` is the only one of its shard.
    """
    shards: list[list[Stored]] = []
    free_bytes = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > free_bytes:
            shards.append([])
            free_bytes = max_bytes
        shards[-1].append(tensor)
        free_bytes -= tensor.num_bytes
    return shards


def write_file(path: Path, tensors: Sequence[Stored]) -> None:
    """Writes one safetensors file, with one tensor in host memory at a time.

    The format: header length (8 bytes, little-endian), a JSON header padded with spaces to a
    multiple of 8, then the values, row-major and little-endian.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.fetch())
            assert values.shape == tensor.shape
            assert values.nbytes == tensor.num_bytes
            file.write(values.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def check_free(out: Path) -> None:
    """Raises UserError if the path of a new folder exists already."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: already exists; write the name of a new folder")


def _unwritable(out: Path, error: OSError) -> UserError:
    """Builds the error for a folder that can't be written."""
    return UserError(
        f"{out}: can't write there ({error.strerror or error}); make room or rights, or write "
        "another folder"
    )


@contextlib.contextmanager
def complete_or_absent(out: Path) -> Iterator[Path]:
    """Yields a temporary folder next to `out`, which is renamed to `out` at the end.

    If anything fails, neither folder remains. Raises UserError if the folder can't be written or
    `out` exists.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        yield temporary
        # mkdtemp makes private folders, but a model folder has ordinary permissions. The umask can
        # only be read by setting it.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        check_free(out)
        temporary.rename(out)
    except OSError as error:
        raise _unwritable(out, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
