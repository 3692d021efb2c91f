"""Extracts kernels, memory traffic, operations and collectives from a compiled XLA:GPU program.

The input is the HLO text of the program. Each instruction of the entry computation or of a loop
body counts as one kernel or library call, except for bookkeeping instructions. The bytes of a
kernel are the sizes of its operands and results, with three exceptions inside fusions:

* An operand that is only sliced or gathered from counts as the size of the slices.
* An operand that is updated in place (dynamic-update-slice, scatter) counts as the size of the
  update, written once.
* A parameter that no instruction of the fusion reads does not count.

An operand that several kernels read counts for each of them, because on-chip caches are ignored. A
matrix product counts 2 m k n operations. cuDNN attention counts 4 operations per query, key, head
and head dimension, half of that if it is causal, and 2.5 times as many in the backward pass. The
kernels of a loop with a known trip count are multiplied by it.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from dataclasses import dataclass

_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?$"
)
_NO_KERNEL = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "copy-done"),
}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation. `shape` is the text of the result's shape."""

    root: bool
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str


@dataclass(frozen=True)
class Kernel:
    """A kernel of a program.

    Attributes:
      kind: product, attention, collective or other.
      opcode: HLO opcode; for a collective, its name.
      bytes: size of operands and results; for a collective, the larger of the two.
      flops: number of floating-point operations.
      half_rate: True if the operands are float32, which matrix units process at half the bfloat16
        rate.
      times: number of launches per run of the program.
      loop: trip counts of the enclosing loops, outermost first.
      shape: text of the result's shape.
      keys: for an attention kernel, the size of its keys and values in bytes.
    """

    kind: str
    opcode: str
    bytes: int
    flops: float
    half_rate: bool
    times: int
    loop: tuple[int, ...]
    shape: str
    keys: int = 0


def size(shape: str) -> int:
    """Returns the total size in bytes of all arrays in the text of a shape."""
    arrays = _ARRAY.findall(shape)
    return sum(_BYTES[kind] * _product(dims) for kind, dims in arrays if kind in _BYTES)


def _product(dims: str) -> int:
    return math.prod(int(d) for d in dims.split(",") if d)


def _dims(shape: str) -> tuple[str, list[int]]:
    found = _ARRAY.search(shape)
    assert found, shape
    return found[1], [int(d) for d in found[2].split(",") if d]


