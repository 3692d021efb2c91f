"""Studies are read from files, and what can't be used is refused before anything is run.

A file in `configs/studies/` has the keys of `Study`; `sizes` holds, by name, keys that replace
those at the top (`cpu`, `gpu`, `7b`). Paths of configs are relative to the file.
"""

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.config.fields import inside, range_text, walk
from bacr_jax.config.reader import read_dataclass, read_value, refusal
from bacr_jax.config.values import any_of, shown
from bacr_jax.config.yaml import constructed, parse_file, parse_override
from bacr_study.spec import SAMPLES, SEEDS, Arm, Evaluation, Study, Sweep, Task

_LEVELS = "[1, 5]"
_RANGES = {"tokens_per_second": "(0, inf)", "devices_per_run": "[0, inf)"}
# Names become parts of file names and of identifiers.
_NAME = re.compile(r"[A-Za-z0-9_+-]+")
# So do swept values, which may have a point.
_VALUE = re.compile(r"[A-Za-z0-9_+.-]+")
# What the study gives each run, and how it is told to.
_GIVEN = {"seed": "the study's key seeds, such as seeds=[4]", "output.dir": "--out DIR"}


def _named(cls: Any, given: Any, where: str, **unwritten: Any) -> tuple[Any, ...]:
    """Dataclasses from a mapping of names; `unwritten`: fields that no file sets."""
    if not isinstance(given, Mapping) or not given:
        raise refusal(where, f"found {shown(given)}", "at least one, by name")
    made = []
    for name, value in given.items():
        _check_name(name, where)
        made.append(_with_sweep(cls, value, f"{where}.{name}", {"id": name, **unwritten}))
    return tuple(made)


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        write = "letters, digits, _ + and -, a number in quotes"
        raise refusal(where, f"found the name {shown(name)}", write)


def _with_sweep(cls: Any, parsed: Any, where: str, given: Mapping[str, Any]) -> Any:
    """`read_dataclass` of one that may hold a `Sweep`."""
    if cls is not Task and isinstance(parsed, Mapping) and parsed.get("sweep") is not None:
        given = {**given, "sweep": _sweep(parsed["sweep"], f"{where}.sweep")}
        parsed = {key: value for key, value in parsed.items() if key != "sweep"}
    return read_dataclass(cls, parsed, where, given=given)


def _sweep(parsed: Any, where: str) -> Sweep:
    read = read_dataclass(Sweep, parsed, where, given={"settings": {}})
    if not isinstance(read.values, list | Mapping) or not read.values:
        raise refusal(f"{where}.values", f"found {shown(read.values)}", "a list, or keys by name")
    for value in read.values:
        if not _VALUE.fullmatch(str(value)):
            raise refusal(
                f"{where}.values", f"found {shown(value)}", "letters, digits, _ + . and -"
            )
    if read.default not in (None, *read.values):
        write = any_of([str(value) for value in read.values])
        raise refusal(f"{where}.default", f"found {shown(read.default)}", write)
    named = isinstance(read.values, Mapping)
    for value in read.values if named else ():
        if not isinstance(read.values[value], Mapping | None):
            place, found = f"{where}.values.{value}", shown(read.values[value])
            raise refusal(place, f"found {found}", "a mapping of config keys")
    settings = {v: (read.values[v] or {}) if named else {read.key: v} for v in read.values}
    return Sweep(read.key, tuple(settings), read.label or read.key, read.default, settings)


def merged(path: Path, size: str | None) -> tuple[dict[str, Any], str]:
    """The keys of a size over those at the top of a file, mappings key by key; and the size."""
    document = _document(path)
    sizes = document.pop("sizes", None)
    if not isinstance(sizes, Mapping) or not sizes:
        raise refusal(f"{path}: sizes", f"found {shown(sizes)}", "at least one, by name")
    for name in sizes:
        _check_name(name, f"{path}: sizes")
    chosen = next(iter(sizes)) if size is None else size
    if chosen not in sizes:
        raise refusal("--size", f"found {shown(chosen)}", any_of([str(name) for name in sizes]))
    over = sizes[chosen] or {}
    if not isinstance(over, Mapping):
        raise refusal(f"{path}: sizes.{chosen}", f"found {shown(over)}", "keys of a study")
    for key, value in over.items():
        document[key] = _over(document.get(key), value)
    return document, chosen


