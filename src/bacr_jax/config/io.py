"""Loads, overrides, serializes and fingerprints configs.

All config keys are derived from the dataclass fields in `schema`. A new field can be set in files
and overrides, and appears in `--help` and config.yaml, without a change in this module. `checks`
validates the values.
"""

import dataclasses
import functools
import hashlib
import json
import math
import operator
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bacr_jax.config.checks import check as check
from bacr_jax.config.fields import Key, range_text, walk
from bacr_jax.config.paths import expand_paths
from bacr_jax.config.reader import read_entry
from bacr_jax.config.schema import Config
from bacr_jax.config.shipped import is_overlay, locate
from bacr_jax.config.values import FrozenMap, describe, written
from bacr_jax.config.yaml import (
    Entry,
    Parsed,
    entries,
    nearest_key,
    parse_file,
    parse_override,
    resolve_numbers,
)
from bacr_jax.errors import UserError

# Overrides of config keys: texts of the form `a.b=value`, or a dict from `a.b` to values.
Overrides = Mapping[str, Any] | Sequence[str]

# Keys that only affect speed and the rounding of the sampler's log-probabilities. They do not
# change which samples are drawn, so `identity` leaves them out.
SPEED_KEYS = frozenset({"output.compile_cache", "rollout.refill", "rollout.windows", "eval.slots"})


