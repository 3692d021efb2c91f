"""Reads the header of a GGUF file: its settings, and the location of each tensor in the file.

The reader in the package `gguf` trusts every count in the file, so a wrong count makes it loop for
hours. This reader compares every count with the size of the file first. Only little-endian files
are supported. See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for the format.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from bacr_jax import files
from bacr_jax.config.values import shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Names of the tensor types that can be dequantised.
_READABLE = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
# The same tensor types by their number in the file, and the names of all tensor types.
KINDS = {GGMLQuantizationType[name].value: GGMLQuantizationType[name] for name in _READABLE}
_KIND_NAMES = {kind.value: kind.name for kind in GGMLQuantizationType}
# Maximum number of bytes read as the header. A vocabulary of 250,000 tokens has a header of about
# 15 MB, which becomes ten times larger as Python objects.
LARGEST_HEADER = 32 << 20
# Maximum number of settings, and maximum number of tensors.
MOST_ENTRIES = 1 << 16
# Maximum number of axes of a tensor (GGML_MAX_DIMS in ggml).
MOST_AXES = 4
# Type numbers of settings in GGUF. Scalar types are mapped to format characters of Python's
# `struct`.
_TEXT = 8
_ARRAY = 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# Default alignment of tensors in bytes, and the alignments that are accepted.
_ALIGNMENT = 32
_ALIGNMENTS = [1 << power for power in range(3, 17)]


class GgufError(ValueError):
    """Raised for an invalid or unsupported GGUF file. The caller adds the file name."""


class TensorEntry(NamedTuple):
    """The description of a tensor in the header.

    Attributes:
      name: name of the tensor in the file.
      shape: shape with the outermost axis first, as in safetensors.
      kind: GGUF type of the stored values, such as a quantised type.
      start: offset of the first byte in the file.
      num_bytes: size in bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file, without the values of the tensors.

    Attributes:
      path: path of the file.
      settings: values of the settings by key. Arrays are stored as tuples.
      tensors: descriptions of the tensors by name.
    """

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def setting(self, key: str, kind: type, default: Any = None) -> Any:
        """Returns the value of a setting, or the default if the setting is missing.

        Raises:
          GgufError: if the value has a different type, or if it is missing and `default` is None.
        """
        value = self.settings.get(key, default)
        if type(value) is not kind:
            raise GgufError(
                f"the setting {key!r} is {shown(value)}, but must be of type {kind.__name__}"
            )
        return value


class _HeaderReader:
    """Reads values sequentially from the bytes of a header."""

    def __init__(self, header: bytes):
        self.header = header
        self.position = 0

    def take(self, codes: str) -> tuple[Any, ...]:
        """Reads values according to a `struct` format string.

        Raises:
          GgufError: if the header ends before the last value. `struct` checks the size before it
            allocates memory, so a wrong count fails immediately.
        """
        try:
            values = struct.unpack_from("<" + codes, self.header, self.position)
        except struct.error:
            raise GgufError(
                f"the file is truncated, or its header is larger than the {len(self.header):,} "
                "bytes that were read"
            ) from None
        self.position += struct.calcsize("<" + codes)
        return values

    def text(self) -> str:
        """Reads a string, which is stored as its length in bytes and then its bytes in UTF-8."""
        (size,) = self.take("Q")
        (content,) = self.take(f"{size}s")
        return content.decode()

    def value(self) -> Any:
        """Reads the type and the value of a setting. An array is returned as a tuple.

        Raises:
          GgufError: if the type is unknown, or if the header ends before the value does.
        """
        (kind,) = self.take("I")
        if kind != _ARRAY:
            (value,) = self._values(kind, 1)
            return value
        kind, count = self.take("IQ")
        return self._values(kind, count)

    def _values(self, kind: int, count: int) -> tuple[Any, ...]:
        """Reads `count` values of the type with the number `kind` in the GGUF format."""
        if kind == _TEXT:
            # If the count is too large, this loop soon reaches the end of the header and raises an
            # error, because each string takes at least eight bytes.
            return tuple(self.text() for _ in range(count))
        if kind not in _SCALARS:
            raise GgufError(
                f"a setting in the file's header has the type number {kind}, which GGUF does not "
                "define"
            )
        return self.take(f"{count}{_SCALARS[kind]}")

    def tensor(self) -> TensorEntry:
        """Reads a tensor's description. Its `start` is relative to the first tensor in the file.

        Raises:
          GgufError: if the tensor type is not supported, or if the axes are invalid for the type.
        """
        name = self.text()
        (rank,) = self.take("I")
        if not 1 <= rank <= MOST_AXES:
            raise GgufError(
                f"the tensor {shown(name)} has {rank:,} axes, but must have 1 to {MOST_AXES}"
            )
        # GGUF stores the innermost axis first.
        *axes, number, start = self.take(f"{rank}QIQ")
        if number not in KINDS:
            kind_name = _KIND_NAMES.get(number, number)
            readable = ", ".join(_READABLE)
            raise GgufError(
                f"the tensor {shown(name)} is stored in the type {kind_name}, which is not "
                f"supported; the supported types are {readable}"
            )
        kind = KINDS[number]
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in axes or axes[0] % block_values:
            raise GgufError(
                f"the tensor {shown(name)} has the shape {axes}, which is impossible in the type "
                f"{kind.name}"
            )
        num_bytes = math.prod(axes) // block_values * block_bytes
        return TensorEntry(name, tuple(axes[::-1]), kind, start, num_bytes)


def read(path: Path) -> GgufFile:
    """Reads the header of a GGUF file.

    Raises:
      GgufError: if the file is not a GGUF file, is damaged, or contains an unsupported tensor type.
    """
    files.check_regular(path)
    file_size = path.stat().st_size
    with path.open("rb") as file:
        reader = _HeaderReader(file.read(min(file_size, LARGEST_HEADER)))
    magic, version, tensor_count, setting_count = reader.take("4sIQQ")
    if magic != _MAGIC:
        raise GgufError(
            f"this is not a GGUF file, because it begins with {magic!r} instead of b'GGUF'"
        )
    if version not in _VERSIONS or max(tensor_count, setting_count) > MOST_ENTRIES:
        raise GgufError(
            f"the header specifies version {version}, {tensor_count} tensors and {setting_count} "
            f"settings; supported are the versions {' and '.join(map(str, _VERSIONS))} with at "
            f"most {MOST_ENTRIES:,} of each"
        )

    settings: dict[str, Any] = {}
    for _ in range(setting_count):
        key = reader.text()
        settings[key] = reader.value()
    entries = [reader.tensor() for _ in range(tensor_count)]
    first_byte = _first_tensor_byte(settings, reader.position)
    tensors = {entry.name: entry._replace(start=first_byte + entry.start) for entry in entries}
    if len(settings) < setting_count or len(tensors) < tensor_count:
        raise GgufError("two settings or two tensors of the file have the same name")
    _check_size(list(tensors.values()), first_byte, file_size)
    return GgufFile(path, settings, tensors)


def _first_tensor_byte(settings: Mapping[str, Any], header_size: int) -> int:
    """Returns the offset of the first tensor: the header size, rounded up to the alignment."""
    alignment = settings.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment not in _ALIGNMENTS:
        raise GgufError(
            f"the setting 'general.alignment' is {shown(alignment)}, but must be a power of two "
            f"from {_ALIGNMENTS[0]} to {_ALIGNMENTS[-1]}"
        )
    padding = -header_size % alignment
    return header_size + padding


def _check_size(tensors: Sequence[TensorEntry], first_byte: int, file_size: int) -> None:
    """Checks that the file is large enough for all of its tensors.

    Raises:
      GgufError: if a tensor extends beyond the end of the file, or if tensors overlap and their
        total size is larger than the file.
    """
    total = first_byte + sum(tensor.num_bytes for tensor in tensors)
    ends = [tensor.start + tensor.num_bytes for tensor in tensors]
    needed = max([total, *ends])
    if needed > file_size:
        raise GgufError(
            f"the file is truncated: its tensors need {needed:,} bytes, but it has only "
            f"{file_size:,}"
        )
