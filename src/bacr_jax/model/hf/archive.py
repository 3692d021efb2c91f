"""Reads, validates and writes the safetensors files of a folder.

Headers are checked before any values are read. This module does not import JAX, because `bacr
import` works without it.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from bacr_client import check_manifest
from bacr_jax import files
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError, first_of
from bacr_jax.model.hf.hf_config import read_json
from bacr_jax.model.hf.names import Entry

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUDGET_FILE = "budget.safetensors"
# Supported dtypes, keyed by their names in safetensors.
FLOATS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file, as a context manager.

    Raises:
      UserError: If the file cannot be read.
    """
    try:
        files.check_regular(path)
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    with file:
        try:
            yield file
        except SafetensorError as error:
            raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    """Builds the error for a safetensors file that cannot be read."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return UserError(f"{path} is truncated, damaged or missing ({reason}); download the file again")


@dataclass(frozen=True)
class Header:
    """Metadata of a tensor in a file.

    Attributes:
      file: file that contains the tensor.
      dtype: name of the dtype in safetensors, such as BF16.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


# Tensors of a folder, keyed by name.
Archive = dict[str, Header]


def _read_index(folder: Path) -> dict[str, str]:
    """Reads the file name of each tensor from the index of a sharded folder.

    Raises:
      UserError: If the index is missing or malformed, or refers to a file outside of the folder.
    """
    if not (folder / INDEX).exists():
        raise UserError(
            f"{folder} contains neither {SINGLE} nor {INDEX}; use a folder with safetensors weights"
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise UserError(
            f"{folder / INDEX} has no valid `weight_map`, which maps tensors to weight files; "
            "download the file again"
        )
    for file in set(weight_map.values()):
        # A name with path separators could refer to any file on the machine.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{folder / INDEX} lists {shown(file)}, which is not the name of a safetensors "
                "file in the same folder; download the file again"
            )
    return weight_map


def check_files(
    folder: str | Path, *, weights: bool = True, digests: Mapping[str, str] | None = None
) -> None:
    """Compares the files of a folder with the digests in its manifest, if it has one.

    Args:
      weights: False to skip weight files, which takes long for large models.
      digests: digests of some files (`check_manifest`), or None to hash all files.

    Raises:
      UserError: If a file differs from the manifest.
    """
    try:
        check_manifest(Path(folder), weights=weights, digests=digests)
    except ValueError as error:
        raise UserError(str(error)) from None


def open_archive(folder: Path) -> Archive:
    """Reads the headers of all weight files in a folder.

    Raises:
      UserError: If a file cannot be read, or does not contain a tensor that the index lists for it.
    """
    if (folder / SINGLE).exists():
        return read_headers([folder / SINGLE])
    weight_map = _read_index(folder)
    archive = read_headers(folder / file for file in sorted(set(weight_map.values())))
    for name, file in sorted(weight_map.items()):
        if name not in archive or archive[name].file.name != file:
            raise UserError(
                f"{folder / INDEX} lists the tensor {name} in {file}, but this file does not "
                "contain it; download both files again"
            )
    return archive


def read_headers(paths: Iterable[Path]) -> Archive:
    """Reads the name, dtype and shape of every tensor in the given safetensors files."""
    archive: Archive = {}
    for path in paths:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                piece = file.get_slice(name)
                archive[name] = Header(path, piece.get_dtype(), tuple(piece.get_shape()))
    return archive


def read_tensor(archive: Archive, name: str) -> np.ndarray:
    """Reads all values of a tensor and converts them to fp32."""
    with opened(archive[name].file) as file:
        return np.asarray(file.get_tensor(name)).astype(np.float32)


def check_tensors(archive: Archive, entries: Sequence[Entry], folder: Path) -> None:
    """Checks that a folder contains exactly the expected tensors, with valid shapes and dtypes.

    Raises:
      UserError: If a tensor is missing, unexpected, or has the wrong shape or dtype.
    """
    expected = {entry.name: entry for entry in entries}
    missing = [name for name in expected if name not in archive]
    if missing:
        raise UserError(
            f"{folder}: the weights lack the tensor {first_of(missing)}; use a folder that "
            "contains all weight files of the model"
        )
    extra = sorted(name for name in archive if name not in expected)
    if extra:
        raise UserError(
            f"{folder}: the weights contain the tensor {first_of(extra)}, which a model with the "
            "config.json of this folder does not have; use a config.json and weights of the same "
            "model"
        )
    for name, entry in expected.items():
        header = archive[name]
        if header.shape != entry.shape:
            raise UserError(
                f"{folder}: the tensor {name} has the shape {list(header.shape)}, but config.json "
                f"requires {list(entry.shape)}; use a config.json and weights of the same model"
            )
        if header.dtype not in FLOATS:
            raise UserError(
                f"{folder}: the tensor {name} is stored as {header.dtype}, which is not "
                f"supported; use a folder whose weights are stored as one of {', '.join(FLOATS)}"
            )


# Writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor to be written. Its values are fetched to the host only when they are written.

    Attributes:
      name: name of the tensor in the file.
      dtype: name of the dtype in safetensors, such as BF16.
      fetch: function that returns the values in that dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Returns the size of the values in the file, in bytes."""
        return math.prod(self.shape) * np.dtype(FLOATS[self.dtype]).itemsize


def stored(params: dict[str, Any], entry: Entry, dtype: str) -> Stored:
    """Prepares a parameter for writing, transposed if the checkpoint stores its transpose.

    Args:
      params: all parameters of the model.
      entry: tensor of the checkpoint to prepare.
      dtype: name of the dtype in safetensors.
    """

    def fetch() -> np.ndarray:
        values = np.asarray(entry.values_in(params))
        if entry.transposed:
            values = values.T
        return values.astype(FLOATS[dtype], copy=False)

    return Stored(entry.name, entry.shape, dtype, fetch)


def into_shards(tensors: Iterable[Stored], *, max_bytes: int) -> list[list[Stored]]:
    """Groups consecutive tensors into shards of at most `max_bytes`.

    A tensor larger than `max_bytes` gets a separate shard.
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
    """Writes a safetensors file, with only one tensor at a time in host memory.

    The file consists of the header length (8 bytes, little-endian), a JSON header padded with
    spaces to a multiple of 8 bytes, and the values in row-major order, little-endian.
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
    """Raises a UserError if the path of a new folder already exists."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists; use the name of a new folder")


def _unwritable(out: Path, error: OSError) -> UserError:
    """Builds the error for a folder that cannot be written."""
    return UserError(
        f"{out}: the folder can't be written ({error.strerror or error}); free disk space or "
        "change the permissions, or use another folder"
    )


@contextlib.contextmanager
def complete_or_absent(out: Path) -> Iterator[Path]:
    """Yields a temporary folder next to `out` that is renamed to `out` on success.

    If an error occurs, the temporary folder is removed and `out` is not created.

    Raises:
      UserError: If the folder cannot be written, or `out` already exists.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        yield temporary
        # mkdtemp creates private folders, but a model folder should have the default permissions.
        # The umask can only be read by setting it.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        check_free(out)
        temporary.rename(out)
    except OSError as error:
        raise _unwritable(out, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
