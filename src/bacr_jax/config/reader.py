"""Converts parsed values strictly to the types of a dataclass.

Every error message contains the place of the value, the value found and what to write instead.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from bacr_jax.config.fields import Key
from bacr_jax.config.values import Misfit, alternatives, any_of, convert, expected, shown
from bacr_jax.config.yaml import Entry, nearest_key
from bacr_jax.errors import UserError


def refusal(where: str, found: str, write: str) -> UserError:
    """Returns the error with the message `where: found; write ...`."""
    return UserError(f"{where}: {found}; write {write}")


def read_value(
    hint: Any, value: Any, where: str, *, found: str | None = None, text: str | None = None
) -> Any:
    """Converts a value to the type `hint`; raises a UserError if it does not fit.

    Args:
      where: place of the value, for the error message.
      found: the value as text, for the error message.
      text: the value as typed, if a plain number may be text.
    """
    try:
        return convert(hint, value, text=text)
    except Misfit:
        maps = [one for one in alternatives(hint) if typing.get_origin(one) is Mapping]
        items = value.items() if maps and isinstance(value, dict) else ()
        # Reads each item by itself, so that the error names the item that does not fit.
        for name, item in items:
            read_value(str, name, where, found=f"the name {shown(name)}")
            item_type = typing.get_args(maps[0])[1]
            read_value(item_type, item, f"{where}.{shown(name, quote=False)}")
        raise refusal(where, f"found {found or shown(value)}", expected(hint, value)) from None


def read_entry(entry: Entry, name: str, keys: Mapping[str, Key]) -> Any:
    """Converts the value of an entry to the type of the key `name`."""
    if name not in keys:
        near = nearest_key(name, {dotted: key.is_section for dotted, key in keys.items()})
        raise refusal(f"{entry.where}: {shown(name, quote=False)}", "no such key", near)
    where = f"{entry.where}: {name}"
    if keys[name].is_section:
        inside = [dotted for dotted in keys if dotted.rpartition(".")[0] == name]
        problem = f"found {entry.text}, but it is a section"
        raise refusal(where, problem, f"one of {', '.join(inside)}")
    typed = entry.raw if entry.lenient else None
    if typed == "" and {str, type(None)} <= {*alternatives(keys[name].hint)}:
        # A shell removes the quotes of '', so that null and an empty text look the same.
        raise refusal(where, "found nothing", f"null, or \"{name}=''\" for an empty text")
    return read_value(keys[name].hint, entry.value, where, found=entry.text, text=typed)


def read_dataclass(
    cls: Any, parsed: Any, where: str, *, given: Mapping[str, Any] | None = None
) -> Any:
    """Builds a dataclass from a parsed mapping.

    Args:
      cls: the dataclass; fields of type `Mapping` or `Any` accept any mapping or value.
      where: place of the mapping, for error messages.
      given: values of fields that the mapping must not contain.
    """
    hints = typing.get_type_hints(cls)
    preset_fields = given or {}
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in preset_fields}
    if not isinstance(parsed, Mapping):
        raise refusal(where, f"found {shown(parsed)}", f"keys such as {any_of(list(fields)[:3])}")
    values: dict[str, Any] = {}
    for key, value in parsed.items():
        if key not in fields:
            unknown_key = f"{where}.{shown(key, quote=False)}"
            raise refusal(unknown_key, "no such key", f"one of {', '.join(fields)}")
        if typing.get_origin(hints[key]) is Mapping:
            if not isinstance(value, Mapping):
                problem = f"found {shown(value)}"
                raise refusal(f"{where}.{key}", problem, "a mapping of config keys")
            values[key] = value
        elif hints[key] is Any:
            values[key] = value
        else:
            values[key] = read_value(hints[key], value, f"{where}.{key}")
    unset = dataclasses.MISSING
    for name, f in fields.items():
        needed = f.default is unset and f.default_factory is unset
        if needed and name not in values:
            raise refusal(where, f"has no {name}", f"{name}: ...")
    return cls(**values, **preset_fields)