def identity(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that can affect the samples of a run. Settings of speed are left out.

    Args:
      values: values of the config, keyed by dotted name (see `flatten`).
    """
    return {name: value for name, value in values.items() if name not in SPEED_KEYS}


@functools.cache
def schema() -> Mapping[str, Key]:
    """Returns every setting and section with its default, keyed by dotted name, in config order."""
    return dict(walk(Config()))


def _read(parsed_entries: Iterable[Entry]) -> dict[str, Any]:
    """Converts the values of parsed config entries to the types of their keys.

    Returns:
      The converted values, keyed by dotted name. The last entry of a key wins.

    Raises:
      UserError: with one line for each unknown key or invalid value.
    """
    values: dict[str, Any] = {}
    faults: list[str] = []
    for entry in parsed_entries:
        try:
            values[entry.key] = _value(entry)
        except UserError as error:
            faults += error.lines
    if faults:
        raise UserError(*faults)
    return values


def _value(entry: Entry) -> Any:
    """Converts an entry to the type of its key, and expands the paths in it."""
    value = read_entry(entry, entry.key, schema())
    try:
        return expand_paths(entry.key, value)
    except ValueError as error:
        raise UserError(f"{entry.where}: {entry.key}={written(value)}: {error}") from None


def _build(cls: type, prefix: str, values: Mapping[str, Any]) -> Any:
    """Builds a config or a section from values. Missing keys have their defaults.

    Args:
      cls: the dataclass to build.
      prefix: dotted name of the section with a trailing dot. Empty for the whole config.
      values: values keyed by full dotted name.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        key = schema()[name]
        if key.is_section:
            fields[field.name] = _build(key.hint, f"{name}.", values)
        else:
            fields[field.name] = values.get(name, key.value)
    return cls(**fields)


def override_texts(overrides: Overrides) -> list[str]:
    """Returns overrides as texts of the form `a.b=value`, as on the command line.

    Args:
      overrides: see `override`.

    Raises:
      UserError: if a value can't be written in YAML.
    """
    if isinstance(overrides, str):
        return [overrides]
    if not isinstance(overrides, Mapping):
        return list(overrides)
    texts = []
    for name, value in overrides.items():
        try:
            texts.append(f"{name}={value_text(_plain_value(value))}")
        except yaml.representer.RepresenterError as error:
            *_, unknown = error.args
            contains = "has" if unknown is value else "contains an item of"
            raise UserError(
                f"overrides: the value of {name} {contains} the type {type(unknown).__name__}; use "
                "a number, a string, a list, a dict, True, False or None"
            ) from None
    return texts


def _plain_value(value: Any) -> Any:
    """Converts paths to strings, and scalars of NumPy or JAX to Python values, also in lists."""
    if isinstance(value, Mapping):
        items = {_plain_value(name): _plain_value(item) for name, item in value.items()}
        # `value_text` sorts the names of a dict, but keeps the order of a config's mapping.
        return FrozenMap(items) if isinstance(value, FrozenMap) else items
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if getattr(value, "shape", None) == ():
        return value.item()
    return value


def load(paths: Sequence[str | Path], overrides: Overrides = ()) -> Config:
    """Loads a config from YAML files and overrides. Keys that are not set have their defaults.

    If a key is set more than once, the last value wins. Overrides come after all files. The
    returned config is not validated. Call `check` to validate it.

    Args:
      paths: YAML files, or names of configs that ship with the package (see `shipped`).
      overrides: see `override`.

    Raises:
      UserError: if a file can't be parsed, a key is unknown, a value has the wrong type, or a
        preset of a method comes before the config that it should change.
    """
    files = [parse_file(locate(path)) for path in paths]
    _check_order(paths, files)
    return _over({}, overrides, files)


def _check_order(paths: Sequence[str | Path], files: Sequence[Parsed]) -> None:
    """Checks that no preset of a method is undone by the first complete config after it.

    A config is complete if it sets `method`. Small configs after a preset may change its keys.

    Args:
      paths: paths or names of configs.
      files: the parsed configs.

    Raises:
      UserError: if a shipped preset comes first, and the first other config is complete and sets
        the preset's keys again.
    """
    is_preset = [is_overlay(path) for path in paths]
    if not paths or not is_preset[0] or all(is_preset):
        return
    base = is_preset.index(False)
    base_keys = {entry.key for entry in _entries_of([files[base]])}
    if "method" not in base_keys:
        return
    for path, file in zip(paths[:base], files[:base], strict=True):
        undone = [entry.key for entry in _entries_of([file]) if entry.key in base_keys]
        if undone:
            order = [paths[base], *paths[:base], *paths[base + 1 :]]
            more = f" and {len(undone) - 1} more of its keys" if len(undone) > 1 else ""
            raise UserError(
                f"{path}: this preset of a method comes before {paths[base]}, which sets "
                f"{undone[0]}{more} again; pass the configs in the order "
                f"{', '.join(map(str, order))}"
            )


def override(config: Config, overrides: Overrides) -> Config:
    """Returns a copy of the config with overrides applied.

    Args:
      config: the config to start from.
      overrides: texts of the form `a.b=value` with the value in YAML, or a dict from names such as
        `a.b` to Python values. Later overrides win.

    Raises:
      UserError: if a key is unknown, or a value has the wrong type.
    """
    return _over(flatten(config), overrides)


def _over(values: Mapping[str, Any], overrides: Overrides, files: Sequence[Parsed] = ()) -> Config:
    """Builds a config from values, then files, then overrides. The last value of each key wins."""
    parsed_entries = _entries_of([*files, *map(parse_override, override_texts(overrides))])
    return _build(Config, "", {**values, **_read(parsed_entries)})


def _entries_of(parsed: Iterable[Parsed]) -> list[Entry]:
    """Returns the entries of all documents, in their order."""
    sections = {name for name, key in schema().items() if key.is_section}
    return [entry for document in parsed for entry in entries(document, sections)]


def overridden_keys(override: str) -> list[str]:
    """Returns the keys that an override sets: several if its value is a section.

    Unknown keys are included.
    """
    return [entry.key for entry in _entries_of([parse_override(override)])]


def is_overridden(key: str, overrides: Iterable[str]) -> bool:
    """True if one of the overrides sets the key, by its dotted name or as a part of its section."""
    return any(key in overridden_keys(text) for text in overrides)


def read_settings(path: Path) -> dict[str, Any]:
    """Returns only the values that a YAML file sets, keyed by dotted name.

    Raises:
      UserError: as for `load`.
    """
    return _read(_entries_of([parse_file(path)]))


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes sections in block style, and list or mapping settings on one line.

    Texts that `load` or another YAML parser would read as numbers are quoted.
    """


resolve_numbers(_Dumper)
_Dumper.add_representer(
    FrozenMap,
    lambda dumper, value: dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), True),
)
_Dumper.add_representer(
    tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True)
)


def to_yaml(config: Config) -> str:
    """Serializes a config with all its keys to YAML. `load` restores an equal config from it."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, width=96)


def value_text(value: Any) -> str:
    """Serializes the value of one setting to YAML on a single line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


@functools.cache
def settings() -> tuple[str, ...]:
    """Returns the dotted names of all keys, in config order."""
    return tuple(name for name, key in schema().items() if not key.is_section)


def flatten(config: Config) -> dict[str, Any]:
    """Returns all settings of a config as a dict keyed by dotted name, in order of definition."""
    values = operator.attrgetter(*settings())(config)
    return dict(zip(settings(), values, strict=True))


def fingerprint(config: Config, *sections: str) -> str:
    """Returns a hash of the settings that can affect a run's samples.

    The hash has 12 hexadecimal digits. Equal settings have the same hash on every machine.

    Args:
      config: the config to hash.
      *sections: dotted names of the sections or keys to include. Without any, the whole config is
        hashed.

    Raises:
      KeyError: if a name is not a section or key of the config.
    """
    for section in sections:
        schema()[section]
    chosen = {}
    for name, value in identity(flatten(config)).items():
        is_requested = any(f"{name}.".startswith(f"{section}.") for section in sections)
        if is_requested or not sections:
            chosen[name] = value
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def help_text(width: int = 100, section: str | None = None) -> str:
    """Returns the help text, which lists the default, meaning and possible values of every key.

    Args:
      width: maximum line width in characters. Values below 80 are raised to 80.
      section: dotted name of a section, whose keys are listed, or of one key. None lists all keys.

    Raises:
      UserError: if `section` is not a section or key.
    """
    # Keys that belong to no section come first.
    names = sorted(settings(), key=lambda name: "." in name)
    if section is not None:
        names = _keys_under(section, names)
    # The column widths are fixed, because a single long name or default would otherwise shift the
    # meanings of all keys to the right.
    name_width, default_width = 30, 14
    lines = [f"  {'key':{name_width}}{'default':{default_width}}meaning (possible values)"]
    heading = ""
    for name in names:
        key = schema()[name]
        parent = name.rpartition(".")[0]
        if parent != heading:
            lines += ["", f"{parent}: {schema()[parent].meaning}"]
            heading = parent
        start = f"  {name:{name_width - 1}} {written(key.value):{default_width - 1}} "
        lines += _help_lines(start, key, margin=2 + name_width + default_width, width=width)
    return "\n".join(lines)


def _keys_under(section: str, names: Sequence[str]) -> list[str]:
    """Returns the keys of a section. If `section` is a key, the list contains only this key.

    Raises:
      UserError: if `section` is neither a section nor a key.
    """
    chosen = [name for name in names if f"{name}.".startswith(f"{section}.")]
    if not chosen:
        sections = {name: key.is_section for name, key in schema().items()}
        near = nearest_key(section, sections)
        raise UserError(f"command line: {section}: there is no such section or key; use {near}")
    return chosen


def _help_lines(start: str, key: Key, *, margin: int, width: int) -> list[str]:
    """Returns the help lines of one key.

    Args:
      start: the key's name and default.
      margin: width of the columns before the meaning, in characters.
      width: maximum line width in characters. Values below 80 are raised to 80.
    """
    lines = []
    if len(start) > margin:
        lines.append(start.rstrip())
        start = " " * margin
    possible = [describe(key.hint), *map(range_text, filter(None, [key.bounds]))]
    lines += textwrap.wrap(
        f"{key.meaning} ({', '.join(possible)})",
        max(width, 80),
        initial_indent=start,
        subsequent_indent=" " * margin,
        break_on_hyphens=False,
    )
    return lines
