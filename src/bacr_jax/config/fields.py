"""Helpers that define settings as fields of frozen dataclasses.

Each setting has a default value, a description for `--help`, and optional bounds. Bounds are
intervals in mathematical notation: `[0, 1)` includes 0 and excludes 1. For a list, every number
must be within the bounds. Infinity is only allowed if the interval includes it, as in
`(0, inf]`.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Smallest sampling temperature except 0, for settings and for requests. Logits that are divided by
# a much smaller one exceed the range of float32.
SMALLEST_TEMPERATURE = 0.001
# Largest seed, for settings and for requests. `jax.random.key` ignores bits beyond the 32nd, so
# different seeds would give the same numbers.
LARGEST_SEED = 2**32 - 1


def key(default: Any, meaning: str, bounds: str | None = None) -> Any:
    """Defines a setting as a dataclass field.

    Args:
      default: the default value.
      meaning: the description that `--help` prints.
      bounds: the interval that numbers must lie in, such as `[0, 1)`. None allows every value.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "bounds": bounds})


def section(cls: type, meaning: str) -> Any:
    """Defines a section of settings as a dataclass field.

    Args:
      cls: the dataclass with the settings of the section. The default is an instance of it.
      meaning: the description that `--help` prints.
    """
    return dataclasses.field(default_factory=cls, metadata={"meaning": meaning, "bounds": None})


@dataclass(frozen=True)
class Key:
    """A setting or a section of a config.

    Attributes:
      hint: type of the value, which is a dataclass for a section.
      value: the value in the config.
      meaning: the description that `--help` prints.
      bounds: the interval that numbers must lie in, such as `[0, 1)`. None allows every value.
      is_section: True for a section, False for a single setting.
    """

    hint: Any
    value: Any
    meaning: str
    bounds: str | None
    is_section: bool


# Cached because every config is built from the same few classes.
_hints_of = functools.cache(typing.get_type_hints)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yields the dotted name and the `Key` of every setting and section, in order of definition.

    Args:
      config: an instance of a config dataclass.
      prefix: text to put before each name, such as `model.`.
    """
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
    """Returns the lower and the upper end of an interval such as `[0, 1)`."""
    low, high = bounds[1:-1].split(",")
    return float(low), float(high)


def inside(number: int | float, bounds: str) -> bool:
    """True if `number` lies in the interval `bounds`, such as `[0, 1)`."""
    low, high = _ends(bounds)
    above = number > low or (number == low and bounds[0] == "[")
    below = number < high or (number == high and bounds[-1] == "]")
    return above and below


def range_text(bounds: str) -> str:
    """Describes an interval in words, for error messages and `--help`."""
    low, high = _ends(bounds)
    if math.isfinite(high):
        return f"in {bounds}"
    if math.isinf(low):
        return "any finite number"
    least = f"{low:g} or more" if bounds[0] == "[" else f"more than {low:g}"
    return f"{least} (.inf: no limit)" if bounds[-1] == "]" else least
