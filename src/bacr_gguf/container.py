"""A GGUF file: its settings, and where its tensors lie.

The reader of the package `gguf` takes counts as the file states them, and loops for hours where one
is wrong; here each is held against the bytes that are there before it is used. The layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from bacr_jax import documents
from bacr_jax.config.values import shown

_READ = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
KINDS = {GGMLQuantizationType[name].value: GGMLQuantizationType[name] for name in _READ}
# Vocabularies of 250,000 tokens make headers of about 15 MB; as Python's objects ten times that.
LARGEST_HEADER = 32 << 20
MOST_ENTRIES = 1 << 16
# GGML_MAX_DIMS of ggml.
MOST_AXES = 4
# GGUF's numbers of the types of settings; of scalars with struct's codes.
_TEXT, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))


class Unusable(ValueError):
    """What is wrong with a file, in a few words; whoever reads one adds its name."""


class Tensor(NamedTuple):
    """Where the values of a tensor lie; its outermost axis comes first, as in safetensors."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """What a file says of itself; its values are still on disk."""

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, Tensor]

    def setting(self, key: str, kind: type, default: Any = None) -> Any:
        """A setting of a type; Unusable: it is of another, or missing without a default."""
        value = self.settings.get(key, default)
        if type(value) is not kind:
            raise Unusable(f"{key} is {shown(value)}, not of type {kind.__name__}")
        return value


class _Cursor:
    """A place in a header, from which nothing is read that is not there."""

    def __init__(self, header: bytes):
        self.header, self.at = header, 0

    def take(self, codes: str) -> tuple[Any, ...]:
        """Values by struct's codes, which measures before it makes any."""
        try:
            found = struct.unpack_from("<" + codes, self.header, self.at)
        except struct.error:
            raise Unusable(f"its header does not end within {len(self.header):,} bytes") from None
        self.at += struct.calcsize("<" + codes)
        return found

    def text(self) -> str:
        (size,) = self.take("Q")
        (found,) = self.take(f"{size}s")
        return found.decode()

    def value(self) -> Any:
        """A setting's value, after its type; an array is a tuple."""
        (kind,), count = self.take("I"), 1
        if array := kind == _ARRAY:
            kind, count = self.take("IQ")
        if kind not in (_TEXT, *_SCALARS):
            raise Unusable(f"a setting is of the unknown type {kind}")
        # A wrong count meets the end of the header: each text has eight bytes of length.
        texts = (self.text() for _ in range(count))
        found = tuple(texts) if kind == _TEXT else self.take(f"{count}{_SCALARS[kind]}")
        return found if array else found[0]

    def tensor(self) -> Tensor:
        """The next tensor, its start counted from the end of the header."""
        name = self.text()
        (rank,) = self.take("I")
        if not 1 <= rank <= MOST_AXES:
            raise Unusable(f"{shown(name)} has {rank:,} axes, not 1 to {MOST_AXES}")
        *axes, number, start = self.take(f"{rank}QIQ")
        if number not in KINDS:
            found = {kind.value: kind.name for kind in GGMLQuantizationType}.get(number, number)
            raise Unusable(f"{shown(name)} is stored as {found}, not as one of {', '.join(_READ)}")
        block, width = GGML_QUANT_SIZES[KINDS[number]]
        if 0 in axes or axes[0] % block:
            raise Unusable(f"{shown(name)} has axes {axes}, impossible in {KINDS[number].name}")
        size = math.prod(axes) // block * width
        return Tensor(name, tuple(axes[::-1]), KINDS[number], start, size)


def read(path: Path) -> GgufFile:
    """Reads a header; Unusable: no GGUF file, a damaged one, or another quantisation."""
    documents.check_regular(path)
    with path.open("rb") as file:
        cursor = _Cursor(file.read(min(size := path.stat().st_size, LARGEST_HEADER)))
    magic, version, *counts = cursor.take("4sIQQ")
    if magic != b"GGUF":
        raise Unusable(f"begins with {magic!r}, not with GGUF")
    if version not in (2, 3) or max(counts) > MOST_ENTRIES:
        raise Unusable(f"claims version {version}, {counts[0]} tensors and {counts[1]} settings")
    pairs = [(cursor.text(), cursor.value()) for _ in range(counts[1])]
    settings: dict[str, Any] = dict(pairs)
    relative = [cursor.tensor() for _ in range(counts[0])]
    alignment = settings.get("general.alignment", 32)
    if alignment not in [1 << power for power in range(3, 17)]:
        raise Unusable(f"general.alignment is {shown(alignment)}, not a small power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors = {one.name: one._replace(start=start + one.start) for one in relative}
    if (len(settings), len(tensors)) != (len(pairs), len(relative)):
        raise Unusable("a setting or a tensor is there twice")
    ends = [one.start + one.num_bytes for one in tensors.values()]
    # The sum is larger where tensors lie over each other.
    if (last := max(*ends, start + sum(one.num_bytes for one in relative), 0)) > size:
        raise Unusable(f"its tensors need {last:,} bytes, and it has {size:,}")
    return GgufFile(path, settings, tensors)
