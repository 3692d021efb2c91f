"""Reads studies from files, and rejects an invalid study before anything is run.

A study file in `configs/studies/` contains the fields of `Study`. Its section `sizes` maps names
(such as `cpu`, `gpu` or `7b`) to fields that replace the ones at the top level. Paths of configs
are relative to the study file.
"""

import datetime
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bacr_jax.config import EvalConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.fields import inside, range_text, walk
from bacr_jax.config.reader import read_dataclass, read_value, refusal
from bacr_jax.config.training_checks import dense_problems
from bacr_jax.config.values import any_of, shown
from bacr_jax.config.yaml import constructed, parse_file, parse_override
from bacr_jax.errors import UserError
from bacr_study.spec import SAMPLES, SEEDS, Arm, Evaluation, Study, Sweep, Task

_LEVELS = "[1, 5]"
_RANGES = {
    "tokens_per_second": "(0, inf)",
    "devices_per_run": "[0, inf)",
}
# Names become parts of file names and cell ids, so only these characters are allowed.
_NAME = re.compile(r"[A-Za-z0-9_+-]+")
# Swept values become parts of file names and cell ids too. They may also contain a decimal point.
_VALUE = re.compile(r"[A-Za-z0-9_+.-]+")
# Config keys that the study sets for each run, and what to write instead.
_KEYS_OF_STUDY = {
    "seed": "the study's key seeds, such as seeds=[4]",
    "output.dir": "--out DIR",
}
_STUDY_TYPES = typing.get_type_hints(Study)
# Fields of `Study` that cannot be set in a file.
_UNWRITTEN = {"name", "size", "folder", "overrides"}

# The result of a check: True if it passed, the path of the key, its value, and what to write
# instead.
_Check = tuple[Any, str, Any, str]


def merged(path: Path, size: str | None) -> tuple[dict[str, Any], str]:
    """Reads a study file and merges the fields of one size into the fields at the top level.

    Mappings are merged key by key; other values of the size replace the top-level values.

    Args:
      path: the study file.
      size: a name in the section `sizes`; None for the first one.

    Returns:
      The merged fields and the name of the size.

    Raises:
      UserError: if the file cannot be read, or does not define this size.
    """
    document: dict[str, Any] = dict(constructed(parse_file(path)) or {})
    sizes = document.pop("sizes", None)
    if sizes is None and "arms" not in document:
        problem = "the file has neither arms nor sizes, so it is not a study"
        raise refusal(str(path), problem, "a study that `bacr configs` lists, or the path of yours")
    if not isinstance(sizes, Mapping) or not sizes:
        raise refusal(
            f"{path}: sizes",
            f"found {shown(sizes)}",
            "at least one size, as a mapping from its name to its keys",
        )
    for name in sizes:
        _check_name(name, f"{path}: sizes")
    chosen = next(iter(sizes)) if size is None else size
    if chosen not in sizes:
        names = [str(name) for name in sizes]
        raise refusal("--size", f"found {shown(chosen)}", any_of(names))
    replacing = sizes[chosen] or {}
    if not isinstance(replacing, Mapping):
        raise refusal(
            f"{path}: sizes.{chosen}",
            f"found {shown(replacing)}",
            "a mapping of the study's keys to values",
        )
    for key, value in replacing.items():
        document[key] = _merge(document.get(key), value)
    return document, chosen


def overridden(text: str) -> tuple[str, Any]:
    """Parses a `key=value` argument of the command line and returns the key and the value."""
    override = parse_override(text)
    return override.prefix[:-1], constructed(override)


