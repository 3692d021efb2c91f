"""Converts parsed YAML values to the types of config keys or dataclass fields, with strict checks.

Every error message contains the location of the value, the value itself, and what to write instead.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from bacr_jax.config.fields import Key
from bacr_jax.config.synonyms import synonym
from bacr_jax.config.values import TypeMismatch, alternatives, any_of, convert, expected, shown
from bacr_jax.config.yaml import Entry, nearest_key
from bacr_jax.errors import UserError


def refusal(where: str, found: str, write: str) -> UserError:
    """Returns a UserError with the message `{where}: {found}; use {write}`.

    Args:
      where: location of the value, such as a file and a line.
      found: description of the invalid value.
      write: what the user should write instead.
    """
    return UserError(f"{where}: {found}; use {write}")


def read_value(
    hint: Any, value: Any, where: str, *, found: str | None = None, text: str | None = None
) -> Any:
    """Converts a value to the type `hint`.

    Args:
      hint: type annotation of the setting or field.
      value: the parsed value.
      where: location of the value, for the error message.
      found: description of the value for the error message. Defaults to the value itself.
      text: the value as the user typed it, if a string setting should accept a value that YAML
        parses as a number or bool. Otherwise None.

    Raises:
      UserError: if the value does not have this type.
    """
    try:
        return convert(hint, value, text=text)
    except TypeMismatch:
        maps = [one for one in alternatives(hint) if typing.get_origin(one) is Mapping]
        items = value.items() if maps and isinstance(value, dict) else ()
        # Convert the items of a mapping one by one, so that the error reports the invalid item.
        for name, item in items:
            read_value(str, name, where, found=f"the name {shown(name)}")
            item_type = typing.get_args(maps[0])[1]
            read_value(item_type, item, f"{where}.{shown(name, quote=False)}")
        raise refusal(where, f"found {found or shown(value)}", expected(hint, value)) from None


def read_entry(entry: Entry, name: str, keys: Mapping[str, Key]) -> Any:
    """Converts the value of an entry to the type of the config key `name`.

    Args:
      entry: the value with its location.
      name: dotted name of the key.
      keys: all settings and sections, keyed by dotted name.

    Raises:
      UserError: if the key is unknown or a section, or if the value has the wrong type.
    """
    if name not in keys:
        near = nearest_key(name, {dotted: key.is_section for dotted, key in keys.items()})
        if near in keys and keys[near].is_section and not isinstance(entry.value, Mapping):
            near = f"a key of the section {near} (bacr keys {near} lists them)"
        raise refusal(f"{entry.where}: {shown(name, quote=False)}", "there is no such key", near)
    where = f"{entry.where}: {name}"
    if keys[name].is_section:
        inside = [dotted for dotted in keys if dotted.rpartition(".")[0] == name]
        problem = f"found {entry.text}, but this is a section and not a key"
        likely = synonym(name)
        if likely is not None:
            raise refusal(
                where, problem, f"{likely}; bacr keys {name} lists all keys of the section"
            )
        raise refusal(where, problem, f"one of {', '.join(inside)}")
    typed = entry.raw if entry.lenient else None
    if typed == "" and {str, type(None)} <= {*alternatives(keys[name].hint)}:
        # The shell removes quotes, so `key=''` arrives as `key=`, which could also mean null.
        raise refusal(where, "the value is empty", f"null, or \"{name}=''\" for an empty text")
    return read_value(keys[name].hint, entry.value, where, found=entry.text, text=typed)


def read_dataclass(
    cls: Any, parsed: Any, where: str, *, given: Mapping[str, Any] | None = None
) -> Any:
    """Builds an instance of a dataclass from a parsed mapping.

    Args:
      cls: the dataclass. Values of fields annotated as `Mapping[...]` or `Any` are not converted.
      parsed: the parsed mapping.
      where: location of the mapping, for error messages.
      given: values of fields that the caller sets. The parsed mapping must not contain these
        fields.

    Raises:
      UserError: if `parsed` is not a mapping, a key is unknown, a value has the wrong type, or a
        field without a default is missing.
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
            raise refusal(unknown_key, "there is no such key", f"one of {', '.join(fields)}")
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
            raise refusal(where, f"the required key {name} is missing", f"{name}: ...")
    return cls(**values, **preset_fields)
