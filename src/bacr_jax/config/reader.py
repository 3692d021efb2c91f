"""The strict reader: values that somebody wrote, in the types of a dataclass.

Every refusal says where the value stands, what was found and what to write instead.
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
    """`where: found; write ...`."""
    return UserError(f"{where}: {found}; write {write}")


def read_value(
    hint: Any, value: Any, where: str, *, found: str | None = None, text: str | None = None
) -> Any:
    """A value in a type.

    Args:
      found: it again, for the refusal.
      text: what was typed, where a plain number may stand for text.
    """
    try:
        return convert(hint, value, text=text)
    except Misfit:
        maps = [one for one in alternatives(hint) if typing.get_origin(one) is Mapping]
        for name, item in value.items() if maps and isinstance(value, dict) else ():
            read_value(str, name, where, found=f"the name {shown(name)}")
            place = f"{where}.{shown(name, quote=False)}"
            read_value(typing.get_args(maps[0])[1], item, place)
        raise refusal(where, f"found {found or shown(value)}", expected(hint, value)) from None


def read_entry(entry: Entry, name: str, keys: Mapping[str, Key]) -> Any:
    """The value of an entry in the type of its key."""
    if name not in keys:
        near = nearest_key(name, {known: key.is_section for known, key in keys.items()})
        raise refusal(f"{entry.where}: {shown(name, quote=False)}", "no such key", near)
    where = f"{entry.where}: {name}"
    if keys[name].is_section:
        inside = [known for known in keys if known.rpartition(".")[0] == name]
        found = f"found {entry.text}, but it is a section"
        raise refusal(where, found, f"one of {', '.join(inside)}")
    typed = entry.raw if entry.lenient else None
    if typed == "" and {str, type(None)} <= {*alternatives(keys[name].hint)}:
        # In a shell '' is nothing, and may have meant either.
        raise refusal(where, "found nothing", f"null, or \"{name}=''\" for an empty text")
    return read_value(keys[name].hint, entry.value, where, found=entry.text, text=typed)


def read_dataclass(
    cls: Any, parsed: Any, where: str, *, given: Mapping[str, Any] | None = None
) -> Any:
    """A dataclass from a parsed mapping.

    Args:
      cls: its class; fields of type `Mapping` or `Any` take what is there.
      given: fields that were made before, and can't be written.
    """
    hints, given = typing.get_type_hints(cls), given or {}
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in given}
    if not isinstance(parsed, Mapping):
        raise refusal(where, f"found {shown(parsed)}", f"keys such as {any_of(list(fields)[:3])}")
    values: dict[str, Any] = {}
    for key, value in parsed.items():
        if key not in fields:
            place = f"{where}.{shown(key, quote=False)}"
            raise refusal(place, "no such key", f"one of {', '.join(fields)}")
        if typing.get_origin(hints[key]) is Mapping:
            if not isinstance(value, Mapping):
                place = f"{where}.{key}"
                raise refusal(place, f"found {shown(value)}", "a mapping of config keys")
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
    return cls(**values, **given)