def _over(below: Any, value: Any) -> Any:
    both = isinstance(value, Mapping) and isinstance(below, Mapping)
    return {**below, **value} if both else value


def overridden(text: str) -> tuple[str, Any]:
    """Key and value of `key=value` on the command line."""
    given = parse_override(text)
    return given.prefix[:-1], constructed(given)


def _document(path: Path) -> dict[str, Any]:
    """The keys at the top of a study's file."""
    return dict(constructed(parse_file(path)) or {})


_HINTS = typing.get_type_hints(Study)


def read_study(path: Path, *, size: str | None = None, overrides: Sequence[str] = ()) -> Study:
    """Reads and checks a study; no run's config is resolved yet.

    Overrides are `seeds=[0]` and other keys of `Study`; any other key belongs to the runs.
    """
    keys, chosen = merged(path, size)
    every = [*(keys.get("arms") or {})]
    own = _HINTS.keys() - {"name", "size", "folder"}
    # Arms and tasks are chosen there, and written in the file.
    told = {text.partition("=")[0].partition(".")[0] for text in overrides} - {"arms", "tasks"}
    place_of = lambda key: f"{'command line' if key.split('.')[0] in told else path}: {key}"
    for key, value in map(overridden, overrides):
        if key.startswith("evaluation."):
            key, value = "evaluation", {key.removeprefix("evaluation."): value}
        if key in ("arms", "tasks") and isinstance(value, list):
            keys[key] = _chosen(keys.get(key, {}), value, key)
        elif key in own:
            if not isinstance(value, Mapping):
                read_value(_HINTS[key], value, place_of(key))
            keys[key] = _over(keys.get(key), value)
        else:
            for name, found, write in _given({key: value}):
                raise refusal(f"command line: {name}", f"found {shown(found)}", write)
            keys["set"] = {**keys.get("set", {}), key: value}
    how = keys.pop("evaluation", {})
    given = {
        "tasks": _named(Task, keys.pop("tasks", None), place_of("tasks"), main="", hard=""),
        "arms": _named(Arm, keys.pop("arms", None), place_of("arms")),
        "evaluation": read_dataclass(Evaluation, how, place_of("evaluation")),
        "name": path.stem,
        "size": chosen,
        "folder": path.parent,
    }
    study: Study = _with_sweep(Study, keys, str(path), given)
    for fits, place, found, write in _checks(study, every):
        if not fits:
            raise refusal(place_of(place), f"found {shown(found)}", write)
    return study


def _chosen(known: Mapping[str, Any], names: Sequence[Any], key: str) -> dict[str, Any]:
    """Some of the arms or tasks, in the order of the file."""
    for name in names:
        if name not in known:
            raise refusal(f"command line: {key}", f"found {shown(name)}", any_of(list(known)))
    if len(set(names)) < len(names):
        raise refusal(f"command line: {key}", f"found {shown(list(names))}", "each of them once")
    return {name: value for name, value in known.items() if name in names}


