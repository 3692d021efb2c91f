"""Reading, overriding, printing and identifying a config.

Everything here follows from the fields in `schema`: a key added there is read, overridden, shown by
`--help` and written to config.yaml without a line here. Which values make sense, alone and
together, is the business of `checks`.
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
from bacr_jax.config.values import FrozenMap, any_of, describe, shown, written
from bacr_jax.config.yaml import Entry, Parsed, entries, parse_file, parse_override
from bacr_jax.documents import expand_home
from bacr_jax.errors import UserError

# Keys of earlier versions, and what is written instead of each of their values.
_GONE: Mapping[str, Mapping[Any, str]] = {
    "conditioning.enabled": {
        True: "conditioning.told=embedding",
        False: "conditioning.told=nothing",
    },
    "dapo.overlong_filter": {True: "loss.overlong_filter"},
}
# Keys of earlier versions whose options are no more, and the value that a run without them had: it
# is still read and says nothing, and stays in fingerprints, so that such runs can be told.
_RETIRED: Mapping[str, Any] = {
    "adapter.decode": "merged",
    "advantage.history": False,
    "conditioning.branches": "trace",
    "conditioning.site": "after_block",
    "curriculum.difficulty": "groups",
    "curriculum.coordinate": "level",
    "curriculum.bandwidth": 0.5,
    "curriculum.strength": 4.0,
    "curriculum.forgetting": 0.995,
    "dapo.overlong_filter": False,
    "curriculum.probe_size": 128,
    "curriculum.probe_budget": None,
    "rollout.compact": False,
    "train.drop_zero_advantage": False,
    "value.loss": "squared",
}
# Values of earlier versions that are still read, and what they mean now. Fingerprints keep the old
# ones, so that runs of those versions can be told.
_FORMERLY: Mapping[str, Mapping[Any, Any]] = {"model.remat": {True: "full", False: "none"}}
# Keys that came after runs had been fingerprinted: at their defaults they change no fingerprint.
_LATER = frozenset(
    {
        *("data.eval_missing", "model.param_dtype", "model.product_dtype"),
        *("train.padding_free",),
        *("optimizer.moment_dtype", "loss.old_logprobs"),
        *("rollout.attention", "advantage.score_weighted", "warmup.short_accuracy"),
        *("advantage.score_uniform", "grading.flip_rate", "elastic.share", "warmup.styles"),
        *("warmup.seed", "optimizer.max_update_kl"),
        *("train.undo_closed_answers", "train.undo_filled_budgets"),
        *("advantage.score_by_budget", "data.trace_column", "loss.overlong_filter"),
        *("export.every", "data.system_prompt", "data.template_variables"),
        "data.prompt_date",
        *(f"l1.{name}" for name in ("kind", "weight", "offset")),
        *("rollout.engine", "rollout.urls", "rollout.weights_dir", "rollout.ahead"),
        *("rollout.transfer", "loss.sequence_mask", "reward.weights", "reward.apart"),
        *(f"length.{name}" for name in ("kind", "target", "weight", "kept")),
        *(f"adapter.{name}" for name in ("rank", "alpha", "targets", "path", "decode")),
    }
)
# Keys of folders, in which ~ is the home folder.
_PATHS = frozenset(
    {
        *("model.path", "model.tokenizer", "adapter.path", "data.dir", "warmup.dir"),
        *("output.dir", "rollout.weights_dir"),
    }
)
# Keys of speed alone: no sample depends on them, log-probabilities of the sampler in their last
# bits. They are in no fingerprint.
_OF_SPEED = frozenset(
    {"output.compile_cache", "rollout.compact", "rollout.refill", "rollout.windows", "eval.slots"}
)


def identity(config: Config) -> dict[str, Any]:
    """What a run's samples depend on: keys and values, as fingerprints have always had them."""

    def formerly(name: str, value: Any) -> Any:
        same = [old for old, new in _FORMERLY.get(name, {}).items() if new == value]
        return same[0] if same else value

    items = {**_RETIRED, **flatten(config)}.items()
    return {name: formerly(name, value) for name, value in items if name not in _OF_SPEED}