def read_study(path: Path, *, size: str | None = None, overrides: Sequence[str] = ()) -> Study:
    """Reads and checks a study, without building the configs of its runs.

    Args:
      path: the study file.
      size: a name in the file's section `sizes`; None for the first one.
      overrides: `key=value` arguments, such as `seeds=[0]`. Keys that are not fields of `Study` are
        config keys of all runs, which override the keys of the file.

    Raises:
      UserError: if the study is invalid. The message names the file or the command line as the
        source.
    """
    keys, chosen_size = merged(path, size)
    arms_of_file = [*(keys.get("arms") or {})]
    keys_written = {overridden(text)[0].partition(".")[0] for text in overrides}
    # The command line only selects arms and tasks. Their settings come from the file.
    keys_written -= {"arms", "tasks"}

    def place_of(key: str) -> str:
        """Returns the location of a key for error messages: the command line or the file."""
        on_command_line = key.split(".")[0] in keys_written
        return f"{'command line' if on_command_line else path}: {key}"

    config_overrides = _override_keys(keys, overrides)
    evaluation = keys.pop("evaluation", {})
    fields = {
        "tasks": _named(
            Task,
            keys.pop("tasks", None),
            place_of("tasks"),
            main="",
            hard="",
        ),
        "arms": _named(
            Arm,
            keys.pop("arms", None),
            place_of("arms"),
        ),
        "evaluation": read_dataclass(
            Evaluation,
            evaluation,
            place_of("evaluation"),
        ),
        "name": path.stem,
        "size": chosen_size,
        "folder": path.parent,
        "overrides": tuple(config_overrides),
    }
    study: Study = _with_sweep(Study, keys, str(path), fields)
    for passed, place_key, value, write in _checks(study, arms_of_file):
        if not passed:
            raise refusal(
                place_of(place_key),
                f"found {shown(value)}",
                write,
            )
    _refuse_fixed_keys(study)
    _refuse_dense_curves(study, place_of("evaluation.cut_every"))
    return _without_unchosen_contrasts(study)


