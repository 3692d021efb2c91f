"""Settings of the variance study, which are read from the `sizes` of a file and from overrides."""

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bacr_jax.config.fields import inside, key, range_text, walk
from bacr_jax.config.reader import read_dataclass
from bacr_jax.errors import UserError
from bacr_study.study_file import merged, overridden

# How the budgets of the traces in a group are chosen:
# common: all traces have the same budget from a grid.
# independent: each trace has a budget from the truncated normal distribution of Eq. 4.
# training: each trace has a budget from the list with which the run trains.
Regime = typing.Literal["common", "independent", "training"]


@dataclass(frozen=True)
class VarianceSettings:
    """Settings of the study: policies, numbers of rollouts, and measurements."""

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
    regimes: tuple[Regime, ...] = key(
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


def _problems(settings: VarianceSettings) -> typing.Iterator[str]:
    for name, known in walk(settings):
        numbers = known.value if isinstance(known.value, tuple) else (known.value,)
        for number in numbers:
            if known.bounds and not inside(number, known.bounds):
                yield f"{name}: found {number}; use numbers {range_text(known.bounds)}"
    for name in ("seeds", "checkpoints", "budgets", "regimes", "config", "groups"):
        if not getattr(settings, name):
            yield f"{name}=[] is empty; use at least one"
    most = max(settings.groups, default=0)
    if settings.traces < 2 * most:
        yield f"traces={settings.traces}: two groups of {most} are needed; use {2 * most} or more"
    if settings.calibration < (least := 2 * max(len(settings.budgets), 4)):
        yield (
            f"calibration={settings.calibration}: each half needs {least // 2} questions; use "
            f"{least} or more"
        )
    if settings.calibration_traces < most:
        yield (
            f"calibration_traces={settings.calibration_traces} is too small; use at least {most}, "
            "as groups"
        )


def read_settings(path: Path, size: str | None, overrides: Sequence[str] = ()) -> VarianceSettings:
    """Reads the settings of one size from a study's file, and applies overrides."""
    keys, chosen = merged(path, size)
    where = f"{path}, {chosen}"
    found = {**keys, **dict(map(overridden, overrides))}
    settings: VarianceSettings = read_dataclass(VarianceSettings, found, where)
    for problem in _problems(settings):
        raise UserError(f"{where}: {problem}")
    return settings