def _closing(text: str) -> int:
    """Returns the index of the bracket that closes an argument list that is already open."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    return len(text)


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
    if not found:
        return None
    root, name, shape, opcode, rest = found.groups()
    end = _closing(rest)
    arguments = rest[:end]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return Instruction(bool(root), name, shape, opcode, operands, arguments, rest[end:])


class Program:
    """A compiled program, parsed from its HLO text (`compiled.as_text()`)."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, inside = "", None
        for line in text.splitlines():
            header = None if line.startswith(" ") else _HEADER.match(line)
            if header:
                inside = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif line.startswith("}"):
                inside = None
            elif inside is not None:
                found = _instruction(line)
                inside += [found] if found else []

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """Returns all kernels that a run of the program launches."""
        return list(self._kernels(self.entry, 1, ()))

    def _kernels(self, name: str, times: int, loop: tuple[int, ...]):
        body = self.computations[name]
        shapes = {one.name: one.shape for one in body}
        for one in body:
            called = re.search(r"(?:body|to_apply|calls)=%?([\w.\-]+)", one.attributes)
            if one.opcode == "while":
                rounds = re.search(r'known_trip_count":\{"n":"(\d+)"', one.attributes)
                count = int(rounds[1]) if rounds else 1
                yield from self._kernels(called[1], times * count, (*loop, count))
            elif one.opcode == "call":
                yield from self._kernels(called[1], times, loop)
            elif one.opcode == "conditional":
                # For a conditional, counts the branch with the most bytes.
                names = re.findall(r"%([\w.\-]+)", one.attributes.partition("branch")[2])
                ways = [
                    list(self._kernels(way, times, loop))
                    for way in names
                    if way in self.computations
                ]
                yield from max(ways, key=lambda way: sum(k.bytes for k in way), default=[])
            elif one.opcode not in _NO_KERNEL and not one.opcode.endswith(("-done", "-update")):
                kernel = self._kernel(one, shapes, called[1] if called else None)
                yield dataclasses.replace(kernel, times=times, loop=loop)

    def _kernel(self, one: Instruction, shapes: dict[str, str], called: str | None) -> Kernel:
        given = sum(size(shapes.get(name, "")) for name in one.operands)
        made = size(re.sub(r"s8\[\d+\]", "", one.shape))
        plain = Kernel("other", one.opcode, given + made, 0.0, False, 1, (), one.shape)
        wrapped = self.computations.get(called or "", []) if one.opcode == "async-start" else []
        for inner in [one, *wrapped]:
            collective = _COLLECTIVE.match(inner.opcode)
            if collective:
                sent = max(size(part) for part in _parts(inner.shape))
                return dataclasses.replace(
                    plain,
                    kind="collective",
                    opcode=collective[1],
                    bytes=max(sent, given // max(len(one.operands), 1)),
                    shape=inner.shape,
                )
        if one.opcode == "fusion" and called:
            fused = self.computations[called]
            flops = sum(self._dot(inner, {i.name: i.shape for i in fused}) for inner in fused)
            kind = "product" if flops else "other"
            return dataclasses.replace(plain, kind=kind, bytes=self._fusion(called), flops=flops)
        target = re.search(r'custom_call_target="([^"]+)"', one.attributes)
        if one.opcode == "dot" or (target and re.search("matmul|gemm", target[1])):
            half = _dims(shapes[one.operands[0]])[0] == "f32"
            flops = self._dot(one, shapes)
            return dataclasses.replace(plain, kind="product", flops=flops, half_rate=half)
        if target and "fmha" in target[1]:
            keys = sum(size(shapes[name]) for name in one.operands[1:3])
            return dataclasses.replace(
                plain, kind="attention", flops=_attention(one, shapes, target[1]), keys=keys
            )
        return plain

    @staticmethod
    def _dot(one: Instruction, shapes: dict[str, str]) -> float:
        if one.opcode != "dot" and "lhs_contracting_dimensions" not in one.attributes:
            return 0.0
        found = re.search(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)', one.attributes)
        if not found or one.operands[0] not in shapes:
            return 0.0
        axes = [int(axis) for axis in re.findall(r"\d+", found[1])]
        left = _dims(shapes[one.operands[0]])[1]
        return 2.0 * math.prod(_dims(one.shape)[1]) * math.prod(left[axis] for axis in axes)

    @functools.cache  # noqa: B019
    def _fusion(self, name: str) -> int:
        """Returns the number of bytes that a fused computation reads and writes."""
        body = self.computations[name]
        by_name = {one.name: one for one in body}
        users: dict[str, list[tuple[Instruction, int]]] = {one.name: [] for one in body}
        for one in body:
            for place, operand in enumerate(one.operands):
                users[operand].append((one, place))

        def uses(name: str) -> list[tuple[Instruction, int]]:
            found = []
            for one, place in users[name]:
                seen_through = one.opcode in ("bitcast", "reshape")
                found += uses(one.name) if seen_through and users[one.name] else [(one, place)]
            return found

        def read(one: Instruction) -> int:
            total = 0
            for user, place in uses(one.name):
                if user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
                    total += size(user.shape)
                elif not (user.opcode in ("dynamic-update-slice", "scatter") and place == 0):
                    return size(one.shape)
            return min(total, size(one.shape))

        def written(one: Instruction) -> int:
            while one.opcode in ("bitcast", "reshape") and one.operands[0] in by_name:
                one = by_name[one.operands[0]]
            if one.opcode == "tuple":
                return sum(written(by_name[operand]) for operand in one.operands)
            if one.opcode == "dynamic-update-slice":
                return size(by_name[one.operands[1]].shape)
            if one.opcode == "scatter":
                return size(by_name[one.operands[-1]].shape)
            return size(one.shape)

        parameters = sum(read(one) for one in body if one.opcode == "parameter")
        return parameters + sum(written(one) for one in body if one.root)


def _parts(shape: str) -> list[str]:
    return [f"{kind}[{dims}]" for kind, dims in _ARRAY.findall(shape)] or [shape]


def _attention(one: Instruction, shapes: dict[str, str], target: str) -> float:
    """Returns the operations of a cuDNN attention call; queries: [B, T, N, H] or [B, N, T, H]."""
    query, keys = (_dims(shapes[name])[1] for name in one.operands[:2])
    whole = math.prod(query)
    # The number of keys is the longer of the two middle axes; the other one is the number of heads.
    over = math.prod(keys) // (keys[0] * min(keys[1], keys[2]) * keys[3])
    causal = 0.5 if re.search(r'"mask_type":"[^"]*CAUSAL', one.attributes) else 1.0
    return 4.0 * whole * over * causal * (2.5 if "ackward" in target else 1.0)


def launches(kernels: list[Kernel]) -> int:
    """Returns the number of kernel launches, without collectives."""
    return sum(one.times for one in kernels if one.kind != "collective")


def traffic(kernels: list[Kernel]) -> int:
    """Returns the bytes that all kernels except collectives read and write."""
    return sum(one.times * one.bytes for one in kernels if one.kind != "collective")


def bfloat16_flops(kernels: list[Kernel]) -> float:
    """Returns the operations in units of the bfloat16 rate: float32 operations count twice."""
    return sum(one.times * one.flops * (1 + one.half_rate) for one in kernels)


def collectives(kernels: list[Kernel], least: int = 2**20) -> dict[str, list[dict]]:
    """Groups the collectives by the loop that contains them. Equal collectives are merged.

    Args:
      kernels: kernels of the program.
      least: minimum size of a collective in bytes; smaller ones are omitted.

    Returns:
      For each loop, its collectives with name, shape, bytes, and the number of times that a run of
      the program executes them. A loop is named by its trip counts, outermost first: "entry",
      "x 16", "x 16 x 28".
    """
    found: dict[str, Counter] = {}
    for one in kernels:
        if one.kind == "collective" and one.bytes >= least:
            loop = " ".join(f"x {count}" for count in one.loop) or "entry"
            shape = " ".join(_parts(re.sub(r"\{[^}]*\}", "", one.shape))[-1:])
            found.setdefault(loop, Counter())[(one.opcode, shape, one.bytes)] += one.times
    return {
        loop: [
            {"what": what, "shape": shape, "bytes": bytes_, "times": times}
            for (what, shape, bytes_), times in sorted(counted.items(), key=lambda x: -x[0][2])
        ]
        for loop, counted in found.items()
    }