@functools.cache
def schema() -> Mapping[str, Key]:
    """Every key and section by its dotted name, in the order of `Config`."""
    return dict(walk(Config()))


def _read(found: Iterable[Entry]) -> dict[str, Any]:
    """The values of entries in the types of their keys, without retired ones."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    for entry in found:
        try:
            values[entry.key] = _value(entry)
        except UserError as error:
            faults += error.lines
    if faults:
        raise UserError(*faults)
    return {name: value for name, value in values.items() if name not in _RETIRED}


def _value(entry: Entry) -> Any:
    name = entry.key
    if name in _RETIRED and entry.value == _RETIRED[name]:
        return entry.value
    if name in _GONE:
        written_before = {shown(value): new for value, new in _GONE[name].items()}
        new = written_before.get(entry.text) or any_of(list(written_before.values()))
        raise UserError(f"{entry.where}: {name}: is no key any more; write {new}")
    if name in _RETIRED:
        raise UserError(
            f"{entry.where}: {name}: found {entry.text}, but the option is no more; leave the key "
            "out"
        )
    if name in _FORMERLY and isinstance(entry.value, bool):
        return _FORMERLY[name][entry.value]
    value = read_entry(entry, name, schema())
    if name not in _PATHS or value is None:
        return value
    try:
        return str(expand_home(value)) if value.startswith("~") else value
    except ValueError as error:
        raise UserError(f"{entry.where}: {name}={value}: {error}") from None


def _build(cls: type, prefix: str, values: Mapping[str, Any]) -> Any:
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
    """The config that files and overrides ask for, over the defaults; not yet checked (`check`).

    Paths are YAML files, or names of configs that ship with the package (`shipped`). Overrides are
    `a.b=value` with the value in YAML, and win over the files. Of each, later ones win.
    """
    return _over({}, overrides, [parse_file(locate(path)) for path in paths])


def override(config: Config, overrides: Sequence[str]) -> Config:
    """The config with `a.b=value` set, the values in YAML; later ones win."""
    return _over(flatten(config), overrides)


def _over(
    values: Mapping[str, Any], overrides: Sequence[str], files: Sequence[Parsed] = ()
) -> Config:
    """The config of values, of files over them and of overrides over these; the last wins."""
    parsed = [*files, *map(parse_override, overrides)]
    sections = {name for name, key in schema().items() if key.is_section}
    found = [entry for one in parsed for entry in entries(one, sections)]
    return _build(Config, "", {**values, **_read(found)})


class _Dumper(yaml.SafeDumper):
    """Sections as blocks, lists on one line."""


_Dumper.add_representer(
    FrozenMap,
    lambda dumper, value: dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), True),
)
_Dumper.add_representer(
    tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True)
)


def to_yaml(config: Config) -> str:
    """Every key of a config as YAML; `load` gives it back exactly."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, width=96)


def value_text(value: Any) -> str:
    """A key's value as it is written in YAML, on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


@functools.cache
def _settings() -> tuple[str, ...]:
    return tuple(name for name, key in schema().items() if not key.is_section)


def flatten(config: Config) -> dict[str, Any]:
    """Values by dotted key, in the order of `Config`."""
    values = operator.attrgetter(*_settings())(config)
    return dict(zip(_settings(), values, strict=True))


def fingerprint(config: Config, *sections: str) -> str:
    """A hash of the sections or keys with these dotted names; of the whole config without any.

    12 hexadecimal digits, equal for equal settings on every machine and in every process. KeyError:
    a name that is in no config.
    """
    for section in sections:
        schema()[section]
    usual = identity(Config())
    chosen = {
        name: value
        for name, value in identity(config).items()
        if not sections or any(f"{name}.".startswith(f"{section}.") for section in sections)
        if name not in _LATER or value != usual[name]
    }
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def help_text(width: int = 100) -> str:
    """Every key by section: its default, meaning and what can be written; 80 columns or more."""
    settings = {name: key for name, key in schema().items() if not key.is_section}
    # One long name or default would push every meaning to the right.
    name_width, default_width = 30, 14
    margin = 2 + name_width + default_width
    lines = [f"  {'key':{name_width}}{'default':{default_width}}meaning (what can be written)"]
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