def _override_keys(keys: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Applies the arguments of the command line to the keys of a study file.

    Args:
      keys: keys of the study file. They are updated in place.
      overrides: `key=value` arguments.

    Returns:
      The arguments that set config keys of the runs, and no keys of the study.
    """
    config_overrides = []
    for text in overrides:
        key, value = overridden(text)
        if key.startswith("evaluation."):
            value = {key.removeprefix("evaluation."): value}
            key = "evaluation"
        if key in ("arms", "tasks") and isinstance(value, list):
            keys[key] = _chosen(keys.get(key, {}), value, key)
        elif key in _STUDY_TYPES.keys() - _UNWRITTEN:
            if not isinstance(value, Mapping):
                read_value(_STUDY_TYPES[key], value, f"command line: {key}")
            keys[key] = _merge(keys.get(key), value)
        else:
            for name, refused, write in _keys_of_study({key: value}):
                raise refusal(f"command line: {name}", f"found {shown(refused)}", write)
            config_overrides.append(text)
    return config_overrides


def _flat_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config keys with dotted names: `{a: {b: 1}}` and `{a.b: 1}` both become `{a.b: 1}`.

    Settings that are mappings, such as `budget.levels`, stay mappings.
    """
    flat: dict[str, Any] = {}
    for name, value in keys.items():
        key = config_io.schema().get(name)
        if key is not None and key.is_section and isinstance(value, Mapping):
            nested = {f"{name}.{last}": item for last, item in value.items()}
            flat |= _flat_keys(nested)
        else:
            flat[name] = value
    return flat


def _refuse_fixed_keys(study: Study) -> None:
    """Raises UserError if the command line sets a config key that distinguishes the study's runs.

    Such a key is in the `set` of an arm (a method with its settings), or is varied by a sweep. If
    the command line set it, runs that should differ would be equal. Arms that the command line did
    not select are not considered.
    """
    config_values: dict[str, Any] = {}
    for text in study.overrides:
        name, parsed = overridden(text)
        config_values |= _flat_keys({name: parsed})
    for key, value in config_values.items():
        setting_arms = []
        sweeping_arms = []
        for arm in study.arms:
            # Votes have no runs.
            if arm.of is not None:
                continue
            sweep = study.sweep_of(arm)
            varied = sweep.settings.values() if sweep else ()
            settings_of_arm = _flat_keys(arm.set)
            # `Study.config_of` keeps an arm without training steps as it is.
            is_untrained = key == "train.steps" and settings_of_arm.get(key) == 0
            if any(key in _flat_keys(settings) for settings in varied):
                sweeping_arms.append(arm.id)
            elif key in settings_of_arm and not is_untrained:
                setting_arms.append(arm.id)
        for arms, problem in (
            (sweeping_arms, "but these arms vary this key in a sweep"),
            (setting_arms, "but these arms set this key"),
        ):
            if arms:
                raise refusal(
                    f"command line: {shown(key, quote=False)}",
                    f"found {shown(value)}, {problem}: {', '.join(arms)}",
                    "arms=[...] without these arms, or change the key in a copy of the study file",
                )


def _refuse_dense_curves(study: Study, where: str) -> None:
    """Raises UserError if `evaluation.cut_every` gives no truncation points or too many.

    Args:
      study: the study.
      where: location of the key, for the error message.
    """
    for task in study.tasks:
        curve = EvalConfig(budgets=task.budgets, cut_every=study.evaluation.cut_every)
        for problem in dense_problems(curve, f"{where}="):
            raise UserError(f"{problem} (tasks.{task.id}.budgets)")


def _without_unchosen_contrasts(study: Study) -> Study:
    """Removes comparisons with arms (methods) that the command line did not select.

    `Study.contrasts` defines pairs of arms to compare. If no pair remains, the section of the
    report that shows the comparisons is removed, too.
    """
    chosen_arms = {arm.id for arm in study.arms}
    contrasts = {}
    for name, pair in study.contrasts.items():
        if chosen_arms.issuperset(pair):
            contrasts[name] = pair
    views = study.views
    if not contrasts:
        views = tuple(view for view in views if view != "contrasts")
    return replace(study, contrasts=contrasts, views=views)


def _merge(below: Any, value: Any) -> Any:
    """Merges two mappings key by key; returns the second value if either is not a mapping."""
    if isinstance(value, Mapping) and isinstance(below, Mapping):
        return {**below, **value}
    return value


def _chosen(by_name: Mapping[str, Any], names: Sequence[Any], key: str) -> dict[str, Any]:
    """Selects arms or tasks of a file by name, and keeps the order of the file.

    Args:
      by_name: the arms or tasks in the file.
      names: the names to select.
      key: `arms` or `tasks`, for error messages.

    Raises:
      UserError: if a name does not exist or is repeated.
    """
    for name in names:
        if name not in by_name:
            raise refusal(
                f"command line: {key}",
                f"found {shown(name)}",
                any_of(list(by_name)),
            )
    if len(set(names)) < len(names):
        raise refusal(
            f"command line: {key}",
            f"found {shown(list(names))}",
            "each name only once",
        )
    return {name: value for name, value in by_name.items() if name in names}


def _named(cls: Any, parsed: Any, where: str, **unwritten: Any) -> tuple[Any, ...]:
    """Parses a mapping from names to the fields of a dataclass.

    Args:
      cls: `Task` or `Arm`.
      parsed: the mapping as parsed from the file.
      where: path of the mapping, for error messages.
      unwritten: values of fields that cannot be set in a file.

    Returns:
      One instance of `cls` per name, with the name as its `id`.
    """
    if not isinstance(parsed, Mapping) or not parsed:
        raise refusal(
            where,
            f"found {shown(parsed)}",
            "a mapping with at least one entry, from a name to its keys",
        )
    records = []
    for name, value in parsed.items():
        _check_name(name, where)
        fields = {"id": name, **unwritten}
        records.append(_with_sweep(cls, value, f"{where}.{name}", fields))
    return tuple(records)


def _check_name(name: Any, where: str) -> None:
    """Raises a UserError if a name contains characters that are not allowed in file names."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refusal(
            where,
            f"found the name {shown(name)}",
            "a name of letters, digits, _, + and - (a name of digits in quotes)",
        )


def _with_sweep(cls: Any, parsed: Any, where: str, fields: Mapping[str, Any]) -> Any:
    """Parses a section into a dataclass, including its sweep if it has one (a `Task` has none).

    Args:
      cls: `Study`, `Task` or `Arm`.
      parsed: the section as parsed from the file.
      where: path of the section, for error messages.
      fields: values of fields that are not in the section.
    """
    has_sweep = isinstance(parsed, Mapping) and parsed.get("sweep") is not None
    if cls is not Task and has_sweep:
        sweep = _sweep(parsed["sweep"], f"{where}.sweep")
        fields = {**fields, "sweep": sweep}
        parsed = {key: value for key, value in parsed.items() if key != "sweep"}
    return read_dataclass(cls, parsed, where, given=fields)


def _sweep(parsed: Any, where: str) -> Sweep:
    """Parses the section of a sweep, and determines the config keys that each value sets."""
    read = read_dataclass(Sweep, parsed, where, given={"settings": {}})
    if not isinstance(read.values, list | Mapping) or not read.values:
        raise refusal(
            f"{where}.values",
            f"found {shown(read.values)}",
            "a list of values, or a mapping from names to config keys",
        )
    for value in read.values:
        is_date = isinstance(value, datetime.date)
        if is_date or not _VALUE.fullmatch(str(value)):
            quoted = " (a date in quotes)" if is_date else ""
            raise refusal(
                f"{where}.values",
                f"found {shown(value)}",
                f"a value of letters, digits, _, +, . and -{quoted}",
            )
    if read.default not in (None, *read.values):
        values = [str(value) for value in read.values]
        raise refusal(
            f"{where}.default",
            f"found {shown(read.default)}",
            any_of(values),
        )
    settings: dict[Any, Mapping[str, Any]] = {}
    for value in read.values:
        if not isinstance(read.values, Mapping):
            settings[value] = {read.key: value}
            continue
        keys = read.values[value]
        if not isinstance(keys, Mapping | None):
            raise refusal(
                f"{where}.values.{value}",
                f"found {shown(keys)}",
                "a mapping of config keys",
            )
        settings[value] = keys or {}
    return Sweep(
        key=read.key,
        values=tuple(settings),
        label=read.label or read.key,
        default=read.default,
        settings=settings,
    )


def _keys_of_study(keys: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Finds the config keys in `keys` that only the study may set.

    Returns:
      A triple for each such key: its name, its value and what the user should write instead.
    """
    flat = _flat_keys(keys)
    result = []
    for name, write in _KEYS_OF_STUDY.items():
        if name in flat:
            result.append((name, flat[name], write))
    return result


def _number_text(bounds: str) -> str:
    """Describes an interval, for the end of an error message such as `use a number in [0, 1]`."""
    text = range_text(bounds)
    return f"a number {text}" if text.startswith("in ") else text


# Checks of a study -------------------------------------------------------------------------------


def _checks(study: Study, arms_of_file: Sequence[str]) -> Iterator[_Check]:
    """Yields the checks of a study. Each may assume that the checks before it have passed.

    Args:
      study: the study.
      arms_of_file: ids of all arms in the file, including arms that the command line did not
        select.
    """
    yield from _number_checks(study)
    yield from _name_checks(study, arms_of_file)
    cut_every = study.evaluation.cut_every
    has_before = cut_every is None or study.before != ""
    write = "null, or set the key before to the arm that is evaluated at these truncation points"
    yield has_before, "evaluation.cut_every", cut_every, write
    for task in study.tasks:
        yield from _task_checks(study, task)
    matched_votes: dict[str | None, int] = {}
    for arm in study.arms:
        yield from _arm_checks(study, arm)
        yield from _vote_checks(study, arm, matched_votes)


def _number_checks(study: Study) -> Iterator[_Check]:
    """Yields the checks of the seeds and of all numbers that have a range."""
    seeds = study.seeds
    yield 0 < len(seeds) == len(set(seeds)), "seeds", list(seeds), "different seeds"
    for seed in seeds:
        yield inside(seed, SEEDS), "seeds", seed, _number_text(SEEDS)
    for name, bounds in _RANGES.items():
        value = getattr(study, name)
        in_range = value is None or inside(value, bounds)
        yield in_range, name, value, _number_text(bounds)
    for name, number in walk(study.evaluation):
        if number.bounds and number.value is not None:
            in_range = inside(number.value, number.bounds)
            yield in_range, f"evaluation.{name}", number.value, _number_text(number.bounds)


def _name_checks(study: Study, arms_of_file: Sequence[str]) -> Iterator[_Check]:
    """Yields the checks of fields that contain ids of arms (methods), and of config keys."""
    for name, keys in study.own.items():
        yield name in arms_of_file, "own", name, any_of(arms_of_file)
        yield isinstance(keys, Mapping), f"own.{name}", keys, "a mapping of config keys"
    yield from _checks_of_config_keys(study)
    for name in study.reference:
        yield name in arms_of_file, "reference", name, any_of(arms_of_file)
    before_exists = not study.before or study.before in arms_of_file
    yield before_exists, "before", study.before, any_of(arms_of_file)

    has_pairs = study.contrasts or "contrasts" not in study.views
    yield has_pairs, "contrasts", None, "pairs of arms by name"
    chosen_arms = {arm.id for arm in study.arms}
    unchosen_arms = [name for name in arms_of_file if name not in chosen_arms]
    possible_arms = [*_unswept_arms(study), *unchosen_arms]
    for name, pair in study.contrasts.items():
        is_pair = isinstance(pair, list) and len(pair) == 2
        passed = is_pair and all(arm in possible_arms for arm in pair)
        write = "two arms of the study without a sweep, [of, less]"
        yield passed, f"contrasts.{name}", pair, write


def _unswept_arms(study: Study) -> list[str]:
    """Returns the ids of the arms (methods with their settings) that no sweep applies to."""
    return [arm.id for arm in study.arms if study.sweep_of(arm) is None]


def _checks_of_config_keys(study: Study) -> Iterator[_Check]:
    """Yields a failed check for each config key that only the study may set."""
    layers: list[tuple[str, Mapping[str, Any]]] = []
    for name, keys in study.own.items():
        layers.append((f"own.{name}.", keys))
    sections: list[tuple[str, Any]] = [("", study)]
    for task in study.tasks:
        sections.append((f"tasks.{task.id}.", task))
    for arm in study.arms:
        sections.append((f"arms.{arm.id}.", arm))
    for where, section in sections:
        layers.append((f"{where}set.", section.set))
        sweep = getattr(section, "sweep", None)
        if sweep:
            for keys in sweep.settings.values():
                layers.append((f"{where}sweep.", keys))
    for where, keys in layers:
        for name, value, write in _keys_of_study(keys):
            yield False, f"{where}{name}", value, write


def _task_checks(study: Study, task: Task) -> Iterator[_Check]:
    """Yields the checks of a task's budgets, evaluation sets and difficulty levels."""
    where = f"tasks.{task.id}"
    budgets = list(task.budgets)
    rising = budgets == sorted(set(budgets)) and min(budgets, default=-1) >= 0
    yield rising, f"{where}.budgets", budgets, "rising numbers, such as [512, 1024]"
    has_pairs = not study.evaluation.swap or sum(budget > 0 for budget in budgets) >= 2
    write = f"false, or two budgets above 0 in {where}.budgets"
    yield has_pairs, "evaluation.swap", True, write
    sets = list(task.data)
    yield len(set(sets)) == len(sets), f"{where}.data", sets, "each set only once"
    for budget in study.focus:
        yield budget in budgets, "focus", budget, any_of(list(map(str, budgets)))
    for level in task.hard_levels:
        yield inside(level, _LEVELS), f"{where}.hard_levels", level, _number_text(_LEVELS)


def _arm_checks(study: Study, arm: Arm) -> Iterator[_Check]:
    """Yields the checks of an arm's label, parts and sweep.

    An arm is a method with its settings. Parts are the parts of BACR that it enables in an
    ablation. A sweep is a setting that it varies.
    """
    where = f"arms.{arm.id}"
    first_of_label = next(
        other for other in study.arms if (other.name, other.sweep) == (arm.name, arm.sweep)
    )
    has_label = arm.label.strip() != "" and first_of_label.id == arm.id
    yield has_label, f"{where}.label", arm.label, "a label that no other arm has"

    parts_shown = not arm.parts or "ablation" in study.views
    yield parts_shown, f"{where}.parts", list(arm.parts), "none, or the view ablation"

    needs_sweep = bool({"scale", "sensitivity"} & set(study.views))
    has_sweep = arm.id not in _unswept_arms(study) or not needs_sweep
    yield has_sweep, f"{where}.sweep", None, "the key and its values"


def _vote_checks(study: Study, arm: Arm, matched_votes: dict[str | None, int]) -> Iterator[_Check]:
    """Yields the checks of an arm's number of samples, and of its majority votes if it has any.

    An arm is a method with its settings. An arm of majority votes has no runs: it votes over the
    sampled responses of another arm (field `of`).

    Args:
      study: the study.
      arm: the arm to check.
      matched_votes: number of votes of the `matched_total` arms checked so far, by the arm whose
        samples vote. The number of this arm is added, because all such arms must agree.
    """
    where = f"arms.{arm.id}"
    votes = arm.votes
    arms = {other.id: other for other in study.arms}
    of_exists = True
    if arm.of is not None:
        of_exists = arm.of in arms and arms[arm.of].of is None
    yield of_exists, f"{where}.of", arm.of, "an arm with runs"

    both_or_neither = (votes is None) == (arm.of is None)
    yield both_or_neither, where, votes, "both votes and of: the arm whose samples vote"

    samples = study.samples_of(arms[arm.of or arm.id])
    yield inside(samples, SAMPLES), f"{where}.samples", samples, _number_text(SAMPLES)

    # An evaluation only computes votes over powers of 2 and over all samples.
    passed = votes is None or (
        2 <= votes <= samples and (votes == samples or votes.bit_count() == 1)
    )
    write = f"a power of 2, up to {samples}, or {samples}, all samples"
    yield passed, f"{where}.votes", votes, write
    if not votes or arm.accounting != "matched_total":
        return

    first_votes = matched_votes.setdefault(arm.of, votes)
    write = f"{first_votes}, as another vote over {arm.of}"
    yield first_votes == votes, f"{where}.votes", votes, write
    for task in study.tasks:
        smallest = min(filter(None, task.budgets), default=0)
        write = f"{votes} or more, a token for each vote of {arm.id}"
        yield smallest >= votes, f"tasks.{task.id}.budgets", list(task.budgets), write
