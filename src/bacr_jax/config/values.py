"""Converts parsed YAML values to the types of settings, and formats values for error messages."""

import contextlib
import difflib
import re
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

# Integers with at least this absolute value are rejected as typos. This also rejects integers with
# more than 4300 digits, which Python can't print.
_LARGEST_INT = 2**63

# Matches numbers such as 1e-6, which YAML 1.1 parses as strings because they have no decimal point.
_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
# Words for null in programming languages. YAML parses them as strings, so the error message
# suggests null instead.
_NOT_NULL = ("None", "none", "nil")
_PLURALS = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}


class FrozenMap(dict[str, Any]):
    """A hashable dict, used for settings that are mappings. It must not be modified."""

    def __hash__(self) -> int:  # type: ignore[override]
        """Returns a hash that does not depend on the order of the items."""
        return hash(frozenset(self.items()))


class _Short(reprlib.Repr):
    """Formats values in abbreviated form, including integers too large for Python to print."""

    def repr_date(self, x: Any, level: int) -> str:
        return str(x)

    repr_datetime = repr_date

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < _LARGEST_INT else f"a number of {x.bit_length()} bits"


_short = _Short()
_short.maxstring = 60
_short.maxother = 60


def shown(value: Any, *, quote: bool = True) -> str:
    """Formats a value for an error message: on one line, printable, and abbreviated if it is long.

    Args:
      value: the value. None and bools are formatted as in YAML (null, true, false).
      quote: True to put quotes around strings.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = value if isinstance(value, str) and not quote else _short.repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    return text if text.isprintable() else _short.repr(text)[1:-1]


def written(value: Any) -> str:
    """Formats a value in the notation of a YAML config, such as `[512, 1024]`."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {written(item)}' for name, item in value.items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    return f"{value:g}" if isinstance(value, float) else shown(value, quote=False)


def any_of(words: Sequence[str]) -> str:
    """Joins words into an enumeration such as `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union type, or a tuple with only `hint` for any other type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _is_map(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


def describe(hint: Any) -> str:
    """Describes the values that a type allows, such as `a whole number or null`."""
    words = []
    for member in alternatives(hint):
        if typing.get_origin(member) is Literal:
            words += [str(value) for value in typing.get_args(member)]
        elif _is_list(member):
            inner = typing.get_args(member)[0]
            words.append(f"a list of {_PLURALS.get(inner) or describe(inner)}")
        elif _is_map(member):
            inner = alternatives(typing.get_args(member)[1])
            kinds = any_of([_PLURALS.get(one, "values") for one in inner])
            words.append(f"a mapping of names to {kinds}")
        else:
            words.append(_NAMES.get(member, getattr(member, "__name__", str(member))))
    return any_of(words)


def _number(value: Any) -> float | None:
    """Converts an int, a float or a string such as `1e-6` to float. Returns None otherwise."""
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


class TypeMismatch(ValueError):
    """Raised by `convert` if a value does not match a type."""


def convert(hint: Any, value: Any, *, text: str | None = None) -> Any:
    """Converts a parsed YAML value to the type `hint`, only if this preserves its meaning.

    Args:
      hint: int, float, bool, str, None, a Literal, a tuple of any length, a Mapping with string
        keys, or a union of these.
      value: the parsed value.
      text: the value as the user typed it, if a string setting should accept a value that YAML
        parses as a number or bool. Otherwise None.

    Raises:
      TypeMismatch: if the value does not match the type.
    """
    members = alternatives(hint)
    if _means_null(members, value):
        raise TypeMismatch
    for member in members:
        with contextlib.suppress(TypeMismatch):
            return _convert_one(member, value, text)
    raise TypeMismatch


def _means_null(members: Sequence[Any], value: Any) -> bool:
    """True if the value is a word for null such as `none`, and the type allows null.

    False if the type has a Literal with this word, which then has its normal meaning.
    """
    choices = [item for member in members for item in typing.get_args(member)]
    return type(None) in members and value in _NOT_NULL and value not in choices


def _convert_one(hint: Any, value: Any, text: str | None) -> Any:
    if _is_list(hint) and isinstance(value, list):
        member = typing.get_args(hint)[0]
        return tuple(convert(member, item) for item in value)
    if _is_map(hint) and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        member = typing.get_args(hint)[1]
        return FrozenMap({name: convert(member, item) for name, item in value.items()})
    if hint is str and text is not None and not isinstance(value, str | None):
        value = text
    if hint is float:
        value = _number(value)
        fits = value is not None
    elif typing.get_origin(hint) is Literal:
        fits = value in [item for item in typing.get_args(hint) if type(item) is type(value)]
    elif hint is str:
        fits = isinstance(value, str) and _encodable(value)
    else:
        fits = type(value) is hint and not (hint is int and abs(value) >= _LARGEST_INT)
    if not fits:
        raise TypeMismatch
    return value


def _encodable(text: str) -> bool:
    """True if the text is valid UTF-8 without NUL characters.

    Escape sequences in YAML can produce text that is not, such as half of a surrogate pair.
    """
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def expected(hint: Any, value: Any) -> str:
    """Suggests what to write instead of a value that does not match the type `hint`.

    Returns a similar valid value if one exists, and otherwise a description of the type.
    """
    members = alternatives(hint)
    if _means_null(members, value):
        return "null"
    if isinstance(value, str):
        choices = [m for m in members if typing.get_origin(m) is Literal]
        names = [str(item) for choice in choices for item in typing.get_args(choice)]
        close = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.5)
        if close:
            return f"{close[0]} (possible: {describe(hint)})"
    number = _number(value)
    if int in members and number is not None and number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    for member in filter(_is_list, members):
        listed = _as_list(member, value)
        if listed is not None:
            return f"{describe(hint)}, here {listed}"
    if str in members and isinstance(value, str):
        return "text without NUL and without halves of surrogate pairs"
    if str in members and value is not None and not isinstance(value, list | dict):
        return f"{describe(hint)}, in quotes"
    return describe(hint)


def _as_list(hint: Any, value: Any) -> str | None:
    """Formats a value such as `8` or `8, 16` as the list that was probably meant.

    The result is None if the value can't be read as a list of the type `hint`.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    items = [item.strip() for item in str(value).split(",")]
    is_text = typing.get_args(hint)[0] is str
    if not is_text and not all(re.fullmatch(r"[-+]?[\d.]+", item) for item in items):
        return None
    text = f"[{', '.join(items)}]"
    return text if len(text) < 60 and text.isprintable() else None
