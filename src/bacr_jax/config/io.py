"""Reads, overrides, prints and fingerprints a config.

This module derives everything from the fields in `schema`: a key added there is read, overridden,
printed by `--help` and written to config.yaml without a change here. `checks` decides which values
are allowed.
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
from bacr_jax.config.reader import read_entry
from bacr_jax.config.schema import Config
from bacr_jax.config.shipped import locate
from bacr_jax.config.values import FrozenMap, describe, written
from bacr_jax.config.yaml import Entry, Parsed, entries, parse_file, parse_override
from bacr_jax.documents import expand_home
from bacr_jax.errors import UserError

# Keys that are newer than the committed cells of studies. At their defaults they change no sample,
# and fingerprints leave them out, so that the cells keep their fingerprints.
_ADDED_LATER = frozenset(
    {
        *("eval.during", "optimizer.max_update_kl"),
        *("train.undo_closed_answers", "train.undo_filled_budgets"),
    }
)
# Keys of folders, in which ~ means the home folder.
_PATHS = frozenset(
    {
        *("model.path", "model.tokenizer", "adapter.path", "data.dir", "warmup.dir"),
        *("output.dir", "rollout.weights_dir"),
    }
)
# Keys that only change speed, and the last bits of the sampler's log-probabilities. Samples do not
# depend on them, so fingerprints leave them out.
_OF_SPEED = frozenset({"output.compile_cache", "rollout.refill", "rollout.windows", "eval.slots"})


def identity(config: Config) -> dict[str, Any]:
    """Returns the keys and values that a run's samples depend on."""
    return {name: value for name, value in flatten(config).items() if name not in _OF_SPEED}


@functools.cache
def schema() -> Mapping[str, Key]:
    """Returns every key and section by its dotted name, in the order of `Config`."""
    return dict(walk(Config()))


def _read(parsed_entries: Iterable[Entry]) -> dict[str, Any]:
    """Returns the values of entries in the types of their keys."""
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
    """Returns the value of an entry in the type of its key, with ~ expanded in folders."""
    value = read_entry(entry, entry.key, schema())
    if entry.key not in _PATHS or value is None:
        return value
    try:
        return str(expand_home(value)) if value.startswith("~") else value
    except ValueError as error:
        raise UserError(f"{entry.where}: {entry.key}={value}: {error}") from None


def _build(cls: type, prefix: str, values: Mapping[str, Any]) -> Any:
    """Builds the section `prefix` of a config from values by dotted key, and defaults."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        key = schema()[name]
        if key.is_section:
            fields[field.name] = _build(key.hint, f"{name}.", values)
        else:
            fields[field.name] = values.get(name, key.value)
    return cls(**fields)


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Loads a config from files and overrides, over the defaults; `check` must still check it.

    Later files win over earlier files, overrides over files, and later overrides over earlier ones.

    Args:
      paths: YAML files, or names of configs that ship with the package (`shipped`).
      overrides: `a.b=value`, with the value in YAML.
    """
    return _over({}, overrides, [parse_file(locate(path)) for path in paths])


def override(config: Config, overrides: Sequence[str]) -> Config:
    """Returns the config with overrides `a.b=value` (values in YAML); later overrides win."""
    return _over(flatten(config), overrides)


def _over(
    values: Mapping[str, Any], overrides: Sequence[str], files: Sequence[Parsed] = ()
) -> Config:
    """Builds a config from values, then files, then overrides; the last value of a key wins."""
    parsed = [*files, *map(parse_override, overrides)]
    sections = {name for name, key in schema().items() if key.is_section}
    parsed_entries = [entry for document in parsed for entry in entries(document, sections)]
    return _build(Config, "", {**values, **_read(parsed_entries)})


class _Dumper(yaml.SafeDumper):
    """Writes sections as blocks, and lists and mappings of settings on one line."""


_Dumper.add_representer(
    FrozenMap,
    lambda dumper, value: dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), True),
)
_Dumper.add_representer(
    tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True)
)


def to_yaml(config: Config) -> str:
    """Returns every key of a config as YAML, from which `load` restores an equal config."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, width=96)


def value_text(value: Any) -> str:
    """Returns a key's value as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


@functools.cache
def _settings() -> tuple[str, ...]:
    return tuple(name for name, key in schema().items() if not key.is_section)


def flatten(config: Config) -> dict[str, Any]:
    """Returns the values by dotted key, in the order of `Config`."""
    values = operator.attrgetter(*_settings())(config)
    return dict(zip(_settings(), values, strict=True))


def fingerprint(config: Config, *sections: str) -> str:
    """Returns a hash of the sections or keys with these dotted names, by default of all keys.

    The hash has 12 hexadecimal digits and is equal for equal settings on every machine.

    Raises:
      KeyError: if a name is not a section or key of the config.
    """
    for section in sections:
        schema()[section]
    defaults = identity(Config())
    chosen = {
        name: value
        for name, value in identity(config).items()
        if not sections or any(f"{name}.".startswith(f"{section}.") for section in sections)
        if name not in _ADDED_LATER or value != defaults[name]
    }
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def help_text(width: int = 100) -> str:
    """Returns the help text: for every key its default, its meaning and the possible values.

    `width`: columns of a line, at least 80.
    """
    settings = {name: key for name, key in schema().items() if not key.is_section}
    # Fixed widths, because one long name or default would push every meaning to the right.
    name_width, default_width = 30, 14
    margin = 2 + name_width + default_width
    lines = [f"  {'key':{name_width}}{'default':{default_width}}meaning (possible values)"]
    heading = ""
    # Keys outside any section come first.
    for name, key in sorted(settings.items(), key=lambda item: "." in item[0]):
        section = name.rpartition(".")[0]
        if section != heading:
            lines += ["", f"{section}: {schema()[section].meaning}"]
            heading = section
        start = f"  {name:{name_width - 1}} {written(key.value):{default_width - 1}} "
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
    return "\n".join(lines)