def _given(keys: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Keys of a run that are the study's to give: their names, their values, what to write."""
    inside = keys.get("output")
    nested = inside if isinstance(inside, Mapping) else {}
    flat = {**keys, **{f"output.{key}": value for key, value in nested.items()}}
    return [(name, flat[name], write) for name, write in _GIVEN.items() if name in flat]


def _given_elsewhere(study: Study) -> Iterator[tuple[bool, str, Any, str]]:
    """Those that stand in a study all the same, as `_checks` has them."""
    layers = [(f"own.{name}.", keys) for name, keys in study.own.items()]
    places: list[tuple[str, Any]] = [("", study)]
    places += [(f"tasks.{task.id}.", task) for task in study.tasks]
    places += [(f"arms.{arm.id}.", arm) for arm in study.arms]
    for where, one in places:
        layers.append((f"{where}set.", one.set))
        if swept := getattr(one, "sweep", None):
            layers += [(f"{where}sweep.", keys) for keys in swept.settings.values()]
    for where, keys in layers:
        for name, value, write in _given(keys):
            yield False, f"{where}{name}", value, write


def _checks(study: Study, every: Sequence[str]) -> Iterator[tuple[Any, str, Any, str]]:
    """What must fit together: whether it does, where, what is there and what to write.

    A check builds on those before it. `every` has the file's arms, chosen or not.
    """
    seeds, views, matched = study.seeds, set(study.views), dict[str | None, int]()
    called = {(arm.name, arm.sweep): arm.id for arm in reversed(study.arms)}
    yield 0 < len(seeds) == len(set(seeds)), "seeds", list(seeds), "different seeds"
    for seed in seeds:
        yield inside(seed, SEEDS), "seeds", seed, range_text(SEEDS)
    for name, span in _RANGES.items():
        value = getattr(study, name)
        yield value is None or inside(value, span), name, value, range_text(span)
    for name, number in walk(study.evaluation):
        if (bounds := number.bounds) and (value := number.value) is not None:
            yield inside(value, bounds), f"evaluation.{name}", value, range_text(bounds)
    for name, keys in study.own.items():
        yield name in every, "own", name, any_of(every)
        yield isinstance(keys, Mapping), f"own.{name}", keys, "a mapping of config keys"
    yield from _given_elsewhere(study)
    for name in study.reference:
        yield name in every, "reference", name, any_of(every)
    fits = not study.before or study.before in every
    yield fits, "before", study.before, any_of(every)
    yield study.contrasts or "contrasts" not in views, "contrasts", None, "pairs of arms by name"
    arms = {arm.id: arm for arm in study.arms}
    single = [arm.id for arm in study.arms if study.sweep_of(arm) is None]
    for name, pair in study.contrasts.items():
        fits = isinstance(pair, list) and len(pair) == 2 and all(one in single for one in pair)
        yield fits, f"contrasts.{name}", pair, "two arms of the study without a sweep, [of, less]"
    for task in study.tasks:
        where, budgets = f"tasks.{task.id}", list(task.budgets)
        fits = budgets == sorted(set(budgets)) and min(budgets, default=-1) >= 0
        yield fits, f"{where}.budgets", budgets, "rising numbers, such as [512, 1024]"
        for budget in study.focus:
            yield budget in budgets, "focus", budget, any_of(list(map(str, budgets)))
        for level in task.hard_levels:
            yield inside(level, _LEVELS), f"{where}.hard_levels", level, range_text(_LEVELS)
    for arm in study.arms:
        where, k = f"arms.{arm.id}", arm.votes
        fits = arm.label.strip() != "" and called[arm.name, arm.sweep] == arm.id
        yield fits, f"{where}.label", arm.label, "a label that no other arm has"
        fits = not arm.parts or "ablation" in views
        yield fits, f"{where}.parts", list(arm.parts), "none, or the view ablation"
        fits = arm.id not in single or not {"scale", "sensitivity"} & views
        yield fits, f"{where}.sweep", None, "the key and its values"
        fits = arm.of is None or (arm.of in arms and arms[arm.of].of is None)
        yield fits, f"{where}.of", arm.of, "an arm with runs"
        fits = (k is None) == (arm.of is None)
        yield fits, where, k, "both votes and of: the arm whose samples vote"
        drawn = study.samples_of(arms[arm.of or arm.id])
        yield inside(drawn, SAMPLES), f"{where}.samples", drawn, range_text(SAMPLES)
        # Those that an evaluation has.
        fits = k is None or (2 <= k <= drawn and (k == drawn or k.bit_count() == 1))
        yield fits, f"{where}.votes", k, f"a power of 2, up to {drawn}, or {drawn}, all samples"
        if k and arm.accounting == "matched_total":
            fits = matched.setdefault(arm.of, k) == k
            yield fits, f"{where}.votes", k, f"{matched[arm.of]}, as another vote over {arm.of}"
            for task in study.tasks:
                fits = min(filter(None, task.budgets), default=0) >= k
                write = f"{k} or more, a token for each vote of {arm.id}"
                yield fits, f"tasks.{task.id}.budgets", list(task.budgets), write
