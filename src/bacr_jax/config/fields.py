"""Defines a setting as a field of a frozen dataclass, with a default, a meaning and bounds.

Bounds are an interval in mathematical notation: `[0, 1)` contains 0 but not 1. Each number of a
list is checked. Infinity is legal only if the interval includes it, as `(0, inf]` does.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def key(default: Any, meaning: str, bounds: str | None = None) -> Any:
    """Returns a field with the meaning that `--help` prints and the bounds of its numbers."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "bounds": bounds})


def section(cls: type, meaning: str) -> Any:
    """Returns a dataclass field that is a section of keys, an instance of `cls`."""
    return dataclasses.field(default_factory=cls, metadata={"meaning": meaning, "bounds": None})


@dataclass(frozen=True)
class Key:
    """A setting or a section: the declaration in its field, and its value in a config."""

    hint: Any
    value: Any
    meaning: str
    bounds: str | None
    is_section: bool


# Cached because each config consists of the same few classes.
_hints_of = functools.cache(typing.get_type_hints)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yields dotted name and `Key` of every setting and section, in the order of the fields."""
    cls: Any = type(config)
    hints = _hints_of(cls)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        nested = dataclasses.is_dataclass(value)
        yield name, Key(hints[field.name], value, is_section=nested, **field.metadata)
        if nested:
            yield from walk(value, f"{name}.")


def _ends(bounds: str) -> tuple[float, float]:
    low, high = bounds[1:-1].split(",")
    return float(low), float(high)


def inside(number: int | float, bounds: str) -> bool:
    """True if the number lies in the interval `bounds`."""
    low, high = _ends(bounds)
    above = number > low or (number == low and bounds[0] == "[")
    below = number < high or (number == high and bounds[-1] == "]")
    return above and below


def range_text(bounds: str) -> str:
    """Describes the numbers of an interval in words, for messages and --help."""
    low, high = _ends(bounds)
    if math.isfinite(high):
        return f"in {bounds}"
    if math.isinf(low):
        return "any finite number"
    least = f"{low:g} or more" if bounds[0] == "[" else f"more than {low:g}"
    return f"{least} (.inf: no limit)" if bounds[-1] == "]" else least
