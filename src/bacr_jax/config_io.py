"""Reading a config: YAML files in order, then dotted overrides, into the typed `Config`.

Every refusal is one line: where it stands, what was found, what to write instead.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from bacr_jax.config import Config
from bacr_jax.config_checks import check
from bacr_jax.errors import UserError

__all__ = ["check", "fingerprint", "flatten", "help_text", "load", "to_yaml"]

Raw = dict[str, Any]


# Reading -------------------------------------------------------------------------------------


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which writing a key twice is an error instead of a silent override."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> Raw:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is not a word", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} stands twice", key_node.start_mark
            )
        seen.add(key)
    pairs = loader.construct_pairs(node, deep=True)  # type: ignore[no-untyped-call]
    return dict(pairs)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeys)  # noqa: S506
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}:{line} not YAML ({problem}); write `key: value` lines") from None
    except (ValueError, OverflowError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where}: not YAML ({reason}); write `key: value` lines") from None


def _read(path: str | Path) -> Raw:
    where = str(path)
    try:
        text = Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{where}: can't read it ({error.strerror}); write a YAML file") from None
    raw = _parse(text, where)
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UserError(f"{where}: found a {type(raw).__name__}; write `key: value` lines")
    return raw


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"write one of {', '.join(known)}"


def _convert(found: Any, wanted: Any, where: str) -> Any:
    """A YAML value as the annotated type, or a UserError that names both."""
    problem = UserError(f"{where}: found {found!r}; write {_describe(wanted)}")
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        for option in inner:
            try:
                return _convert(found, option, where)
            except UserError:
                continue
        raise problem
    if origin is Literal:
        if found in inner and isinstance(found, str):
            return found
        hint = _nearest(str(found), [str(choice) for choice in inner])
        raise UserError(f"{where}: found {found!r}; {hint} (of {_describe(wanted)})")
    if origin is tuple:
        if not isinstance(found, list | tuple):
            raise problem
        return tuple(_convert(entry, inner[0], where) for entry in found)
    if wanted is type(None):
        if found is None:
            return None
    elif wanted is bool:
        if isinstance(found, bool):
            return found
    elif wanted is int:
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    elif wanted is float:
        number = _float(found)
        if number is not None:
            return number
    elif wanted is str and isinstance(found, str):
        return found
    raise problem


def _float(found: Any) -> float | None:
    """A finite float from a number, or from text such as 1e-6, which YAML takes for a word."""
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        return None
    try:
        number = float(found)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _describe(wanted: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in inner)
    if origin is Literal:
        return " | ".join(str(choice) for choice in inner)
    if origin is tuple:
        return f"a list of [{_describe(inner[0])}, ...]"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    return names[wanted]


def _build(cls: type, raw: Mapping[str, Any], sources: Mapping[str, str], prefix: str) -> Any:
    """A section from raw values; `sources` says which file or override set each key."""
    annotations = typing.get_type_hints(cls)
    values = {}
    for name, found in raw.items():
        dotted = prefix + name
        where = f"{sources.get(dotted, 'config')}: {dotted}"
        if name not in annotations:
            raise UserError(f"{where}: no such key; {_nearest(name, list(annotations))}")
        wanted = annotations[name]
        if dataclasses.is_dataclass(wanted):
            if not isinstance(found, dict):
                keys = ", ".join(field.name for field in dataclasses.fields(wanted))
                raise UserError(f"{where}: found {found!r}; it is a section, write keys: {keys}")
            values[name] = _build(wanted, found, sources, f"{dotted}.")  # type: ignore[arg-type]
        else:
            values[name] = _convert(found, wanted, where)
    return cls(**values)


def _merge(into: Raw, new: Mapping[str, Any], source: str, sources: dict[str, str], prefix: str):
    for name, value in new.items():
        dotted = prefix + name
        sources[dotted] = source
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value, source, sources, f"{dotted}.")
        else:
            into[name] = value
            if isinstance(value, dict):
                into[name] = {}
                _merge(into[name], value, source, sources, f"{dotted}.")


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """A config from files, later ones winning, and `section.key=value` overrides on top.

    Types are checked, impossible combinations are not: see `check`.

    Raises:
      UserError: a file that can't be read, an unknown key, a value of the wrong type.
    """
    raw: Raw = {}
    sources: dict[str, str] = {}
    for path in paths:
        _merge(raw, _read(path), str(path), sources, "")
    for override in overrides:
        name, equals, text = override.partition("=")
        where = f"command line: {override!r}"
        if not equals or not name or not all(part for part in name.split(".")):
            raise UserError(f"{where}: not an override; write section.key=value")
        value: Any = _parse(text, where)
        for part in reversed(name.split(".")):
            value = {part: value}
        _merge(raw, value, "command line", sources, "")
    return typing.cast(Config, _build(Config, raw, sources, ""))


# Writing -------------------------------------------------------------------------------------


def _plain(config: Any) -> Any:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return list(config) if isinstance(config, tuple) else config


def to_yaml(config: Config) -> str:
    """The whole config as YAML; `load` gives it back exactly."""
    return yaml.safe_dump(_plain(config), sort_keys=False, width=100)


def flatten(config: Config) -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}

    def walk(section: Any, prefix: str) -> None:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if dataclasses.is_dataclass(value):
                walk(value, f"{prefix}{field.name}.")
            else:
                found[prefix + field.name] = value

    walk(config, "")
    return found


def fingerprint(config: Config, *sections: str) -> str:
    """Twelve hexadecimal digits that change when a key of these sections (or keys) changes."""
    chosen = {
        name: value
        for name, value in flatten(config).items()
        if any(name == section or name.startswith(f"{section}.") for section in sections)
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]


def _entries(cls: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    annotations = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        meaning = field.metadata["meaning"]
        if dataclasses.is_dataclass(annotations[field.name]):
            yield f"{prefix}{field.name}.", "", "", meaning
            yield from _entries(annotations[field.name], f"{prefix}{field.name}.")
        else:
            default = field.default
            shown = list(default) if isinstance(default, tuple) else default
            kind = _describe(annotations[field.name])
            yield prefix + field.name, json.dumps(shown), kind, meaning


def help_text() -> str:
    """Every key with its default and meaning, grouped by section."""
    lines = ["keys (default): meaning"]
    for name, default, kind, meaning in _entries(Config):
        if name.endswith("."):
            lines += ["", f"{name[:-1]}: {meaning}"]
            continue
        choices = f" [{kind}]" if "|" in kind else ""
        lines.append(f"  {name} ({default}): {meaning}{choices}")
    return "\n".join(lines)
