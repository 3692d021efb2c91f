"""Settings of the variance study: `sizes` of a file in configs/studies, and overrides."""

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax.config.fields import inside, key, range_text, walk
from bacr_jax.config.reader import read_entry, refusal
from bacr_jax.config.yaml import Entry, entries, parse_file, parse_override
from bacr_jax.errors import UserError

# common: all traces of a group under one budget of a grid. independent: each under its own, from
# the TruncNorm of Eq. 4. training: each under its own, from the list that the run trains at.
Regime = typing.Literal["common", "independent", "training"]
KIND = "variance"
SIZES = ("cpu", "gpu", "7b")


@dataclass(frozen=True)
class VarianceSettings:
    """What is measured, on which policies, with how many rollouts."""

    config: tuple[str, ...] = key(
        ("configs/quickstart.yaml",), "configs of the run, later ones win"
    )
    overrides: tuple[str, ...] = key((), "keys of that run set here, as key.sub=value")
    seeds: tuple[int, ...] = key(
        (0, 1, 2), "a run, its pools and their partitions each", "[0, inf)"
    )
    checkpoints: tuple[int, ...] = key((10, 50, 100), "steps: early, middle, late", "[1, inf)")
    output: str = key("studies/variance", "folder of runs, pools and results")
    questions: int = key(64, "held-out questions Q of a pool, spread over levels", "[2, inf)")
    traces: int = key(64, "traces N of each question under each budget", "[4, inf)")
    budgets: tuple[int, ...] = key((16, 32, 48, 64), "grid of the common regime", "[1, inf)")
    regimes: tuple[str, ...] = key(
        ("common", "independent"),
        "of budgets: common, independent (TruncNorm), training (the run's budget.choices)",
    )
    answers: int = key(4, "answers A at every cut; 1 takes a run with one cut", "[1, inf)")
    answer_questions: int = key(
        8, "questions of which the gradient of answers is measured too", "[0, inf)"
    )
    groups: tuple[int, ...] = key((2, 4, 8, 16), "group sizes G", "[2, inf)")
    partitions: int = key(8, "random partitions of a pool into groups", "[1, inf)")
    calibration: int = key(
        256, "training questions for values, moments and slopes; half of them each", "[4, inf)"
    )
    calibration_traces: int = key(16, "traces of each of them", "[2, inf)")
    oracle: int = key(256, "further rollouts under each budget, for the oracle", "[2, inf)")
    bandwidth: float = key(
        3.0, "tokens over which the oracle smooths budgets (independent regime)", "(0, inf)"
    )
    sketch: int = key(4096, "numbers kept of a gradient", "[16, inf)")
    resamples: int = key(1000, "of the bootstrap over questions", "[100, inf)")


def _value(entry: Entry, name: str) -> Any:
    """The value of an entry in the type of its key, within its bounds."""
    keys = dict(walk(VarianceSettings()))
    value = read_entry(entry, name, keys)
    numbers, bounds = value if isinstance(value, tuple) else (value,), keys[name].bounds
    if bounds and not all(inside(number, bounds) for number in numbers):
        wanted = f"numbers {range_text(bounds)}"
        raise refusal(f"{entry.where}: {name}", f"found {entry.text}", wanted)
    return value


def _problems(settings: VarianceSettings) -> typing.Iterator[str]:
    most = max(settings.groups, default=0)
    if not settings.groups or settings.traces < 2 * most:
        yield f"traces={settings.traces}: two groups of {most} are needed; write {2 * most} or more"
    if settings.calibration_traces < most:
        yield f"calibration_traces={settings.calibration_traces}: write at least {most}, as groups"
    for regime in settings.regimes:
        if regime not in typing.get_args(Regime):
            yield f"regimes: found {regime!r}; write common, independent or training"
    for name in ("seeds", "checkpoints", "budgets", "regimes", "config"):
        if not getattr(settings, name):
            yield f"{name}=[]: is empty; write at least one"


def read_settings(path: Path, size: str, overrides: Sequence[str] = ()) -> VarianceSettings:
    """One size of a study's file, with some values replaced.

    UserError: the file or an override can't be used.
    """
    sections = {"sizes", *(f"sizes.{name}" for name in SIZES)}
    found = {entry.key: entry for entry in entries(parse_file(path), sections)}
    kind = found.pop("kind", None)
    if kind is None or kind.value != KIND:
        said = "nothing" if kind is None else kind.text
        raise UserError(f"{path}: kind: found {said}; write kind: {KIND}")
    if not any(name.startswith(f"sizes.{size}.") for name in found):
        there = sorted({name.split(".")[1] for name in found if name.startswith("sizes.")})
        raise UserError(f"{path}: has no size {size!r}; write one of {', '.join(there)}")
    values: dict[str, Any] = {}
    for name, entry in found.items():
        section, _, last = name.rpartition(".")
        if section not in sections - {"sizes"}:
            raise UserError(f"{entry.where}: {name}: no such key; write kind or sizes")
        value = _value(entry, last)
        if section == f"sizes.{size}":
            values[last] = value
    for text in overrides:
        for entry in entries(parse_override(text, "command line"), set()):
            values[entry.key] = _value(entry, entry.key)
    settings = dataclasses.replace(VarianceSettings(), **values)
    for problem in _problems(settings):
        raise UserError(f"{path}, {size}: {problem}")
    return settings
