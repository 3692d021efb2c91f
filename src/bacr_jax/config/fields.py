"""A setting as a field of a frozen dataclass: its default, its meaning and the bounds of numbers.

Bounds are an interval in mathematical notation: `[0, 1)` holds 0, and not 1. A list of numbers is
checked number by number. Infinity is only legal where the interval says so.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def key(default: Any, meaning: str, bounds: str | None = None) -> Any:
    """A field with a one-line meaning, shown by `--help`, and the interval its numbers lie in."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "bounds": bounds})


def section(cls: type, meaning: str) -> Any:
    """A nested section of keys."""
    return dataclasses.field(default_factory=cls, metadata={"meaning": meaning, "bounds": None})


@dataclass(frozen=True)
class Key:
    """A setting or a section, as its field states it, and the value it is set to."""

    hint: Any
    value: Any
    meaning: str
    bounds: str | None
    is_section: bool


# The same few classes are walked again and again.
_hints_of = functools.cache(typing.get_type_hints)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Every key and section of a dataclass by its dotted name, in the order written there."""
    cls: Any = type(config)
    hints = _hints_of(cls)
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        nested = dataclasses.is_dataclass(value)
        yield name, Key(hints[field.name], value, is_section=nested, **field.metadata)
        if nested:
            yield from walk(value, f"{name}.")


def _ends(bounds: str) -> tuple[float, float]:
    low, high = bounds[1:-1].split(",")
    return float(low), float(high)


def inside(number: int | float, bounds: str) -> bool:
    """Whether an interval holds a number."""
    low, high = _ends(bounds)
    above = number >= low if bounds[0] == "[" else number > low
    return above and (number <= high if bounds[-1] == "]" else number < high)


def range_text(bounds: str) -> str:
    """The numbers of an interval, in words."""
    low, high = _ends(bounds)
    if math.isfinite(high):
        return f"in {bounds}"
    if math.isinf(low):
        return "any finite number"
    least = f"{low:g} or more" if bounds[0] == "[" else f"more than {low:g}"
    return f"{least} (.inf: no limit)" if bounds[-1] == "]" else least
