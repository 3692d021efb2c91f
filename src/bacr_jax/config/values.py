"""Values as YAML gives them, against the type annotations of the config."""

import contextlib
import difflib
import re
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

# Whole numbers beyond 64 bits are typing errors, and can't be printed beyond 4300 digits.
_LARGEST_INT = 2**63

# YAML 1.1 reads 1e-6 as text, because it asks for a point and a signed exponent.
_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
# Other languages' words for null, which YAML would read as text.
_NOT_NULL = ("None", "none", "nil")
_PLURALS = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}


class FrozenMap(dict[str, Any]):
    """A mapping that can be a setting: hashable, and never changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        """Equal mappings have equal hashes."""
        return hash(frozenset(self.items()))


class _Short(reprlib.Repr):
    """Short forms of values, also of numbers too long for Python to print."""

    repr_date = repr_datetime = lambda self, x, level: str(x)

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < _LARGEST_INT else f"a number of {x.bit_length()} bits"


_short = _Short()
_short.maxstring = _short.maxother = 60


def shown(value: Any, *, quote: bool = True) -> str:
    """A value as a short, printable piece of one line, in YAML's words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = value if isinstance(value, str) and not quote else _short.repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    return text if text.isprintable() else _short.repr(text)[1:-1]


def written(value: Any) -> str:
    """A value as one would write it in a config."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {written(item)}' for name, item in value.items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    return f"{value:g}" if isinstance(value, float) else shown(value, quote=False)


def any_of(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a type that is none is its only member."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _is_map(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


def describe(hint: Any) -> str:
    """What can be written for a type, in words: `a whole number or null`."""
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
    """A float, if this is one: whole numbers and 1e-6 included, true and false not."""
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


class Misfit(ValueError):
    """A value that does not fit a type."""


def convert(hint: Any, value: Any, *, text: str | None = None) -> Any:
    """A value of YAML in a type, without changing what it means; Misfit: it is none of that type.

    Types are int, float, bool, str, None, Literal, tuple of any length, Mapping, or a union of
    these. `text` is what was typed, if a str may also be made of something that YAML reads as a
    number.
    """
    members = alternatives(hint)
    for member in members if not _means_null(members, value) else ():
        with contextlib.suppress(Misfit):
            return _convert_one(member, value, text)
    raise Misfit


def _means_null(members: Sequence[Any], value: Any) -> bool:
    """Whether a text was meant to be null; not where it is a choice of its own."""
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
        raise Misfit
    return value


def _encodable(text: str) -> bool:
    """Text that can name a file: YAML's escapes can also spell NUL and halves of surrogates."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def expected(hint: Any, value: Any) -> str:
    """What to write where `value` did not fit `hint`: the nearest value if there is one."""
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
    """The list that `8`, or `8, 16`, was probably meant to be."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    items = [item.strip() for item in str(value).split(",")]
    is_text = typing.get_args(hint)[0] is str
    if not is_text and not all(re.fullmatch(r"[-+]?[\d.]+", item) for item in items):
        return None
    text = f"[{', '.join(items)}]"
    return text if len(text) < 60 and text.isprintable() else None
